"""Types of matrix products, convolutions and pools."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from ltc.device.shapes.formulas.operands import (
    COMPLEX,
    FLOATS,
    FULL,
    WHOLE,
    Shape,
    broadcast,
    is_real,
    of_one_dtype,
    type_of,
)
from ltc.device.shapes.formulas.table import Formula, Types, add, types_of

_FACTORS = FLOATS | COMPLEX | WHOLE


# --- matrices -----------------------------------------------------------------------------------


@types_of("aten::mm")
def _mm(x: Any, y: Any) -> Types | None:
    if len(x.shape) != 2 or len(y.shape) != 2 or x.shape[1] != y.shape[0]:
        return None
    return (((x.shape[0], y.shape[1]), x.dtype),) if of_one_dtype(_FACTORS, x, y) else None


@types_of("aten::bmm")
def _bmm(x: Any, y: Any) -> Types | None:
    if len(x.shape) != 3 or len(y.shape) != 3 or x.shape[2] != y.shape[1]:
        return None
    if x.shape[0] != y.shape[0] or not of_one_dtype(_FACTORS, x, y):
        return None
    return (((x.shape[0], x.shape[1], y.shape[2]), x.dtype),)


_GROUPED = frozenset({torch.bfloat16, torch.float32})
_ALIGNED = 16  # bytes that rows have to be a multiple of


@types_of("aten::_grouped_mm")
def _grouped_mm(
    x: Any, y: Any, ends: Any = None, bias: Any = None, out_dtype: Any = None
) -> Types | None:
    """Products of groups of rows (or columns), as experts make them; torch's Meta kernel knows bfloat16."""
    if bias is not None or out_dtype not in (None, x.dtype) or not of_one_dtype(_GROUPED, x, y):
        return None
    row, shape = _ALIGNED // x.dtype.itemsize, _grouped_shape(x.shape, y.shape, ends)
    if shape is None or 0 in shape or x.shape[-1] % row or y.shape[-1] % row:
        return None
    return ((shape, x.dtype),)


def _grouped_shape(x: Shape, y: Shape, ends: Any) -> Shape | None:
    ranks = len(x), len(y)
    if ranks not in ((2, 2), (2, 3), (3, 2)) or x[-1] != y[-2] or 0 in x or 0 in y:
        return None
    if ends is None or len(ends.shape) != 1 or ends.dtype is not torch.int32:
        return None
    groups: int = ends.shape[0]
    if ranks == (2, 2):
        return groups, x[0], y[1]
    return (x[-2], y[-1]) if groups == (y if ranks == (2, 3) else x)[0] else None


@types_of("aten::mv")
def _mv(x: Any, y: Any) -> Types | None:
    if len(x.shape) != 2 or y.shape != x.shape[1:] or not of_one_dtype(_FACTORS, x, y):
        return None
    return ((x.shape[:1], x.dtype),)


@types_of("aten::dot", "aten::vdot")
def _dot(x: Any, y: Any) -> Types | None:
    if len(x.shape) != 1 or y.shape != x.shape or not of_one_dtype(_FACTORS, x, y):
        return None
    return (((), x.dtype),)


def _with_sum(added: Any, product: Types | None, beta: Any, alpha: Any) -> Types | None:
    """beta * added + alpha * product, where the product has the larger shape."""
    if product is None or product[0] is None or added.dtype not in FLOATS:
        return None
    shape, dtype = product[0]
    if added.dtype is not dtype or not (is_real(beta) and is_real(alpha)):
        return None
    return product if 0 not in shape and broadcast(added.shape, shape) == shape else None


@types_of("aten::addmm")
def _addmm(added: Any, x: Any, y: Any, beta: Any = 1, alpha: Any = 1) -> Types | None:
    return _with_sum(added, _mm(x, y), beta, alpha)


@types_of("aten::baddbmm")
def _baddbmm(added: Any, x: Any, y: Any, beta: Any = 1, alpha: Any = 1) -> Types | None:
    return _with_sum(added, _bmm(x, y), beta, alpha)


@types_of("aten::addmv")
def _addmv(added: Any, x: Any, y: Any, beta: Any = 1, alpha: Any = 1) -> Types | None:
    return _with_sum(added, _mv(x, y), beta, alpha)


