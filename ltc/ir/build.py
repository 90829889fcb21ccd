"""The words that a tracing rule is written in: one function for each way to make a node.

Numbers are welcome wherever a tensor of the same formula fixes their dtype. Dimensions may be
negative. Nothing here promotes dtypes: see aten/promote.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ltc.ir import ops
from ltc.ir.node import Node, constant, like, make, paired
from ltc.ir.ops import Op

Shape = Sequence[int]


def _unary(op: Op) -> Callable[[Node], Node]:
    def build(x: Node) -> Node:
        return make(op, x)

    return build


def _binary(op: Op) -> Callable[[Any, Any], Node]:
    def build(x: Any, y: Any) -> Node:
        return make(op, *paired(x, y))

    return build


exp, exp2, expm1 = _unary(ops.EXP), _unary(ops.EXP2), _unary(ops.EXPM1)
log, log1p, log2, log10 = map(_unary, (ops.LOG, ops.LOG1P, ops.LOG2, ops.LOG10))
sqrt, rsqrt, absolute, sign = map(_unary, (ops.SQRT, ops.RSQRT, ops.ABS, ops.SIGN))
sin, cos, tan = _unary(ops.SIN), _unary(ops.COS), _unary(ops.TAN)
asin, acos, atan = _unary(ops.ASIN), _unary(ops.ACOS), _unary(ops.ATAN)
sinh, cosh, tanh = _unary(ops.SINH), _unary(ops.COSH), _unary(ops.TANH)
asinh, acosh, atanh = _unary(ops.ASINH), _unary(ops.ACOSH), _unary(ops.ATANH)
erf, erfc, erfinv = _unary(ops.ERF), _unary(ops.ERFC), _unary(ops.ERFINV)
lgamma, digamma = _unary(ops.LGAMMA), _unary(ops.DIGAMMA)
floor, ceil, trunc = _unary(ops.FLOOR), _unary(ops.CEIL), _unary(ops.TRUNC)
round_half_even = _unary(ops.ROUND)
floor_divide, trunc_divide = _binary(ops.FLOOR_DIVIDE), _binary(ops.TRUNC_DIVIDE)
remainder, fmod, power = _binary(ops.REMAINDER), _binary(ops.FMOD), _binary(ops.POW)
atan2, hypot, copysign = _binary(ops.ATAN2), _binary(ops.HYPOT), _binary(ops.COPYSIGN)
nextafter = _binary(ops.NEXTAFTER)
maximum, minimum = _binary(ops.MAXIMUM), _binary(ops.MINIMUM)
shift_left, shift_right = _binary(ops.SHIFT_LEFT), _binary(ops.SHIFT_RIGHT)
eq, ne = _binary(ops.EQ), _binary(ops.NE)
lt, le, gt, ge = _binary(ops.LT), _binary(ops.LE), _binary(ops.GT), _binary(ops.GE)


def where(condition: Node, x: Any, y: Any) -> Node:
    assert isinstance(x, Node) or isinstance(y, Node), "two numbers have no dtype: use `full`"
    return make(ops.WHERE, condition, *paired(x, y))


def cast(x: Node, dtype: torch.dtype) -> Node:
    return x if x.dtype == dtype else make(ops.CAST, x, dtype=dtype)


def check(x: Node, holds: Node, message: str) -> Node:
    """x; where any of `holds` is False, the program fails with a RuntimeError of that message.

    Readers of the result keep the check alive: nothing else does.

    Args:
        holds: A mask of x's shape, or one that can be expanded to it.
        message: {} in it stands for the first wrong element, of integers.
    """
    assert holds.dtype == torch.bool
    return make(ops.CHECK, x, expand(holds, x.shape), message=message)


def is_nan(x: Node) -> Node:
    return make(ops.NE, x, x)


# --- shapes ------------------------------------------------------------------------------------


def dim_of(x: Node, dim: int) -> int:
    """`dim` counted from the front; a 0-dim tensor has dimension 0 for this purpose."""
    return dim % max(len(x.shape), 1)


def dims_of(x: Node, dims: int | Iterable[int] | None) -> tuple[int, ...]:
    """Increasing dimensions; all of them for None or an empty list."""
    if isinstance(dims, int):
        dims = (dims,)
    rank = len(x.shape)
    if dims is None or not tuple(dims):
        return tuple(range(rank))
    return tuple(sorted({dim_of(x, d) for d in dims})) if rank else ()


def permute(x: Node, dims: Iterable[int]) -> Node:
    dims = tuple(dim_of(x, d) for d in dims)
    return x if dims == tuple(range(len(dims))) else make(ops.PERMUTE, x, dims=dims)


def transpose(x: Node, a: int, b: int) -> Node:
    if not x.shape:
        return x
    dims = list(range(len(x.shape)))
    a, b = dim_of(x, a), dim_of(x, b)
    dims[a], dims[b] = dims[b], dims[a]
    return permute(x, dims)


def reshape(x: Node, shape: Shape) -> Node:
    """One extent may be -1."""
    shape = tuple(shape)
    if -1 in shape:
        known = math.prod(extent for extent in shape if extent != -1)
        missing = x.size // known if known else 0
        shape = tuple(missing if extent == -1 else extent for extent in shape)
    return x if shape == x.shape else make(ops.RESHAPE, x, shape=shape)


def expand(x: Node, shape: Shape) -> Node:
    """An extent of -1 keeps the operand's."""
    offset = len(shape) - len(x.shape)
    shape = tuple(x.shape[i - offset] if n == -1 else n for i, n in enumerate(shape))
    return x if shape == x.shape else make(ops.EXPAND, x, shape=shape)


