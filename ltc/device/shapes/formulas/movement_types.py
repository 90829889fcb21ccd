"""Types of views, copies, and of what moves elements without looking at them."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from ltc.device.shapes.formulas.operands import (
    COMPLEX,
    FLOATS,
    MOST_ELEMENTS,
    VALUES,
    Shape,
    axes_of,
    axis_of,
    broadcast,
    is_real,
    is_value,
    number_of,
    of_one_dtype,
    type_of,
    with_extent,
)
from ltc.device.shapes.formulas.table import Types, types_of
from ltc.support.sizes.choices import count_in_slice

PLAIN_FORMATS = (None, torch.preserve_format, torch.contiguous_format)


def _moved(x: Any, shape: Shape) -> Types | None:
    """One result with the operand's elements."""
    return ((shape, x.dtype),) if x.dtype in VALUES else None


# --- the same elements in another shape ---------------------------------------------------------


@types_of("aten::view", "aten::_unsafe_view")
def _view(x: Any, size: Sequence[int]) -> Types | None:
    """-1 stands for what is left."""
    count, known = prod(x.shape), prod(size)
    if known == count and all(extent >= 0 for extent in size):
        return _moved(x, tuple(size))
    if known >= 0 or any(extent < -1 for extent in size) or size.count(-1) != 1:
        return None
    rest, remainder = divmod(count, -known)
    if remainder:
        return None
    return _moved(x, tuple([rest if extent < 0 else extent for extent in size]))


@types_of("aten::alias", "aten::detach", "aten::lift_fresh")
def _alias(x: Any) -> Types | None:
    return _moved(x, x.shape)


@types_of("aten::t")
def _t(x: Any) -> Types | None:
    return _moved(x, x.shape[::-1]) if len(x.shape) <= 2 else None


@types_of("aten::permute")
def _permute(x: Any, dims: Sequence[int]) -> Types | None:
    shape = x.shape
    if len(dims) != len(shape) or axes_of(dims, len(shape)) is None:
        return None
    return _moved(x, tuple([shape[dim] for dim in dims]))


@types_of("aten::transpose.int")
def _transpose(x: Any, dim0: int, dim1: int) -> Types | None:
    shape = list(x.shape)
    first, second = axis_of(dim0, len(shape)), axis_of(dim1, len(shape))
    if first is None or second is None:
        return None
    shape[first], shape[second] = shape[second], shape[first]
    return _moved(x, tuple(shape))


@types_of("aten::unsqueeze")
def _unsqueeze(x: Any, dim: int) -> Types | None:
    axis = axis_of(dim, len(x.shape) + 1)
    return None if axis is None else _moved(x, (*x.shape[:axis], 1, *x.shape[axis:]))


@types_of("aten::squeeze")
def _squeeze(x: Any) -> Types | None:
    return _moved(x, tuple([extent for extent in x.shape if extent != 1]))


@types_of("aten::squeeze.dim", "aten::squeeze.dims")
def _squeeze_axes(x: Any, dim: int | Sequence[int]) -> Types | None:
    dims = (dim,) if dim.__class__ is int else dim
    axes = axes_of(dims, len(x.shape)) if dims else None  # type: ignore[arg-type]  # no int here
    if axes is None:
        return None
    kept = [extent for axis, extent in enumerate(x.shape) if extent != 1 or axis not in axes]
    return _moved(x, tuple(kept))


@types_of("aten::expand", "aten::expand_copy")
def _expand(x: Any, size: Sequence[int], implicit: bool = False) -> Types | None:
    """-1 stands for the operand's own extent."""
    added = len(size) - len(x.shape)
    if added < 0 or prod(size) > MOST_ELEMENTS:
        return None
    shape = list(size)
    for axis, extent in enumerate(x.shape, added):
        if shape[axis] == -1:
            shape[axis] = extent
        elif shape[axis] != extent and extent != 1:
            return None
    return None if any(extent < 0 for extent in shape) else _moved(x, tuple(shape))


# --- parts --------------------------------------------------------------------------------------


@types_of("aten::select.int")
def _select(x: Any, dim: int, index: int) -> Types | None:
    axis = axis_of(dim, len(x.shape))
    if axis is None or not -x.shape[axis] <= index < x.shape[axis]:
        return None
    return _moved(x, (*x.shape[:axis], *x.shape[axis + 1 :]))


def sliced(shape: Shape, dim: int, start: int | None, end: int | None, step: int) -> Shape | None:
    """The shape of every `step`-th part along an axis."""
    axis = axis_of(dim, len(shape))
    if axis is None or step < 1 or shape[axis] < 0:
        return None
    extent = count_in_slice(shape[axis], start, end, step)
    return with_extent(shape, axis, extent)


