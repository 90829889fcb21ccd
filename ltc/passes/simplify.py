"""Identities that hold for every input, NaN and infinity included.

Equal expressions are one node already, and nodes that no output needs are not reached: what is left
are movements that cancel, casts that change nothing and multiplications by one. A barrier is an
operation like any other here, so nothing is ever moved across it.
"""

from __future__ import annotations

import torch

from ltc.ir import ops
from ltc.ir.graph import Graph
from ltc.ir.node import Node, constant, constant_value, make
from ltc.passes.rewrite import rewrite
from ltc.support.sizes.extent import Extent


def _is_constant(n: Node, value: float) -> bool:
    """Return True if `n` is `value`, its sign counted: 0.0 is not -0.0."""
    while n.op is ops.EXPAND:
        n = n.inputs[0]
    return n.op is ops.CONSTANT and repr(constant_value(n)) in (repr(value), repr(float(value)))


def times_one(n: Node) -> Node | None:
    """x * 1 -> x"""
    x, y = n.inputs
    if _is_constant(y, 1) and x.type == n.type:
        return x
    if _is_constant(x, 1) and y.type == n.type:
        return y


def divided_by_one(n: Node) -> Node | None:
    """x / 1 -> x"""
    x, y = n.inputs
    if _is_constant(y, 1) and x.type == n.type:
        return x


def minus_zero(n: Node) -> Node | None:
    """x - 0 -> x, which keeps the sign of a zero where x + 0 does not"""
    x, y = n.inputs
    if _is_constant(y, 0) and x.type == n.type:
        return x


def plus_integer_zero(n: Node) -> Node | None:
    """x + 0 -> x for integers"""
    x, y = n.inputs
    if n.dtype.is_floating_point or n.dtype.is_complex:
        return None
    if _is_constant(y, 0) and x.type == n.type:
        return x
    if _is_constant(x, 0) and y.type == n.type:
        return y


def neg_of_neg(n: Node) -> Node | None:
    """-(-x) -> x"""
    (x,) = n.inputs
    if x.op is ops.NEG:
        return x.inputs[0]


def not_of_not(n: Node) -> Node | None:
    """~~x -> x"""
    (x,) = n.inputs
    if x.op is ops.NOT:
        return x.inputs[0]


def where_of_same(n: Node) -> Node | None:
    """where(c, x, x) -> x"""
    _, x, y = n.inputs
    if x is y and x.type == n.type:
        return x


def cast_to_same(n: Node) -> Node | None:
    """cast(x, its dtype) -> x"""
    (x,) = n.inputs
    if x.dtype == n.dtype:
        return x


# (from, to): every value of `from` is a value of `to`, so going there and on is going on.
_WIDENING = frozenset(
    {
        (torch.float32, torch.float64),
        (torch.float16, torch.float32),
        (torch.float16, torch.float64),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.float64),
        (torch.int32, torch.int64),
        (torch.int16, torch.int64),
        (torch.int8, torch.int64),
        (torch.uint8, torch.int64),
        (torch.bool, torch.int64),
        (torch.bool, torch.float32),
        (torch.bool, torch.float64),
        (torch.int32, torch.float64),
    }
)


def cast_of_widening_cast(n: Node) -> Node | None:
    """cast(cast(x, wider), dtype) -> cast(x, dtype)"""
    (inner,) = n.inputs
    if inner.op is ops.CAST and (inner.inputs[0].dtype, inner.dtype) in _WIDENING:
        return make(ops.CAST, inner.inputs[0], dtype=n.dtype)


def cast_of_constant(n: Node) -> Node | None:
    """cast(constant, dtype) -> constant, where the value is a small whole number"""
    (x,) = n.inputs
    if x.op is not ops.CONSTANT or n.dtype.is_complex:
        return None
    value = constant_value(x)
    if isinstance(value, (complex, Extent)):
        return None
    # Small whole numbers are exact in every dtype but unsigned ones, and bool; -0.0 is not whole.
    if repr(float(value)) != "-0.0" and value in range(128):
        return constant(value, n.dtype)


def permute_of_permute(n: Node) -> Node | None:
    """permute(permute(x, a), b) -> permute(x, a[b])"""
    (inner,) = n.inputs
    if inner.op is ops.PERMUTE:
        a, b = inner.attr("dims"), n.attr("dims")
        return make(ops.PERMUTE, inner.inputs[0], dims=tuple(a[d] for d in b))


def permute_of_nothing(n: Node) -> Node | None:
    """permute(x, 0, 1, ...) -> x"""
    if n.attr("dims") == tuple(range(len(n.shape))):
        return n.inputs[0]


def permute_of_ones(n: Node) -> Node | None:
    """permute(x, dims) -> reshape(x), where only dimensions of one element change places"""
    (x,) = n.inputs
    moved = [d for d in n.attr("dims") if x.shape[d] != 1]
    if moved == sorted(moved):
        return make(ops.RESHAPE, x, shape=n.shape)


def result_of_nothing(n: Node) -> Node | None:
    """an elementwise operation without elements -> 0, of which there is none"""
    if n.size == 0:
        return make(ops.EXPAND, constant(0, n.dtype), shape=n.shape)


