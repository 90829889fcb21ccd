"""Programs drawn at random from many kinds of calls: each fits the shapes that are there.

A program is a list of calls, drawn while it runs on the CPU; a call that the CPU refuses is left
out. It can then run on any device, with or without gradients.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

SIZES = (1, 2, 3, 4, 5, 7, 8, 16, 17, 33)
MOST_ELEMENTS = 20_000
NEARBY = 1e-13  # relative
LARGEST = 1e4  # values beyond this are brought back: rounding stays what it is


@dataclass(frozen=True)
class Call:
    """`run(*operands)` of the values of these numbers; `text` is for the reader of a failure."""

    text: str
    operands: tuple[int, ...]
    run: Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Program:
    """Tensors to begin with, calls that each add a value, and which values are its results.

    marks  calls after which the step ends
    """

    inputs: tuple[torch.Tensor, ...]
    calls: tuple[Call, ...]
    results: tuple[int, ...]
    marks: frozenset[int]

    def run(
        self, device: str, gradients: bool, mark: Callable[[], object] = lambda: None
    ) -> list[torch.Tensor]:
        """The results, then the gradients of the inputs that any depends on."""
        values: list = [x.clone().to(device).requires_grad_(gradients) for x in self.inputs]
        leaves = list(values)
        last = {n: k for k, call in enumerate(self.calls) for n in call.operands}
        for k, call in enumerate(self.calls):
            values.append(call.run(*[values[n] for n in call.operands]))
            for n in set(call.operands):
                if last[n] == k and n not in self.results:
                    values[n] = None  # what nobody holds is never in memory
            if k in self.marks:
                mark()
        found = [values[n] for n in self.results]
        if not gradients or not any(y.requires_grad for y in found):
            return found
        total = sum(y.sin().sum() for y in found if y.requires_grad)
        given = torch.autograd.grad(total, leaves, allow_unused=True)
        return [y.detach() for y in found] + [g for g in given if g is not None]

    def nearby(self) -> Program:
        """The same of inputs that are nearly these: what that changes, rounding may change too."""
        g = torch.Generator().manual_seed(0)
        others = tuple(
            x + x * NEARBY * torch.randn(x.shape, generator=g, dtype=x.dtype) for x in self.inputs
        )
        return Program(others, self.calls, self.results, self.marks)

    def only(self, result: int) -> Program:
        """What one result needs, for the reader of a failure."""
        needed, first = {result}, len(self.inputs)
        for k in reversed(range(len(self.calls))):
            if first + k in needed:
                needed.update(self.calls[k].operands)
        kept = [n for n in range(first + len(self.calls)) if n >= first and n in needed]
        new = {n: n for n in range(first)} | {n: first + k for k, n in enumerate(kept)}
        calls = []
        for n in kept:
            call = self.calls[n - first]
            calls.append(Call(call.text, tuple(new[m] for m in call.operands), call.run))
        marks = frozenset(new[first + k] - first for k in self.marks if first + k in new)
        return Program(self.inputs, tuple(calls), (new[result],), marks)

    def __str__(self) -> str:
        first = len(self.inputs)
        lines = [f"v{k} = input {tuple(x.shape)}" for k, x in enumerate(self.inputs)]
        for k, call in enumerate(self.calls):
            operands = ", ".join(f"v{n}" for n in call.operands)
            marked = "; mark" if k in self.marks else ""
            lines.append(f"v{first + k} = {call.text}({operands}){marked}")
        return "\n".join([*lines, f"results {self.results}"])


def drawn_program(seed: int, length: int = 14, dtype: torch.dtype = torch.float64) -> Program:
    """The program of a seed."""
    source = random.Random(seed)
    torch.manual_seed(seed)
    inputs = tuple(torch.randn(_shape(source), dtype=dtype) for _ in range(3))
    values, calls = list(inputs), []
    while len(calls) < length:
        call = _drawn_call(source, values)
        try:
            value = call.run(*[values[n] for n in call.operands])
        except (RuntimeError, IndexError, ValueError):
            continue
        if not _is_usable(value):
            continue
        values.append(value)
        calls.append(call)
    count = len(values)
    results = sorted({count - 1, *source.sample(range(len(inputs), count), source.randint(1, 4))})
    marks = frozenset(k for k in range(length) if source.random() < 0.08)
    return Program(inputs, tuple(calls), tuple(results), marks)


def _shape(source: random.Random) -> tuple[int, ...]:
    while True:
        shape = tuple(source.choice(SIZES) for _ in range(source.randint(1, 4)))
        if math.prod(shape) <= MOST_ELEMENTS:
            return shape


def _is_usable(value: torch.Tensor) -> bool:
    if value.numel() > MOST_ELEMENTS or not value.is_floating_point():
        return False
    return bool(torch.isfinite(value).all()) and (
        not value.numel() or float(value.abs().max()) < LARGEST
    )


def _drawn_call(source: random.Random, values: list[torch.Tensor]) -> Call:
    kind = source.choice(_KINDS)
    n = source.choice(range(max(0, len(values) - 6), len(values)))  # chains more than bushes
    return kind(source, values, n)


# --- kinds of calls ------------------------------------------------------------------------------


def _unary(source, values, n) -> Call:
    name = source.choice(list(UNARY))
    return Call(name, (n,), UNARY[name])


UNARY = {
    "tanh": torch.tanh,
    "sin": torch.sin,
    "neg": torch.neg,
    "abs": torch.abs,
    "relu": F.relu,
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,
    "exp of tanh": lambda x: x.tanh().exp(),
    "root": lambda x: (x * x + 1).sqrt(),
    "log": lambda x: (x.abs() + 1).log(),
    "times 0.5": lambda x: x * 0.5,
    "plus 1": lambda x: x + 1,
    "one over": lambda x: 1 / (x.abs() + 1),
    "square": lambda x: x * x * 0.1,
    "clamp": lambda x: x.clamp(-0.7, 1.3),
    "positive part by mask": lambda x: x * (x > 0),
    "where": lambda x: torch.where(x > 0.25, x, 1.0),
    "masked_fill": lambda x: x.masked_fill(x < -0.25, 2.0),
    "floor": lambda x: x.floor(),
    "to int and back": lambda x: (x * 3).to(torch.int32).to(x.dtype),
    "contiguous": lambda x: x.contiguous() + 0,
    "clone": torch.clone,
    "detach": lambda x: x.detach() * 2,
    "zeros_like": lambda x: torch.zeros_like(x) + 0.5,
    "tril": torch.tril,
    "written to": lambda x: x.clone().mul_(0.5).add_(1),
}


def _binary(source, values, n) -> Call:
    name = source.choice(list(BINARY))
    m = source.choice(range(len(values)))
    return Call(name, (n, m), BINARY[name])


def _fitted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """y in a shape that broadcasts to x's."""
    dims = [k for k in range(min(x.dim(), y.dim())) if y.shape[-1 - k] not in (1, x.shape[-1 - k])]
    while y.dim() > x.dim():
        y = y.mean(0)
    dims = [-1 - k for k in dims if k < y.dim()]
    return y.mean(dims, keepdim=True) if dims else y


