"""Rules of interpolation to another size, and of its gradients.

What is computed is as the CPU has it: positions of neighbours as formulas of whole numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ltc.aten.nn.resampling import Taps, resampled, transposed
from ltc.aten.promote import compute_dtype
from ltc.aten.registry import traces
from ltc.ir import build
from ltc.ir.node import Node

NEAR = 1e-6  # how far a position may be rounded: an element so close is counted as one that is read

# Of sizes before and after, align_corners, and a factor that was given or None.
Table = Callable[[int, int, bool, "float | None"], "Taps | None"]


def _step(size: int, results: int, aligned: bool, factor: float | None) -> float:
    """From one result to the next, in elements."""
    if aligned:
        return (size - 1) / (results - 1) if results > 1 else 0.0
    return 1.0 / factor if factor is not None and factor > 0 else size / results


def _stacked(rows: Sequence[Node]) -> Node:
    return build.concat([build.unsqueeze(row, 0) for row in rows], 0)


def _clamped(index: Node, size: int) -> Node:
    return build.minimum(build.maximum(index, 0), size - 1)


# --- one element -----------------------------------------------------------------------------------


def nearest(shift: float, dtype: torch.dtype) -> Table:
    """The element at floor((i + shift) * step), rounded as the CPU rounds it."""

    def table(size: int, results: int, aligned: bool, factor: float | None) -> Taps | None:
        step = torch.tensor(_step(size, results, False, factor), dtype=dtype, device="cpu").item()
        position = (build.cast(build.iota(results), dtype) + shift) * step
        numbers = (torch.arange(results, dtype=dtype, device="cpu") + shift) * step
        return _one_each(position, numbers, size)

    return table


def nearest_center(dtype: torch.dtype) -> Table:
    """The element whose center is nearest to that of the result.

    The CPU takes (i + 0.5) * step - 0.5 in one rounding, then adds 0.5 again: of float32 that is a
    product in float64, which is exact, rounded once.
    """

    def table(size: int, results: int, aligned: bool, factor: float | None) -> Taps | None:
        step = torch.tensor(_step(size, results, False, factor), dtype=dtype, device="cpu").item()
        position = (build.cast(build.iota(results), torch.float64) + 0.5) * step - 0.5
        numbers = (torch.arange(results, dtype=torch.float64, device="cpu") + 0.5) * step - 0.5
        position = build.maximum(build.cast(position, dtype), 0.0) + 0.5
        return _one_each(position, numbers.to(dtype).clamp(min=0) + 0.5, size)

    return table


def _one_each(position: Node, numbers: torch.Tensor, size: int) -> Taps:
    """A table of the elements below positions: a node, and the numbers that it computes."""
    at = _clamped(build.cast(build.floor(position), torch.int64), size)
    spans = tuple((int(i), int(i)) for i in numbers.floor().clamp(0, size - 1).tolist())
    return Taps(build.unsqueeze(at, 0), None, spans, size)


# --- two or four elements --------------------------------------------------------------------------


def _position(results: int, step: float, aligned: bool) -> Node:
    i = build.cast(build.iota(results), torch.float64)
    return i * step if aligned else (i + 0.5) * step - 0.5


def _spans(
    size: int, results: int, step: float, aligned: bool, before: int, after: int
) -> tuple[tuple[int, int], ...]:
    """Return each result's span: from `before` elements before its position to `after` behind."""
    found = []
    for i in range(results):
        at = i * step if aligned else (i + 0.5) * step - 0.5
        low, high = math.floor(at - NEAR) - before, math.floor(at + NEAR) + after
        found.append((min(max(low, 0), size - 1), min(max(high, 0), size - 1)))
    return tuple(found)


def linear(size: int, results: int, aligned: bool, factor: float | None) -> Taps | None:
    if size == results:
        return None  # whatever the factor: so the CPU has it
    step = _step(size, results, aligned, factor)
    at = build.maximum(_position(results, step, aligned), 0.0)
    low = build.minimum(build.floor(at), float(size - 1))
    share = build.minimum(build.maximum(at - low, 0.0), 1.0)
    first = build.cast(low, torch.int64)
    indices = _stacked([first, build.minimum(first + 1, size - 1)])
    spans = _spans(size, results, step, aligned, 0, 1)
    return Taps(indices, _stacked([1.0 - share, share]), spans, size)


_KEYS, _KEYS_ANTIALIASED = -0.75, -0.5


def _near(x: Node, a: float) -> Node:
    """Keys' cubic, to a distance of 1."""
    return ((a + 2) * x - (a + 3)) * x * x + 1


def _far(x: Node, a: float) -> Node:
    """The same from 1 to 2."""
    return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a


def cubic(size: int, results: int, aligned: bool, factor: float | None) -> Taps | None:
    step = _step(size, results, aligned, factor)
    at = _position(results, step, aligned)
    low = build.floor(at)
    share, first = at - low, build.cast(low, torch.int64)
    indices = _stacked([_clamped(first + k, size) for k in (-1, 0, 1, 2)])
    weights = [
        _far(share + 1, _KEYS), _near(share, _KEYS), _near(1 - share, _KEYS), _far(2 - share, _KEYS),
    ]  # fmt: skip
    spans = _spans(size, results, step, aligned, 1, 2)
    return Taps(indices, _stacked(weights), spans, size)


# --- as many elements as a result covers ------------------------------------------------------------


def triangle(x: Node) -> Node:
    return build.maximum(1 - build.absolute(x), 0.0)


def keys(x: Node) -> Node:
    x = build.absolute(x)
    far = build.where(x < 2, _far(x, _KEYS_ANTIALIASED), 0.0)
    return build.where(x < 1, _near(x, _KEYS_ANTIALIASED), far)


def antialiased(kernel: Callable[[Node], Node], reach: float) -> Table:
    def table(size: int, results: int, aligned: bool, factor: float | None) -> Taps | None:
        step = _step(size, results, aligned, factor)
        wide = max(step, 1.0)
        support = reach * wide
        centers = [(i + 0.5) * step for i in range(results)]
        spans = tuple(
            (
                min(max(int(c - support + 0.5 - NEAR), 0), size - 1),
                min(max(int(c + support + 0.5 + NEAR), 1), size) - 1,
            )
            for c in centers
        )
        count = max(high - low for low, high in spans) + 1
        center = (build.cast(build.iota(results), torch.float64) + 0.5) * step
        low = build.maximum(build.trunc(center - support + 0.5), 0.0)
        high = build.minimum(build.trunc(center + support + 0.5), float(size))
        element = build.reshape(build.iota(count, torch.float64), (count, 1)) + low
        share = build.where(element < high, kernel((element - center + 0.5) / wide), 0.0)
        total = build.sum_of(share, 0, keepdim=True)
        indices = _clamped(build.cast(element, torch.int64), size)
        return Taps(indices, share / total, spans, size)

    return table


def averages(size: int, results: int) -> Taps:
    """The mean over windows from floor(i * size / results) to ceil((i + 1) * size / results)."""
    spans = tuple((i * size // results, -(-(i + 1) * size // results) - 1) for i in range(results))
    count = max(high - low for low, high in spans) + 1
    i = build.iota(results)
    low = build.floor_divide(i * size, results)
    high = build.floor_divide((i + 1) * size + (results - 1), results)
    element = build.reshape(build.iota(count), (count, 1)) + low
    share = 1.0 / build.cast(high - low, torch.float64)
    weights = build.where(element < high, share, 0.0)
    return Taps(_clamped(element, size), weights, spans, size)


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
