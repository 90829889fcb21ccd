"""`generate()`, flexible attention, files of weights, adapters and diffusion, as on the CPU."""

import copy

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tests import trainers

pytestmark = pytest.mark.also_native


@pytest.mark.parametrize(
    "options",
    [
        {"do_sample": False},
        {"num_beams": 3, "do_sample": False},
        {"do_sample": True, "top_k": 1},
        {"do_sample": False, "cache_implementation": "static", "disable_compile": True},
    ],
    ids=["greedy", "beams", "sampled", "static"],
)
def test_generate_gives_the_tokens_of_the_cpu(options):
    model = trainers.language_model().eval()
    lazy = copy.deepcopy(model).to("ltc")
    ids = trainers.words(2, 5)
    mask = torch.ones_like(ids)
    mask[0, :2] = 0

    expected = model.generate(ids, attention_mask=mask, max_new_tokens=5, **options)
    found = lazy.generate(ids.to("ltc"), attention_mask=mask.to("ltc"), max_new_tokens=5, **options)

    assert found.is_ltc
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("kind", ["eager", "sdpa", "flex_attention"])
def test_a_kind_of_attention_gives_the_loss_and_gradients_of_the_cpu(kind):
    ids = trainers.words(2, 5)
    model = trainers.language_model(attn_implementation="eager")
    lazy = trainers.language_model(attn_implementation=kind).to("ltc")
    lazy.gradient_checkpointing_enable()
    for one, device in ((model, "cpu"), (lazy, "ltc")):
        one.train()(ids.to(device), labels=ids.to(device)).loss.backward()

    for p, q in zip(model.parameters(), lazy.parameters()):
        assert torch.allclose(q.grad.cpu(), p.grad, atol=1e-5)


def test_flexible_attention_is_answered_through_its_dense_form():
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4, 16, 8), (1, 2, 16, 8), (1, 2, 16, 8))
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]

    def near(batch, head, query, key):
        return (query >= key) & (query > 0)  # the first query sees nothing

    def nearer(score, batch, head, query, key):
        return score + (query - key) * 0.1 + head

    found = []
    for device in ("cpu", "ltc"):
        q, k, v = (x.to(device) for x in tensors)
        mask = create_block_mask(near, None, None, 16, 16, device=device)
        found.append(flex_attention(q, k, v, nearer, mask, enable_gqa=True, return_lse=True))
    for expected, lazy in zip(*found):
        assert torch.allclose(lazy.cpu(), expected, atol=1e-5)
    q.requires_grad_()
    torch.compile(flex_attention)(q, k, v, enable_gqa=True).sum().backward()
    assert q.grad.is_ltc


def test_safetensors_files_are_opened_on_the_device(tmp_path):
    safetensors = pytest.importorskip("safetensors", reason="safetensors is not installed")
    torch_files = pytest.importorskip("safetensors.torch")
    path, x = str(tmp_path / "x.safetensors"), torch.arange(6.0).reshape(2, 3)
    torch_files.save_file({"x": x.to("ltc")}, path)

    assert torch_files.load_file(path, device="ltc")["x"].is_ltc
    with safetensors.safe_open(path, framework="pt", device="ltc:0") as file:
        assert list(file.keys()) == ["x"]
        assert file.get_slice("x")[1].is_ltc
        assert torch.equal(file.get_tensor("x").cpu(), x)


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
def test_adapters_train_as_on_the_cpu(kind):
    peft = trainers.needs("peft")
    layers = ["k_proj", "down_proj"]
    if kind == "ia3":
        chosen = peft.IA3Config(target_modules=layers, feedforward_modules=["down_proj"])
    else:
        chosen = peft.LoraConfig(r=2, target_modules=layers, use_dora=kind == "dora")
    losses = []
    for device in ("cpu", "ltc"):
        model = peft.get_peft_model(trainers.language_model(), copy.deepcopy(chosen)).to(device)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.1)
        ids = trainers.words(2, 5).to(device)
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
        losses.append(
            [loss.item(), model.merge_and_unload()(input_ids=ids, labels=ids).loss.item()]
        )

    assert losses[1] == pytest.approx(losses[0], abs=1e-4)


def test_a_diffusion_pipeline_gives_the_images_of_the_cpu():
    diffusers = trainers.needs("diffusers")
    images = []
    for device in ("cpu", "ltc"):
        torch.manual_seed(0)
        network = diffusers.UNet2DModel(
            sample_size=8, block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"),
            up_block_types=("AttnUpBlock2D", "UpBlock2D"), attention_head_dim=4,
        )  # fmt: skip
        pipeline = diffusers.DDIMPipeline(network, diffusers.DDIMScheduler(20)).to(device)
        pipeline.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(0)
        made = pipeline(1, generator, num_inference_steps=2, output_type="np").images
        images.append(torch.from_numpy(made))

    assert torch.allclose(images[1], images[0], atol=1e-5)
