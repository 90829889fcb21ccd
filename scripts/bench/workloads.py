"""Six training and compute workloads in ordinary PyTorch, to compare ways of running it.

Each workload is build(device, way) -> step: `step()` runs one iteration and returns a scalar tensor
(the loss).  Nothing here knows a backend.  More of them: more_workloads.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

OPEN = ("mlp", "mnist_cnn", "resnet18", "gpt", "black_scholes", "adamw_many")


def _as_it_is(function: Callable) -> Callable:
    return function


@dataclass(frozen=True)
class Way:
    """The way a workload is run.

    Attributes:
        mark: Called at the end of every step.
        compile_model: Makes a faster function of a model's.
        compile_optimizer: Makes a faster function of an optimizer's step.
        compile_step: Makes a faster function of a whole step, given its batch.
        optimizer_options: Further arguments of the optimizer, such as fused=True.
    """

    mark: Callable[[], object] = lambda: None
    compile_model: Callable[[Callable], Callable] = _as_it_is
    compile_optimizer: Callable[[Callable], Callable] = _as_it_is
    compile_step: Callable[[Callable], Callable] = _as_it_is
    optimizer_options: dict = field(default_factory=dict)


class MnistCnn(nn.Module):
    """[N, 1, 28, 28] images to [N, 10] logarithms of probabilities."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 32, 3), nn.Conv2d(32, 64, 3)
        self.drop1, self.drop2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(9216, 128), nn.Linear(128, 10)

    def forward(self, x):
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = torch.flatten(self.drop1(F.max_pool2d(x, 2)), 1)
        return F.log_softmax(self.fc2(self.drop2(F.relu(self.fc1(x)))), dim=1)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions beside a shortcut.  Source: arXiv:1512.03385, figure 2."""

    def __init__(self, channels_in: int, channels: int, stride: int):
        super().__init__()
        self.c1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.b1 = nn.BatchNorm2d(channels)
        self.c2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.b2 = nn.BatchNorm2d(channels)
        self.short = nn.Sequential()
        if stride != 1 or channels_in != channels:
            self.short = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x):
        y = self.b2(self.c2(F.relu(self.b1(self.c1(x)))))
        return F.relu(y + self.short(x))


class ResNet18(nn.Module):
    """[N, 3, H, W] small images to [N, classes]: the 18-layer network with a 3x3 stem."""

    def __init__(self, width: int = 64, classes: int = 10):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        blocks, channels_in = [], width
        for stage in range(4):
            channels = width << stage
            for stride in (2 if stage else 1, 1):
                blocks.append(BasicBlock(channels_in, channels, stride))
                channels_in = channels
        self.blocks, self.fc = nn.Sequential(*blocks), nn.Linear(8 * width, classes)

    def forward(self, x):
        x = self.blocks(self.stem(x))
        return self.fc(x.mean((2, 3)))


class GptBlock(nn.Module):
    """Causal attention and a feed-forward layer, each behind its norm; [N, T, D] to the same."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        n, t, d = x.shape
        parts = self.qkv(self.ln1(x)).split(d, dim=2)
        q, k, v = (p.reshape(n, t, self.heads, d // self.heads).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(n, t, d))
        return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """[N, T] tokens to [N, T, vocabulary] logits."""

    def __init__(self, vocabulary=1024, width=256, layers=4, heads=4, length=128):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*[GptBlock(width, heads) for _ in range(layers)])
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.ln(self.blocks(self.tok(tokens) + self.pos(positions))))


def training(model, optimizer, loss_of, batches, device, way: Way) -> Callable:
    """A step of gradient descent over the batches in turn; loss_of(model, *batch) is minimised."""
    model = model.train().to(device)
    optimizer = optimizer(model.parameters(), **way.optimizer_options)
    forward, update = way.compile_model(model), way.compile_optimizer(optimizer.step)
    batches = [tuple(tensor.to(device) for tensor in batch) for batch in batches]
    done = 0

    @way.compile_step
    def train(*batch):
        optimizer.zero_grad()
        loss = loss_of(forward, *batch)
        loss.backward()
        update()
        way.mark()
        return loss

    def step():
        nonlocal done
        batch = batches[done % len(batches)]
        done += 1
        return train(*batch)

    return step


def images(n: int, channels: int, size: int, batches: int = 4) -> list[tuple]:
    g = torch.Generator().manual_seed(1)
    return [
        (torch.randn(n, channels, size, size, generator=g), torch.randint(10, (n,), generator=g))
        for _ in range(batches)
    ]


def sgd(parameters, **options):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9, **options)


def adamw(parameters, **options):
    return torch.optim.AdamW(parameters, lr=3e-4, weight_decay=0.1, **options)


def cross_entropy(model, x, y):
    return F.cross_entropy(model(x), y)


def mlp(device, way: Way = Way()) -> Callable:
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(784, 512),
        nn.ReLU(),
        nn.Linear(512, 512),
        nn.ReLU(),
        nn.Linear(512, 10),
    )
    return training(model, sgd, cross_entropy, images(128, 1, 28), device, way)


def mnist_cnn(device, way: Way = Way()) -> Callable:
    def loss_of(model, x, y):
        return F.nll_loss(model(x), y)

    return training(MnistCnn(), sgd, loss_of, images(64, 1, 28), device, way)


def resnet18(device, way: Way = Way()) -> Callable:
    return training(ResNet18(), sgd, cross_entropy, images(16, 3, 32, batches=2), device, way)


def gpt(device, way: Way = Way()) -> Callable:
    g = torch.Generator().manual_seed(1)
    batches = [tuple(torch.randint(1024, (2, 8, 128), generator=g)) for _ in range(4)]

    def loss_of(model, x, y):
        return F.cross_entropy(model(x).flatten(0, 1), y.flatten())

    return training(Gpt(), adamw, loss_of, batches, device, way)


def _normal_cdf(x):
    """P(Z <= x) for a standard normal Z."""
    return 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def black_scholes(device, way: Way = Way()) -> Callable:
    """4 million European calls: one long chain of elementwise operations."""
    prices = pricing(1 << 22, device, way)
    return lambda: prices()[0]


def pricing(calls: int, device, way: Way) -> Callable:
    """A step that gives the prices of so many European calls."""
    g, ranges = torch.Generator().manual_seed(1), ((50, 100), (50, 100), (0.1, 2))
    spot, strike, years = (
        (torch.rand(calls, generator=g) * hi + lo).to(device) for lo, hi in ranges
    )

    def price(s, k, t, rate=0.03, volatility=0.2):
        spread = volatility * torch.sqrt(t)
        d1 = (torch.log(s / k) + (rate + volatility * volatility / 2) * t) / spread
        return s * _normal_cdf(d1) - k * torch.exp(-rate * t) * _normal_cdf(d1 - spread)

    run = way.compile_model(price)

    @way.compile_step
    def prices():
        with torch.no_grad():
            found = run(spot, strike, years)
        way.mark()
        return found

    return prices


def adamw_many(device, way: Way = Way()) -> Callable:
    """The optimizer alone: 40 large and 80 small tensors."""
    parameters, update = updating(device, way)

    def step():
        update()
        return parameters[0][0]

    return step


def updating(device, way: Way) -> tuple[list[torch.Tensor], Callable]:
    """Many parameters, and a step that updates them by gradients that stay."""
    sizes = [100_000] * 40 + [256] * 80
    parameters = [torch.randn(n).to(device).requires_grad_() for n in sizes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape).to(device)
    run = way.compile_optimizer(adamw(parameters, **way.optimizer_options).step)

    @way.compile_step
    def update():
        run()
        way.mark()

    return parameters, update