def unsqueeze(x: Node, dim: int) -> Node:
    dim %= len(x.shape) + 1
    return reshape(x, (*x.shape[:dim], 1, *x.shape[dim:]))


def squeeze(x: Node, dims: Iterable[int]) -> Node:
    """Without those of `dims` that have one element."""
    gone = {dim_of(x, d) for d in dims}
    return reshape(x, tuple(n for i, n in enumerate(x.shape) if i not in gone or n != 1))


def slice_dim(x: Node, dim: int, start: int, limit: int, step: int = 1) -> Node:
    """Elements start, start + step, ... below `limit` of one dimension; both inside it."""
    dim = dim_of(x, dim)
    if (start, limit, step) == (0, x.shape[dim], 1):
        return x
    starts, limits, steps = [0] * len(x.shape), list(x.shape), [1] * len(x.shape)
    starts[dim], limits[dim], steps[dim] = start, max(start, limit), step
    return make(ops.SLICE, x, starts=tuple(starts), limits=tuple(limits), steps=tuple(steps))


def select(x: Node, dim: int, index: int) -> Node:
    dim = dim_of(x, dim)
    index %= x.shape[dim]
    return reshape(slice_dim(x, dim, index, index + 1), (*x.shape[:dim], *x.shape[dim + 1 :]))


def insert(base: Node, new: Node, dim: int, start: int, step: int = 1) -> Node:
    """`base` with the slice of `dim` that starts at `start` replaced by `new`."""
    dim = dim_of(base, dim)
    starts, steps = [0] * len(base.shape), [1] * len(base.shape)
    starts[dim], steps[dim] = start, step
    return make(ops.INSERT, base, new, starts=tuple(starts), steps=tuple(steps))


def concat(parts: Sequence[Node], dim: int) -> Node:
    return parts[0] if len(parts) == 1 else make(ops.CONCAT, *parts, dim=dim_of(parts[0], dim))


def flip(x: Node, dims: Iterable[int]) -> Node:
    dims = tuple(sorted({dim_of(x, d) for d in dims})) if x.shape else ()
    return make(ops.FLIP, x, dims=dims) if dims else x


def pad(x: Node, low: Shape, high: Shape, value: Any = 0) -> Node:
    """A negative amount cuts elements off."""
    starts = tuple(max(-a, 0) for a in low)
    limits = tuple(n - max(-b, 0) for n, b in zip(x.shape, high))
    if any(starts) or limits != x.shape:
        x = make(ops.SLICE, x, starts=starts, limits=limits, steps=(1,) * len(starts))
    low, high = tuple(max(a, 0) for a in low), tuple(max(b, 0) for b in high)
    return make(ops.PAD, x, like(value, x), low=low, high=high) if any(low + high) else x


def full(shape: Shape, value: Any, dtype: torch.dtype) -> Node:
    """`value`, a number or a 0-dim node, everywhere."""
    node = cast(value, dtype) if isinstance(value, Node) else constant(value, dtype)
    return expand(node, tuple(shape))


def full_like(x: Node, value: Any) -> Node:
    return full(x.shape, value, x.dtype)


def iota(size: int, dtype: torch.dtype = torch.int64) -> Node:
    return cast(make(ops.IOTA, size=size), dtype)


def iota_along(shape: Shape, dim: int) -> Node:
    """Each element's position along `dim`, in a shape that broadcasts to `shape`."""
    dim %= len(shape)
    return reshape(iota(shape[dim]), [shape[dim] if d == dim else 1 for d in range(len(shape))])


# --- reductions --------------------------------------------------------------------------------


def reduce(op: Op, x: Node, dims: int | Iterable[int] | None = None, keepdim: bool = False) -> Node:
    """Over `dims`, or over everything for None or an empty list."""
    dims = dims_of(x, dims)
    result = make(op, x, dims=dims) if dims else x
    if keepdim:
        result = reshape(result, [1 if d in dims else n for d, n in enumerate(x.shape)])
    return result


def sum_of(x: Node, dims: int | Iterable[int] | None = None, keepdim: bool = False) -> Node:
    return reduce(ops.SUM, x, dims, keepdim)


def max_of(x: Node, dims: int | Iterable[int] | None = None, keepdim: bool = False) -> Node:
    return reduce(ops.MAX, x, dims, keepdim)


def count_of(x: Node, dims: int | Iterable[int] | None = None) -> int:
    """Return how many elements each result of a reduction over `dims` reads."""
    return math.prod(x.shape[d] for d in dims_of(x, dims))


def mean_of(x: Node, dims: int | Iterable[int] | None = None, keepdim: bool = False) -> Node:
    return sum_of(x, dims, keepdim) / count_of(x, dims)


def sum_to(x: Node, shape: Shape) -> Node:
    """Undoes an expand: sums what was repeated."""
    lead = len(x.shape) - len(shape)
    dims = [d for d, n in enumerate(x.shape) if d < lead or (shape[d - lead] == 1 and n != 1)]
    return reshape(sum_of(x, dims), shape) if dims else x


# --- products, indices, tuples -------------------------------------------------------------------


def matmul(x: Node, y: Node) -> Node:
    return make(ops.MATMUL, x, y)


def take(x: Node, index: Node, dim: int) -> Node:
    return make(ops.TAKE, x, index, dim=dim_of(x, dim))


def gather(x: Node, index: Node, dim: int) -> Node:
    return make(ops.GATHER, x, index, dim=dim_of(x, dim))


def get(node: Node, index: int) -> Node:
    return make(ops.GET, node, index=index)


def random_bits(seed: Node, shape: Shape, bits: int, stream: int = 0) -> Node:
    return make(ops.RANDOM_BITS, seed, shape=tuple(shape), bits=bits, stream=stream)