@types_of("aten::addmm_")
def _addmm_in_place(added: Any, x: Any, y: Any, beta: Any = 1, alpha: Any = 1) -> Types | None:
    found = _addmm(added, x, y, beta, alpha)
    return found if found == (type_of(added),) else None


@types_of("aten::baddbmm_")
def _baddbmm_in_place(added: Any, x: Any, y: Any, beta: Any = 1, alpha: Any = 1) -> Types | None:
    found = _baddbmm(added, x, y, beta, alpha)
    return found if found == (type_of(added),) else None


@types_of("aten::linear")
def _linear(x: Any, weight: Any, bias: Any = None) -> Types | None:
    if not x.shape or len(weight.shape) != 2 or x.shape[-1] != weight.shape[1]:
        return None
    shape = (*x.shape[:-1], weight.shape[0])
    if not of_one_dtype(_FACTORS, x, weight):
        return None
    if bias is None:
        return ((shape, x.dtype),)
    if 0 in shape or bias.shape != weight.shape[:1] or not of_one_dtype(FLOATS, x, bias):
        return None
    return ((shape, x.dtype),)


@types_of("aten::linear_backward")
def _linear_backward(
    x: Any, gradient: Any, weight: Any, output_mask: Sequence[bool]
) -> Types | None:
    if _linear(x, weight) != (type_of(gradient),):
        return None
    made = type_of(x), type_of(weight), (weight.shape[:1], x.dtype)
    return tuple([one if wanted else None for one, wanted in zip(made, output_mask)])


# --- convolutions -------------------------------------------------------------------------------


def _each(count: int, *settings: Sequence[int]) -> list[Sequence[int]] | None:
    """One number of each setting for each axis, where one may stand for all."""
    found = [list(values) * count if len(values) == 1 else values for values in settings]
    return found if all(len(values) == count for values in found) else None


