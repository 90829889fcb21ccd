"""Types of sums, means, extremes, and of what goes along one axis."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from ltc.device.shapes.formulas.operands import (
    BOOL,
    COMPLEX,
    FLOATS,
    INDICES,
    NUMBERS,
    REALS,
    VALUES,
    axes_of,
    axis_of,
    is_real,
    is_value,
    number_of,
    reduced,
    type_of,
    with_extent,
)
from ltc.device.shapes.formulas.table import Type, Types, types_of

Dims = Sequence[int] | int | None


def _along(x: Any, dims: Dims, keepdim: bool, dtype: torch.dtype) -> Types | None:
    """One result: the operand's shape without these axes."""
    named = (dims,) if isinstance(dims, int) else dims
    axes = axes_of(named, len(x.shape))
    return None if axes is None else ((reduced(x.shape, axes, keepdim), dtype),)


def _is_full(x: Any) -> bool:
    """Whether there is something to choose from, and axes to name."""
    return bool(x.shape) and 0 not in x.shape


# --- sums ---------------------------------------------------------------------------------------


@types_of("aten::sum", "aten::sum.dim_IntList")
def _sum(
    x: Any, dim: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Types | None:
    if x.dtype not in VALUES:
        return None
    if dtype is None:
        dtype = x.dtype if x.dtype in FLOATS or x.dtype in COMPLEX else torch.int64
    elif dtype not in FLOATS or x.dtype in COMPLEX:
        return None
    return _along(x, dim, keepdim, dtype)


@types_of("aten::nansum")
def _nansum(
    x: Any, dim: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Types | None:
    """No dimensions are all of them: torch's Meta kernel says none."""
    return _sum(x, dim, keepdim, dtype) if x.dtype in FLOATS else None


@types_of("aten::prod", "aten::prod.dim_int")
def _prod(
    x: Any, dim: int | None = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Types | None:
    return _sum(x, dim, keepdim) if x.dtype in REALS and _is_full(x) and dtype is None else None


@types_of("aten::mean", "aten::mean.dim")
def _mean(
    x: Any, dim: Dims = None, keepdim: bool = False, dtype: torch.dtype | None = None
) -> Types | None:
    found = x.dtype if dtype is None else dtype
    is_known = found in FLOATS and x.dtype in REALS | BOOL
    return _along(x, dim, keepdim, found) if is_known and 0 not in x.shape else None


def _varies(x: Any, dims: Dims, correction: Any) -> bool:
    """Whether there are more elements than degrees of freedom: torch warns otherwise."""
    number = 1 if correction is None else number_of(correction)
    if x.dtype not in FLOATS or not is_real(number):
        return False
    axes = axes_of((dims,) if isinstance(dims, int) else dims, len(x.shape))
    return axes is not None and prod([x.shape[axis] for axis in axes]) > number


@types_of("aten::var.correction", "aten::std.correction")
def _var(x: Any, dim: Dims = None, correction: Any = None, keepdim: bool = False) -> Types | None:
    if not _varies(x, dim, correction) or 0 in x.shape:
        return None
    return _along(x, dim, keepdim, x.dtype)


@types_of("aten::var_mean.correction", "aten::std_mean.correction")
def _var_mean(
    x: Any, dim: Dims = None, correction: Any = None, keepdim: bool = False
) -> Types | None:
    one = _var(x, dim, correction, keepdim)
    return None if one is None else one * 2


@types_of("aten::linalg_vector_norm")
def _vector_norm(
    x: Any,
    ord: Any = 2,
    dim: Dims = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> Types | None:
    if x.dtype not in FLOATS or 0 in x.shape or not is_real(ord):
        return None
    made = x.dtype if dtype is None else dtype
    if made not in FLOATS or torch.promote_types(x.dtype, made) is not made:
        return None
    return _along(x, dim, keepdim, made)


@types_of("aten::norm.Scalar", "aten::norm.ScalarOpt_dim")
def _norm(x: Any, p: Any = 2, dim: Dims = None, keepdim: bool = False) -> Types | None:
    return _vector_norm(x, 2 if p is None else p, dim, keepdim)


@types_of("aten::logsumexp")
def _logsumexp(x: Any, dim: Dims, keepdim: bool = False) -> Types | None:
    return _along(x, dim, keepdim, x.dtype) if x.dtype in FLOATS and _is_full(x) and dim else None


@types_of("aten::any", "aten::any.dim", "aten::any.dims")
@types_of("aten::all", "aten::all.dim", "aten::all.dims")
def _truth(x: Any, dim: Dims = None, keepdim: bool = False) -> Types | None:
    if x.dtype not in VALUES or x.dtype is torch.uint8:  # which stays uint8
        return None
    if dim is not None and (dim == [] or not _is_full(x)):  # no axis here is none, not all
        return None
    return _along(x, dim, keepdim, torch.bool)


@types_of("aten::count_nonzero.dim_IntList")
def _count(x: Any, dim: Dims) -> Types | None:
    return _along(x, dim, False, torch.int64) if x.dtype in VALUES and _is_full(x) else None


# --- extremes -----------------------------------------------------------------------------------


@types_of("aten::amax", "aten::amin")
def _extreme(x: Any, dim: Dims = (), keepdim: bool = False) -> Types | None:
    return _along(x, dim, keepdim, x.dtype) if x.dtype in REALS | BOOL and _is_full(x) else None


@types_of("aten::max", "aten::min")
def _extreme_of_all(x: Any) -> Types | None:
    return _extreme(x)


@types_of("aten::argmax", "aten::argmin")
def _place(x: Any, dim: int | None = None, keepdim: bool = False) -> Types | None:
    if x.dtype not in REALS or not _is_full(x):
        return None
    return _along(x, dim, keepdim, torch.int64)


@types_of("aten::max.dim", "aten::min.dim")
def _extreme_and_place(x: Any, dim: int, keepdim: bool = False) -> Types | None:
    one = _extreme(x, dim, keepdim)
    return None if one is None else _with_places(one[0])


def _with_places(one: Type | None) -> Types | None:
    return None if one is None else (one, (one[0], torch.int64))


@types_of("aten::topk")
def _topk(x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Types | None:
    axis = axis_of(dim, len(x.shape))
    if axis is None or x.dtype not in REALS or not _is_full(x) or not 0 < k <= x.shape[axis]:
        return None
    return _with_places((with_extent(x.shape, axis, k), x.dtype))


@types_of("aten::sort", "aten::sort.stable")
def _sort(
    x: Any, dim: int = -1, descending: bool = False, stable: bool | None = None
) -> Types | None:
    if axis_of(dim, len(x.shape)) is None or x.dtype not in REALS | BOOL or not _is_full(x):
        return None
    return _with_places(type_of(x))


@types_of("aten::median.dim", "aten::nanmedian.dim", "aten::mode")
def _middle(x: Any, dim: int = -1, keepdim: bool = False) -> Types | None:
    if x.dtype not in REALS or not _is_full(x):
        return None
    one = _along(x, dim, keepdim, x.dtype)
    return None if one is None else _with_places(one[0])


@types_of("aten::median", "aten::nanmedian")
def _middle_of_all(x: Any) -> Types | None:
    return (((), x.dtype),) if x.dtype in REALS and _is_full(x) else None


@types_of("aten::kthvalue")
def _of_rank(x: Any, k: int, dim: int = -1, keepdim: bool = False) -> Types | None:
    axis = axis_of(dim, len(x.shape))
    is_known = axis is not None and _is_full(x) and 0 < k <= x.shape[axis]
    return _middle(x, dim, keepdim) if is_known else None


@types_of("aten::aminmax")
def _extremes(x: Any, *, dim: int | None = None, keepdim: bool = False) -> Types | None:
    one = _extreme(x, () if dim is None else dim, keepdim)
    return None if one is None or (dim is None and keepdim) else one * 2


@types_of("aten::_is_all_true", "aten::_is_any_true")
def _truth_of_all(x: Any) -> Types | None:
    return (((), torch.bool),) if is_value(x) and x.dtype is torch.bool else None


# --- along an axis ------------------------------------------------------------------------------


@types_of("aten::cumsum", "aten::cumprod")
def _cumulated(x: Any, dim: int, dtype: torch.dtype | None = None) -> Types | None:
    if axis_of(dim, len(x.shape)) is None or x.dtype not in NUMBERS | BOOL:
        return None
    if dtype is not None:
        return ((x.shape, dtype),) if x.dtype in REALS | BOOL and dtype in REALS else None
    return ((x.shape, x.dtype if x.dtype in FLOATS or x.dtype in COMPLEX else torch.int64),)


@types_of("aten::cummax", "aten::cummin")
def _extremes_so_far(x: Any, dim: int) -> Types | None:
    if axis_of(dim, len(x.shape)) is None or x.dtype not in REALS or not _is_full(x):
        return None
    return _with_places(type_of(x))


@types_of("aten::logcumsumexp")
def _log_of_sums_so_far(x: Any, dim: int) -> Types | None:
    is_known = x.dtype in FLOATS and _is_full(x) and axis_of(dim, len(x.shape)) is not None
    return (type_of(x),) if is_known else None


@types_of("aten::take")
def _taken(x: Any, index: Any) -> Types | None:
    is_known = x.dtype in VALUES and index.dtype is torch.int64 and 0 not in x.shape
    return ((index.shape, x.dtype),) if is_known else None


@types_of("aten::gather")
def _gather(x: Any, dim: int, index: Any, sparse_grad: bool = False) -> Types | None:
    axis = axis_of(dim, len(x.shape))
    if axis is None or x.dtype not in VALUES or not lies_within(index, x.shape, axis):
        return None
    return ((index.shape, x.dtype),)


def lies_within(index: Any, shape: tuple[int, ...], axis: int) -> bool:
    """Whether there is something for each index, whatever its value along the axis."""
    return (
        index.dtype is torch.int64
        and len(index.shape) == len(shape)
        and 0 not in shape
        and 0 not in index.shape
        and all(n <= m for a, (n, m) in enumerate(zip(index.shape, shape)) if a != axis)
    )


@types_of("aten::index_select")
def _index_select(x: Any, dim: int, index: Any) -> Types | None:
    axis = axis_of(dim, len(x.shape))
    if axis is None or x.dtype not in VALUES or index.dtype not in INDICES or not _is_full(x):
        return None
    if len(index.shape) != 1:
        return None
    return ((with_extent(x.shape, axis, index.shape[0]), x.dtype),)


# --- spectra ------------------------------------------------------------------------------------

_SPECTRUM = {torch.float32: torch.complex64, torch.float64: torch.complex128}
_SIGNAL = {spectrum: signal for signal, spectrum in _SPECTRUM.items()}


def _along_axes(x: Any, dim: Sequence[int], dtypes: Any) -> bool:
    """Whether x, of one of these dtypes, has elements along these axes, of which there is one."""
    is_named = len(dim) > 0 and axes_of(dim, len(x.shape)) is not None and min(dim) >= 0
    return is_named and x.dtype in dtypes and 0 not in x.shape


@types_of("aten::_fft_r2c")
def _spectrum(x: Any, dim: Sequence[int], normalization: int, onesided: bool) -> Types | None:
    if not _along_axes(x, dim, _SPECTRUM):
        return None
    axis = dim[-1]
    extent = x.shape[axis] // 2 + 1 if onesided else x.shape[axis]
    return ((with_extent(x.shape, axis, extent), _SPECTRUM[x.dtype]),)


@types_of("aten::_fft_c2c")
def _turned_spectrum(x: Any, dim: Sequence[int], normalization: int, forward: bool) -> Types | None:
    return (type_of(x),) if _along_axes(x, dim, _SIGNAL) else None


@types_of("aten::_fft_c2r")
def _signal(x: Any, dim: Sequence[int], normalization: int, last_dim_size: int) -> Types | None:
    if not _along_axes(x, dim, _SIGNAL):
        return None
    axis = dim[-1]
    if last_dim_size < 1 or last_dim_size // 2 + 1 != x.shape[axis]:
        return None
    return ((with_extent(x.shape, axis, last_dim_size), _SIGNAL[x.dtype]),)
