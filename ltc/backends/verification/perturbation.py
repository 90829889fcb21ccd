"""Errors such as rounding makes, put into every value of a computation: how far they carry shows
how far a right result may be from the exact one.

Stochastic arithmetic (M. La Porte and J. Vignes, 1974; D. S. Parker, Monte Carlo Arithmetic, 1997),
with errors of one size and random signs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ltc.backends.verification.double_precision import wide
from ltc.ir import ops
from ltc.ir.node import Node, is_channels_last
from ltc.ir.tensor_type import LOW_PRECISION

# Of an exact operand the result is exact.
_EXACT = frozenset({
    ops.CONSTANT, ops.IOTA, ops.RANDOM_BITS, ops.NEG, ops.ABS, ops.SIGN, ops.FLOOR, ops.CEIL,
    ops.TRUNC, ops.ROUND, ops.COPYSIGN, ops.MAXIMUM, ops.MINIMUM, ops.WHERE, ops.BITCAST, ops.MAX,
    ops.MIN, ops.TAKE, ops.GATHER, ops.MAX_POOL, ops.GET, ops.BARRIER, ops.TO_SYMMETRIC, ops.NEXTAFTER,
    ops.CHECK,
})  # fmt: skip
_EXACT_KINDS = frozenset({"view", "pad", "concat", "insert", "leaf"})
# Right to the last bit everywhere: a result that needs no rounding gets none.
_ROUNDED_ONCE = frozenset({ops.CAST, ops.ADD, ops.SUB, ops.MUL})
# Sums of products: what they lose is of the size of the sum of the absolute values.
_SUMS = frozenset({
    ops.SUM, ops.CUMSUM, ops.MATMUL, ops.CONVOLUTION, ops.CONVOLUTION_INPUT_GRADIENT,
    ops.CONVOLUTION_WEIGHT_GRADIENT, ops.MAX_POOL_GRADIENT, ops.AVERAGE_POOL,
    ops.AVERAGE_POOL_GRADIENT,
})  # fmt: skip
# What is computed by many steps inside: errors of the operands stand for theirs.
_MANY_STEPS = frozenset({
    ops.ATTENTION, ops.ATTENTION_GRADIENT, ops.RECURRENCE, ops.RECURRENCE_GRADIENT,
})  # fmt: skip
# Functions that libraries give with several units in the last place.
_ROUGH = frozenset({ops.POW, ops.LGAMMA, ops.DIGAMMA, ops.ERFINV})
ROUGHNESS = 8


class Perturbation:
    """Adds to each value an error of the size of its own rounding; see Formula.values."""

    def __init__(self, seed: int, in_double: bool = False) -> None:
        """`in_double`: the errors are those of values that are not rounded to their types."""
        self._in_double = in_double
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(
        self, node: Node, value: Any, operands: list[Any], compute: Callable[..., Any]
    ) -> Any:
        if node.op in _EXACT or node.op.kind in _EXACT_KINDS:
            return value
        if node.op in _MANY_STEPS:
            value = compute(
                *[
                    self._off(x, _steps_of(node) * self._inner(n.dtype) * x.abs())
                    if n.shape and is_inexact(n.dtype)
                    else x
                    for n, x in zip(node.inputs, operands)
                ]
            )
        if isinstance(value, tuple):
            types: Any = node.type  # of several results, a tuple
            return tuple(self._rounded_off(v, t.dtype) for v, t in zip(value, types))
        if not is_inexact(node.dtype):
            return value
        size = 2 * self._outer(node.dtype) * value.abs()
        if node.op in _ROUGH:
            size = ROUGHNESS * size + ROUGHNESS * self._outer(node.dtype)
        elif node.op in _ROUNDED_ONCE:
            size = torch.where(self._needs_no_rounding(node, value), 0, size)
        elif node.op in (ops.PROD, ops.CUMPROD) or _scatters(node, "multiply"):
            size = _steps_of(node) * size
        elif node.op in _SUMS or _scatters(node, "add"):
            added = _added(node, operands, compute)
            size = size + _steps_of(node) * self._inner(node.dtype) * added
            if _may_transform_tiles(node):  # it may overflow on the way
                value = torch.where(
                    added < torch.finfo(node.dtype).max / _HEADROOM, value, torch.nan
                )
        return self._off(value, size)

    def _needs_no_rounding(self, node: Node, value: torch.Tensor) -> torch.Tensor:
        if self._in_double:  # where double has rounded, nothing tells
            return torch.tensor(node.op is ops.CAST)
        return value.to(node.dtype).to(value.dtype) == value

    def _outer(self, dtype: torch.dtype) -> float:
        """The unit roundoff of what a value of that type is rounded to."""
        return _roundoff(wide(dtype) if self._in_double else dtype)

    def _inner(self, dtype: torch.dtype) -> float:
        """Return the error of the dtype in which it is computed."""
        return self._outer(torch.float32 if dtype in LOW_PRECISION else dtype)

    def _rounded_off(self, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if not is_inexact(dtype):
            return value
        return self._off(value, 2 * self._outer(dtype) * value.abs())

    def _off(self, value: torch.Tensor, size: torch.Tensor) -> torch.Tensor:
        size = torch.where(torch.isfinite(size), size, 0)
        off = value + size * self._signs(value.shape)
        return off + 1j * size * self._signs(value.shape) if value.is_complex() else off

    def _signs(self, shape: tuple[int, ...]) -> torch.Tensor:
        return 2 * torch.randint(2, shape, generator=self._generator) - 1


def is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _roundoff(dtype: torch.dtype) -> float:
    """Half a unit in the last place of 1."""
    return torch.finfo(dtype).eps / 2


def _scatters(node: Node, mode: str) -> bool:
    return node.op.kind == "scatter" and bool(node.attr("mode") == mode)


def _steps_of(node: Node) -> float:
    """Return how many roundings a sum of so many terms loses by, if it is made in pieces."""
    terms = max(n.size for n in node.inputs)
    if node.op.kind == "reduce":
        terms //= max(1, node.size)
    return 1 + math.log2(max(2, terms))


def _added(node: Node, operands: list[torch.Tensor], compute: Callable[..., Any]) -> torch.Tensor:
    """Return the sum of all terms' absolute values."""
    terms = [x.abs().to(x.dtype) if is_inexact(x.dtype) else x for x in operands]
    if _may_transform_tiles(node):
        terms = _mixed_in_tiles(node, *terms)
    total: torch.Tensor = compute(*terms)
    return total.abs()


