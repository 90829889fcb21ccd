"""Rules of the overloads that make tensors from numbers and shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ltc.aten.promote import compute_dtype
from ltc.aten.registry import traces
from ltc.ir import build
from ltc.ir.node import Node, Operand
from ltc.ir.tensor_type import TensorType


def _filled(value: Any, results: Sequence[TensorType]) -> Node:
    return build.full(results[0].shape, value, results[0].dtype)


@traces(
    "aten::zeros", "aten::zeros_like", "aten::new_zeros", "aten::empty.memory_format",
    "aten::empty_like", "aten::new_empty", "aten::empty_strided", "aten::new_empty_strided",
    "aten::zero", "aten::_efficientzerotensor", moves=True,
)  # fmt: skip
def zeros(*_: Any, results: Sequence[TensorType], **__: Any) -> Node:
    """What `empty` leaves open is zero too: a program gives the same result each time."""
    return _filled(0, results)


@traces("aten::ones", "aten::ones_like", "aten::new_ones", moves=True)
def ones(*_: Any, results: Sequence[TensorType], **__: Any) -> Node:
    return _filled(1, results)


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
    return _filled(second if fill_value is None else fill_value, results)


@traces("aten::scalar_tensor", moves=True)
def scalar_tensor(value: Operand, *_: Any, results: Sequence[TensorType], **__: Any) -> Node:
    return _filled(value, results)


@traces("aten::eye", "aten::eye.m")
def eye(*_: Any, results: Sequence[TensorType], **__: Any) -> Node:
    rows, columns = results[0].shape
    if not rows or not columns:
        return _filled(0, results)
    shape = results[0].shape
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
    ((size,), dtype) = results[0].shape, results[0].dtype
    if not isinstance(start, (int, float)) or not isinstance(step, (int, float)):
        return NotImplemented
    if dtype.is_floating_point:
        return build.iota(size, torch.float64) * float(step) + float(start)
    if not float(start).is_integer() or not float(step).is_integer():
        return NotImplemented
    return build.iota(size) * int(step) + int(start)


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
        return build.full(results[0].shape, start, dtype)
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
