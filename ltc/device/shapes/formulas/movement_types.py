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
    of_one_dtype,
    type_of,
    with_extent,
)
from ltc.device.shapes.formulas.table import Formula, Types, add, types_of
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


@types_of("aten::diagonal")
def _diagonal(x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Types | None:
    first, second = axis_of(dim1, len(x.shape)), axis_of(dim2, len(x.shape))
    if first is None or second is None or first == second:
        return None
    rows, columns = x.shape[first] + min(offset, 0), x.shape[second] - max(offset, 0)
    kept = [extent for axis, extent in enumerate(x.shape) if axis not in (first, second)]
    return _moved(x, (*kept, max(min(rows, columns), 0)))


@types_of("aten::unfold")
def _unfold(x: Any, dimension: int, size: int, step: int) -> Types | None:
    axis = axis_of(dimension, len(x.shape))
    if axis is None or not 0 <= size <= x.shape[axis] or step < 1:
        return None
    windows = (x.shape[axis] - size) // step + 1
    return _moved(x, (*with_extent(x.shape, axis, windows), size))


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


# --- together, again, around --------------------------------------------------------------------


@types_of("aten::cat")
def _cat(tensors: Sequence[Any], dim: int = 0) -> Types | None:
    if not tensors or not of_one_dtype(VALUES, *tensors):
        return None
    joined = [x.shape for x in tensors if not _begins_empty(x.shape)]
    if not joined:
        return ((tensors[0].shape, tensors[0].dtype),)
    shape = joined[0]
    axis = axis_of(dim, len(shape))
    if axis is None:
        return None
    around = shape[:axis], shape[axis + 1 :]
    if any(len(x) != len(shape) or (x[:axis], x[axis + 1 :]) != around for x in joined):
        return None
    return ((with_extent(shape, axis, sum([x[axis] for x in joined])), tensors[0].dtype),)


def _begins_empty(shape: tuple[int, ...]) -> bool:
    """A tensor without elements, of one dimension, which PyTorch joins to any: a cache at first."""
    return len(shape) == 1 and isinstance(shape[0], int) and shape[0] == 0


@types_of("aten::stack")
def _stack(tensors: Sequence[Any], dim: int = 0) -> Types | None:
    if not tensors or not of_one_dtype(VALUES, *tensors):
        return None
    shape = tensors[0].shape
    axis = axis_of(dim, len(shape) + 1)
    if axis is None or any(x.shape != shape for x in tensors):
        return None
    return (((*shape[:axis], len(tensors), *shape[axis:]), tensors[0].dtype),)


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


def _continued(axes: int, *, mirrored: bool) -> Formula:
    """Padding of the last axes by what lies at the edge, or by what lies inside, mirrored."""

    def formula(x: Any, padding: Sequence[int]) -> Types | None:
        if x.dtype not in FLOATS or len(x.shape) not in (axes + 1, axes + 2) or 0 in x.shape:
            return None
        if len(padding) != 2 * axes or min(padding) < 0:
            return None
        shape = list(x.shape)
        for axis in range(axes):
            before, after = padding[2 * axis : 2 * axis + 2]
            if mirrored and not (before < shape[-1 - axis] and after < shape[-1 - axis]):
                return None
            shape[-1 - axis] = shape[-1 - axis] + before + after
        return ((tuple(shape), x.dtype),)

    return formula


def _continued_gradient(forward: Formula) -> Formula:
    def formula(gradient: Any, x: Any, padding: Sequence[int]) -> Types | None:
        return (type_of(x),) if forward(x, padding) == (type_of(gradient),) else None

    return formula


for _axes in (1, 2, 3):
    for _kind in ("reflection", "replication"):
        _formula = _continued(_axes, mirrored=_kind == "reflection")
        add(_formula, f"aten::{_kind}_pad{_axes}d")
        add(_continued_gradient(_formula), f"aten::{_kind}_pad{_axes}d_backward")
