"""Rules of interpolation to another size, and of its gradients.

What is computed is as the CPU has it: positions of neighbours as formulas of whole numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ltc.aten.nn.interpolation import (
    Table,
    antialiased,
    cubic,
    keys,
    linear,
    nearest,
    nearest_center,
    triangle,
)
from ltc.aten.nn.resampling import resampled, transposed
from ltc.aten.promote import compute_dtype
from ltc.aten.registry import traces
from ltc.ir import build
from ltc.ir.node import Node

Sizes = Sequence[int]
Factor = float | None  # by which a dimension grows; None: as its sizes say

_FACTORS = {1: ("scales",), 2: ("scales_h", "scales_w"), 3: ("scales_d", "scales_h", "scales_w")}


def _resized(
    table: Table, x: Node, sizes: Sizes, aligned: bool, *factors: Factor, moves: bool = False
) -> Node:
    """`x` with other sizes of its last dimensions."""
    lead = x.shape[: -len(sizes)]
    if not moves and not x.dtype.is_floating_point:
        return NotImplemented
    if not x.size:
        return build.full((*lead, *sizes), 0, x.dtype)
    for dim, (size, factor) in enumerate(zip(sizes, factors, strict=True), len(lead)):
        if x.shape[dim] == 1:
            x = build.expand(x, (*x.shape[:dim], size, *x.shape[dim + 1 :]))
            continue
        taps = table(int(x.shape[dim]), int(size), aligned, factor)  # one for each pair of sizes
        x = x if taps is None else resampled(x, dim, taps)
    return x


def _resized_back(table: Table, grad: Node, shape: Sizes, aligned: bool, *factors: Factor) -> Node:
    """The gradient of an operand of that shape."""
    lead = len(shape) - len(factors)
    if not grad.dtype.is_floating_point:
        return NotImplemented
    if not grad.size:
        return build.full(tuple(shape), 0, grad.dtype)
    for dim, (size, factor) in enumerate(zip(shape[lead:], factors, strict=True), lead):
        if size == 1:
            grad = build.cast(grad, compute_dtype(grad.dtype))
            grad = build.sum_of(grad, dim, keepdim=True)
            continue
        taps = table(int(size), int(grad.shape[dim]), aligned, factor)
        grad = grad if taps is None else resampled(grad, dim, transposed(taps))
    return grad


def _trace(name: str, rank: int, resize: Callable[..., Any], back: Callable[..., Any]) -> None:
    """Make the rules of an overload and of its gradient; both are given a factor for each dimension."""
    names = _FACTORS[rank]

    def with_factors(rule: Callable[..., Any], count: int) -> Callable[..., Node]:
        def made(*given: Any, **named: Any) -> Node:
            factors = [*given[count:], *[named.get(name) for name in names[len(given) - count :]]]
            resized: Node = rule(*given[:count], factors)
            return resized

        return made

    aligns = int("nearest" not in name)  # these have the argument align_corners
    for overload, rule, count in ((name, resize, 2), (f"{name}_backward", back, 3)):
        traces(f"aten::{overload}", static=dict.fromkeys(names))(with_factors(rule, count + aligns))


# --- nearest ---------------------------------------------------------------------------------------


def _position_dtype(x: Node) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _nearest(x: Node, sizes: Sizes, factors: Sequence[Factor]) -> Node:
    return _resized(nearest(0.0, _position_dtype(x)), x, sizes, False, *factors, moves=True)


def _nearest_exact(x: Node, sizes: Sizes, factors: Sequence[Factor]) -> Node:
    return _resized(nearest_center(_position_dtype(x)), x, sizes, False, *factors, moves=True)


def _nearest_back(shift: float) -> Callable[..., Node]:
    """The CPU's positions are float32 here, whatever the gradient is."""

    def back(grad: Node, sizes: Sizes, shape: Sizes, factors: Sequence[Factor]) -> Node:
        return _resized_back(nearest(shift, torch.float32), grad, shape, False, *factors)

    return back


for _rank, _name, _name_of_exact in (
    (1, "upsample_nearest1d", "_upsample_nearest_exact1d"),
    (2, "upsample_nearest2d", "_upsample_nearest_exact2d"),
    (3, "upsample_nearest3d", "_upsample_nearest_exact3d"),
):
    _trace(_name, _rank, _nearest, _nearest_back(0.0))
    _trace(_name_of_exact, _rank, _nearest_exact, _nearest_back(0.5))


# --- weighted sums ---------------------------------------------------------------------------------


def _weighted(table: Table) -> tuple[Callable[..., Node], Callable[..., Node]]:
    def resize(x: Node, sizes: Sizes, aligned: bool, factors: Sequence[Factor]) -> Node:
        return _resized(table, x, sizes, aligned, *factors)

    def back(
        grad: Node, sizes: Sizes, shape: Sizes, aligned: bool, factors: Sequence[Factor]
    ) -> Node:
        return _resized_back(table, grad, shape, aligned, *factors)

    return resize, back


for _name, _rank, _table in (
    ("upsample_linear1d", 1, linear),
    ("upsample_bilinear2d", 2, linear),
    ("upsample_trilinear3d", 3, linear),
    ("upsample_bicubic2d", 2, cubic),
    ("_upsample_bilinear2d_aa", 2, antialiased(triangle, 1.0)),
    ("_upsample_bicubic2d_aa", 2, antialiased(keys, 2.0)),
):
    _trace(_name, _rank, *_weighted(_table))