BINARY = {
    "add": lambda x, y: x + _fitted(x, y),
    "sub": lambda x, y: _fitted(x, y) - x,
    "mul": lambda x, y: x * _fitted(x, y).tanh(),
    "div": lambda x, y: x / (_fitted(x, y).abs() + 1),
    "maximum": lambda x, y: torch.maximum(x, _fitted(x, y)),
    "where greater": lambda x, y: torch.where(x > _fitted(x, y), x, 0.5 * x),
    "matmul": lambda x, y: torch.matmul(x, y) * 0.1,
    "matmul transposed": lambda x, y: torch.matmul(x, y.mT) * 0.1,
    "transposed matmul": lambda x, y: torch.matmul(x.mT, y) * 0.1,
    "cat": lambda x, y: torch.cat([x, y], -1),
    "cat of self": lambda x, y: torch.cat([x, x * 2, x], 0),
    "stack": lambda x, y: torch.stack([x, _fitted(x, y).expand_as(x)], 1),
    "outer": lambda x, y: x.flatten()[:17, None] * y.flatten()[None, :33],
    "copied into a slice": lambda x, y: _into_slice(x, y),
    "lerp": lambda x, y: torch.lerp(x, _fitted(x, y).expand_as(x), 0.3),
    "addcmul": lambda x, y: torch.addcmul(x, x, _fitted(x, y).expand_as(x), value=0.1),
    "einsum": lambda x, y: torch.einsum("i...,j...->ij", x, y) * 0.1,
}