@types_of("aten::slice.Tensor")
def _slice(
    x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Types | None:
    shape = sliced(x.shape, dim, start, end, step)
    return None if shape is None else _moved(x, shape)


@types_of("aten::split_with_sizes", "aten::split_with_sizes_copy")
def _split_with_sizes(x: Any, split_sizes: Sequence[int], dim: int = 0) -> Types | None:
    axis = axis_of(dim, len(x.shape))
    if axis is None or sum(split_sizes) != x.shape[axis] or any(n < 0 for n in split_sizes):
        return None
    if x.dtype not in VALUES:
        return None
    return tuple([(with_extent(x.shape, axis, extent), x.dtype) for extent in split_sizes])


@types_of("aten::split.Tensor", "aten::unsafe_split.Tensor")
def _split(x: Any, split_size: int, dim: int = 0) -> Types | None:
    axis = axis_of(dim, len(x.shape))
    if axis is None or split_size < 1 or x.shape[axis] < 1:
        return None
    whole, rest = divmod(x.shape[axis], split_size)
    return _split_with_sizes(x, [split_size] * whole + [rest] * (rest > 0), dim)


@types_of("aten::unbind.int")
def _unbind(x: Any, dim: int = 0) -> Types | None:
    axis = axis_of(dim, len(x.shape))
    one = None if axis is None else _moved(x, (*x.shape[:axis], *x.shape[axis + 1 :]))
    return None if one is None or not x.shape[axis] else one * x.shape[axis]


@types_of("aten::diagonal", "aten::diagonal_copy")
def _diagonal(x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Types | None:
    shape = _shape_of_diagonal(x.shape, offset, dim1, dim2)
    return None if shape is None else _moved(x, shape)


def _shape_of_diagonal(shape: Shape, offset: int, dim1: int, dim2: int) -> Shape | None:
    first, second = axis_of(dim1, len(shape)), axis_of(dim2, len(shape))
    if first is None or second is None or first == second:
        return None
    rows, columns = shape[first] + min(offset, 0), shape[second] - max(offset, 0)
    kept = [extent for axis, extent in enumerate(shape) if axis not in (first, second)]
    return (*kept, max(min(rows, columns), 0))


@types_of("aten::diag_embed")
def _diag_embed(x: Any, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Types | None:
    rank = len(x.shape) + 1
    if not x.shape or (axis_of(dim1, rank), axis_of(dim2, rank)) != (rank - 2, rank - 1):
        return None
    extent = x.shape[-1] + abs(offset)
    return _moved(x, (*x.shape[:-1], extent, extent))


@types_of("aten::unfold")
def _unfold(x: Any, dimension: int, size: int, step: int) -> Types | None:
    shape = _shape_of_windows(x.shape, dimension, size, step)
    return None if shape is None else _moved(x, shape)


def _shape_of_windows(shape: Shape, dimension: int, size: int, step: int) -> Shape | None:
    axis = axis_of(dimension, len(shape))
    if axis is None or not 0 <= size <= shape[axis] or step < 1:
        return None
    windows = (shape[axis] - size) // step + 1
    return (*with_extent(shape, axis, windows), size)


# --- gradients of parts -------------------------------------------------------------------------


@types_of("aten::select_backward")
def _select_backward(
    gradient: Any, input_sizes: Sequence[int], dim: int, index: int
) -> Types | None:
    shape = tuple(input_sizes)
    axis = axis_of(dim, len(shape))
    if axis is None or not -shape[axis] <= index < shape[axis] or gradient.dtype not in VALUES:
        return None
    return _gradient_of_part(gradient, (*shape[:axis], *shape[axis + 1 :]), shape)


@types_of("aten::slice_backward")
def _slice_backward(
    gradient: Any, input_sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> Types | None:
    shape = tuple(input_sizes)
    return _gradient_of_part(gradient, sliced(shape, dim, start, end, step), shape)


@types_of("aten::diagonal_backward")
def _diagonal_backward(
    gradient: Any, input_sizes: Sequence[int], offset: int, dim1: int, dim2: int
) -> Types | None:
    shape = tuple(input_sizes)
    if gradient.dtype not in VALUES or min(shape, default=0) < 0:
        return None
    return _gradient_of_part(gradient, _shape_of_diagonal(shape, offset, dim1, dim2), shape)


@types_of("aten::unfold_backward")
def _unfold_backward(
    gradient: Any, input_sizes: Sequence[int], dim: int, size: int, step: int
) -> Types | None:
    shape = tuple(input_sizes)
    if gradient.dtype not in FLOATS or 0 in shape or size < 1:
        return None
    return _gradient_of_part(gradient, _shape_of_windows(shape, dim, size, step), shape)


def _gradient_of_part(gradient: Any, part: Shape | None, shape: Shape) -> Types | None:
    return ((shape, gradient.dtype),) if gradient.shape == part else None


@types_of("aten::slice_scatter")
def _slice_scatter(
    x: Any, src: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Types | None:
    is_part = of_one_dtype(VALUES, x, src) and src.shape == sliced(x.shape, dim, start, end, step)
    return (type_of(x),) if is_part else None


@types_of("aten::select_scatter")
def _select_scatter(x: Any, src: Any, dim: int, index: int) -> Types | None:
    part = _select(x, dim, index)
    return (type_of(x),) if part is not None and type_of(src) == part[0] else None


# --- again, around -------------------------------------------------------------------------------


@types_of("aten::repeat")
def _repeat(x: Any, repeats: Sequence[int]) -> Types | None:
    added = len(repeats) - len(x.shape)
    if added < 0 or any(n < 0 for n in repeats):
        return None
    shape = [n * extent for n, extent in zip(repeats, (1,) * added + tuple(x.shape))]
    return _moved(x, tuple(shape)) if prod(shape) <= MOST_ELEMENTS else None


@types_of("aten::constant_pad_nd")
def _padded(x: Any, pad: Sequence[int], value: Any = 0) -> Types | None:
    shape = list(x.shape)
    if len(pad) % 2 or len(pad) > 2 * len(shape) or not is_real(value):
        return None
    if x.dtype not in FLOATS | COMPLEX and not abs(number_of(value)) < 1 << 7:
        return None  # an integer that does not hold it
    for place in range(0, len(pad), 2):
        axis = -1 - place // 2
        before, after = pad[place : place + 2]
        shape[axis] += before + after
        if shape[axis] < 1 or x.shape[axis] + min(before, 0) + min(after, 0) < 0:
            return None
    return _moved(x, tuple(shape)) if prod(shape) <= MOST_ELEMENTS else None


@types_of("aten::as_strided")
def _strided(
    x: Any, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Types | None:
    """Of what lies among the operand's own elements."""
    if len(size) != len(stride) or any(n < 1 for n in size) or any(n < 0 for n in stride):
        return None
    last = (storage_offset or 0) + sum((n - 1) * step for n, step in zip(size, stride))
    if (storage_offset or 0) < 0 or last >= prod(x.shape):
        return None
    return _moved(x, tuple(size))


@types_of("aten::flip")
def _flip(x: Any, dims: Sequence[int]) -> Types | None:
    return _moved(x, x.shape) if axes_of(dims, len(x.shape)) is not None else None


@types_of("aten::rot90")
def _turned(x: Any, k: int = 1, dims: Sequence[int] = (0, 1)) -> Types | None:
    """By quarters: after two of them the axes are where they were."""
    axes = axes_of(dims, len(x.shape))
    if axes is None or len(dims) != 2 or len(axes) != 2:
        return None
    one, other = axes
    shape = list(x.shape)
    if k % 2:
        shape[one], shape[other] = shape[other], shape[one]
    return _moved(x, tuple(shape))


@types_of("aten::roll")
def _roll(x: Any, shifts: Sequence[int], dims: Sequence[int] = ()) -> Types | None:
    """Without axes: all elements, as one line."""
    if len(shifts) != max(len(dims), 1) or axes_of(dims, len(x.shape)) is None:
        return None
    return _moved(x, x.shape)


@types_of("aten::triu", "aten::tril")
def _triangle(x: Any, diagonal: int = 0) -> Types | None:
    return _moved(x, x.shape) if len(x.shape) >= 2 else None


# --- copies -------------------------------------------------------------------------------------


@types_of("aten::clone")
def _clone(x: Any, memory_format: Any = None) -> Types | None:
    return _moved(x, x.shape) if memory_format in PLAIN_FORMATS else None


@types_of("aten::_to_copy")
def _to_copy(
    x: Any,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> Types | None:
    found = x.dtype if dtype is None else dtype
    if memory_format not in PLAIN_FORMATS or layout not in (None, torch.strided) or pin_memory:
        return None
    return ((x.shape, found),) if _may_become(x.dtype, found) else None


def _may_become(old: torch.dtype, new: torch.dtype) -> bool:
    """Whether a copy is of that dtype, without the warning that it loses imaginary parts."""
    return old in VALUES and new in VALUES and (new in COMPLEX or old not in COMPLEX)


@types_of("aten::copy_")
def _copy(x: Any, src: Any, non_blocking: bool = False) -> Types | None:
    if not is_value(x, src) or not _may_become(src.dtype, x.dtype):
        return None
    return (type_of(x),) if broadcast(src.shape, x.shape) == x.shape else None
