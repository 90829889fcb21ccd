"""Ten workloads of a size that a GPU is used for, built and run like those of workloads.py.

float32 products may use TF32 where `torch.set_float32_matmul_precision("high")` says so; the names
with bf16 run under autocast.
"""

from __future__ import annotations

from collections.abc import Callable

import more_workloads
import torch
import torch.nn.functional as F
import workloads
from more_workloads import EncoderBlock, VisionTransformer
from torch import nn
from workloads import Gpt, ResNet18, Way, adamw, cross_entropy, images, mlp, mnist_cnn, sgd

NAMES = (
    "tiny_adam", "mlp", "adamw_4m", "black_scholes_16m", "mnist_cnn", "gpt_bf16", "gpt_tf32",
    "vit_bf16", "resnet18_tf32", "resnet18_bf16",
)  # fmt: skip


def in_bfloat16(loss_of: Callable, device: str) -> Callable:
    """The loss under autocast."""

    def function(*given):
        with torch.autocast(torch.device(device).type, dtype=torch.bfloat16):
            return loss_of(*given)

    return function


def tiny_adam(device, way: Way = Way()) -> Callable:
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    g = torch.Generator().manual_seed(1)
    batches = [(torch.randn(8, 32, generator=g), torch.randint(10, (8,), generator=g))]
    return workloads.training(model, torch.optim.Adam, cross_entropy, batches, device, way)


def adamw_4m(device, way: Way = Way()) -> Callable:
    """Without a look at a value, which is a call of its own."""
    parameters, update = workloads.updating(device, way)

    def step():
        update()
        return parameters[0]

    return step


def black_scholes_16m(device, way: Way = Way()) -> Callable:
    return workloads.pricing(1 << 24, device, way)


def _gpt(device, way: Way, loss_of: Callable) -> Callable:
    g = torch.Generator().manual_seed(1)
    batches = [tuple(torch.randint(1024, (2, 16, 256), generator=g)) for _ in range(4)]
    model = Gpt(width=384, layers=6, heads=6, length=256)
    return workloads.training(model, adamw, loss_of, batches, device, way)


def _loss_of_tokens(model, x, y):
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def gpt_tf32(device, way: Way = Way()) -> Callable:
    return _gpt(device, way, _loss_of_tokens)


def gpt_bf16(device, way: Way = Way()) -> Callable:
    return _gpt(device, way, in_bfloat16(_loss_of_tokens, device))


class DroppingBlock(EncoderBlock):
    """An encoder's block that drops a tenth of what it gives."""

    def forward(self, x):
        return F.dropout(super().forward(x), 0.1, self.training)


class DroppingTransformer(VisionTransformer):
    """The vision transformer, of such blocks."""

    def __init__(self, width: int, layers: int, heads: int):
        super().__init__(width, layers, heads)
        self.blocks = nn.Sequential(*[DroppingBlock(width, heads) for _ in range(layers)])


def vit_bf16(device, way: Way = Way()) -> Callable:
    loss_of, batches = in_bfloat16(cross_entropy, device), images(64, 3, 32)
    return workloads.training(DroppingTransformer(384, 6, 6), adamw, loss_of, batches, device, way)


def resnet18_tf32(device, way: Way = Way()) -> Callable:
    batches = images(64, 3, 32, batches=2)
    return workloads.training(ResNet18(), sgd, cross_entropy, batches, device, way)


def resnet18_bf16(device, way: Way = Way()) -> Callable:
    """In channels_last, weights and images."""
    batches = [
        (x.to(memory_format=torch.channels_last), y) for x, y in images(64, 3, 32, batches=2)
    ]
    model = ResNet18().to(memory_format=torch.channels_last)
    return workloads.training(model, sgd, in_bfloat16(cross_entropy, device), batches, device, way)


BUILDERS: dict[str, Callable] = {
    **{name: vars(workloads)[name] for name in workloads.OPEN},
    **{name: vars(more_workloads)[name] for name in (*more_workloads.FURTHER, "tiny")},
    "mlp": mlp, "mnist_cnn": mnist_cnn, "tiny_adam": tiny_adam, "adamw_4m": adamw_4m,
    "black_scholes_16m": black_scholes_16m, "gpt_tf32": gpt_tf32, "gpt_bf16": gpt_bf16,
    "vit_bf16": vit_bf16, "resnet18_tf32": resnet18_tf32, "resnet18_bf16": resnet18_bf16,
}  # fmt: skip
