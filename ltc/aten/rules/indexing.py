"""Rules of the overloads that read and write where an index tensor says."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ltc import config
from ltc.aten.promote import compute_dtype
from ltc.aten.registry import traces
from ltc.ir import build, ops
from ltc.ir.infer import broadcast
from ltc.ir.node import Node, Operand, make

INDEX_DTYPES = frozenset({torch.int64, torch.int32, torch.int16, torch.int8})


def checked(index: Node, size: int, message: str) -> Node:
    """The index as i64; one that is not from 0 to size - 1 is an IndexError, {} being its value."""
    index = build.cast(index, torch.int64)
    if not config.value("LTC_CHECK_INDEX"):
        return index
    return make(ops.WRAP_INDEX, index, size=size, lowest=0, message=message)


def _inside(index: Node, x: Node, dim: int) -> Node:
    """An index of `x` along `dim`, in the words that torch has for most overloads."""
    dim = build.dim_of(x, dim)
    return checked(index, x.shape[dim], _outside(dim, x.shape[dim]))


def _outside(dim: int, size: int) -> str:
    return f"index {{}} is out of bounds for dimension {dim} with size {size}"


def _wrapped(index: Node, size: int, dim: int) -> Node:
    """An index that may be counted from the end."""
    message = _outside(dim, size)
    index = build.cast(index, torch.int64)
    return make(ops.WRAP_INDEX, index, size=size, lowest=-size, message=message)


def _added(op: ops.Op, base: Node, index: Node, new: Node, dim: int) -> Node:
    """Add `new` to `base` where the index says; a sum of 16-bit numbers is rounded once."""
    dtype = compute_dtype(base.dtype)
    base, new = build.cast(base, dtype), build.cast(new, dtype)
    return make(op, base, index, new, dim=dim, mode="add")


def _in_self(index: Node, x: Node, dim: int) -> Node:
    """An index of `x` along `dim`, in torch's words for embedding and index_select; then our own."""
    text = f"index out of range in self\n{_outside(dim, x.shape[dim])}"
    return checked(index, x.shape[dim], text)


@traces("aten::index_select", moves=True)
def index_select(x: Node, dim: int, index: Node) -> Node:
    if not x.shape:
        return NotImplemented
    dim = build.dim_of(x, dim)
    index = _in_self(build.reshape(index, (-1,)), x, dim)
    return build.take(x, index, dim)