def sum_of_nothing(n: Node) -> Node | None:
    """sum of no elements -> 0"""
    if n.inputs[0].size == 0:
        return make(ops.EXPAND, constant(0, n.dtype), shape=n.shape)


def reduction_of_ones(n: Node) -> Node | None:
    """sum(x, dims) -> sum(x, those of more than one element), reshaped; likewise prod, max, ..."""
    (x,) = n.inputs
    dims = tuple(d for d in n.attr("dims") if x.shape[d] != 1)
    if dims != n.attr("dims"):
        return make(ops.RESHAPE, make(n.op, x, dims=dims) if dims else x, shape=n.shape)


def reshape_of_reshape(n: Node) -> Node | None:
    """reshape(reshape(x, a), b) -> reshape(x, b)"""
    (inner,) = n.inputs
    if inner.op is ops.RESHAPE:
        return make(ops.RESHAPE, inner.inputs[0], shape=n.attr("shape"))


def reshape_to_same_shape(n: Node) -> Node | None:
    """reshape(x, its shape) -> x"""
    if n.type == n.inputs[0].type:
        return n.inputs[0]


def expand_of_expand(n: Node) -> Node | None:
    """expand(expand(x, a), b) -> expand(x, b)"""
    (inner,) = n.inputs
    if inner.op is ops.EXPAND:
        return make(ops.EXPAND, inner.inputs[0], shape=n.attr("shape"))


def expand_to_same_shape(n: Node) -> Node | None:
    """expand(x, its shape) -> x"""
    if n.type == n.inputs[0].type:
        return n.inputs[0]


def slice_of_everything(n: Node) -> Node | None:
    """x[0:end] -> x"""
    if n.type == n.inputs[0].type and not any(n.attr("starts")):
        return n.inputs[0]


def slice_of_slice(n: Node) -> Node | None:
    """x[a::s][b::t] -> x[a + b * s :: s * t]"""
    (inner,) = n.inputs
    if inner.op is not ops.SLICE:
        return None
    starts, limits, steps = [], [], []
    for a, s, b, t, extent in zip(
        inner.attr("starts"), inner.attr("steps"), n.attr("starts"), n.attr("steps"), n.shape
    ):
        start = a + b * s if extent else 0
        starts.append(start)
        steps.append(s * t)
        limits.append(start + (extent - 1) * s * t + 1 if extent else start)
    return make(
        ops.SLICE, inner.inputs[0], starts=tuple(starts), limits=tuple(limits), steps=tuple(steps)
    )


def flip_of_flip(n: Node) -> Node | None:
    """flip(flip(x, a), a) -> x"""
    (inner,) = n.inputs
    if inner.op is ops.FLIP and inner.attr("dims") == n.attr("dims"):
        return inner.inputs[0]


def insert_of_everything(n: Node) -> Node | None:
    """base with all of it replaced by new -> new"""
    base, new = n.inputs
    if new.shape == base.shape and not any(n.attr("starts")):
        return new


def insert_of_nothing(n: Node) -> Node | None:
    """base with none of it replaced -> base"""
    base, new = n.inputs
    if new.size == 0:
        return base


def insert_over_insert(n: Node) -> Node | None:
    """an inserted value, replaced by new -> new inserted in its place"""
    base, new = n.inputs
    if (
        base.op is ops.INSERT
        and base.attr("starts") == n.attr("starts")
        and base.attr("steps") == n.attr("steps")
        and base.inputs[1].type == new.type
    ):
        return make(ops.INSERT, base.inputs[0], new, starts=n.attr("starts"), steps=n.attr("steps"))


def slice_of_insert(n: Node) -> Node | None:
    """the slice that was just inserted -> what was inserted there"""
    (inner,) = n.inputs
    if (
        inner.op is ops.INSERT
        and inner.attr("starts") == n.attr("starts")
        and inner.attr("steps") == n.attr("steps")
        and inner.inputs[1].type == n.type
    ):
        return inner.inputs[1]


RULES = {
    ops.MUL: (times_one,),
    ops.DIV: (divided_by_one,),
    ops.SUB: (minus_zero,),
    ops.ADD: (plus_integer_zero,),
    ops.NEG: (neg_of_neg,),
    ops.NOT: (not_of_not,),
    ops.WHERE: (where_of_same,),
    ops.CAST: (cast_to_same, cast_of_widening_cast, cast_of_constant),
    ops.PERMUTE: (permute_of_permute, permute_of_nothing, permute_of_ones),
    **dict.fromkeys((ops.PROD, ops.MAX, ops.MIN, ops.ANY, ops.ALL_TRUE), (reduction_of_ones,)),
    ops.SUM: (sum_of_nothing, reduction_of_ones),
    ops.RESHAPE: (reshape_of_reshape, reshape_to_same_shape),
    ops.EXPAND: (expand_of_expand, expand_to_same_shape),
    ops.SLICE: (slice_of_everything, slice_of_slice, slice_of_insert),
    ops.FLIP: (flip_of_flip,),
    ops.INSERT: (insert_of_everything, insert_of_nothing, insert_over_insert),
}


RULES |= {
    op: (result_of_nothing, *RULES.get(op, ()))
    for op in ops.ALL.values()
    if op.kind == "elementwise"
}


def simplify(graph: Graph) -> Graph:
    return rewrite(graph, RULES)
