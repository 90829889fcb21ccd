"""Type rules: the type of an op's result from the types of its operands and its attributes.

A rule raises InvalidGraph where the operands do not fit, so a graph that exists is well typed.
Operands of elementwise ops broadcast as in torch; nothing else broadcasts.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from ltc.errors import InvalidGraph
from ltc.ir.tensor_type import TensorType, TupleType

Shape = tuple[int, ...]


def broadcast(*shapes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that all of these expand to.  Raises InvalidGraph where there is none."""
    first = shapes[0]
    if all([len(x) == len(first) and x == first for x in shapes]):  # not from the left: see Extent
        return first
    result = [1] * max(map(len, shapes))
    for shape in shapes:
        offset = len(result) - len(shape)
        for i, extent in enumerate(shape):
            if extent != 1 and result[offset + i] != extent:
                if result[offset + i] != 1:
                    raise InvalidGraph(f"shapes {shapes} do not broadcast together")
                result[offset + i] = extent
    return tuple(result)


def _same_dtype(operands: tuple[TensorType, ...]) -> torch.dtype:
    dtype = operands[0].dtype
    for other in operands[1:]:
        if other.dtype != dtype:
            raise InvalidGraph(
                f"operands {', '.join(map(str, operands))} differ in dtype. The aten rule that "
                f"built this node must cast one; see promote() in ltc/aten/promote.py."
            )
    return dtype


def _need(holds: bool, text: str, *operands: TensorType) -> None:
    if not holds:
        raise InvalidGraph(f"{text}; the operands are {', '.join(map(str, operands))}")


def leaf(*, dtype: torch.dtype, shape: Shape = (), **_: Any) -> TensorType:
    return TensorType(dtype, tuple(shape))


def iota(*, size: int) -> TensorType:
    return TensorType(torch.int64, (size,))


def elementwise(*operands: TensorType) -> TensorType:
    return TensorType(_same_dtype(operands), broadcast(*[x.shape for x in operands]))


def floating(*operands: TensorType) -> TensorType:
    result = elementwise(*operands)
    _need(result.dtype.is_floating_point, "this operation is defined on floats alone", *operands)
    return result


def integral(*operands: TensorType) -> TensorType:
    result = elementwise(*operands)
    is_number = result.dtype.is_floating_point or result.dtype.is_complex
    _need(not is_number, "this operation is defined on integers and bool alone", *operands)
    return result


def comparison(*operands: TensorType) -> TensorType:
    return TensorType(torch.bool, elementwise(*operands).shape)


def where(condition: TensorType, x: TensorType, y: TensorType) -> TensorType:
    _need(condition.dtype == torch.bool, "the condition of where is bool", condition, x, y)
    return TensorType(_same_dtype((x, y)), broadcast(condition.shape, x.shape, y.shape))


def cast(x: TensorType, *, dtype: torch.dtype) -> TensorType:
    return TensorType(dtype, x.shape)


def bitcast(x: TensorType, *, dtype: torch.dtype) -> TensorType:
    _need(dtype.itemsize == x.dtype.itemsize, f"bitcast to {dtype} changes the size", x)
    return TensorType(dtype, x.shape)


def same(x: TensorType, *_: TensorType, **__: Any) -> TensorType:
    return x