@traces("aten::embedding", moves=True)
def embedding(
    weight: Node,
    indices: Node,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Node:
    return build.take(weight, _in_self(indices, weight, 0), 0)


@traces("aten::embedding_dense_backward")
def embedding_dense_backward(
    grad: Node, indices: Node, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Node:
    """Each row's gradient is the sum over its uses, or their mean, but for the padding row."""
    if grad.shape[:-1] != indices.shape:
        return NotImplemented
    grad = build.cast(grad, compute_dtype(grad.dtype))
    text = f"index out of range in self\n{_outside(0, num_weights)}"
    indices = checked(indices, num_weights, text)
    if scale_grad_by_freq:
        zeros, ones = (
            build.full(shape, n, torch.int64)
            for shape, n in (((num_weights,), 0), (indices.shape, 1))
        )
        uses = build.take(make(ops.PUT, zeros, indices, ones, dim=0, mode="add"), indices, 0)
        share = 1.0 / build.cast(uses, torch.float64)
        grad = grad * build.unsqueeze(build.cast(share, grad.dtype), -1)
    if padding_idx >= 0:
        is_padding = build.unsqueeze(build.eq(indices, padding_idx), -1)
        grad = build.where(is_padding, 0.0, grad)
    zeros = build.full((num_weights, grad.shape[-1]), 0.0, grad.dtype)
    return _added(ops.PUT, zeros, indices, grad, 0)


def _ranked(x: Node, index: Node) -> tuple[Node, Node]:
    """Both with at least one dimension."""
    x = x if x.shape else build.reshape(x, (1,))
    return x, index if index.shape else build.reshape(index, (1,))


@traces("aten::gather", moves=True)
def gather(x: Node, dim: int, index: Node, sparse_grad: bool = False) -> Node:
    shape = index.shape
    x, index = _ranked(x, index)
    if not index.size:
        return build.full(shape, 0, x.dtype)
    return build.reshape(build.gather(x, _inside(index, x, dim), dim), shape)


@traces("aten::gather_backward")
def gather_backward(grad: Node, x: Node, dim: int, index: Node, sparse_grad: bool) -> Node:
    return _scatter(build.full_like(x, 0), dim, index, grad, "add")


def _scatter(x: Node, dim: int, index: Node, src: Node, mode: str) -> Node:
    """Writes, or reduces with what is there, src[i] where index[i] says along `dim`.

    For the places i of the index; `mode` as SCATTER has it.
    """
    shape = x.shape
    x, index = _ranked(x, index)
    if not index.size:
        return build.reshape(x, shape)
    index = _inside(index, x, dim)
    src = src if src.shape else build.reshape(src, (1,))
    if src.shape != index.shape:
        src = make(
            ops.SLICE, src, starts=(0,) * len(src.shape), limits=index.shape,
            steps=(1,) * len(src.shape),
        )  # fmt: skip
    dim = build.dim_of(x, dim)
    if mode == "add":
        made = _added(ops.SCATTER, x, index, src, dim)
    else:
        made = make(ops.SCATTER, x, index, src, dim=dim, mode=mode)
    return build.reshape(made, shape)


@traces("aten::scatter.src", moves=True)
def scatter(x: Node, dim: int, index: Node, src: Node) -> Node:
    return _scatter(x, dim, index, src, "set")


@traces("aten::scatter.value", moves=True)
def scatter_value(x: Node, dim: int, index: Node, value: Operand) -> Node:
    return _scatter(x, dim, index, build.full(index.shape, value, x.dtype), "set")


@traces("aten::scatter_add")
def scatter_add(x: Node, dim: int, index: Node, src: Node) -> Node:
    return NotImplemented if x.dtype == torch.bool else _scatter(x, dim, index, src, "add")


_REDUCED_BY = {
    "sum": "add", "mean": "add", "prod": "multiply", "amax": "maximum", "amin": "minimum",
}  # fmt: skip


@traces("aten::scatter_reduce.two")
def scatter_reduce(
    x: Node, dim: int, index: Node, src: Node, reduce: str, include_self: bool = True
) -> Node:
    """Reduce into x; elements that are not to take part begin as the reduction's neutral value."""
    mode, is_float = _REDUCED_BY.get(reduce), x.dtype.is_floating_point
    if mode is None or x.dtype == torch.bool or (reduce == "mean" and not is_float):
        return NotImplemented
    dtype = compute_dtype(x.dtype)
    begun, new = build.cast(x, dtype), build.cast(src, dtype)
    if not include_self:
        nothing = build.full(index.shape, _nothing_reduced(reduce, dtype), dtype)
        begun = _scatter(begun, dim, index, nothing, "set")
    made = _scatter(begun, dim, index, new, mode)
    if reduce != "mean":
        return made
    ones = build.full(index.shape, 1, dtype)
    counts = _scatter(build.full_like(made, int(include_self)), dim, index, ones, "add")
    return made / build.maximum(counts, 1)


def _nothing_reduced(reduce: str, dtype: torch.dtype) -> float:
    """Return the neutral value of a reduction."""
    if reduce == "prod":
        return 1
    if reduce in ("sum", "mean"):
        return 0
    if dtype.is_floating_point:
        return -math.inf if reduce == "amax" else math.inf
    limits = torch.iinfo(dtype)
    return limits.min if reduce == "amax" else limits.max


@traces("aten::index_add")
def index_add(x: Node, dim: int, index: Node, source: Node, alpha: Operand = 1) -> Node:
    if not x.shape or x.dtype == torch.bool or not source.shape:
        return NotImplemented
    if not x.size:
        return x  # the CPU looks at no index then, not even at one that is wrong
    source = build.cast(source, compute_dtype(x.dtype)) * alpha
    dim = build.dim_of(x, dim)
    index = _in_self(build.reshape(index, (-1,)), x, dim)
    return _added(ops.PUT, x, index, source, dim)


@traces("aten::index_copy", moves=True)
def index_copy(x: Node, dim: int, index: Node, source: Node) -> Node:
    if not x.shape or not source.shape:
        return NotImplemented
    if not source.size:
        return x  # as in index_add
    dim = build.dim_of(x, dim)
    text = f"index_copy_(): {_outside(dim, x.shape[dim])}"
    index = checked(build.reshape(index, (-1,)), x.shape[dim], text)
    return make(ops.PUT, x, index, source, dim=dim, mode="set")


@traces("aten::index_fill.int_Scalar", "aten::index_fill.int_Tensor", moves=True)
def index_fill(x: Node, dim: int, index: Node, value: Operand) -> Node:
    if not x.shape:
        return NotImplemented
    dim = build.dim_of(x, dim)
    index = _wrapped(build.reshape(index, (-1,)), x.shape[dim], dim)
    shape = (*x.shape[:dim], *index.shape, *x.shape[dim + 1 :])
    if 0 in shape:
        return x  # as in index_add
    new = build.full(shape, value, x.dtype)
    return make(ops.PUT, x, index, new, dim=dim, mode="set")


@traces("ltc::one_hot")
def one_hot(x: Node, classes: int) -> Node:
    x = build.check(x, x >= 0, "Class values must be non-negative.")
    x = build.check(x, x < classes, "Class values must be smaller than num_classes.")
    return build.cast(build.eq(build.unsqueeze(x, -1), build.iota(classes)), torch.int64)


# --- x[i, :, j] ----------------------------------------------------------------------------------


def _plan(x: Node, indices: Sequence[Node | None]) -> tuple[list[int], Node, list[int]] | None:
    """Plan the reading of x[indices] as one lookup.

    Returns:
        The dimensions that are indexed, as they should be brought together in front or left in
        place; the positions in those dimensions flattened; where the lookup's own dimensions go in
        the result. None where an index is a mask or the like.
    """
    used = {d: index for d, index in enumerate(indices) if index is not None}
    if not used or any(index.dtype not in INDEX_DTYPES for index in used.values()):
        return None
    shape = broadcast(*[index.shape for index in used.values()])
    position: Node | None = None
    for d, unwrapped in used.items():
        size = x.shape[d]
        index = _wrapped(unwrapped, size, d)
        position = index if position is None else position * size + index
    assert position is not None
    return list(used), build.expand(position, shape), list(shape)


def _gathered(x: Node, given: list[int]) -> tuple[Node, int, list[int]]:
    """x with the indexed dimensions flattened into one: (x, that dimension, the permutation).

    Indices side by side stay where they are; others move to the front, as NumPy has it.
    """
    adjacent = given == list(range(given[0], given[-1] + 1))
    front = given[0] if adjacent else 0
    rest = [d for d in range(len(x.shape)) if d not in given]
    order = [*rest[:front], *given, *rest[front:]]
    moved = build.permute(x, order)
    size = math.prod(x.shape[d] for d in given)
    shape = moved.shape
    flat = build.reshape(moved, (*shape[:front], size, *shape[front + len(given) :]))
    return flat, front, order


@traces("aten::index.Tensor", "aten::_unsafe_index.Tensor", moves=True)
def index(x: Node, indices: Sequence[Node | None]) -> Node:
    plan = _plan(x, indices)
    if plan is None:
        return NotImplemented
    given, position, _ = plan
    flat, dim, _ = _gathered(x, given)
    shape = (*flat.shape[:dim], *position.shape, *flat.shape[dim + 1 :])
    if _reads_nothing(flat, dim, shape):
        return build.full(shape, 0, x.dtype)
    return build.take(flat, position, dim)


def _reads_nothing(flat: Node, dim: int, shape: Sequence[int]) -> bool:
    """Return True if the CPU checks no index, not even a wrong one: there is no element.

    Of a dimension without any, it refuses every index nevertheless.
    """
    return 0 in shape and flat.shape[dim] > 0


@traces("aten::index_put", "aten::_unsafe_index_put", "aten::_index_put_impl")
def index_put(
    x: Node,
    indices: Sequence[Node | None],
    values: Node,
    accumulate: bool = False,
    unsafe: bool = False,
) -> Node:
    if len(indices) and all(i is None or i.dtype == torch.bool for i in indices):
        return _masked_put(x, indices, values, accumulate)
    plan = _plan(x, indices)
    if plan is None or (x.dtype == torch.bool and accumulate):
        return NotImplemented
    given, position, _ = plan
    flat, dim, order = _gathered(x, given)
    shape = (*flat.shape[:dim], *position.shape, *flat.shape[dim + 1 :])
    if _reads_nothing(flat, dim, shape):
        return x
    values = build.expand(build.cast(values, x.dtype), shape)
    if accumulate:
        made = _added(ops.PUT, flat, position, values, dim)
    else:
        made = make(ops.PUT, flat, position, values, dim=dim, mode="set")
    moved = build.reshape(made, tuple(x.shape[d] for d in order))
    return build.permute(moved, [order.index(d) for d in range(len(order))])


def _masked_put(x: Node, indices: Sequence[Node | None], values: Node, accumulate: bool) -> Node:
    """x[:, mask] = values, where they are the same for each element that the only mask selects."""
    used = [d for d, index in enumerate(indices) if index is not None]
    mask = indices[used[0]] if len(used) == 1 else None
    if mask is None or mask.shape != x.shape[used[0] : used[0] + len(mask.shape)]:
        return NotImplemented
    rest = len(x.shape) - used[0] - len(mask.shape)
    shape = values.shape
    at = len(shape) - rest - 1  # the selected elements' dimension among theirs
    if at >= 0:
        if shape[at] != 1:
            return _put_each(x, used[0], mask, values, at, accumulate)
        shape = (*shape[:at], *(1,) * len(mask.shape), *shape[at + 1 :])
    pairs = zip(reversed(shape), reversed(x.shape))
    if len(shape) > len(x.shape) or any(n not in (1, extent) for n, extent in pairs):
        return NotImplemented  # for the CPU to refuse
    mask = build.reshape(mask, (*mask.shape, *(1,) * rest))
    values = build.reshape(build.cast(values, x.dtype), shape)
    return build.where(mask, x + values if accumulate else values, x)


_FEW = 1 << 16  # elements that are written anew sooner than PyTorch's kernel is called


def _put_each(x: Node, first: int, mask: Node, values: Node, at: int, accumulate: bool) -> Node:
    """x[:, mask] = values, with one for each element that the mask selects: see above.

    All of x is written, so it is to be small, or to begin with one number, as a gradient does.

    Args:
        at: The dimension of the selected ones among those of `values`.
    """
    last = first + len(mask.shape)
    before, rest, count = x.shape[:first], x.shape[last:], values.shape[at]
    fits = broadcast(values.shape, (*before, count, *rest)) == (*before, count, *rest)
    is_sum_of_bools = accumulate and x.dtype == torch.bool
    if not fits or is_sum_of_bools or not (_is_one_number(x) or x.size <= _FEW):
        return NotImplemented
    if count == 0:
        return NotImplemented  # of no values none can be taken: sizes that are symbols get a guard
    chosen = build.reshape(mask, (-1,))
    so_far = make(ops.CUMSUM, build.cast(chosen, torch.int64), dim=0)
    size = chosen.shape[0]
    selected = build.reshape(build.slice_dim(so_far, 0, size - 1, size), ())
    # as floats, which an extent may be without becoming part of what is compiled
    place = build.minimum(build.cast(so_far - 1, torch.float64), count - 1)
    place = build.cast(build.maximum(place, 0.0), torch.int64)
    place = place + _as_many(selected, count, values, before, rest)
    whole = build.expand(build.cast(values, x.dtype), (*before, count, *rest))
    new, old = build.take(whole, place, first), build.reshape(x, (*before, size, *rest))
    chosen = build.reshape(chosen, (size, *(1,) * len(rest)))
    put = build.where(chosen, old + new if accumulate else new, old)
    return build.reshape(put, x.shape)


def _is_one_number(x: Node) -> bool:
    while x.op is ops.EXPAND:
        x = x.inputs[0]
    return x.op is ops.CONSTANT


def _as_many(
    selected: Node, count: int, values: Node, before: Sequence[int], rest: Sequence[int]
) -> Node:
    """0; an error, in the CPU's words, where the mask selects more or fewer than that."""
    text = f"shape mismatch: value tensor of shape {_listed(*values.shape)} cannot be broadcast to indexing "
    none, some = (f"{text}result of shape {_listed(*before, n, *rest)}" for n in ("0", "{}"))
    is_wrong = build.ne(build.cast(selected, torch.float64), count)
    wrong = build.where(is_wrong, build.maximum(selected, 1), 0)
    empty = build.cast(build.eq(selected, 0), torch.int64)
    first = build.check(empty, build.eq(empty, 0), none)
    return first + build.check(wrong, build.eq(wrong, 0), some)


def _listed(*extents: object) -> str:
    return f"[{', '.join(map(str, extents))}]"
