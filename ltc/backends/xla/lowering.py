"""The table: every primitive but other kernels, exchanges, and what is written in smaller ones.

Attention and random bits are what passes/smaller_primitives.py makes of them.
"""

from __future__ import annotations

from ltc.backends.interface import NodeLowering
from ltc.backends.xla import (
    elementwise_rows,
    exchange_rows,
    movement_rows,
    product_rows,
    recurrent_rows,
    reduction_rows,
    window_rows,
)  # fmt: skip
from ltc.backends.xla.elementwise_rows import Row
from ltc.backends.xla.numbers import DTYPES
from ltc.ir import ops
from ltc.ir.node import Node
from ltc.ir.ops import Op
from ltc.ir.tensor_type import TensorType

_MODULES = (
    elementwise_rows, reduction_rows, movement_rows, product_rows, window_rows, recurrent_rows,
)  # fmt: skip
TABLE: dict[Op, Row] = {op: row for module in _MODULES for op, row in module.ROWS.items()}

# What is defined on complex numbers: rules give nothing else of them.
_COMPLEX_KINDS = frozenset({"leaf", "view", "pad", "concat", "insert", "gather", "scatter"})
_COMPLEX = frozenset({ops.CAST, ops.WHERE, ops.GET, ops.BARRIER})


def accepts(node: Node) -> bool:
    """True if the rows take the dtypes of a node and its operands."""
    found = [t for n in (node, *node.inputs) for t in _types(n)]
    if any(t.dtype not in DTYPES for t in found):
        return False
    if any(t.dtype.is_complex for t in found):
        return node.op.kind in _COMPLEX_KINDS or node.op in _COMPLEX
    return True


def _types(node: Node) -> tuple[TensorType, ...]:
    return (node.type,) if isinstance(node.type, TensorType) else node.type


LOWERING = NodeLowering(TABLE, accepts)
TOGETHER = NodeLowering(TABLE | exchange_rows.ROWS, accepts)  # of a program of all replicas
