"""Architectures of timm, torchvision and transformers, made small, with random weights.

A name is the package and the architecture: "timm xcit". Few layers and narrow ones keep a network
quick; every kind of layer stays. Dropout and other draws are off.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
import torchvision_operators  # noqa: F401  # before the three packages that import torchvision
from network_check import Network
from torch import nn

# isort: split
import timm
import torchvision
import transformers

CLASSES, WORDS = 10, 99
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)

sgd = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
adamw = partial(torch.optim.AdamW, lr=1e-3)


def images(count: int, size: int, channels: int = 3) -> torch.Tensor:
    return torch.randn(count, channels, size, size)


def words(count: int, length: int) -> torch.Tensor:
    return torch.randint(5, WORDS, (count, length))


def without_dropout(model: nn.Module) -> nn.Module:
    """The model with every probability of dropping a number or a layer at zero."""
    for module in model.modules():
        if isinstance(module, (*DROPOUTS, torchvision.ops.StochasticDepth)):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)
    return model


# --- classifiers ------------------------------------------------------------------------------


def classified(model: nn.Module, batch: dict) -> tuple:
    """Cross entropy of the scores, which some networks give first among others."""
    outputs = model(batch["x"])
    scores = outputs if isinstance(outputs, torch.Tensor) else outputs[0]
    return F.cross_entropy(scores, batch["y"]), outputs


def classifier(make: Callable, size: int, count: int = 4, optimizer=sgd) -> Network:
    def batch():
        return {"x": images(count, size), "y": torch.randint(CLASSES, (count,))}

    return Network(lambda: without_dropout(make()), batch, classified, optimizer)


def timm_classifier(name: str, size: int = 64, optimizer=sgd, **options) -> Network:
    make = partial(timm.create_model, name, num_classes=CLASSES, **options)
    return classifier(make, size, optimizer=optimizer)


def sized(name: str, size: int = 64, **options) -> Network:
    """A network of timm that must know the size of its images."""
    return timm_classifier(name, size, adamw, img_size=size, **options)


TIMM = {
    "resnet": timm_classifier("resnet18", layers=(1, 1, 1, 1)),
    "resnet bottleneck": timm_classifier("resnet50", layers=(1, 1, 1, 1)),
    "res2net": timm_classifier("res2net50_26w_4s", layers=(1, 1, 1, 1)),
    "resnest": timm_classifier("resnest14d"),
    "resnetv2": timm_classifier("resnetv2_50", layers=(1, 1, 1, 1)),
    "nfnet": timm_classifier("test_nfnet"),
    "convnext": timm_classifier("convnext_atto", depths=(1, 1, 2, 1), drop_path_rate=0.0),
    "convnextv2": timm_classifier("convnextv2_atto", depths=(1, 1, 2, 1)),
    "inception_next": timm_classifier("inception_next_atto", depths=(1, 1, 1, 1)),
    "efficientnet": timm_classifier("test_efficientnet"),
    "efficientnet_b0": timm_classifier("efficientnet_b0"),
    "mobilenetv3": timm_classifier("mobilenetv3_small_050"),
    "mobilenetv4": timm_classifier("mobilenetv4_conv_small_035"),
    "ghostnet": timm_classifier("ghostnet_050"),
    "densenet": timm_classifier("densenet121", block_config=(2, 2, 2, 2)),
    "regnet": timm_classifier("regnety_002"),
    "repvgg": timm_classifier("repvgg_a0"),
    "repvit": timm_classifier("repvit_m0_9"),
    "fastvit": timm_classifier("fastvit_t8"),
    "xception": timm_classifier("xception41"),
    "vit": sized("vit_tiny_patch16_224", depth=2),
    "vit relative positions": sized("test_vit_relpos", 64),
    "deit": sized("deit_tiny_distilled_patch16_224", depth=2),
    "beit": sized("beit_base_patch16_224", depth=2, embed_dim=96, num_heads=3),
    "eva": sized("eva02_tiny_patch14_224", size=56, depth=2),
    "cait": sized("cait_xxs24_224", depth=2),
    "swin": sized("swin_tiny_patch4_window7_224", 56, embed_dim=24, depths=(2, 2),
                  num_heads=(2, 4)),
    "swinv2": sized("swinv2_tiny_window8_256", 64, embed_dim=24, depths=(2, 2), num_heads=(2, 4)),
    "xcit": sized("xcit_nano_12_p16_224", depth=2),
    "coat": sized("coat_lite_tiny"),
    "levit": timm_classifier("levit_128s", size=224),
    "mobilevit": timm_classifier("mobilevit_xxs"),
    "mobilevitv2": timm_classifier("mobilevitv2_050"),
    "maxvit": timm_classifier("test_maxvit", 160),
    "coatnet": timm_classifier("test_coatnet", 160),
    "edgenext": timm_classifier("edgenext_xx_small", optimizer=adamw),
    "pit": sized("pit_ti_224"),
    "pvt_v2": timm_classifier("pvt_v2_b0", depths=(1, 1, 1, 1)),
    "twins": sized("twins_svt_small", depths=(1, 1, 1, 1)),
    "tnt": sized("tnt_s_legacy_patch16_224", depth=2),
    "crossvit": sized("crossvit_tiny_240", size=120),
    "convit": sized("convit_tiny", depth=3),
    "davit": timm_classifier("davit_tiny", depths=(1, 1, 1, 1), embed_dims=(24, 48, 96, 192),
                             num_heads=(1, 2, 4, 8)),
    "hiera": timm_classifier("hiera_tiny_224", size=224, stages=(1, 1, 1, 1), embed_dim=24),
    "sequencer": timm_classifier("sequencer2d_s", layers=(1, 1, 1, 1)),
    "mambaout": timm_classifier("test_mambaout"),
    "lambda resnet": sized("lambda_resnet26t"),
    "bottleneck transformer": sized("botnet26t_256"),
    "efficientformer": timm_classifier("efficientformer_l1", size=224),
    "efficientvit": timm_classifier("efficientvit_b0"),
    "starnet": timm_classifier("starnet_s050"),
    "visformer": sized("visformer_tiny"),
    "naflexvit": timm_classifier("naflexvit_base_patch16_gap", embed_dim=96, num_heads=3, depth=2),
}  # fmt: skip


# --- torchvision ------------------------------------------------------------------------------


def vision_classifier(name: str, size: int = 64, **options) -> Network:
    make = getattr(torchvision.models, name)
    return classifier(partial(make, num_classes=CLASSES, **options), size)


def with_helpers(model: nn.Module, batch: dict) -> tuple:
    """The networks of the Inception family have classifiers on their way as well."""
    outputs = model(batch["x"])
    return sum(F.cross_entropy(scores, batch["y"]) for scores in outputs), list(outputs)


def inception(name: str, size: int) -> Network:
    plain = vision_classifier(name, size, aux_logits=True, init_weights=True)
    return Network(plain.model, plain.batch, with_helpers, sgd)


def segmented(model: nn.Module, batch: dict) -> tuple:
    outputs = model(batch["x"])
    return sum(F.cross_entropy(o, batch["y"]) for o in outputs.values()), outputs


def segmenter(name: str, **options) -> Network:
    make = partial(getattr(torchvision.models.segmentation, name), weights=None,
                   weights_backbone=None, num_classes=5, **options)  # fmt: skip

    def batch():
        return {"x": images(2, 64), "y": torch.randint(5, (2, 64, 64))}

    return Network(lambda: without_dropout(make()), batch, segmented, sgd)


def detected(model: nn.Module, batch: dict) -> tuple:
    losses = model(list(batch["x"]), batch["targets"])
    return sum(losses.values()), losses


def detector(name: str, **options) -> Network:
    """One that learns from every proposal: which of them it would draw depends on the device."""
    make = partial(getattr(torchvision.models.detection, name), weights=None, num_classes=4,
                   weights_backbone=None, **options)  # fmt: skip

    def target():
        corner, size = torch.rand(3, 2) * 40, torch.rand(3, 2) * 40 + 10
        boxes = torch.cat([corner, corner + size], dim=1)
        masks = torch.zeros(3, 96, 96, dtype=torch.uint8)
        for mask, (x0, y0, x1, y1) in zip(masks, boxes.int().tolist()):
            mask[y0:y1, x0:x1] = 1
        return {"boxes": boxes, "labels": torch.randint(1, 4, (3,)), "masks": masks}

    def batch():
        return {"x": torch.rand(2, 3, 96, 96), "targets": [target(), target()]}

    return Network(make, batch, detected, partial(sgd, lr=0.001))


TWO_STAGES = {  # of small images, and every proposal is learnt from
    "min_size": 96,
    "max_size": 96,
    "rpn_batch_size_per_image": 10**6,
    "box_batch_size_per_image": 10**6,
    "rpn_pre_nms_top_n_train": 100,
    "rpn_post_nms_top_n_train": 50,
}


def film(name: str, frames: int = 8) -> Network:
    def make():
        model = getattr(torchvision.models.video, name)(num_classes=CLASSES)
        model.avgpool = nn.AdaptiveAvgPool3d(1)  # whatever the frames' size
        return without_dropout(model)

    def batch():
        return {"x": torch.randn(2, 3, frames, 32, 32), "y": torch.randint(CLASSES, (2,))}

    return Network(make, batch, classified, sgd)


def optical_flow() -> Network:
    def loss_of(model, batch):
        flows = model(batch["x"], batch["after"], num_flow_updates=2)
        return sum((flow - batch["y"]).abs().mean() for flow in flows), flows

    def batch():
        return {"x": images(1, 128), "after": images(1, 128), "y": torch.randn(1, 2, 128, 128)}

    return Network(torchvision.models.optical_flow.raft_small, batch, loss_of, adamw)


def vgg() -> nn.Module:
    """With one small layer in the place of its three large ones."""
    model = torchvision.models.vgg11_bn()
    model.avgpool, model.classifier = nn.Identity(), nn.Linear(512, CLASSES)
    return model


TORCHVISION = {
    "vgg": classifier(vgg, 32),
    "inception_v3": vision_classifier("inception_v3", 128, aux_logits=False),
    "googlenet": inception("googlenet", size=64),
    "shufflenet": vision_classifier("shufflenet_v2_x0_5"),
    "mnasnet": vision_classifier("mnasnet0_5"),
    "squeezenet": vision_classifier("squeezenet1_1"),
    "mobilenet_v2": vision_classifier("mobilenet_v2", width_mult=0.35),
    "resnext": vision_classifier("resnext50_32x4d"),
    "deeplabv3": segmenter("deeplabv3_mobilenet_v3_large", aux_loss=True),
    "lraspp": segmenter("lraspp_mobilenet_v3_large"),
    "ssdlite": detector("ssdlite320_mobilenet_v3_large"),
    "fasterrcnn": detector("fasterrcnn_mobilenet_v3_large_fpn", **TWO_STAGES),
    "maskrcnn": detector("maskrcnn_resnet50_fpn", **TWO_STAGES),
    "r3d": film("r3d_18"),
    "s3d": film("s3d", frames=16),
    "raft": optical_flow(),
}


# --- transformers -----------------------------------------------------------------------------

WORD_IDS = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TINY = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 96, "max_position_embeddings": 64,
    "use_cache": False,
}  # fmt: skip

DRAWS = ("mask_time_prob", "mask_feature_prob", "router_jitter_noise")


def settings(kind: str, size: dict = TINY, **options) -> transformers.PretrainedConfig:
    """Return the settings of a small network that draws nothing."""
    config = transformers.AutoConfig.for_model(kind, **(WORD_IDS | size | options))
    parts = [v for v in vars(config).values() if isinstance(v, transformers.PretrainedConfig)]
    for part in (config, *parts):
        draw_nothing(part)
    return config


def draw_nothing(config: transformers.PretrainedConfig) -> None:
    for name, value in list(vars(config).items()):
        if isinstance(value, float) and ("drop" in name or name in DRAWS):
            setattr(config, name, 0.0)


def by_its_loss(model: nn.Module, batch: dict) -> tuple:
    """Models of transformers compute their own loss where the batch has labels."""
    outputs = model(**batch)
    return outputs.loss, [outputs.logits] if "logits" in outputs else []


def transformer(
    auto: str, kind: str, batch: Callable, loss_of=by_its_loss, way: dict | None = None, **options
) -> Network:
    """A network by the class that makes it and the name of its settings.

    Args:
        way: The implementation of a part for which transformers offers several.
    """

    def make():
        maker = getattr(transformers, auto)
        return without_dropout(maker.from_config(settings(kind, **options), **(way or {})))

    return Network(make, batch, loss_of, adamw)


def text(length: int = 24) -> dict:
    tokens = words(2, length)
    return {"input_ids": tokens, "labels": tokens.clone()}


def padded_text(length: int = 24) -> dict:
    batch = text(length)
    mask = torch.ones_like(batch["input_ids"])
    mask[1, length - 5 :] = 0
    return batch | {"attention_mask": mask}


def pair() -> dict:
    return {"input_ids": words(2, 20), "labels": words(2, 12)}


def labelled_image(size: int = 32) -> dict:
    return {"pixel_values": images(2, size), "labels": torch.randint(CLASSES, (2,))}


causal = partial(transformer, "AutoModelForCausalLM", batch=padded_text)
masked = partial(transformer, "AutoModelForMaskedLM", batch=padded_text)
translator = partial(transformer, "AutoModelForSeq2SeqLM", batch=pair)
of_images = partial(
    transformer, "AutoModelForImageClassification", batch=labelled_image,
    image_size=32, patch_size=8, num_labels=CLASSES,
)  # fmt: skip

EACH_EXPERT = {"experts_implementation": "eager"}
BATCHED_EXPERTS = {"experts_implementation": "batched_mm"}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
ENCODER_AND_DECODER = {
    "d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "encoder_layers": 2,
    "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "decoder_start_token_id": 1,
}  # fmt: skip
SPEECH = {
    "conv_dim": (32, 32, 32), "conv_stride": (5, 2, 2), "conv_kernel": (10, 3, 3),
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
}  # fmt: skip


def speech() -> dict:
    return {"input_values": torch.randn(2, 800), "labels": torch.randint(5, 30, (2, 6))}


def mel_and_text() -> dict:
    return {"input_features": torch.randn(2, 16, 60), "labels": words(2, 10)}


def image_and_text() -> dict:
    return {"pixel_values": images(2, 32), "input_ids": words(2, 12), "return_loss": True}


def clip() -> nn.Module:
    text_part = WORD_IDS | TINY | {"projection_dim": 32}
    image_part = TINY | {"image_size": 32, "patch_size": 8, "projection_dim": 32}
    config = transformers.CLIPConfig(
        text_config=text_part, vision_config=image_part, projection_dim=32
    )
    return without_dropout(transformers.CLIPModel(config))


def matched(model: nn.Module, batch: dict) -> tuple:
    outputs = model(**batch)
    return outputs.loss, [outputs.logits_per_image]


def series() -> dict:
    return {"past_values": torch.randn(2, 32, 3), "future_values": torch.randn(2, 8, 3)}


def forecast(model: nn.Module, batch: dict) -> tuple:
    outputs = model(**batch)
    return outputs.loss, [outputs.prediction_outputs]


def label_map(size: int = 64) -> dict:
    return {"pixel_values": images(2, size), "labels": torch.randint(5, (2, size, size))}


TRANSFORMERS = {
    "gpt2": causal("gpt2"),
    "gpt_neo": causal("gpt_neo", attention_types=[[["global", "local"], 1]], window_size=8),
    "gpt_neox": causal("gpt_neox"),
    "gptj": causal("gptj", rotary_dim=8),
    "gpt_oss": causal("gpt_oss", head_dim=16, **EXPERTS),
    "codegen": causal("codegen", rotary_dim=8),
    "llama": causal("llama"),
    "mistral": causal("mistral", sliding_window=8),
    "mixtral": causal("mixtral", output_router_logits=True, **EXPERTS),
    "qwen2": causal("qwen2"),
    "qwen3": causal("qwen3", head_dim=16),
    "qwen2_moe": causal("qwen2_moe", way=EACH_EXPERT, moe_intermediate_size=32,
                        shared_expert_intermediate_size=32, **EXPERTS),
    "qwen3_moe": causal("qwen3_moe", way=BATCHED_EXPERTS, head_dim=16,
                        moe_intermediate_size=32, **EXPERTS),
    "qwen3_next": causal("qwen3_next", way=BATCHED_EXPERTS, head_dim=16, moe_intermediate_size=32,
                         shared_expert_intermediate_size=32, linear_num_value_heads=4,
                         linear_num_key_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
                         layer_types=["linear_attention", "full_attention"], **EXPERTS),
    "deepseek_v3": causal("deepseek_v3", way=BATCHED_EXPERTS, q_lora_rank=24,
                          kv_lora_rank=16, qk_rope_head_dim=8,
                          qk_nope_head_dim=8, v_head_dim=16, n_routed_experts=4, n_group=2,
                          topk_group=1, num_experts_per_tok=2, moe_intermediate_size=32,
                          first_k_dense_replace=1, num_key_value_heads=4),
    "olmo2": causal("olmo2"),
    "olmoe": causal("olmoe", **EXPERTS),
    "granitemoe": causal("granitemoe", **EXPERTS),
    "falcon": causal("falcon", alibi=True),
    "opt": causal("opt", ffn_dim=96, word_embed_proj_dim=64),
    "bloom": causal("bloom", n_head=4, n_layer=2),
    "mpt": causal("mpt", d_model=64, n_heads=4, n_layers=2, max_seq_len=64),
    "gemma2": causal("gemma2", head_dim=16, query_pre_attn_scalar=16, sliding_window=8),
    "gemma3": causal("gemma3_text", head_dim=16, sliding_window=8),
    "phi": causal("phi"),
    "phi3": causal("phi3"),
    "stablelm": causal("stablelm"),
    "starcoder2": causal("starcoder2"),
    "cohere": causal("cohere"),
    "nemotron": causal("nemotron"),
    "xglm": causal("xglm", d_model=64, ffn_dim=96, num_layers=2, attention_heads=4),
    "mamba": causal("mamba", state_size=8),
    "mamba2": causal("mamba2", state_size=8, num_heads=8, head_dim=16, n_groups=2, chunk_size=8),
    "falcon_mamba": causal("falcon_mamba", state_size=8),
    "jamba": causal("jamba", way=EACH_EXPERT, num_hidden_layers=4, attn_layer_period=2,
                    attn_layer_offset=1,
                    expert_layer_period=2, expert_layer_offset=1, mamba_d_state=8,
                    use_mamba_kernels=False, **EXPERTS),
    "bamba": causal("bamba", attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=16,
                    mamba_d_state=8, mamba_n_groups=2, mamba_chunk_size=8),
    "recurrent_gemma": causal("recurrent_gemma", num_hidden_layers=3, lru_width=64,
                              attention_window_size=8, head_dim=16),
    "rwkv": causal("rwkv", attention_hidden_size=64, context_length=32),
    "xlstm": causal("xlstm", embedding_dim=64, num_blocks=2, num_heads=4, chunk_size=8),
    "lfm2": causal("lfm2", layer_types=["conv", "full_attention"]),
    "bert": masked("bert"),
    "roberta": masked("roberta", max_position_embeddings=70),
    "distilbert": masked("distilbert", dim=64, n_heads=4, n_layers=2, hidden_dim=96),
    "albert": masked("albert", embedding_size=32),
    "electra": masked("electra", embedding_size=32),
    "deberta": masked("deberta", relative_attention=True, pos_att_type=["c2p", "p2c"],
                      max_relative_positions=16),
    "deberta_v2": masked("deberta-v2", relative_attention=True, pos_att_type=["c2p", "p2c"],
                         position_buckets=8, share_att_key=True, norm_rel_ebd="layer_norm"),
    "longformer": masked("longformer", attention_window=[8, 8], max_position_embeddings=70),
    "big_bird": masked("big_bird", attention_type="block_sparse", block_size=8,
                       num_random_blocks=1, batch=partial(padded_text, 64)),
    "mpnet": masked("mpnet", max_position_embeddings=70),
    "convbert": masked("convbert", embedding_size=64),
    "fnet": masked("fnet", batch=text),
    "funnel": masked("funnel", size={}, block_sizes=[1, 1], d_model=64, n_head=4, d_head=16,
                     d_inner=96),
    "mobilebert": masked("mobilebert", embedding_size=32, intra_bottleneck_size=32,
                         true_hidden_size=32),
    "squeezebert": masked("squeezebert", embedding_size=64),
    "roformer": masked("roformer", embedding_size=32),
    "modernbert": masked("modernbert", local_attention=8, global_attn_every_n_layers=2),
    "esm": masked("esm", position_embedding_type="rotary", mask_token_id=3, token_dropout=False),
    "ibert": masked("ibert", quant_mode=False),
    "xlnet": transformer("AutoModelForCausalLM", "xlnet", text, size={}, d_model=64, n_layer=2,
                         n_head=4, d_inner=96, d_head=16),
    "t5": translator("t5", **ENCODER_AND_DECODER),
    "longt5": translator("longt5", local_radius=4, encoder_attention_type="transient-global",
                         global_block_size=4, **ENCODER_AND_DECODER),
    "switch_transformers": translator("switch_transformers", num_sparse_encoder_layers=1,
                                      num_sparse_decoder_layers=1, num_decoder_layers=2,
                                      expert_capacity=16, num_experts=4,
                                      **ENCODER_AND_DECODER),
    "bart": translator("bart", **ENCODER_AND_DECODER),
    "pegasus": translator("pegasus", **ENCODER_AND_DECODER),
    "marian": translator("marian", **ENCODER_AND_DECODER),
    "m2m_100": translator("m2m_100", **ENCODER_AND_DECODER),
    "led": translator("led", attention_window=8, **ENCODER_AND_DECODER),
    "prophetnet": translator("prophetnet", size={}, hidden_size=64, num_encoder_layers=2,
                             num_decoder_layers=2,
                             num_encoder_attention_heads=4, num_decoder_attention_heads=4,
                             decoder_start_token_id=1, ngram=2, encoder_ffn_dim=96,
                             decoder_ffn_dim=96),
    "whisper": transformer("AutoModelForSpeechSeq2Seq", "whisper", mel_and_text, num_mel_bins=16,
                           max_source_positions=30, max_target_positions=32,
                           **ENCODER_AND_DECODER),
    "wav2vec2": transformer("AutoModelForCTC", "wav2vec2", speech, **SPEECH),
    "hubert": transformer("AutoModelForCTC", "hubert", speech, **SPEECH),
    "wavlm": transformer("AutoModelForCTC", "wavlm", speech, num_buckets=16,
                         max_bucket_distance=32, **SPEECH),
    "audio_spectrogram_transformer": transformer(
        "AutoModelForAudioClassification", "audio-spectrogram-transformer",
        lambda: {"input_values": torch.randn(2, 40, 16), "labels": torch.randint(CLASSES, (2,))},
        max_length=40, num_mel_bins=16, patch_size=8, frequency_stride=4, time_stride=4,
        num_labels=CLASSES),
    "vit": of_images("vit"),
    "beit": of_images("beit", use_relative_position_bias=True, use_mask_token=False),
    "dinov2": of_images("dinov2"),
    "swin": of_images("swin", size={}, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4],
                      window_size=4, hidden_size=32),
    "pvt": of_images("pvt", hidden_sizes=[16, 32, 64, 64], depths=[1, 1, 1, 1], patch_size=4,
                     num_attention_heads=[1, 2, 4, 4], patch_sizes=[4, 2, 2, 2]),
    "segformer": transformer("AutoModelForSemanticSegmentation", "segformer", label_map,
                             hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 1, 1],
                             num_attention_heads=[1, 2, 3, 4], decoder_hidden_size=32,
                             num_labels=5),
    "videomae": transformer("AutoModelForVideoClassification", "videomae",
                            lambda: {"pixel_values": torch.randn(2, 4, 3, 32, 32),
                                     "labels": torch.randint(CLASSES, (2,))},
                            image_size=32, patch_size=8, num_frames=4, tubelet_size=2,
                            num_labels=CLASSES),
    "timesformer": transformer("AutoModelForVideoClassification", "timesformer",
                               lambda: {"pixel_values": torch.randn(2, 4, 3, 32, 32),
                                        "labels": torch.randint(CLASSES, (2,))},
                               image_size=32, patch_size=8, num_frames=4, num_labels=CLASSES),
    "clip": Network(clip, image_and_text, matched, adamw),
    "patchtst": Network(
        lambda: without_dropout(transformers.PatchTSTForPrediction(settings(
            "patchtst", num_input_channels=3, context_length=32, prediction_length=8,
            patch_length=8, patch_stride=4, d_model=32, ffn_dim=64, loss="mse"))),
        series, forecast, adamw),
}  # fmt: skip

NETWORKS = {
    f"{package} {name}": network
    for package, networks in [
        ("timm", TIMM), ("torchvision", TORCHVISION), ("transformers", TRANSFORMERS)
    ]
    for name, network in networks.items()
}  # fmt: skip
