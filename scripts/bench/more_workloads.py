"""Five further training workloads, of kinds that the six of workloads.py do not have.

Built and run like those.  Sources: ViT arXiv:2010.11929, inverted residuals arXiv:1801.04381,
DLRM arXiv:1906.00091.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from workloads import GptBlock, Way, adamw, cross_entropy, images, mlp, sgd, training

FURTHER = ("vit", "inverted_residuals", "lstm", "dlrm", "pointwise")


class EncoderBlock(GptBlock):
    """The layers of a GptBlock, with attention among all positions; [N, T, D] to the same."""

    def forward(self, x):
        n, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(n, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(y.transpose(1, 2).reshape(n, t, d))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class VisionTransformer(nn.Module):
    """[N, 3, 32, 32] images as 64 patches of 4 x 4, to [N, classes]."""

    def __init__(self, width=192, layers=6, heads=3, classes=10):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 65, width) * 0.02)
        self.blocks = nn.Sequential(*[EncoderBlock(width, heads) for _ in range(layers)])
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.positions
        return self.head(self.ln(self.blocks(x))[:, 0])


class InvertedResidual(nn.Module):
    """1x1 up, 3x3 for each channel alone, 1x1 down, beside a shortcut where shapes allow it."""

    def __init__(self, channels_in: int, channels: int, stride: int, expansion: int = 4):
        super().__init__()
        inner = channels_in * expansion
        self.adds = stride == 1 and channels_in == channels
        self.layers = nn.Sequential(
            nn.Conv2d(channels_in, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU6(),
            nn.Conv2d(inner, inner, 3, stride, 1, groups=inner, bias=False),
            nn.BatchNorm2d(inner), nn.ReLU6(),
            nn.Conv2d(inner, channels, 1, bias=False), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x):
        y = self.layers(x)
        return x + y if self.adds else y


class InvertedResidualNet(nn.Module):
    """[N, 3, 32, 32] images to [N, classes]."""

    def __init__(self, classes: int = 10):
        super().__init__()
        stages = [(24, 24, 1), (24, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 64, 1)]
        self.stem = nn.Sequential(
            nn.Conv2d(3, 24, 3, 1, 1, bias=False), nn.BatchNorm2d(24), nn.ReLU6()
        )
        self.blocks = nn.Sequential(*[InvertedResidual(*stage) for stage in stages])
        self.head = nn.Linear(64, classes)

    def forward(self, x):
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class TextClassifier(nn.Module):
    """[N, T] tokens to [N, classes]: an embedding and the last state of a two-layer LSTM."""

    def __init__(self, vocabulary=5000, width=128, classes=10):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens):
        states, _ = self.lstm(self.embedding(tokens))
        return self.head(states[:, -1])


class Recommender(nn.Module):
    """[N, 13] numbers and [N, 16] categories to [N] logits: tables, products of pairs, two nets."""

    def __init__(self, tables=16, rows=20_000, width=32):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.bottom = nn.Sequential(
            nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU()
        )  # fmt: skip
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(
            nn.Linear(width + pairs, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(),
            nn.Linear(128, 1),
        )  # fmt: skip
        first, second = torch.tril_indices(tables + 1, tables + 1, -1)
        self.register_buffer("pairs", first * (tables + 1) + second)

    def forward(self, numbers, categories):
        x = self.bottom(numbers)
        rows = [table(categories[:, k]) for k, table in enumerate(self.tables)]
        vectors = torch.stack([x, *rows], 1)
        products = (vectors @ vectors.transpose(1, 2)).flatten(1)[:, self.pairs]
        return self.top(torch.cat([x, products], 1))[:, 0]


def vit(device, way: Way = Way()) -> Callable:
    return training(VisionTransformer(), adamw, cross_entropy, images(32, 3, 32), device, way)


def inverted_residuals(device, way: Way = Way()) -> Callable:
    return training(InvertedResidualNet(), sgd, cross_entropy, images(32, 3, 32), device, way)


def lstm(device, way: Way = Way()) -> Callable:
    g = torch.Generator().manual_seed(1)
    batches = [
        (torch.randint(5000, (32, 64), generator=g), torch.randint(10, (32,), generator=g))
        for _ in range(4)
    ]
    return training(TextClassifier(), adamw, cross_entropy, batches, device, way)


def dlrm(device, way: Way = Way()) -> Callable:
    g = torch.Generator().manual_seed(1)
    batches = [
        (
            torch.randn(256, 13, generator=g),
            torch.randint(20_000, (256, 16), generator=g),
            torch.randint(2, (256,), generator=g).float(),
        )
        for _ in range(4)
    ]

    def loss_of(model, numbers, categories, clicked):
        logits = model(numbers, categories)
        return F.binary_cross_entropy_with_logits(logits, clicked)

    return training(Recommender(), plain_sgd, loss_of, batches, device, way)


def plain_sgd(parameters, **options):
    return torch.optim.SGD(parameters, lr=0.1, **options)


class Physics(nn.Module):
    """A closed formula with a few parameters, fitted to a million points."""

    def __init__(self):
        super().__init__()
        self.factors = nn.Parameter(torch.ones(5))

    def forward(self, x, t):
        a, b, c, d, e = self.factors
        wave = a * torch.sin(b * x - c * t) * torch.exp(-((d * x) ** 2))
        return wave + torch.tanh(e * t) * torch.sigmoid(x)


def pointwise(device, way: Way = Way()) -> Callable:
    """Elementwise work with gradients, which end in sums over all points."""
    g = torch.Generator().manual_seed(1)
    batches = [tuple(torch.randn(3, 1 << 20, generator=g)) for _ in range(2)]

    def loss_of(model, x, t, y):
        return F.mse_loss(model(x, t), y)

    return training(Physics(), plain_sgd, loss_of, batches, device, way)


def tiny(device, way: Way = Way()) -> Callable:
    """A step so small that only the cost of asking for it is left."""
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10))
    g = torch.Generator().manual_seed(1)
    batches = [(torch.randn(8, 32, generator=g), torch.randint(10, (8,), generator=g))]
    return training(model, plain_sgd, cross_entropy, batches, device, way)


def mlp_fed(device, way: Way = Way()) -> Callable:
    """`mlp` in a loop that reads the numbers of its next batch from text, some 2 ms of Python."""
    step = mlp(device, way)
    lines = [",".join(str(n / 7) for n in range(first, first + 200)) for first in range(128)]

    def fed_step():
        for line in lines:
            [float(word) for word in line.split(",")]
        return step()

    return fed_step