def _into_slice(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x = x.clone()
    x[..., ::2] = _fitted(x[..., ::2], y)
    return x


def _view(source, values, n) -> Call:
    x = values[n]
    order = source.sample(range(x.dim()), x.dim())
    d = source.randrange(x.dim()) if x.dim() else 0
    size = x.shape[d] if x.dim() else 1
    first, step = source.randrange(size) if size else 0, source.randint(1, 3)
    shape = _factors(source, x.numel())
    shift = source.randint(-3, 3)
    choices = {
        f"permute {order}": lambda x: x.permute(order),
        f"reshape {shape}": lambda x: x.reshape(shape),
        f"flatten and reshape {shape}": lambda x: (x + 1).reshape(shape),
        f"slice {d} {first}::{step}": lambda x: x.movedim(d, 0)[first::step],
        f"select {d} {first}": lambda x: x.select(d, first),
        f"unsqueeze {d}": lambda x: x.unsqueeze(d),
        f"expand {d}": lambda x: x.unsqueeze(d).expand(*x.shape[:d], 3, *x.shape[d:]),
        f"flip {d}": lambda x: x.flip(d),
        f"roll {d} {shift}": lambda x: x.roll(shift, d),
        "squeeze": lambda x: x.squeeze(),
        "mT": lambda x: x.mT,
        "diagonal": lambda x: x.diagonal(),
        f"chunk {d}": lambda x: x.chunk(2, d)[-1],
        f"unfold {d}": lambda x: x.unfold(d, 2, step),
        f"pad {shift}": lambda x: F.pad(x, (shift, 2, 1, 0)) if x.dim() > 1 else F.pad(x, (2, 1)),
        f"repeat {d}": lambda x: x.repeat_interleave(2, d),
        "reflect": lambda x: F.pad(x, (1, 1), mode="reflect"),
    }
    name = source.choice(list(choices))
    return Call(name, (n,), choices[name])


def _factors(source: random.Random, count: int) -> tuple[int, ...]:
    shape = []
    while count > 1 and len(shape) < 3:
        divisors = [k for k in range(1, min(count, 64) + 1) if count % k == 0]
        shape.append(source.choice(divisors))
        count //= shape[-1]
    source.shuffle(shape)
    return (*shape, count)


def _reduction(source, values, n) -> Call:
    x = values[n]
    dims = source.sample(range(x.dim()), source.randint(1, x.dim())) if x.dim() else []
    d = source.randrange(x.dim()) if x.dim() else 0
    keep = source.random() < 0.6
    rest = tuple(x.shape[source.randrange(x.dim()) :]) if x.dim() else ()
    choices = {
        f"sum {dims} {keep}": lambda x: x.sum(dims, keepdim=keep) * 0.1,
        f"mean {dims} {keep}": lambda x: x.mean(dims, keepdim=keep),
        f"amax {dims} {keep}": lambda x: x.amax(dims, keepdim=keep),
        f"var {dims} {keep}": lambda x: x.var(dims, correction=0, keepdim=keep),
        f"centered {dims}": lambda x: x - x.mean(dims, keepdim=True),
        f"scaled {dims}": lambda x: x / (x.abs().sum(dims, keepdim=True) + 1),
        f"norm {dims} {keep}": lambda x: (x.square().sum(dims, keepdim=keep) + 1).sqrt(),
        f"softmax {d}": lambda x: x.softmax(d),
        f"log_softmax {d}": lambda x: x.log_softmax(d),
        f"logsumexp {d}": lambda x: x.logsumexp(d, keepdim=keep),
        f"cumsum {d}": lambda x: x.cumsum(d) * 0.1,
        f"layer_norm {rest}": lambda x: F.layer_norm(x, rest),
        f"argmax {d}": lambda x: x.argmax(d, keepdim=keep).to(x.dtype) * 0.1,
        f"max {d}": lambda x: x.max(d, keepdim=keep).values,
        f"sort {d}": lambda x: x.sort(d).values,
        f"std and mean {d}": lambda x: sum(torch.std_mean(x, d, keepdim=True, correction=0)),
        f"any {d}": lambda x: (x > 1).any(d, keepdim=keep).to(x.dtype),
    }
    name = source.choice(list(choices))
    return Call(name, (n,), choices[name])


def _indexed(source, values, n) -> Call:
    x = values[n]
    d = source.randrange(x.dim()) if x.dim() else 0
    size = x.shape[d] if x.dim() else 1
    count = source.randint(1, 9) if size else 0
    picked = torch.tensor([source.randrange(size) for _ in range(count)], dtype=torch.long)

    def at(x):
        return picked.to(x.device)

    def along(x):
        shape = [1] * x.dim()
        shape[d] = count
        full = [*x.shape]
        full[d] = count
        return at(x).view(shape).expand(full)

    def scattered(x, new):
        return torch.zeros_like(x).scatter_add(d, along(x), new)

    choices = {
        f"index_select {d}": lambda x: x.index_select(d, at(x)),
        f"x[index] {d}": lambda x: x.movedim(d, 0)[at(x)],
        f"gather {d}": lambda x: x.gather(d, along(x)),
        f"scatter_add {d}": lambda x: scattered(x, x.index_select(d, at(x))),
        f"scatter_add ones {d}": lambda x: x * scattered(
            x, torch.ones_like(x.index_select(d, at(x)))
        ),
        f"index_add {d}": lambda x: x.index_add(d, at(x), x.index_select(d, at(x) * 0)),
        f"index_fill {d}": lambda x: x.index_fill(d, at(x), 0.25),
        f"index_put {d}": lambda x: x.movedim(d, 0).index_put(
            (at(x),), torch.ones((), dtype=x.dtype, device=x.device), accumulate=True
        ),
        "embedding": lambda x: F.embedding(at(x) % x.shape[0], x.flatten(1)),
        "one_hot": lambda x: F.one_hot(at(x) % 5, 5).to(x.dtype) * x.mean(),
        f"take_along_dim of argsort {d}": lambda x: x.take_along_dim(x.argsort(d), d),
    }  # fmt: skip
    name = source.choice(list(choices))
    return Call(f"{name} at {picked.tolist()}", (n,), choices[name])


def _layer(source, values, n) -> Call:
    stride, padding, groups = source.randint(1, 2), source.randint(0, 1), source.choice([1, 1, 2])
    m = source.choice(range(len(values)))

    def weight(x, y, *shape):
        needed = math.prod(shape)
        flat = y.flatten().tanh()
        return flat.repeat(-(-needed // max(1, flat.numel())))[:needed].view(shape)

    def image(x, dims):
        while x.dim() < dims:
            x = x.unsqueeze(0)
        return x.flatten(0, x.dim() - dims) if x.dim() > dims else x

    def convolved(x, y):
        x = image(x, 4)
        c = x.shape[1]
        g = groups if c % groups == 0 else 1
        kernel = weight(x, y, 4 * g, c // g, min(3, x.shape[2] + 2 * padding), 1 + padding)
        return F.conv2d(x, kernel, stride=stride, padding=padding, groups=g) * 0.2

    def along(x, y):
        x = image(x, 3)
        return F.conv1d(x, weight(x, y, 5, x.shape[1], 1 + padding), stride=stride) * 0.2

    def attended(x, y):
        x = image(x, 3).unsqueeze(1)
        k = F.linear(x, weight(x, y, x.shape[-1], x.shape[-1])) * 0.3
        return F.scaled_dot_product_attention(x, k, x, is_causal=padding == 1)

    def batch_normed(x, y):
        x = image(x, 3)
        return F.batch_norm(x, None, None, training=True)

    choices = {
        f"conv2d {stride} {padding} {groups}": convolved,
        f"conv1d {stride} {padding}": along,
        "linear": lambda x, y: F.linear(x, weight(x, y, 5, x.shape[-1]), weight(x, y, 5)) * 0.2,
        f"attention {padding}": attended,
        "batch_norm": batch_normed,
        f"max_pool {stride}": lambda x, y: F.max_pool2d(image(x, 4), 2, stride),
        f"avg_pool {stride} {padding}": lambda x, y: F.avg_pool2d(image(x, 4), 2, stride, padding),
        "group_norm": lambda x, y: F.group_norm(image(x, 3), 1),
        "rms_norm": lambda x, y: F.rms_norm(x, x.shape[-1:]),
        "cross_entropy": lambda x, y: F.cross_entropy(
            image(x, 2), torch.arange(image(x, 2).shape[0], device=x.device) % x.shape[-1]
        ),
        "interpolate": lambda x, y: F.interpolate(image(x, 4), scale_factor=2),
        "glu": lambda x, y: F.glu(torch.cat([x, x * 0.5], -1)),
    }
    name = source.choice(list(choices))
    return Call(name, (n, m), choices[name])


_KINDS = [_unary, _binary, _view, _reduction] * 2 + [_indexed, _layer]
