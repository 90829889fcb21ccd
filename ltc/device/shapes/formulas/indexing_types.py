"""Types of what reads and writes at indices."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from ltc.device.shapes import bag_types
from ltc.device.shapes.formulas.operands import (
    FLOATS,
    INDICES,
    NUMBERS,
    REALS,
    VALUES,
    WHOLE,
    Shape,
    axis_of,
    broadcast,
    is_real,
    is_value,
    number_of,
    of_one_dtype,
    type_of,
    with_extent,
)
from ltc.device.shapes.formulas.reduction_types import lies_within
from ltc.device.shapes.formulas.table import Formula, Types, add, types_of

# --- by lists of indices ------------------------------------------------------------------------


def _indexed(shape: Shape, indices: Sequence[Any]) -> Shape | None:
    """The shape of x[indices]; None for masks, whose number of elements nobody knows."""
    named = [axis for axis, index in enumerate(indices) if index is not None]
    if not named or len(indices) > len(shape) or 0 in shape:
        return None
    common: Shape | None = ()
    for axis in named:
        index = indices[axis]
        if not is_value(index) or index.dtype not in INDICES:
            return None
        common = broadcast(common, index.shape)
        if common is None:
            return None
    kept = [extent for axis, extent in enumerate(shape) if axis not in named]
    is_one_block = named[-1] - named[0] == len(named) - 1
    first = named[0] if is_one_block else 0
    return (*kept[:first], *(common or ()), *kept[first:])


@types_of("aten::index.Tensor", "aten::_unsafe_index.Tensor")
def _index(x: Any, indices: Sequence[Any]) -> Types | None:
    shape = _indexed(x.shape, indices) if x.dtype in VALUES else None
    return None if shape is None else ((shape, x.dtype),)


@types_of("aten::index_put", "aten::index_put_", "aten::_unsafe_index_put")
@types_of("aten::_index_put_impl_")
def _index_put(
    x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False, unsafe: bool = False
) -> Types | None:
    if not of_one_dtype(VALUES, x, values):
        return None
    shape = _indexed(x.shape, indices)
    if shape is None:
        return (type_of(x),) if _fits_mask(x.shape, indices, values.shape) else None
    if 0 in shape or broadcast(values.shape, shape) != shape:
        return None
    return (type_of(x),)


def _fits_mask(shape: Shape, indices: Sequence[Any], values: Shape) -> bool:
    """Whether values may be written where a single mask says so.

    How many it selects is found when the step runs, and whether they are as many.
    """
    named = [axis for axis, index in enumerate(indices) if index is not None]
    if len(named) != 1 or 0 in shape or 0 in values:
        return False
    (axis,) = named
    mask = indices[axis]
    if not is_value(mask) or mask.dtype is not torch.bool or not mask.shape:
        return False
    end = axis + len(mask.shape)
    if mask.shape != shape[axis:end]:
        return False
    most = (*shape[:axis], prod(mask.shape), *shape[end:])
    selected = len(most) - 1 - axis  # the dimension of the selected, counted from the last
    pairs = list(zip(reversed(values), reversed(most)))
    fits = (n == 1 or (n <= m if k == selected else n == m) for k, (n, m) in enumerate(pairs))
    return len(values) <= len(most) and all(fits)


# --- along one axis -----------------------------------------------------------------------------


def _factor_fits(alpha: Any, dtype: torch.dtype) -> bool:
    return number_of(alpha).__class__ is int or (is_real(alpha) and dtype in FLOATS)


def _index_add(x: Any, dim: int, index: Any, source: Any, alpha: Any = 1) -> Types | None:
    if not of_one_dtype(NUMBERS, x, source) or not _factor_fits(alpha, x.dtype):
        return None
    return _index_copy(x, dim, index, source)


def _index_copy(x: Any, dim: int, index: Any, source: Any) -> Types | None:
    axis = axis_of(dim, len(x.shape))
    if axis is None or not of_one_dtype(VALUES, x, source) or 0 in x.shape:
        return None
    if not is_value(index) or index.dtype is not torch.int64 or len(index.shape) != 1:
        return None
    return (type_of(x),) if source.shape == with_extent(x.shape, axis, index.shape[0]) else None


def _index_fill(x: Any, dim: int, index: Any, value: Any) -> Types | None:
    axis = axis_of(dim, len(x.shape))
    if axis is None or x.dtype not in FLOATS or 0 in x.shape:
        return None
    if not is_real(value) and not (is_value(value) and type_of(value) == ((), x.dtype)):
        return None
    is_list = is_value(index) and index.dtype is torch.int64 and len(index.shape) == 1
    return (type_of(x),) if is_list else None


def _scattered(dtypes: frozenset[torch.dtype]) -> Formula:
    def formula(x: Any, dim: int, index: Any, src: Any) -> Types | None:
        axis = axis_of(dim, len(x.shape))
        if axis is None or not of_one_dtype(dtypes, x, src) or not is_value(index):
            return None
        if not lies_within(index, x.shape, axis) or not _is_inside(index.shape, src.shape):
            return None
        return (type_of(x),)

    return formula


def _scatter_reduced(
    x: Any, dim: int, index: Any, src: Any, reduce: str, include_self: bool = True
) -> Types | None:
    is_known = reduce in ("sum", "prod", "mean", "amax", "amin")
    return _scattered(REALS)(x, dim, index, src) if is_known else None


def _is_inside(shape: Shape, other: Shape) -> bool:
    return len(shape) == len(other) and all(n <= m for n, m in zip(shape, other))


def _holds(dtype: torch.dtype, value: Any) -> bool:
    """Whether that number is one of the dtype: of whole ones, where it is small."""
    if dtype in WHOLE:
        return number_of(value).__class__ is int and 0 <= number_of(value) < 1 << 7
    return dtype in FLOATS and is_real(value)


def _scattered_number(x: Any, dim: int, index: Any, value: Any) -> Types | None:
    axis = axis_of(dim, len(x.shape))
    if axis is None or not _holds(x.dtype, value):
        return None
    is_known = is_value(index) and lies_within(index, x.shape, axis)
    return (type_of(x),) if is_known else None


add(_index_add, "aten::index_add", "aten::index_add_")
add(_index_copy, "aten::index_copy", "aten::index_copy_")
for _base, _kind in itertools.product(("index_fill", "index_fill_"), ("int_Scalar", "int_Tensor")):
    add(_index_fill, f"aten::{_base}.{_kind}")
add(_scattered(NUMBERS), "aten::scatter_add", "aten::scatter_add_")
add(_scatter_reduced, "aten::scatter_reduce.two", "aten::scatter_reduce_.two")
add(_scattered(VALUES), "aten::scatter.src", "aten::scatter_.src")
add(_scattered_number, "aten::scatter.value", "aten::scatter_.value")


@types_of("aten::put_")
def _put(x: Any, index: Any, source: Any, accumulate: bool = False) -> Types | None:
    if not of_one_dtype(NUMBERS, x, source) or not is_value(index) or 0 in x.shape:
        return None
    is_known = index.dtype is torch.int64 and prod(index.shape) == prod(source.shape)
    return (type_of(x),) if is_known else None


@types_of("aten::masked_scatter", "aten::masked_scatter_")
def _masked_scatter(x: Any, mask: Any, source: Any) -> Types | None:
    if not of_one_dtype(VALUES, x, source) or not is_value(mask) or mask.dtype is not torch.bool:
        return None
    is_known = mask.shape == x.shape and prod(source.shape) >= prod(x.shape)
    return (type_of(x),) if is_known else None  # else there may be too few


@types_of("aten::masked_scatter_backward")
def _masked_scatter_backward(gradient: Any, mask: Any, sizes: Sequence[int]) -> Types | None:
    if not is_value(gradient, mask) or gradient.dtype not in FLOATS or mask.dtype is not torch.bool:
        return None
    is_known = mask.shape == gradient.shape and prod(sizes) >= prod(gradient.shape) > 0
    return ((tuple(sizes), gradient.dtype),) if is_known else None


@types_of("aten::bucketize.Tensor")
def _bucketize(
    x: Any, limits: Any, *, out_int32: bool = False, right: bool = False
) -> Types | None:
    if len(limits.shape) != 1 or not of_one_dtype(REALS, x, limits) or 0 in x.shape + limits.shape:
        return None
    return ((x.shape, torch.int32 if out_int32 else torch.int64),)


# --- rows of a table ----------------------------------------------------------------------------


@types_of("aten::embedding")
def _embedding(
    weight: Any,
    indices: Any,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Types | None:
    if len(weight.shape) != 2 or weight.dtype not in FLOATS or 0 in weight.shape:
        return None
    if indices.dtype not in INDICES:
        return None
    return (((*indices.shape, weight.shape[1]), weight.dtype),)


@types_of("aten::embedding_dense_backward")
def _embedding_gradient(
    gradient: Any, indices: Any, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Types | None:
    if not gradient.shape or gradient.dtype not in FLOATS or indices.dtype not in INDICES:
        return None
    if gradient.shape[:-1] != indices.shape or 0 in gradient.shape or num_weights < 1:
        return None
    return (((num_weights, gradient.shape[-1]), gradient.dtype),)


def _bags(notes_for_backward: bool) -> Formula:
    """Sums and means of bags of rows, and what the CPU notes of them."""

    def formula(
        weight: Any,
        indices: Any,
        offsets: Any,
        scale_grad_by_freq: bool = False,
        mode: int = bag_types.SUM,
        sparse: bool = False,
        per_sample_weights: Any = None,
        include_last_offset: bool = False,
        padding_idx: int = -1,
    ) -> Types | None:
        shapes = weight.shape, indices.shape, offsets.shape
        if [len(shape) for shape in shapes] != [2, 1, 1] or any(0 in shape for shape in shapes):
            return None
        if weight.dtype not in FLOATS or not of_one_dtype(INDICES, indices, offsets):
            return None
        if per_sample_weights is not None or mode not in (bag_types.SUM, bag_types.MEAN):
            return None
        count = offsets.shape[0] - int(include_last_offset)
        if count < 1 or not -1 <= padding_idx < weight.shape[0]:
            return None
        made = (count, weight.shape[1]), weight.dtype
        return bag_types.of_bags(
            made, type_of(indices), offsets.shape, mode, padding_idx, notes_for_backward
        )

    return formula


add(_bags(True), "aten::_embedding_bag")
add(_bags(False), "aten::_embedding_bag_forward_only")


@types_of("aten::_embedding_bag_backward")
def _bags_gradient(
    gradient: Any,
    indices: Any,
    offsets: Any,
    bag_of_each: Any,
    sizes: Any,
    largest: Any,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Any,
    padding_idx: int = -1,
) -> Types | None:
    notes = indices, offsets, bag_of_each, sizes, largest
    if sparse or scale_grad_by_freq or per_sample_weights is not None or num_weights < 1:
        return None
    if len(gradient.shape) != 2 or 0 in gradient.shape + indices.shape:
        return None
    if not of_one_dtype(INDICES, *notes) or any(len(note.shape) != 1 for note in notes):
        return None
    if gradient.dtype not in FLOATS or mode not in (bag_types.SUM, bag_types.MEAN):
        return None
    return (((num_weights, gradient.shape[1]), gradient.dtype),)


# --- what looks at its values: see hooks/checked_values.py ----------------------------------------


@types_of("ltc::one_hot")
def _one_hot(index: Any, num_classes: int) -> Types:
    return (((*index.shape, num_classes), index.dtype),)


@types_of("ltc::quantile_fractions")
def _fractions(q: Any) -> Types:
    return (type_of(q),)
