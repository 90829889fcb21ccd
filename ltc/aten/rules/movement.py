"""Rules of the overloads that only move elements, and of writing through a chain of views."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch

from ltc.aten.call import name_of_overload
from ltc.aten.expansion import apply
from ltc.aten.extern import extern, made_by_kernel
from ltc.aten.registry import rule_of, traces
from ltc.aten.value_views import changes_values
from ltc.ir import build, ops
from ltc.ir.node import Node, Operand, make
from ltc.ir.tensor_type import TensorType

# --- views ---------------------------------------------------------------------------------------


@traces(
    "aten::view", "aten::_unsafe_view", "aten::reshape", "aten::_reshape_copy", "aten::view_copy",
    moves=True,
)  # fmt: skip
def view(x: Node, size: Sequence[int]) -> Node:
    return build.reshape(x, size)


@traces("aten::_reshape_alias", "aten::_reshape_alias_copy", moves=True)
def reshape_alias(x: Node, size: Sequence[int], stride: Sequence[int]) -> Node:
    return build.reshape(x, size)


@traces("aten::t", "aten::t_copy", "aten::numpy_T", moves=True)
def t(x: Node) -> Node:
    return build.permute(x, range(len(x.shape))[::-1])


@traces("aten::transpose.int", "aten::transpose_copy.int", moves=True)
def transpose(x: Node, dim0: int, dim1: int) -> Node:
    return build.transpose(x, dim0, dim1)


@traces("aten::permute", "aten::permute_copy", moves=True)
def permute(x: Node, dims: Sequence[int]) -> Node:
    return build.permute(x, dims)


@traces("aten::expand", "aten::expand_copy", moves=True)
def expand(x: Node, size: Sequence[int], implicit: bool = False) -> Node:
    return build.expand(x, tuple(size))


def _bounds(extent: int, start: int | None, end: int | None) -> tuple[int, int]:
    """Return where a Python slice starts and ends, inside 0..extent."""
    low = 0 if start is None else start
    high = extent if end is None else end
    low = min(max(low + extent if low < 0 else low, 0), extent)
    high = min(max(high + extent if high < 0 else high, low), extent)
    return low, high


@traces("aten::slice.Tensor", "aten::slice_copy.Tensor", moves=True)
def slice_tensor(
    x: Node, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Node:
    low, high = _bounds(x.shape[build.dim_of(x, dim)], start, end)
    return build.slice_dim(x, dim, low, high, step)


@traces("aten::select.int", "aten::select_copy.int", moves=True)
def select(x: Node, dim: int, index: int) -> Node:
    extent = x.shape[build.dim_of(x, dim)]
    return build.select(x, dim, index) if -extent <= index < extent else NotImplemented


@traces("aten::squeeze", "aten::squeeze_copy", moves=True)
def squeeze(x: Node) -> Node:
    return build.squeeze(x, range(len(x.shape)))


@traces("aten::squeeze.dim", "aten::squeeze_copy.dim", moves=True)
def squeeze_dim(x: Node, dim: int) -> Node:
    return build.squeeze(x, [dim])


@traces("aten::squeeze.dims", "aten::squeeze_copy.dims", moves=True)
def squeeze_dims(x: Node, dim: Sequence[int]) -> Node:
    return build.squeeze(x, dim)


@traces("aten::unsqueeze", "aten::unsqueeze_copy", moves=True)
def unsqueeze(x: Node, dim: int) -> Node:
    return build.unsqueeze(x, dim)


@traces("aten::detach", "aten::alias", "aten::detach_copy", "aten::alias_copy", moves=True)
def alias(x: Node) -> Node:
    return x


@traces("aten::split.Tensor", "aten::split_copy.Tensor", moves=True)
def split(x: Node, split_size: int, dim: int = 0) -> list[Node]:
    extent = x.shape[build.dim_of(x, dim)]
    starts = range(0, extent, split_size) if extent else (0,)
    return [build.slice_dim(x, dim, s, min(s + split_size, extent)) for s in starts]


@traces("aten::split_with_sizes", "aten::split_with_sizes_copy", moves=True)
def split_with_sizes(x: Node, split_sizes: Sequence[int], dim: int = 0) -> list[Node]:
    if sum(split_sizes) != x.shape[build.dim_of(x, dim)]:
        return NotImplemented
    starts = [sum(split_sizes[:i]) for i in range(len(split_sizes))]
    return [build.slice_dim(x, dim, s, s + n) for s, n in zip(starts, split_sizes)]


@traces("aten::unbind.int", "aten::unbind_copy.int", moves=True)
def unbind(x: Node, dim: int = 0) -> list[Node]:
    return [build.select(x, dim, i) for i in range(x.shape[build.dim_of(x, dim)])]


@traces("aten::view.dtype", "aten::view_copy.dtype", moves=True)
def view_dtype(x: Node, dtype: torch.dtype) -> Node:
    same_size = dtype.itemsize == x.dtype.itemsize
    return make(ops.BITCAST, x, dtype=dtype) if same_size else NotImplemented


@traces("aten::diagonal", "aten::diagonal_copy", moves=True)
def diagonal(x: Node, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Node:
    """The diagonal lies at equal steps of the two dimensions flattened into one."""
    dim1, dim2 = build.dim_of(x, dim1), build.dim_of(x, dim2)
    rest = [d for d in range(len(x.shape)) if d not in (dim1, dim2)]
    rows, columns = x.shape[dim1], x.shape[dim2]
    x = build.permute(x, [*rest, dim1, dim2])
    lead = x.shape[:-2]
    first = offset if offset >= 0 else -offset * columns
    count = max(min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns), 0)
    flat = build.reshape(x, (*lead, rows * columns))
    limit = first + (count - 1) * (columns + 1) + 1 if count else 0
    return build.slice_dim(flat, -1, first if count else 0, limit, columns + 1)


# --- writing through views -----------------------------------------------------------------------

# One view of a chain: (overload, arguments after the tensor, keyword arguments, output or None).
View = tuple[Any, Sequence[Any], dict[str, Any], int | None]
# Behind these an element may be seen at several places.
_REPEATING = frozenset({"aten::expand", "aten::unfold", "aten::as_strided"})


@traces("ltc::write_view", moves=True)
def write_view(base: Node, new: Node, chain: Sequence[Any]) -> Node:
    """`base` with the elements that the chain of views selects replaced by `new`."""
    parts = _parts_of_one_way_back(chain)
    bases = [base]
    for part in parts:
        bases.append(reduce(_view, part, bases[-1]))
    for part, inner in zip(reversed(parts), reversed(bases[:-1])):
        by = _put_back if len(part) == 1 else _put_back_by_position
        new = by(inner, new, part)
    return new


def _parts_of_one_way_back(chain: Sequence[View]) -> list[list[View]]:
    """Views that are written through at once: one each, but for those behind a repetition.

    Where a view shows an element several times, only what the views behind it select tells at
    which of its places it is written to; the other places still hold what was there before.
    """
    parts: list[list[View]] = []
    for step in chain:
        is_repeated = bool(parts) and name_of_overload(parts[-1][0][0]) in _REPEATING
        if is_repeated and not changes_values(step[0]):
            parts[-1].append(step)
        else:
            parts.append([step])
    return parts


def _view(base: Node, step: View) -> Node:
    """Return the part of `base` that the view selects."""
    overload, args, kwargs, index = step
    name = name_of_overload(overload)
    rule = rule_of(name)
    made = None
    if rule is not None:
        made = apply(rule, name, [base, *args], dict(kwargs), (), None)
    if made is None:
        made = extern(name, [base, *args], dict(kwargs), _view_types(base, step))
    selected = made[index or 0]
    assert selected is not None  # a view is a tensor
    return selected


def _view_types(base: Node, step: View) -> tuple[TensorType, ...]:
    """The types a view without a rule gives, asked of torch on a tensor without memory."""
    overload, args, kwargs, _ = step
    empty = torch.empty(base.shape, dtype=base.dtype, device="meta")
    made = overload(empty, *args, **kwargs)
    made = made if isinstance(made, (list, tuple)) else (made,)
    return tuple(TensorType(m.dtype, tuple(m.shape)) for m in made)


def _put_back(base: Node, new: Node, part: Sequence[View]) -> Node:
    """By the inverse of the only view of a part."""
    ((overload, args, kwargs, index),) = part
    name = name_of_overload(overload)
    inverse = INVERSES.get(name) or INVERSES.get(name.partition(".")[0])
    if inverse is None:
        return _put_back_by_position(base, new, part)
    if index is None:
        return inverse(base, new, *args, **kwargs)
    return inverse(base, new, index, *args, **kwargs)


def _put_back_by_position(base: Node, new: Node, chain: Sequence[View]) -> Node:
    """For views without an inverse here: what they select of the positions says where to write."""
    positions = build.reshape(build.iota(base.size), base.shape)
    for step in chain:
        positions = _view(positions, step)
    selected = build.reshape(positions, (-1,))
    new = build.reshape(build.cast(new, base.dtype), (-1,))
    flat = make(ops.PUT, build.reshape(base, (-1,)), selected, new, dim=0, mode="set")
    return build.reshape(flat, base.shape)


def _back_to_shape(base: Node, new: Node, *args: Any, **kwargs: Any) -> Node:
    return build.reshape(build.cast(new, base.dtype), base.shape)


def _back_from_permute(base: Node, new: Node, dims: Sequence[int]) -> Node:
    dims = [d % max(len(dims), 1) for d in dims]
    return build.permute(new, [dims.index(d) for d in range(len(dims))])


def _back_from_slice(
    base: Node,
    new: Node,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Node:
    low, _ = _bounds(base.shape[build.dim_of(base, dim)], start, end)
    return build.insert(base, new, dim, low, step)


def _back_from_select(base: Node, new: Node, dim: int, index: int) -> Node:
    dim = build.dim_of(base, dim)
    return build.insert(base, build.unsqueeze(new, dim), dim, index % base.shape[dim])


def _back_from_split(base: Node, new: Node, index: int, split_size: int, dim: int = 0) -> Node:
    return build.insert(base, new, dim, index * split_size)


def _back_from_split_with_sizes(
    base: Node, new: Node, index: int, split_sizes: Sequence[int], dim: int = 0
) -> Node:
    return build.insert(base, new, dim, sum(split_sizes[:index]))


def _back_from_unbind(base: Node, new: Node, index: int, dim: int = 0) -> Node:
    return _back_from_select(base, new, dim, index)


def _back_from_dtype(base: Node, new: Node, dtype: torch.dtype) -> Node:
    if new.dtype.itemsize == base.dtype.itemsize:
        return make(ops.BITCAST, new, dtype=base.dtype)
    return made_by_kernel("aten::view.dtype", base, new, base.dtype)


def _back_from_real(base: Node, new: Node) -> Node:
    return made_by_kernel("aten::view_as_complex", base, new)


def _back_from_complex(base: Node, new: Node) -> Node:
    return made_by_kernel("aten::view_as_real", base, new)


def _back_from_conj(base: Node, new: Node) -> Node:
    return made_by_kernel("aten::_conj_physical", base, new)


INVERSES: dict[str, Callable[..., Node]] = {
    "aten::view": _back_to_shape,
    "aten::_unsafe_view": _back_to_shape,
    "aten::_reshape_alias": _back_to_shape,
    "aten::reshape": _back_to_shape,
    "aten::squeeze": _back_to_shape,
    "aten::unsqueeze": _back_to_shape,
    "aten::detach": _back_to_shape,
    "aten::alias": _back_to_shape,
    "aten::t": lambda base, new: t(new),
    "aten::numpy_T": lambda base, new: t(new),
    "aten::transpose": lambda base, new, a, b: build.transpose(new, a, b),
    "aten::permute": _back_from_permute,
    "aten::slice": _back_from_slice,
    "aten::select": _back_from_select,
    "aten::split": _back_from_split,
    "aten::split_with_sizes": _back_from_split_with_sizes,
    "aten::unbind": _back_from_unbind,
    "aten::view.dtype": _back_from_dtype,
    "aten::view_as_real": _back_from_real,
    "aten::view_as_complex": _back_from_complex,
    "aten::_conj": _back_from_conj,
    "aten::_neg_view": lambda base, new: -new,
}


# --- gradients of views, and their functional writes ---------------------------------------------


@traces("aten::slice_scatter", moves=True)
def slice_scatter(
    x: Node,
    src: Node,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Node:
    if not _has_shape(src, slice_tensor(x, dim, start, end, step).shape):
        return NotImplemented
    return _back_from_slice(x, build.cast(src, x.dtype), dim, start, end, step)


def _has_shape(x: Node, shape: tuple[int, ...]) -> bool:
    return len(x.shape) == len(shape) and x.shape == shape


@traces("aten::select_scatter", moves=True)
def select_scatter(x: Node, src: Node, dim: int, index: int) -> Node:
    axis = build.dim_of(x, dim)
    if not _has_shape(src, (*x.shape[:axis], *x.shape[axis + 1 :])):
        return NotImplemented
    if not -x.shape[axis] <= index < x.shape[axis]:
        return NotImplemented
    return _back_from_select(x, build.cast(src, x.dtype), dim, index)


@traces("aten::slice_backward", moves=True)
def slice_backward(
    grad: Node, input_sizes: Sequence[int], dim: int, start: int, end: int, step: int
) -> Node:
    zeros = build.full(tuple(input_sizes), 0, grad.dtype)
    return slice_scatter(zeros, grad, dim, start, end, step)


@traces("aten::select_backward", moves=True)
def select_backward(grad: Node, input_sizes: Sequence[int], dim: int, index: int) -> Node:
    return select_scatter(build.full(tuple(input_sizes), 0, grad.dtype), grad, dim, index)


# --- joining, repeating, padding -----------------------------------------------------------------


def _is_legacy_empty(x: Node) -> bool:
    """Concatenation ignores 1-D tensors without elements, whatever the other shapes are."""
    return x.shape == (0,)


@traces("aten::cat", moves=True)
def cat(tensors: Sequence[Node], dim: int = 0, *, results: Sequence[TensorType]) -> Node:
    parts = [build.cast(x, results[0].dtype) for x in tensors if not _is_legacy_empty(x)]
    if not parts:
        return build.cast(tensors[0], results[0].dtype)
    return build.concat(parts, dim)


@traces("aten::stack", moves=True)
def stack(tensors: Sequence[Node], dim: int = 0, *, results: Sequence[TensorType]) -> Node:
    dim %= len(tensors[0].shape) + 1
    parts = [build.unsqueeze(build.cast(x, results[0].dtype), dim) for x in tensors]
    return build.concat(parts, dim)


@traces("aten::flip", moves=True)
def flip(x: Node, dims: Sequence[int]) -> Node:
    return build.flip(x, dims)


@traces("aten::roll", moves=True)
def roll(x: Node, shifts: Sequence[int], dims: Sequence[int] = ()) -> Node:
    shifts = [shifts] if isinstance(shifts, int) else list(shifts)
    dims = [dims] if isinstance(dims, int) else list(dims)
    if not dims:
        return build.reshape(_roll_one(build.reshape(x, (-1,)), shifts[0], 0), x.shape)
    for shift, dim in zip(shifts, dims):
        x = _roll_one(x, shift, dim)
    return x


def _roll_one(x: Node, shift: int, dim: int) -> Node:
    extent = x.shape[build.dim_of(x, dim)] if x.shape else 0
    cut = -shift % extent if extent else 0
    if not cut:
        return x
    tail = build.slice_dim(x, dim, cut, extent)
    return build.concat([tail, build.slice_dim(x, dim, 0, cut)], dim)


@traces("aten::repeat", moves=True)
def repeat(x: Node, repeats: Sequence[int]) -> Node:
    """Each dimension becomes (times, extent), then the two are flattened."""
    lead = len(repeats) - len(x.shape)
    shape = (1,) * lead + x.shape
    paired = [n for extent in shape for n in (1, extent)]
    times = [n for r, extent in zip(repeats, shape) for n in (r, extent)]
    result = tuple(r * extent for r, extent in zip(repeats, shape))
    return build.reshape(build.expand(build.reshape(x, paired), tuple(times)), result)


@traces("aten::constant_pad_nd", moves=True)
def constant_pad_nd(x: Node, pad: Sequence[int], value: Operand = 0) -> Node:
    """`pad` holds (low, high) for the last dimension first."""
    pairs = list(zip(pad[::2], pad[1::2]))[::-1]
    pairs = [(0, 0)] * (len(x.shape) - len(pairs)) + pairs
    return build.pad(x, [a for a, _ in pairs], [b for _, b in pairs], value)


@traces("aten::pixel_shuffle", moves=True)
def pixel_shuffle(x: Node, upscale_factor: int) -> Node:
    """[..., C * r * r, H, W] -> [..., C, H * r, W * r]"""
    *lead, channels, height, width = x.shape
    r, depth = upscale_factor, len(lead)
    x = build.reshape(x, (*lead, channels // (r * r), r, r, height, width))
    x = build.permute(x, [*range(depth), depth, depth + 3, depth + 1, depth + 4, depth + 2])
    return build.reshape(x, (*lead, channels // (r * r), height * r, width * r))


@traces("aten::tril", moves=True)
def tril(x: Node, diagonal: int = 0) -> Node:
    return build.where(_below_diagonal(x.shape, diagonal), x, 0)


@traces("aten::triu", moves=True)
def triu(x: Node, diagonal: int = 0) -> Node:
    return build.where(_below_diagonal(x.shape, diagonal - 1), 0, x)


def _below_diagonal(shape: tuple[int, ...], diagonal: int) -> Node:
    """[rows, columns], True where column - row <= diagonal."""
    matrix = shape[-2:]
    return build.iota_along(matrix, 1) <= build.iota_along(matrix, 0) + diagonal


# --- Rules of the overloads that write diagonals -------------------------------------------------


def _diagonal_written(base: Node, new: Node, offset: int, dim1: int, dim2: int) -> Node:
    step: View = (torch.ops.aten.diagonal.default, (offset, dim1, dim2), {}, None)
    return _put_back_by_position(base, new, [step])


@traces("aten::diagonal_scatter", moves=True)
def diagonal_scatter(x: Node, src: Node, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Node:
    return _diagonal_written(x, src, offset, dim1, dim2)


@traces("aten::diagonal_backward", moves=True)
def diagonal_backward(
    grad: Node, input_sizes: Sequence[int], offset: int, dim1: int, dim2: int
) -> Node:
    return _diagonal_written(
        build.full(tuple(input_sizes), 0, grad.dtype), grad, offset, dim1, dim2
    )


@traces("aten::diag_embed", moves=True)
def diag_embed(x: Node, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Node:
    """x[..., i] at column i + offset of row i, or at row i - offset of column i; else 0."""
    rank = len(x.shape) + 1
    dim1, dim2 = dim1 % rank, dim2 % rank
    size = x.shape[-1] + abs(offset)
    x = build.pad(x, [0] * (rank - 1), [0] * (rank - 2) + [abs(offset)])
    x = build.unsqueeze(x, -1 if offset >= 0 else -2)
    matrix = (size, size)
    on_it = build.eq(build.iota_along(matrix, 1), build.iota_along(matrix, 0) + offset)
    made = build.where(on_it, x, 0)
    rest = [d for d in range(rank) if d not in (dim1, dim2)]
    order = [*rest, dim1, dim2]
    return build.permute(made, [order.index(d) for d in range(rank)])


# --- as_strided: a slice where it selects elements in order, else a lookup of each element -------


@traces("aten::as_strided", "aten::as_strided_copy", moves=True)
def as_strided(
    x: Node, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Node:
    """Elements of the contiguous `x`, from storage_offset on; some may be there several times."""
    flat, start = build.reshape(x, (-1,)), storage_offset or 0
    if not math.prod(size):
        return build.full(tuple(size), 0, x.dtype)
    if start + sum((n - 1) * step for n, step in zip(size, stride)) >= x.size:
        return NotImplemented
    step = _step_of(size, stride)
    if step is not None:
        last = start + (math.prod(size) - 1) * step
        return build.reshape(build.slice_dim(flat, 0, start, last + 1, step), tuple(size))
    return build.take(flat, _positions(size, stride, start), 0)


def _positions(size: Sequence[int], stride: Sequence[int], start: int) -> Node:
    """Return where each element is in the flat tensor."""
    along = [build.iota_along(size, d) * step for d, step in enumerate(stride)]
    return functools.reduce(operator.add, along) + start


def _back_from_as_strided(
    base: Node,
    new: Node,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Node:
    step = _step_of(size, stride)
    if step is None:
        view: View = (torch.ops.aten.as_strided.default, (size, stride, storage_offset), {}, None)
        return _put_back_by_position(base, new, [view])
    run = build.reshape(build.cast(new, base.dtype), (-1,))
    flat = build.insert(build.reshape(base, (-1,)), run, 0, storage_offset or 0, step)
    return build.reshape(flat, base.shape)


def _step_of(size: Sequence[int], stride: Sequence[int]) -> int | None:
    """Return the step from each element to the next, if that is one number above 0; else None.

    Of an extent of 1 any stride will do.
    """
    expected = None
    for extent, step in zip(reversed(size), reversed(stride)):
        if extent != 1:
            if step != (step if expected is None else expected) or not step:
                return None
            expected = step * extent
    last = [step for extent, step in zip(size, stride) if extent != 1]
    return last[-1] if last else 1


@traces("aten::as_strided_scatter", moves=True)
def as_strided_scatter(
    x: Node,
    src: Node,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Node:
    if src.shape != tuple(size):
        return NotImplemented
    return _back_from_as_strided(x, src, size, stride, storage_offset)


INVERSES["aten::as_strided"] = _back_from_as_strided