def _without(shape: tuple[int, ...], dims: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(extent for i, extent in enumerate(shape) if i not in dims)


def reduce(x: TensorType, *, dims: Shape) -> TensorType:
    increasing = all(a < b for a, b in pairwise(dims))
    inside = all(0 <= d < x.rank for d in dims)
    _need(increasing and inside, f"dims {dims} are not increasing dimensions", x)
    return TensorType(x.dtype, _without(x.shape, dims))


def reduce_to_bool(x: TensorType, *, dims: Shape) -> TensorType:
    _need(x.dtype == torch.bool, "any and all read bool", x)
    return reduce(x, dims=dims)


def arg_reduce(x: TensorType, *, dim: int) -> TensorType:
    _need(0 <= dim < x.rank and x.shape[dim] > 0, f"no element to choose in dim {dim}", x)
    return TensorType(torch.int64, _without(x.shape, (dim,)))


def scan(x: TensorType, *, dim: int) -> TensorType:
    _need(0 <= dim < x.rank, f"dim {dim} does not exist", x)
    return x


def permute(x: TensorType, *, dims: Shape) -> TensorType:
    _need(sorted(dims) == list(range(x.rank)), f"dims {dims} are not a permutation", x)
    return TensorType(x.dtype, tuple(x.shape[d] for d in dims))


def slice_(x: TensorType, *, starts: Shape, limits: Shape, steps: Shape) -> TensorType:
    fits = len(starts) == len(limits) == len(steps) == x.rank and all(
        0 <= a <= b <= extent and step >= 1
        for a, b, step, extent in zip(starts, limits, steps, x.shape)
    )
    _need(fits, f"slice {starts}..{limits} by {steps} leaves the operand", x)
    shape = tuple(-((a - b) // step) for a, b, step in zip(starts, limits, steps))
    return TensorType(x.dtype, shape)


def expand(x: TensorType, *, shape: Shape) -> TensorType:
    fits = len(shape) >= x.rank and broadcast(x.shape, shape) == tuple(shape)
    _need(fits, f"expand to {shape} does not keep the operand", x)
    return TensorType(x.dtype, shape)


def reshape(x: TensorType, *, shape: Shape) -> TensorType:
    result = TensorType(x.dtype, shape)
    _need(result.size == x.size, f"reshape to {shape} changes the number of elements", x)
    return result


def pad(x: TensorType, value: TensorType, *, low: Shape, high: Shape) -> TensorType:
    fits = len(low) == len(high) == x.rank and min((*low, *high), default=0) >= 0
    _need(fits and value.shape == (), f"pad by {low} and {high} does not fit", x, value)
    shape = tuple(a + extent + b for a, extent, b in zip(low, x.shape, high))
    return TensorType(_same_dtype((x, value)), shape)


def flip(x: TensorType, *, dims: Shape) -> TensorType:
    _need(all(0 <= d < x.rank for d in dims), f"dims {dims} do not exist", x)
    return x


def concat(*operands: TensorType, dim: int) -> TensorType:
    first = operands[0]
    agree = all(_without(x.shape, (dim,)) == _without(first.shape, (dim,)) for x in operands)
    _need(agree and 0 <= dim < first.rank, f"concat along {dim} needs equal other dims", *operands)
    extent = sum(x.shape[dim] for x in operands)
    return TensorType(_same_dtype(operands), (*first.shape[:dim], extent, *first.shape[dim + 1 :]))


def insert(base: TensorType, new: TensorType, *, starts: Shape, steps: Shape) -> TensorType:
    fits = len(starts) == len(steps) == base.rank == new.rank and all(
        start >= 0 and step >= 1 and (n == 0 or start + (n - 1) * step < extent)
        for start, step, n, extent in zip(starts, steps, new.shape, base.shape)
    )
    _need(fits, f"insert at {starts} by {steps} leaves the base", base, new)
    return TensorType(_same_dtype((base, new)), base.shape)


def take(x: TensorType, index: TensorType, *, dim: int) -> TensorType:
    _need(index.dtype == torch.int64 and 0 <= dim < x.rank, "take needs i64 indices", x, index)
    return TensorType(x.dtype, (*x.shape[:dim], *index.shape, *x.shape[dim + 1 :]))


def put(base: TensorType, index: TensorType, new: TensorType, *, dim: int, mode: str) -> TensorType:
    expected = take(base, index, dim=dim).shape
    _need(new.shape == expected, f"put of {mode} along {dim} needs {expected}", base, index, new)
    return TensorType(_same_dtype((base, new)), base.shape)


def gather(x: TensorType, index: TensorType, *, dim: int) -> TensorType:
    is_index = index.dtype == torch.int64 and index.rank == x.rank
    _need(is_index, "gather needs i64 of the operand's rank", x, index)
    fits = all(n <= extent for d, (n, extent) in enumerate(zip(index.shape, x.shape)) if d != dim)
    _need(fits and 0 <= dim < x.rank, f"gather along {dim}: the index is too large", x, index)
    return TensorType(x.dtype, index.shape)


def scatter(
    base: TensorType, index: TensorType, new: TensorType, *, dim: int, mode: str
) -> TensorType:
    gather(base, index, dim=dim)
    _need(new.shape == index.shape, f"scatter of {mode} needs one value an index", base, index, new)
    return TensorType(_same_dtype((base, new)), base.shape)


def wrapped_index(index: TensorType, *, size: int, lowest: int, message: str) -> TensorType:
    _need(index.dtype == torch.int64, "an index is i64", index)
    return index


def matmul(x: TensorType, y: TensorType) -> TensorType:
    """[..., M, K] by [..., K, N]; the leading dimensions are equal."""
    fits = x.rank >= 2 and x.shape[:-2] == y.shape[:-2] and x.shape[-1] == y.shape[-2]
    _need(fits and x.rank == y.rank, "matmul needs [..., M, K] and [..., K, N]", x, y)
    return TensorType(_same_dtype((x, y)), (*x.shape[:-1], y.shape[-1]))


def attention(
    query: TensorType,
    key: TensorType,
    value: TensorType,
    scale: TensorType,
    *rest: TensorType,
    causal: bool,
    biased: bool,
    dropped: bool,
    safe: bool,
    order: Shape,
) -> tuple[TensorType, TensorType]:
    """[*B, L, E], [*B, S, E], [*B, S, V], f64[] give [*B, L, V] in `order`, and [*B, L].

    Args:
        rest: The bias [*B, L, S] where `biased`: bool, or of the query's dtype; then the seed i64[]
            and the probability f64[] of being dropped where `dropped`.
    """
    bias = rest[:biased]
    _need(len(rest) == biased + 2 * dropped, "attention: operands are missing", query, *rest)
    _need(scale == (torch.float64, ()), "the scale of attention is a double", scale)
    _need(query.rank == key.rank == value.rank >= 2, "attention needs matrices", query, key, value)
    (*batch, length, extent), (*_, count, width) = query.shape, value.shape
    fits = key.shape == (*batch, count, extent) and value.shape == (*batch, count, width)
    _need(fits and query.dtype.is_floating_point, "attention over these", query, key, value)
    dtype = _same_dtype((query, key, value))
    for mask in bias:
        fits = mask.shape == (*batch, length, count) and mask.dtype in (torch.bool, dtype)
        _need(fits, "attention: the bias has one number for each score", query, key, mask)
    result = TensorType(dtype, (*batch, length, width))
    return permute(result, dims=order), TensorType(_summed_dtype(dtype), (*batch, length))


def attention_gradient(
    gradient: TensorType,
    query: TensorType,
    key: TensorType,
    value: TensorType,
    result: TensorType,
    logarithms: TensorType,
    scale: TensorType,
    factor: TensorType,
    *rest: TensorType,
    causal: bool,
    biased: bool,
    dropped: bool,
    safe: bool,
    orders: Sequence[Shape],
    wants_bias: bool,
) -> TupleType:
    """Infer the gradients of query, key and value, each in its own order, and of the bias if wanted.

    Args:
        factor: f64[]: the factor of the gradients of query and key; the scale, unless it was
        changed.
    """
    plain = tuple(range(query.rank))
    of = attention(
        query,
        key,
        value,
        scale,
        *rest,
        causal=causal,
        biased=biased,
        dropped=dropped,
        safe=safe,
        order=plain,
    )
    fits = (gradient, result, logarithms, factor) == (of[0], of[0], of[1], scale)
    fits = fits and wants_bias <= biased
    _need(fits, "gradients of attention need its results", gradient, result, logarithms)
    made = tuple(permute(x, dims=o) for x, o in zip((query, key, value), orders, strict=True))
    return made + ((TensorType(query.dtype, rest[0].shape),) if wants_bias else ())


GATES = {"lstm": 4, "gru": 3, "tanh": 1, "relu": 1}  # of a recurrent cell


def recurrence(
    pre: TensorType, weight: TensorType, hidden: TensorType, *rest: TensorType, cell: str, **_: Any
) -> TupleType:
    """[R, gates * H], [gates * H, H], [B, H] give [R, H], [B, H], and what ops.RECURRENCE says."""
    width = hidden.shape[1]
    fits = pre.shape[1] == weight.shape[0] == GATES[cell] * width and weight.shape[1] == width
    _need(fits, f"a recurrence of {cell} over these", pre, weight, hidden)
    dtype = _same_dtype((pre, weight, hidden))
    rows, gates = (TensorType(dtype, (pre.shape[0], n * width)) for n in (1, 4))
    return rows, hidden, *{"lstm": (hidden, gates, rows), "gru": (gates,)}.get(cell, ())


def recurrence_gradient(
    gradient: TensorType,
    last: TensorType,
    weight: TensorType,
    *rest: TensorType,
    cell: str,
    **_: Any,
) -> TupleType:
    """Gradients of `pre` and `hidden`, the hidden states before each step, and what follows."""
    pre = TensorType(_same_dtype((gradient, last)), (gradient.shape[0], weight.shape[0]))
    return pre, last, gradient, *{"lstm": (last,), "gru": (pre,)}.get(cell, ())


def _summed_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that sums are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def window_extent(extent: int, kernel: int, stride: int, low: int, high: int, dilation: int) -> int:
    """Return how many windows fit along one padded dimension."""
    return (extent + low + high - dilation * (kernel - 1) - 1) // stride + 1


def convolution(
    x: TensorType,
    weight: TensorType,
    *,
    stride: Shape,
    padding: Shape,
    dilation: Shape,
    groups: int,
    channels_last: bool = False,
) -> TensorType:
    """[N, C, *spatial] and [O, C / groups, *kernel] give [N, O, *windows].

    Where channels_last: [N, *spatial, C] gives [N, *windows, O].
    """
    channels, extents = x.shape[1], x.shape[2:]
    if channels_last:
        channels, extents = x.shape[-1], x.shape[1:-1]
    fits = x.rank == weight.rank >= 3 and channels == weight.shape[1] * groups
    _need(fits and weight.shape[0] % groups == 0, f"convolution in {groups} groups", x, weight)
    spatial = tuple(
        window_extent(extent, kernel, s, p, p, d)
        for extent, kernel, s, p, d in zip(extents, weight.shape[2:], stride, padding, dilation)
    )
    shape = (*spatial, weight.shape[0]) if channels_last else (weight.shape[0], *spatial)
    return TensorType(_same_dtype((x, weight)), (x.shape[0], *shape))


def convolution_gradient(*operands: TensorType, shape: Shape, **_: Any) -> TensorType:
    return TensorType(_same_dtype(operands), shape)


def max_pool(x: TensorType, *, shape: Shape, **_: Any) -> tuple[TensorType, TensorType]:
    return TensorType(x.dtype, shape), TensorType(torch.int64, shape)


def max_pool_gradient(
    grad: TensorType, indices: TensorType, *, shape: Shape, **_: Any
) -> TensorType:
    _need(grad.shape == indices.shape, "one index for each gradient", grad, indices)
    return TensorType(grad.dtype, shape)


def shaped(x: TensorType, *, shape: Shape, **_: Any) -> TensorType:
    return TensorType(x.dtype, shape)


def random_bits(seed: TensorType, *, shape: Shape, bits: int, stream: int) -> TensorType:
    _need(seed == (torch.int64, ()) and 1 <= bits <= 63, f"random {bits} bits", seed)
    return TensorType(torch.int64, shape)


def extern(*operands: TensorType, results: TupleType, **_: Any) -> TupleType:
    return results


def collective_start(*operands: TensorType, collective: Any, count: int) -> TensorType:
    fits = count <= len(operands) <= count + 1
    _need(fits, f"{collective.kind} of {count} operands and a token", *operands)
    return TensorType(torch.int64, ())


def collective_wait(token: TensorType, *, results: TupleType) -> TupleType:
    _need(token == (torch.int64, ()), "a token is one i64", token)
    return results


def element(*operands: TupleType, index: int) -> TensorType:
    (tuple_type,) = operands
    return tuple_type[index]
