"""Programs whose steps are not alike, or so small that their runtime is the cost.

Each is made for a device by a function that gives `step(number)`. A step returns a tensor to look
at, and reads what such a program reads. The same numbers give the same shapes on every device.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

Step = Callable[[int], torch.Tensor]
Mark = Callable[[], object]


def trained(loss: torch.Tensor, optimizer: torch.optim.Optimizer, mark: Mark) -> torch.Tensor:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    mark()
    return loss


def adamw(parameters, **options) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters), lr=1e-3, **options)


# --- other shapes each step -----------------------------------------------------------------------


def classifier_of_any_length(device: str, mark: Mark, **options) -> Step:
    """A transformer over sequences of 10 to 200."""
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = nn.ModuleList([nn.Embedding(1000, 64), body, nn.Linear(64, 4)]).to(device)
    embed, encode, classify = model
    optimizer, lengths = adamw(model.parameters(), **options), random.Random(0)

    def step(number: int) -> torch.Tensor:
        tokens = torch.randint(0, 1000, (8, lengths.randint(10, 200))).to(device)
        wanted = torch.randint(0, 4, (8,)).to(device)
        return trained(
            F.cross_entropy(classify(encode(embed(tokens)).mean(1)), wanted), optimizer, mark
        )

    return step


def perceptron_of_any_batch(device: str, mark: Mark, **options) -> Step:
    """Another number of rows each step."""
    model = nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
    ).to(device)
    optimizer = adamw(model.parameters(), **options)

    def step(number: int) -> torch.Tensor:
        x = torch.randn(2 + number, 64).to(device)
        wanted = torch.randint(0, 10, (2 + number,)).to(device)
        return trained(F.cross_entropy(model(x), wanted), optimizer, mark)

    return step


def graph_network(device: str, mark: Mark, **options) -> Step:
    """Nodes and edges vary."""
    layers = nn.ModuleList([nn.Linear(32, 64), nn.Linear(64, 64), nn.Linear(64, 4)]).to(device)
    *hidden, last = layers
    optimizer, sizes = adamw(layers.parameters(), **options), random.Random(0)

    def step(number: int) -> torch.Tensor:
        nodes, edges = sizes.randint(50, 300), sizes.randint(200, 900)
        h = torch.randn(nodes, 32).to(device)
        source, target = torch.randint(0, nodes, (2, edges)).to(device)
        wanted = torch.randint(0, 4, (nodes,)).to(device)
        for layer in hidden:
            h = layer(h)
            h = torch.zeros_like(h).index_add(0, target, h[source]).relu()
        return trained(F.cross_entropy(last(h), wanted), optimizer, mark)

    return step


def reinforcement(device: str, mark: Mark, **options) -> Step:
    """Acts, one read each, and an update on episodes of every length."""
    policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2)).to(device)
    optimizer, lengths = adamw(policy.parameters(), **options), random.Random(0)

    def step(number: int) -> torch.Tensor:
        length = lengths.randint(5, 40)
        seen = torch.randn(length, 4)
        with torch.no_grad():
            actions = [policy(one.to(device)).argmax().item() for one in seen]
        chosen = torch.tensor(actions).to(device)
        rewards = torch.linspace(1, 0, length).to(device)
        scores = policy(seen.to(device)).log_softmax(-1)
        picked = scores.gather(1, chosen[:, None])[:, 0]
        return trained(-(picked * rewards).mean(), optimizer, mark)

    return step


def generation(device: str, mark: Mark) -> Step:
    """Sixteen tokens after a prompt of a new length, with keys and values that grow."""
    width, heads, vocabulary = 64, 4, 256
    make = {"q": width, "k": width, "v": width, "out": width}
    blocks = nn.ModuleList(
        nn.ModuleDict({name: nn.Linear(width, to) for name, to in make.items()}) for _ in range(2)
    )
    model = nn.ModuleList([nn.Embedding(vocabulary, width), blocks, nn.Linear(width, vocabulary)])
    embed, blocks, last = model.to(device)

    def split(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (heads, width // heads)).transpose(1, 2)

    def attend(block: nn.ModuleDict, x: torch.Tensor, cache: list) -> torch.Tensor:
        q, k, v = (split(block[name](x)) for name in "qkv")
        if cache:
            k, v = torch.cat([cache[0], k], 2), torch.cat([cache[1], v], 2)
        cache[:] = k, v
        made = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)
        return x + block["out"](made.transpose(1, 2).flatten(2))

    @torch.no_grad()
    def step(number: int) -> torch.Tensor:
        tokens = torch.randint(0, vocabulary, (1, 5 + number % 50)).to(device)
        caches: list[list] = [[] for _ in blocks]
        for _ in range(16):
            x = embed(tokens)
            for block, cache in zip(blocks, caches):
                x = attend(block, x, cache)
            tokens = last(x[:, -1:]).argmax(-1)
            tokens[0, 0].item()
        mark()
        return tokens

    return step


def boxes(device: str, mark: Mark) -> Step:
    """Do the end of a detection: changing numbers of boxes, masks by their scores, overlaps."""
    numbers = random.Random(0)

    def step(number: int) -> torch.Tensor:
        found = torch.rand(numbers.randint(20, 400), 5).to(device)
        kept = found[found[:, 4] > 0.5]
        low, high = kept[:, :2], kept[:, :2] + kept[:, 2:4]
        shared = torch.minimum(high[:, None], high) - torch.maximum(low[:, None], low)
        area = shared.clamp(min=0).prod(-1)
        mark()
        return area.sum()

    return step


# --- small, or many small ------------------------------------------------------------------------


def tiny(device: str, mark: Mark, **options) -> Step:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, **options)
    x, y = torch.randn(16, 8).to(device), torch.randn(16, 1).to(device)

    def step(number: int) -> torch.Tensor:
        return trained(F.mse_loss(model(x), y), optimizer, mark)

    return step


def small_operations(device: str, mark: Mark) -> Step:
    """Two hundred, and a read."""
    x = torch.randn(64).to(device)

    def step(number: int) -> torch.Tensor:
        y = x
        for _ in range(100):
            y = (y * 1.01).tanh()
        y.sum().item()
        mark()
        return y

    return step


def many_parameters(device: str, mark: Mark, **options) -> Step:
    """AdamW over 120 tensors."""
    parameters = [torch.randn(64, 64).to(device).requires_grad_() for _ in range(120)]
    for parameter in parameters:
        parameter.grad = torch.randn(64, 64).to(device)
    optimizer = adamw(parameters, **options)

    def step(number: int) -> torch.Tensor:
        optimizer.step()
        mark()
        return parameters[0]

    return step


def without_marks(device: str, mark: Mark) -> Step:
    """Make a program of ten tiny steps without marks and reads."""
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(16, 8).to(device), torch.randn(16, 1).to(device)

    def step(number: int) -> torch.Tensor:
        for _ in range(10):
            loss = trained(F.mse_loss(model(x), y), optimizer, lambda: None)
        return loss

    return step


# --- recurrent layers ----------------------------------------------------------------------------


def recurrent(kind: Callable[..., nn.Module], device: str, mark: Mark, **options) -> Step:
    """64 steps of a sequence."""
    layer, last = kind(32, 64).to(device), nn.Linear(64, 4).to(device)
    optimizer = adamw([*layer.parameters(), *last.parameters()], **options)
    x, wanted = torch.randn(64, 16, 32).to(device), torch.randint(0, 4, (16,)).to(device)

    def step(number: int) -> torch.Tensor:
        return trained(F.cross_entropy(last(layer(x)[0][-1]), wanted), optimizer, mark)

    return step


def lstm(device: str, mark: Mark, **options) -> Step:
    return recurrent(nn.LSTM, device, mark, **options)


def gru(device: str, mark: Mark, **options) -> Step:
    return recurrent(nn.GRU, device, mark, **options)


# --- many kernels --------------------------------------------------------------------------------


def diffusion(device: str, mark: Mark) -> Step:
    """A sample of 20 steps, each with another number, through a few convolutions."""
    model = nn.Sequential(
        nn.Conv2d(4, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.SiLU(),
        nn.Conv2d(32, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.SiLU(),
        nn.Conv2d(32, 4, 3, padding=1),
    ).to(device)  # fmt: skip

    @torch.no_grad()
    def step(number: int) -> torch.Tensor:
        x = torch.randn(1, 4, 32, 32).to(device)
        for k in range(20):
            x = x - model(x) * (0.1 / (k + 1))
        mark()
        return x

    return step


def deep_convolutions(device: str, mark: Mark, **options) -> Step:
    """Thirty blocks of other widths: nearly every kernel is its own."""
    widths = [8 + 4 * k for k in range(31)]
    blocks = [
        nn.Sequential(
            nn.Conv2d(a, a, 3, padding=1, groups=a, bias=False), nn.BatchNorm2d(a), nn.SiLU(),
            nn.Conv2d(a, b, 1, bias=False), nn.BatchNorm2d(b),
        )
        for a, b in itertools.pairwise(widths)
    ]  # fmt: skip
    model = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), *blocks).to(device)
    optimizer = adamw(model.parameters(), **options)
    x = torch.randn(4, 3, 64, 64).to(device)

    def step(number: int) -> torch.Tensor:
        return trained(model(x).square().mean(), optimizer, mark)

    return step


RESTLESS: dict[str, Callable[..., Step]] = {
    make.__name__: make
    for make in (
        classifier_of_any_length, perceptron_of_any_batch, graph_network, reinforcement, generation,
        boxes, tiny, small_operations, many_parameters, without_marks, lstm, gru, diffusion,
        deep_convolutions,
    )
}  # fmt: skip
# What takes options of an optimizer is run with each of eager's ways to update parameters.
HAVE_OPTIMIZER = frozenset(RESTLESS) - {
    "generation", "boxes", "small_operations", "without_marks", "diffusion"
}  # fmt: skip
