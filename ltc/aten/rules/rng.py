"""Rules of the random overloads: formulas over Philox bits, keyed by the call's seed.

Their distributions are torch's; their numbers are ltc's own, the same on every backend.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ltc.aten.legal_values import fraction
from ltc.aten.promote import compute_dtype, to_dtype
from ltc.aten.registry import traces
from ltc.ir import build
from ltc.ir.infer import broadcast
from ltc.ir.node import Node, Operand, like
from ltc.ir.tensor_type import TensorType

# Bits of a uniform number: as many as the dtype's significand holds.
UNIFORM_BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def uniform(seed: Node, shape: Any, dtype: torch.dtype, stream: int = 0) -> Node:
    """Uniform on [0, 1) in the compute dtype: a multiple of the significand's last bit."""
    bits = UNIFORM_BITS[dtype]
    words = build.random_bits(seed, shape, bits, stream)
    return build.cast(words, compute_dtype(dtype)) * 2.0**-bits


def normal(seed: Node, shape: Any, dtype: torch.dtype) -> Node:
    """Standard normal numbers by the transform of Box and Muller, from two uniform streams."""
    dtype = compute_dtype(dtype)
    bits = 32 if dtype == torch.float32 else 53
    first = build.cast(build.random_bits(seed, shape, bits, 0), dtype)
    radius = build.sqrt(-2.0 * build.log((first + 1.0) * 2.0**-bits))  # + 1: the log of 0 never
    return radius * build.cos(2.0 * math.pi * uniform(seed, shape, dtype, stream=1))


def _shape_of(x: Sequence[int] | Node) -> tuple[int, ...]:
    """The size that was given, or that of the tensor."""
    return x.shape if isinstance(x, Node) else tuple(x)


def _is_float(type: Any) -> bool:
    return type.dtype in UNIFORM_BITS


@traces("aten::rand", "aten::rand_like")
def rand(
    x: Sequence[int] | Node,
    dtype: torch.dtype | None = None,
    *_: Any,
    results: Sequence[TensorType],
    seed: Node,
    **__: Any,
) -> Node:
    if not _is_float(results[0]):
        return NotImplemented
    return uniform(seed, _shape_of(x), results[0].dtype)


@traces("aten::randn", "aten::randn_like")
def randn(
    x: Sequence[int] | Node,
    dtype: torch.dtype | None = None,
    *_: Any,
    results: Sequence[TensorType],
    seed: Node,
    **__: Any,
) -> Node:
    if not _is_float(results[0]):
        return NotImplemented
    return normal(seed, _shape_of(x), results[0].dtype)


@traces("aten::uniform", "aten::uniform_")
def uniform_between(
    x: Node,
    from_: Operand = 0.0,
    to: Operand = 1.0,
    *,
    results: Sequence[TensorType],
    seed: Node,
    **named: Any,
) -> Node:
    """from + u * (to - from)"""
    if not _is_float(results[0]):
        return NotImplemented
    low = named.get("from", from_)
    u = uniform(seed, x.shape, results[0].dtype)
    low, high = like(low, u), like(to, u)
    return u * (high - low) + low


@traces("aten::normal_", "aten::normal_functional")
def normal_with(
    x: Node, mean: Operand = 0.0, std: Operand = 1.0, *, results: Sequence[TensorType], seed: Node
) -> Node:
    return _normal_with(x.shape, mean, std, results, seed)


def _normal_with(
    shape: Any, mean: Operand, std: Operand, results: Sequence[TensorType], seed: Node
) -> Node:
    if not _is_float(results[0]):
        return NotImplemented
    return normal(seed, shape, results[0].dtype) * std + mean


@traces("aten::normal.float_float")
def normal_of_size(
    mean: Operand,
    std: Operand,
    size: Sequence[int],
    dtype: torch.dtype | None = None,
    *,
    results: Sequence[TensorType],
    seed: Node,
) -> Node:
    return _normal_with(tuple(size), mean, std, results, seed)


@traces("aten::normal.Tensor_float")
def normal_around_tensor(
    mean: Node, std: Operand = 1.0, *, results: Sequence[TensorType], seed: Node
) -> Node:
    if not _is_float(results[0]):
        return NotImplemented
    shape = broadcast(*[x.shape for x in (mean, std) if isinstance(x, Node)])
    z = normal(seed, shape, results[0].dtype)
    return z * to_dtype(std, z.dtype) + to_dtype(mean, z.dtype)


