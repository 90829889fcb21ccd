"""Rules of the overloads that make tensors from numbers and shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ltc.aten.promote import compute_dtype
from ltc.aten.registry import traces
from ltc.ir import build
from ltc.ir.node import Node, Operand
from ltc.ir.tensor_type import TensorType


def _filled(shape: Any, value: Any, results: Sequence[TensorType]) -> Node:
    return build.full(tuple(shape), value, results[0].dtype)


def _shape_of(first: Sequence[int] | Node, rest: Sequence[Any]) -> Sequence[int]:
    """The size that was given, behind a tensor or alone; the tensor's where none was given."""
    if not isinstance(first, Node):
        return first
    return rest[0] if rest and isinstance(rest[0], (list, tuple)) else first.shape


@traces(
    "aten::zeros", "aten::zeros_like", "aten::new_zeros", "aten::empty.memory_format",
    "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided",
    "aten::zero", "aten::_efficientzerotensor", moves=True,
)  # fmt: skip
def zeros(first: Sequence[int] | Node, *rest: Any, results: Sequence[TensorType], **_: Any) -> Node:
    """Zeros; also for `empty`, so that a program gives the same result each time."""
    return _filled(_shape_of(first, rest), 0, results)


@traces("aten::ones", "aten::ones_like", "aten::new_ones", moves=True)
def ones(first: Sequence[int] | Node, *rest: Any, results: Sequence[TensorType], **_: Any) -> Node:
    return _filled(_shape_of(first, rest), 1, results)


@traces(
    "aten::full", "aten::full_like", "aten::new_full", "aten::fill.Scalar", "aten::fill.Tensor",
    moves=True,
)  # fmt: skip
def full(
    shape_or_tensor: Sequence[int] | Node,
    second: Operand | Sequence[int],
    fill_value: Operand | None = None,
    *_: Any,
    results: Sequence[TensorType],
    **__: Any,
) -> Node:
    """new_full has the shape between the tensor and the value."""
    shape = _shape_of(shape_or_tensor, (second,))
    return _filled(shape, second if fill_value is None else fill_value, results)


@traces("aten::scalar_tensor", moves=True)
def scalar_tensor(value: Operand, *_: Any, results: Sequence[TensorType], **__: Any) -> Node:
    return _filled((), value, results)


@traces("aten::eye", "aten::eye.m")
def eye(*extents: int, results: Sequence[TensorType], **_: Any) -> Node:
    shape = extents[0], extents[-1]
    if not all(shape):
        return _filled(shape, 0, results)
    return build.eq(build.iota_along(shape, 0), build.iota_along(shape, 1))


@traces("aten::arange", "aten::arange.start", "aten::arange.start_step")
def arange(
    first: Operand,
    end: Operand | None = None,
    step: Operand = 1,
    *_: Any,
    results: Sequence[TensorType],
    **__: Any,
) -> Node:
    """start + i * step, computed in i64 for whole numbers and in f64 otherwise."""
    start = 0 if end is None else first
    end, dtype = first if end is None else end, results[0].dtype
    if isinstance(start, _NO_BOUND) or isinstance(end, _NO_BOUND) or isinstance(step, _NO_BOUND):
        return NotImplemented
    if dtype.is_floating_point:
        return build.iota(_count(start, end, step), torch.float64) * float(step) + float(start)
    if not float(start).is_integer() or not float(step).is_integer():
        return NotImplemented
    size = _count(start, _whole(end) if dtype == torch.int64 else end, step)
    return build.iota(size) * int(step) + int(start)


_NO_BOUND = (Node, complex)


def _whole(number: float) -> Any:
    return int(number) if isinstance(number, float) else number


def _count(start: float, end: float, step: float) -> Any:
    """Return how many numbers lie from start on before end; an expression if a bound is one."""
    bounds = start, end, step
    if any(isinstance(n, float) and not n.is_integer() for n in bounds):
        return math.ceil((end - start) / step)
    start, end, step = map(_whole, bounds)
    return -((start - end) // step)


@traces(
    "aten::linspace", "aten::linspace.Tensor_Tensor", "aten::linspace.Tensor_Scalar",
    "aten::linspace.Scalar_Tensor",
)  # fmt: skip
def linspace(
    start: Operand, end: Operand, steps: int, *_: Any, results: Sequence[TensorType], **__: Any
) -> Node:
    """Counted from the nearer end, so that both ends are exact."""
    dtype = compute_dtype(results[0].dtype)
    if not dtype.is_floating_point or any(isinstance(n, complex) for n in (start, end)):
        return NotImplemented
    if steps < 2:
        return build.full((steps,), start, dtype)
    if isinstance(start, Node) or isinstance(end, Node):
        first, last = (build.full((), n, torch.float64) for n in (start, end))
        start, end = build.cast(first, dtype), build.cast(last, dtype)
        step = build.cast((last - first) / float(steps - 1), dtype)
    else:
        step = build.full((), (end - start) / (steps - 1), dtype)
    i = build.iota(steps)
    from_start = start + step * build.cast(i, dtype)
    from_end = end - step * build.cast((steps - 1) - i, dtype)
    return build.where(i < steps // 2, from_start, from_end)
