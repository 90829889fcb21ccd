"""Programs drawn at random that run at other sizes each time: the same calls, other extents.

A program is a list of calls on values whose shapes have the names of extents in them; it is drawn
while it runs on the CPU, and a call that the CPU refuses is left out.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional as F

# Where generated code changes: nothing, one, vectors with their neighbours, panels, primes.
SIZES = (
    0,
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    9,
    13,
    15,
    16,
    17,
    23,
    31,
    32,
    33,
    37,
    63,
    64,
    65,
    97,
    129,
    131,
    257,
)
USUAL = SIZES[2:]
WHOLE = (16, 32, 48, 64)  # vectors of every dtype, with nothing left over
SEEDS_OF_PARTS = 3
LARGEST = 1e3

Extents = dict[str, int]
Run = Callable[[list[torch.Tensor], Extents], torch.Tensor]


def _linear(r: random.Random) -> Run:
    width = r.choice((1, 3, 8, 17))

    def run(x: list[torch.Tensor], e: Extents) -> torch.Tensor:
        weight = _weights(x[0].shape[-1] * width, x[0]).view(x[0].shape[-1], width)
        return x[0] @ weight / x[0].shape[-1]

    return run


def _weights(count: int, like: torch.Tensor) -> torch.Tensor:
    numbers = torch.linspace(-1, 1, max(count, 1), dtype=like.dtype)[:count].sin()
    return numbers.to(like.device)


def _pointwise(r: random.Random) -> Run:
    name = r.choice(("sin", "tanh", "sigmoid", "exp", "relu", "neg", "square", "cos"))
    return lambda x, e: getattr(x[0].clamp(-4, 4), name)()


def _binary(r: random.Random) -> Run:
    name = r.choice(("add", "sub", "mul", "maximum"))
    return lambda x, e: getattr(torch, name)(x[0], x[1])


def _reduction(r: random.Random) -> Run:
    dim, keep = r.choice((0, -1, 1)), r.random() < 0.5
    name = r.choice(("sum", "mean", "amax", "logsumexp"))
    return lambda x, e: getattr(torch, name)(x[0], dim, keepdim=keep)


def _softmax(r: random.Random) -> Run:
    dim = r.choice((0, -1, 1))
    return lambda x, e: x[0].softmax(dim)


def _norm(r: random.Random) -> Run:
    # A usual eps would make a gradient of two numbers that are nearly equal one of roundings alone.
    return lambda x, e: F.layer_norm(x[0], x[0].shape[-1:], eps=0.1)


def _slice(r: random.Random) -> Run:
    first, step, dim = r.choice((0, 1, 2)), r.choice((1, 1, 2)), r.choice((0, -1))
    cut = r.choice((0, 1))
    return lambda x, e: x[0].movedim(dim, 0)[first : x[0].shape[dim] - cut : step].movedim(0, dim)


def _moved(r: random.Random) -> Run:
    return r.choice(
        (
            lambda x, e: x[0].transpose(0, -1),
            lambda x, e: x[0].flip(0),
            lambda x, e: x[0].roll(1, -1),
            lambda x, e: x[0].transpose(0, -1).reshape(-1),
            lambda x, e: x[0].flatten(0, 1),
            lambda x, e: x[0].unsqueeze(1).expand(-1, 3, *x[0].shape[1:]),
            lambda x, e: F.pad(x[0], (1, 2)),
        )
    )


def _joined(r: random.Random) -> Run:
    dim = r.choice((0, -1))
    return lambda x, e: torch.cat([x[0], x[1], x[0]], dim)


def _looked_up(r: random.Random) -> Run:
    shift = r.choice((1, 3))

    def run(x: list[torch.Tensor], e: Extents) -> torch.Tensor:
        rows = (torch.arange(e["m"]) * shift % max(1, x[0].shape[0])).to(x[0].device)
        return x[0][rows]

    return run


def _added_where(r: random.Random) -> Run:
    def run(x: list[torch.Tensor], e: Extents) -> torch.Tensor:
        rows = (torch.arange(x[0].shape[0]) * 7 % max(1, e["m"])).to(x[0].device)
        zeros = torch.zeros(e["m"], *x[0].shape[1:], dtype=x[0].dtype, device=x[0].device)
        return zeros.index_add(0, rows, x[0])

    return run


def _attention(r: random.Random) -> Run:
    causal = r.random() < 0.3

    def run(x: list[torch.Tensor], e: Extents) -> torch.Tensor:
        q = x[0].reshape(1, 1, *x[0].shape[-2:])
        return F.scaled_dot_product_attention(q, q.cos(), q * 0.5, is_causal=causal)[0, 0]

    return run


def _product(r: random.Random) -> Run:
    return lambda x, e: x[0].transpose(-2, -1) @ x[0] / max(1, x[0].shape[-2])


def _chosen(r: random.Random) -> Run:
    return lambda x, e: torch.where(
        torch.arange(x[0].shape[-1], device=x[0].device) % 2 == 0, x[0], x[0] * 0.5
    )


def _gathered(r: random.Random) -> Run:
    def run(x: list[torch.Tensor], e: Extents) -> torch.Tensor:
        index = torch.arange(x[0].shape[0]).to(x[0].device) % x[0].shape[-1]
        return x[0].gather(-1, index.view(-1, *[1] * (x[0].dim() - 1)).expand(*x[0].shape[:-1], 1))

    return run


def _other(r: random.Random) -> Run:
    return r.choice(
        (
            lambda x, e: x[0].cumsum(-1),
            lambda x, e: x[0] / (1 + x[0].norm()),
            lambda x, e: x[0].tril() if x[0].dim() > 1 else x[0],
            lambda x, e: x[0].sort(-1).values,
            lambda x, e: x[0].chunk(2, -1)[0],
            lambda x, e: x[0] - x[0].mean(),
            lambda x, e: x[0].argmax(-1).to(x[0].dtype),
        )
    )


CALLS: tuple[tuple[int, Callable[[random.Random], Run]], ...] = (
    (2, _linear), (3, _pointwise), (3, _binary), (3, _reduction), (2, _softmax), (2, _norm),
    (3, _slice), (4, _moved), (2, _joined), (2, _looked_up), (2, _added_where), (1, _attention),
    (1, _product), (1, _chosen), (1, _gathered), (1, _other),
)  # fmt: skip
LEAVES: tuple[tuple[str | int, ...], ...] = (
    ("n", 6), ("n",), ("n", "l"), (6,), ("n", "l", 4), ("l", 6), (5, "n"), ("n", 1), ("l",),
)  # fmt: skip


class ResizedProgram:
    """Leaves and calls; what it computes at any extents."""

    def __init__(self, seed: int, length: int) -> None:
        self.r = r = random.Random(f"resized {seed}")
        self.dtype = r.choice((torch.float64, torch.float64, torch.float32))
        self.leaves = [r.choice(LEAVES) for _ in range(r.choice((2, 3)))]
        self.calls: list[tuple[Run, tuple[int, ...]]] = []
        values = self._leaves("cpu", {"n": 5, "l": 7, "m": 11}, 0)
        for _ in range(length * 4):
            if len(self.calls) == length:
                break
            run = r.choices([c for _, c in CALLS], [w for w, _ in CALLS])[0](r)
            operands = tuple(r.randrange(max(0, len(values) - 4), len(values)) for _ in range(2))
            try:
                made = run([values[k] for k in operands], {"n": 5, "l": 7, "m": 11})
            except (RuntimeError, IndexError, ValueError):
                continue
            if made.numel() > 20_000 or made.dim() > 4:
                continue
            self.calls.append((run, operands))
            values.append(made)

    def _leaves(self, device: str, extents: Extents, salt: int) -> list[torch.Tensor]:
        g = torch.Generator().manual_seed(salt)
        shapes = [[extents.get(n, n) for n in leaf] for leaf in self.leaves]  # type: ignore[arg-type]
        return [torch.randn(shape, generator=g, dtype=self.dtype).to(device) for shape in shapes]

    def run(self, device: str, extents: Extents, salt: int) -> list[torch.Tensor]:
        """The last values and the gradients of the leaves."""
        leaves = [x.requires_grad_() for x in self._leaves(device, extents, salt)]
        values = list(leaves)
        for run, operands in self.calls:
            values.append(run([values[k] for k in operands], extents))
        results = values[-2:]
        total = sum((y.sin().sum() for y in results if y.requires_grad), torch.zeros(()).to(device))
        given: Sequence[torch.Tensor | None] = ()
        if total.requires_grad:
            given = torch.autograd.grad(total, leaves, allow_unused=True)
        return [y.detach() for y in results] + [g for g in given if g is not None]


def sequence(seed: int, count: int) -> list[Extents]:
    """Extents of so many runs: most change each time, and some come again."""
    r = random.Random(f"extents {seed}")
    usual = WHOLE if r.random() < 0.3 else USUAL
    found: list[Extents] = []
    while len(found) < count:
        if found and r.random() < 0.1:
            found.append(r.choice(found))
            continue
        table = usual if r.random() < 0.9 else SIZES
        most = r.choice((12, 20, len(table)))
        found.append({name: r.choice(table[:most]) for name in "nlm"})
    return found