_TAPS = 3, 3  # of kernels that llvm/conv/winograd.py computes
_HEADROOM = 32  # numbers of a tile are at most so many times what is added
_REACH = 2  # positions, from where a tile's gradient is to where it is added and taken away again


def _may_transform_tiles(node: Node) -> bool:
    """Return True for a convolution whose backend may add up taps before it multiplies."""
    if node.op.kind != "convolution" or node.dtype != torch.float32 or not is_channels_last(node):
        return False
    of_weight = node.op is ops.CONVOLUTION_WEIGHT_GRADIENT
    return (node if of_weight else node.inputs[1]).shape[2:] == _TAPS


def _mixed_in_tiles(node: Node, x: torch.Tensor, other: torch.Tensor) -> list[torch.Tensor]:
    """Return operands of which each number is as large as those that are added to it in a tile.

    They are the taps of a pair of channels; or the neighbours in a gradient [N, H, W, C], of which a weight's
    gradient is made.
    """
    if node.op is not ops.CONVOLUTION_WEIGHT_GRADIENT:
        return [x, other.amax((2, 3), keepdim=True).expand_as(other)]
    around = torch.nn.functional.max_pool2d(x.movedim(-1, 1), 2 * _REACH + 1, 1, _REACH)
    return [around.movedim(1, -1), other]
