"""Reductions of many values to one: an accumulator's start, its steps, and its end.

Accumulators of f16 and bf16 are float and round once, at the end.
"""

from __future__ import annotations

import math

import torch

from ltc.ir import ops
from ltc.ir.loop_nest import Value
from ltc.ir.node import Node
from ltc.ir.ops import Op
from ltc.llvm.emit.builder import Builder
from ltc.llvm.emit.dtype import FORMS, Form
from ltc.llvm.emit.elementwise import ROWS, rounded

COMBINE = {
    ops.SUM: ROWS[ops.ADD],
    ops.PROD: ROWS[ops.MUL],
    ops.MAX: ROWS[ops.MAXIMUM],
    ops.MIN: ROWS[ops.MINIMUM],
    ops.ANY: ROWS[ops.OR],
    ops.ALL_TRUE: ROWS[ops.AND],
}


def can_reduce(node: Node) -> bool:
    """Return True if a kernel can compute this reduction."""
    dtype = node.dtype
    if node.op not in COMBINE or dtype not in FORMS or not node.attr("dims"):
        return False
    return dtype != torch.bool or node.op in (ops.ANY, ops.ALL_TRUE, ops.MAX, ops.MIN)


def op_of(value: Value) -> Op:
    """Return the operation by which a reduction combines its operands."""
    assert value.op is not None, value.kind
    return value.op


def start(op: Op, form: Form) -> float | int | bool:
    """Return the neutral value of the operation."""
    if op is ops.SUM:
        return -0.0 if form.is_float else 0
    if op is ops.PROD:
        return 1
    if op is ops.ANY or op is ops.ALL_TRUE:
        return op is ops.ALL_TRUE
    if form.kind == "bool":
        return op is ops.MIN
    if form.is_float:
        return -math.inf if op is ops.MAX else math.inf
    low, high = (0, 255) if form.kind == "unsigned" else (-(1 << (8 * form.bytes - 1)), 0)
    if form.kind == "signed":
        high = -low - 1
    return low if op is ops.MAX else high


def combine(b: Builder, op: Op, form: Form, x: str, y: str) -> str:
    return COMBINE[op](b, form, x, y)


def across_lanes(b: Builder, op: Op, form: Form, vector: str) -> str:
    """The scalar that the lanes of a vector come to: halves are combined until one is left."""
    width, scalar = b.width, form.computed
    while width > 1:
        half = width // 2
        parts = [_lanes(b, scalar, vector, width, first, half) for first in (0, half)]
        with b.lanes(half):
            vector = combine(b, op, form, *parts)
        width = half
    return vector


def _lanes(b: Builder, scalar: str, vector: str, width: int, first: int, count: int) -> str:
    type = f"<{width} x {scalar}>"
    if count == 1:
        return b.value(f"extractelement {type} {vector}, i64 {first}")
    chosen = ", ".join(f"i32 {first + lane}" for lane in range(count))
    return b.value(f"shufflevector {type} {vector}, {type} poison, <{count} x i32> <{chosen}>")


def finished(b: Builder, form: Form, x: str) -> str:
    return rounded(b, form, x)