@traces("aten::normal.float_Tensor", "aten::normal.Tensor_Tensor")
def normal_of_tensors(
    mean: Operand, std: Node, *, results: Sequence[TensorType], seed: Node
) -> Node:
    std = build.check(std, std >= 0, "normal expects all elements of std >= 0.0")
    return normal_around_tensor(mean, std, results=results, seed=seed)


_NO_PROBABILITY = (
    "Expected p_in >= 0 && p_in <= 1 to be true, but got false.  (Could this error message be "
    "improved?  If so, please report an enhancement request to PyTorch.)"
)


@traces("aten::bernoulli", "aten::bernoulli_.Tensor", "aten::bernoulli.Tensor")
def bernoulli(x: Node, p: Node | None = None, *, seed: Node) -> Node:
    """1 where a uniform number lies below the probability."""
    p = x if p is None else p
    if p.dtype not in UNIFORM_BITS:
        return NotImplemented
    p = fraction(p, _NO_PROBABILITY)
    return uniform(seed, x.shape, torch.float64) < build.cast(p, torch.float64)


@traces("aten::bernoulli_.float", "aten::bernoulli.p")
def bernoulli_with(x: Node, p: Operand = 0.5, *, seed: Node) -> Node:
    return build.lt(uniform(seed, x.shape, torch.float64), p)


@traces("aten::native_dropout", static={"p": (0, 1)})
def native_dropout(
    x: Node, p: Operand, train: bool | None = None, *, seed: Node
) -> tuple[Node, Node]:
    """(x / (1 - p) where kept, what is kept)."""
    if train is False:
        return x, build.full(x.shape, True, torch.bool)
    if not isinstance(p, Node) and p == 1:
        return x * 0.0, build.full(x.shape, False, torch.bool)
    x = build.cast(x, compute_dtype(x.dtype))
    keep = build.ge(uniform(seed, x.shape, torch.float32), p)
    scale = 1.0 / (1.0 - like(p, build.full((), 0, torch.float64)))
    return build.cast(keep, x.dtype) * x * build.cast(scale, x.dtype), keep


@traces("aten::native_dropout_backward")
def native_dropout_backward(grad: Node, mask: Node, scale: Operand) -> Node:
    if not grad.dtype.is_floating_point:
        return NotImplemented
    wide = build.cast(grad, compute_dtype(grad.dtype))
    return wide * build.cast(mask, wide.dtype) * scale


# --- integers ------------------------------------------------------------------------------------


def integers(seed: Node, shape: Any, low: Any, high: Any) -> Node:
    """Uniform on low, low + 1, ..., high - 1; the bias of the remainder is below 2**-31 for any
    range that has less than 2**32 elements."""
    zero = build.full((), 0, torch.int64)
    low, high = like(low, zero), like(high, zero)
    return build.remainder(build.random_bits(seed, shape, 63), high - low) + low


@traces("aten::randint", "aten::randint_like")
def randint(
    first: int | Node,
    second: Sequence[int] | int,
    *_: Any,
    seed: Node,
    **__: Any,
) -> Node:
    """The limit is the first argument, or the second, after a tensor of the size."""
    if isinstance(second, (list, tuple)):
        return integers(seed, tuple(second), 0, first)
    assert isinstance(first, Node)
    return integers(seed, first.shape, 0, second)


@traces("aten::randint.low")
def randint_low(
    low: int,
    high: int,
    size: Sequence[int],
    *_: Any,
    seed: Node,
    **__: Any,
) -> Node:
    return integers(seed, tuple(size), low, high)


@traces("aten::randint_like.low_dtype")
def randint_like_low(x: Node, low: int, high: int, *_: Any, seed: Node, **__: Any) -> Node:
    return integers(seed, x.shape, low, high)


@traces("aten::random_.to", "aten::random.to")
def random_to(x: Node, to: int, *, seed: Node) -> Node:
    return integers(seed, x.shape, 0, to)


@traces("aten::random_.from", "aten::random.from")
def random_from(
    x: Node,
    low: int = 0,
    to: int | None = None,
    *,
    seed: Node,
    **named: Any,
) -> Node:
    low = named.get("from", low)
    return NotImplemented if to is None else integers(seed, x.shape, low, to)


@traces("aten::exponential_", "aten::exponential")
def exponential(
    x: Node, lambd: Operand = 1.0, *, results: Sequence[TensorType], seed: Node
) -> Node:
    """-log(1 - u) / lambda"""
    if not _is_float(results[0]):
        return NotImplemented
    u = uniform(seed, x.shape, results[0].dtype)
    return -build.log1p(-u) / like(lambd, u)
