"""Layers, their hooks and utilities."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

from feature_cases.programs import (
    drawn,
    feature,
    gradients,
    integers,
    made,
    module_case,
    perceptron,
    table,
)

table(
    "modules",
    LSTM=module_case(lambda: nn.LSTM(4, 5, 2, bidirectional=True), (6, 3, 4)),
    LSTM_with_a_projection=module_case(lambda: nn.LSTM(4, 5, proj_size=3), (6, 3, 4)),
    GRU=module_case(lambda: nn.GRU(4, 5, batch_first=True), (3, 6, 4)),
    RNN=module_case(lambda: nn.RNN(4, 5, nonlinearity="relu"), (6, 3, 4)),
    LSTMCell=module_case(lambda: nn.LSTMCell(4, 5), (3, 4)),
    GRUCell=module_case(lambda: nn.GRUCell(4, 5), (3, 4)),
    MultiheadAttention=module_case(
        lambda: nn.MultiheadAttention(8, 2, batch_first=True), *[(2, 5, 8)] * 3
    ),
    TransformerEncoder=module_case(
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2
        ),
        (2, 5, 8),
    ),
    TransformerEncoder_for_inference=lambda d: (
        made(
            lambda: nn.TransformerEncoder(
                nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2
            ),
            d,
        )
        .eval()(drawn(d, 2, 5, 8))
        .detach()
    ),
    Transformer=module_case(
        lambda: nn.Transformer(8, 2, 1, 1, 16, dropout=0.0), (5, 2, 8), (4, 2, 8)
    ),
    Conv1d=module_case(lambda: nn.Conv1d(4, 6, 3, dilation=2), (2, 4, 9)),
    Conv2d_in_groups=module_case(lambda: nn.Conv2d(4, 6, 3, groups=2, stride=2), (2, 4, 8, 8)),
    Conv3d=module_case(lambda: nn.Conv3d(2, 3, 2), (1, 2, 4, 4, 4)),
    ConvTranspose2d=module_case(
        lambda: nn.ConvTranspose2d(3, 2, 3, stride=2, output_padding=1), (1, 3, 4, 4)
    ),
    BatchNorm=module_case(lambda: nn.BatchNorm2d(3), (4, 3, 5, 5)),
    LayerNorm=module_case(lambda: nn.LayerNorm(6), (4, 6)),
    RMSNorm=module_case(lambda: nn.RMSNorm(6), (4, 6)),
    GroupNorm=module_case(lambda: nn.GroupNorm(2, 4), (2, 4, 3, 3)),
    InstanceNorm=module_case(lambda: nn.InstanceNorm2d(3, affine=True), (2, 3, 4, 4)),
    LocalResponseNorm=module_case(lambda: nn.LocalResponseNorm(2), (2, 4, 3, 3)),
    Bilinear=module_case(lambda: nn.Bilinear(3, 4, 2), (5, 3), (5, 4)),
    PReLU=module_case(lambda: nn.PReLU(3), (2, 3, 4)),
    Fold_and_Unfold=module_case(
        lambda: nn.Sequential(nn.Unfold(2, stride=2), nn.Fold((4, 4), 2, stride=2)), (1, 3, 4, 4)
    ),
    PixelShuffle=module_case(lambda: nn.PixelShuffle(2), (1, 8, 3, 3)),
    AdaptivePooling=module_case(lambda: nn.AdaptiveAvgPool2d((3, 2)), (1, 2, 7, 5)),
    FractionalMaxPool=lambda d: (
        nn.FractionalMaxPool2d(2, output_size=2)(drawn(d, 1, 2, 5, 5)).shape
    ),
    MaxUnpool=lambda d: nn.MaxUnpool2d(2)(
        *F.max_pool2d(drawn(d, 1, 2, 4, 4), 2, return_indices=True)
    ),
    AdaptiveLogSoftmax=lambda d: made(lambda: nn.AdaptiveLogSoftmaxWithLoss(6, 20, [5, 10]), d)(
        drawn(d, 4, 6), integers(d, 20, 4)
    ),
    Embedding=lambda d: gradients(
        lambda w: F.embedding(integers(d, 7, 3, 2), w, padding_idx=1), drawn(d, 7, 4)
    ),
    EmbeddingBag=lambda d: gradients(
        lambda w: F.embedding_bag(
            integers(d, 7, 6), w, torch.tensor([0, 2, 5], device=d), mode="mean"
        ),
        drawn(d, 7, 4),
    ),
    weight_norm=module_case(lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), (2, 4)),
    orthogonal=module_case(lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)), (2, 4)),
    scaled_dot_product_attention=lambda d: gradients(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        *(drawn(d, 2, 2, 5, 8, seed=i) for i in range(3)),
    ),
)


@feature("modules")
def packed_sequences(d):
    rnn = made(lambda: nn.LSTM(4, 5), d)
    packed = nn.utils.rnn.pack_padded_sequence(
        drawn(d, 6, 3, 4), torch.tensor([6, 2, 4]), enforce_sorted=False
    )
    outputs, state = rnn(packed)
    return nn.utils.rnn.pad_packed_sequence(outputs), state


@feature("modules")
def pad_and_unpad_sequences(d):
    rows = [drawn(d, n, 2, seed=n) for n in (3, 1, 2)]
    padded = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    return padded, nn.utils.rnn.unpad_sequence(padded, torch.tensor([3, 1, 2]), batch_first=True)


@feature("modules")
def spectral_norm(d):
    module = made(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)), d)
    return [module(drawn(d, 2, 4)) for _ in range(3)]


@feature("modules")
def pruning(d):
    module = made(lambda: nn.Linear(4, 3), d)
    prune.l1_unstructured(module, "weight", amount=0.4)
    prune.remove(module, "weight")
    return module.weight


@feature("modules")
def parametrization(d):
    class Symmetric(nn.Module):
        def forward(self, x):
            return x.triu() + x.triu(1).mT

    module = made(lambda: nn.Linear(3, 3), d)
    nn.utils.parametrize.register_parametrization(module, "weight", Symmetric())
    module(drawn(d, 2, 3)).sum().backward()
    return module.weight, module.parametrizations.weight.original.grad


@feature("modules")
def parameters_as_a_vector(d):
    module = made(perceptron, d)
    vector = nn.utils.parameters_to_vector(module.parameters())
    nn.utils.vector_to_parameters(vector * 2, module.parameters())
    return vector, list(module.parameters())


@feature("modules")
def lazy_modules(d):
    torch.manual_seed(0)
    module = nn.Sequential(nn.LazyLinear(3), nn.LazyBatchNorm1d()).to(d)
    output = module(drawn(d, 4, 5))
    return output.shape, module[0].weight.shape, module[0].weight.device.type == d


@feature("modules")
def fused_convolution_and_norm(d):
    convolution, norm = (
        made(lambda: nn.Conv2d(3, 4, 3), d).eval(),
        made(lambda: nn.BatchNorm2d(4), d),
    )
    fused = nn.utils.fusion.fuse_conv_bn_eval(convolution, norm.eval())
    return fused(drawn(d, 1, 3, 5, 5)).detach()


@feature("modules")
def initialisers(d):
    w = torch.empty(40, 50, device=d)
    moments = []
    for name in ("xavier_uniform_", "kaiming_normal_", "orthogonal_", "trunc_normal_"):
        torch.manual_seed(0)
        getattr(nn.init, name)(w)
        moments.append(bool(w.mean().abs() < 0.05) and bool(w.std() > 0))
    return moments, nn.init.eye_(w), nn.init.dirac_(torch.empty(3, 3, 2, device=d))
