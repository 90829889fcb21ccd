"""Rules of comparisons, of logic and bits, and of choices by a mask."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ltc.aten.promote import promote_exact, to_dtype
from ltc.aten.registry import traces
from ltc.ir import build, ops
from ltc.ir.build import where
from ltc.ir.node import Node, Operand, make


def _on_promoted(function: Callable[[Node, Node], Node]) -> Callable[[Any, Any], Node]:
    def rule(x: Any, y: Any) -> Node:
        return function(*promote_exact(x, y))

    return rule


for _name, _function in {
    "eq": build.eq,
    "ne": build.ne,
    "lt": build.lt,
    "le": build.le,
    "gt": build.gt,
    "ge": build.ge,
}.items():
    traces(f"aten::{_name}.Tensor", f"aten::{_name}.Scalar")(_on_promoted(_function))


def _as_bool(x: Any) -> Node:
    return build.cast(x, torch.bool)


@traces("aten::logical_not")
def logical_not(x: Node) -> Node:
    return ~_as_bool(x)


@traces("aten::logical_and")
def logical_and(x: Node, y: Node) -> Node:
    return _as_bool(x) & _as_bool(y)


@traces("aten::logical_or")
def logical_or(x: Node, y: Node) -> Node:
    return _as_bool(x) | _as_bool(y)


@traces("aten::logical_xor")
def logical_xor(x: Node, y: Node) -> Node:
    return _as_bool(x) ^ _as_bool(y)


@traces("aten::bitwise_not")
def bitwise_not(x: Node) -> Node:
    return ~x


for _name, _op in {
    "bitwise_and": ops.AND,
    "bitwise_or": ops.OR,
    "bitwise_xor": ops.XOR,
    "bitwise_left_shift": ops.SHIFT_LEFT,
    "bitwise_right_shift": ops.SHIFT_RIGHT,
}.items():
    _scalar_form = "Tensor_Scalar" if "shift" in _name else "Scalar"
    for _variant in ("Tensor", _scalar_form, "Scalar_Tensor"):
        traces(f"aten::{_name}.{_variant}")(_on_promoted(partial(make, _op)))

for _name, _op in {"and": ops.AND, "or": ops.OR, "xor": ops.XOR}.items():
    _rule = _on_promoted(partial(make, _op))
    traces(f"aten::__{_name}__.Tensor", f"aten::__{_name}__.Scalar")(_rule)

for _name, _op in {"lshift": ops.SHIFT_LEFT, "rshift": ops.SHIFT_RIGHT}.items():
    _rule = _on_promoted(partial(make, _op))
    traces(f"aten::__{_name}__.Tensor", f"aten::__{_name}__.Scalar")(_rule)


@traces(
    "aten::where.self", "aten::where.ScalarSelf", "aten::where.ScalarOther", "aten::where.Scalar"
)
def where_rule(condition: Node, x: Operand, y: Operand) -> Node:
    x, y = promote_exact(x, y)
    return where(_as_bool(condition), x, y)


# Known values tell a mask of attention, and its gradient, from other fills.
@traces("aten::masked_fill.Scalar", "aten::masked_fill.Tensor", static={"value": (-math.inf, 0)})
def masked_fill(x: Node, mask: Node, value: Operand) -> Node:
    value = to_dtype(value, x.dtype)
    return where(_as_bool(mask), value, x)