def _convolved(
    x: Shape,
    weight: Shape,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Shape | None:
    """The result's shape, where every extent is positive and channels and groups agree."""
    axes = len(x) - 2
    if not 1 <= axes <= 3 or len(weight) != len(x) or 0 in x or 0 in weight or groups < 1:
        return None
    each = _each(axes, stride, padding, dilation, output_padding)
    channels, needed = (weight[1] * groups, weight[0]) if transposed else (weight[0], weight[1])
    if each is None or x[1] != (needed if transposed else needed * groups) or channels % groups:
        return None
    if needed % groups and transposed:
        return None
    shape = [x[0], channels]
    for extent, size, s, p, d, o in zip(*[x[2:], weight[2:], *each]):
        reach = d * (size - 1) + 1
        if s < 1 or p < 0 or d < 1:
            return None
        if transposed:
            if not 0 <= o < max(s, d):
                return None
            shape.append((extent - 1) * s - 2 * p + reach + o)
        else:
            shape.append((extent + 2 * p - reach) // s + 1)
    # each is asked for itself: which of them is the least would split paths of symbols
    return tuple(shape) if all(n > 0 for n in shape) else None


@types_of("aten::convolution")
def _convolution(
    x: Any,
    weight: Any,
    bias: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Types | None:
    values = (x, weight) if bias is None else (x, weight, bias)
    if not of_one_dtype(FLOATS, *values):
        return None
    geometry = stride, padding, dilation, transposed, output_padding, groups
    shape = _convolved(x.shape, weight.shape, *geometry)
    if shape is None or (bias is not None and bias.shape != shape[1:2]):
        return None
    return ((shape, x.dtype),)


@types_of("aten::convolution_backward")
def _convolution_backward(
    gradient: Any,
    x: Any,
    weight: Any,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> Types | None:
    if not of_one_dtype(FLOATS, gradient, x, weight):
        return None
    geometry = stride, padding, dilation, transposed, output_padding, groups
    shape = _convolved(x.shape, weight.shape, *geometry)
    if shape is None or gradient.shape != shape:
        return None
    if output_mask[2] and (bias_sizes is None or tuple(bias_sizes) != shape[1:2]):
        return None
    made = type_of(x), type_of(weight), (shape[1:2], x.dtype)
    return tuple([one if wanted else None for one, wanted in zip(made, output_mask)])


# --- pools --------------------------------------------------------------------------------------


def _pooled(
    x: Shape,
    axes: int,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> Shape | None:
    """The result's shape, with a batch or without one; a window begins inside the padded operand."""
    each = _each(axes, kernel, stride or kernel, padding, dilation)
    if each is None or len(x) not in (axes + 1, axes + 2) or 0 in x:
        return None
    shape = list(x[:-axes])
    for extent, k, s, p, d in zip(*[x[-axes:], *each]):
        if k < 1 or s < 1 or d < 1 or not 0 <= p <= k // 2:
            return None
        windows = (extent + 2 * p - d * (k - 1) - 1 + (s - 1) * ceil_mode) // s + 1
        if ceil_mode and (windows - 1) * s >= extent + p:
            windows -= 1
        if windows < 1:
            return None
        shape.append(windows)
    return tuple(shape)


def _max_pool(axes: int) -> tuple[Formula, Formula]:
    """Of the pool over so many axes, and of its gradient."""

    def forward(
        x: Any,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        dilation: Sequence[int] = (1,),
        ceil_mode: bool = False,
    ) -> Types | None:
        if x.dtype not in FLOATS:
            return None
        shape = _pooled(x.shape, axes, kernel_size, stride, padding, dilation, ceil_mode)
        return None if shape is None else ((shape, x.dtype), (shape, torch.int64))

    def backward(gradient: Any, x: Any, *settings: Any) -> Types | None:
        *same, indices = settings
        found = forward(x, *same)
        return (type_of(x),) if found == (type_of(gradient), type_of(indices)) else None

    return forward, backward


def _avg_pool(axes: int) -> tuple[Formula, Formula]:
    def forward(
        x: Any,
        kernel_size: Sequence[int],
        stride: Sequence[int] = (),
        padding: Sequence[int] = (0,),
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Types | None:
        if x.dtype not in FLOATS or divisor_override == 0:
            return None
        if axes == 3 and not _is_taken_by_3d(x, kernel_size):
            return None
        shape = _pooled(x.shape, axes, kernel_size, stride, padding, ceil_mode=ceil_mode)
        return None if shape is None else ((shape, x.dtype),)

    def backward(gradient: Any, x: Any, *settings: Any) -> Types | None:
        return (type_of(x),) if forward(x, *settings) == (type_of(gradient),) else None

    return forward, backward


def _is_taken_by_3d(x: Any, kernel: Sequence[int]) -> bool:
    """Its kernel has floats of full precision alone, and wants one whole window in the operand."""
    extents = x.shape[-3:]
    sizes = list(kernel) * 3 if len(kernel) == 1 else kernel
    return x.dtype in FULL and all(size <= extent for size, extent in zip(sizes, extents))


def _adaptive_avg_pool(axes: int) -> tuple[Formula, Formula]:
    def forward(x: Any, output_size: Sequence[int]) -> Types | None:
        return _adaptive_pool(x, axes, output_size)

    def backward(gradient: Any, x: Any) -> Types | None:
        found = _adaptive_pool(x, axes, gradient.shape[-axes:])
        return (type_of(x),) if found == (type_of(gradient),) else None

    return forward, backward


def _adaptive_pool(x: Any, axes: int, output_size: Sequence[int]) -> Types | None:
    if len(x.shape) not in (axes + 1, axes + 2) or 0 in x.shape or x.dtype not in FLOATS:
        return None
    is_known = len(output_size) == axes and min(output_size) > 0 and prod(output_size) < 1 << 30
    return (((*x.shape[:-axes], *output_size), x.dtype),) if is_known else None


for _axes in (2, 3):
    for _base, _formulas in (
        (f"max_pool{_axes}d_with_indices", _max_pool(_axes)),
        (f"avg_pool{_axes}d", _avg_pool(_axes)),
        (f"_adaptive_avg_pool{_axes}d", _adaptive_avg_pool(_axes)),
    ):
        for _way, _formula in zip(("", "_backward"), _formulas):
            add(_formula, f"aten::{_base}{_way}")


@types_of("aten::adaptive_max_pool2d")
def _adaptive_max_pool(x: Any, output_size: Sequence[int]) -> Types | None:
    found = _adaptive_pool(x, 2, output_size)
    return None if found is None or found[0] is None else (*found, (found[0][0], torch.int64))


@types_of("aten::adaptive_max_pool2d_backward")
def _adaptive_max_pool_backward(gradient: Any, x: Any, indices: Any) -> Types | None:
    found = _adaptive_max_pool(x, gradient.shape[-2:])
    return (type_of(x),) if found == (type_of(gradient), type_of(indices)) else None
