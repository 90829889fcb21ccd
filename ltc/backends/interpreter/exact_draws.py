"""Whether random numbers have the same bits whoever computes them.

Every backend draws the same bits.  Of them integers, uniform numbers and masks are made by what
rounds nothing, or once; normal numbers by logarithms and cosines, which differ in the last place.
"""

from __future__ import annotations

from ltc.ir import ops
from ltc.ir.graph import Graph, schedule
from ltc.ir.node import Node

_ROUNDS_ONCE = frozenset({ops.MUL})
_EXACT = frozenset(
    {
        ops.INPUT, ops.SCALAR, ops.CONSTANT, ops.IOTA, ops.RANDOM_BITS, ops.NEG, ops.ABS, ops.FLOOR,
        ops.CEIL, ops.TRUNC, ops.NOT, ops.AND, ops.OR, ops.XOR, ops.SHIFT_LEFT, ops.SHIFT_RIGHT,
        ops.EQ, ops.NE, ops.LT, ops.LE, ops.GT, ops.GE, ops.WHERE, ops.CAST, ops.BITCAST,
        ops.MAXIMUM, ops.MINIMUM, ops.MAX, ops.MIN, ops.ANY, ops.ALL_TRUE, ops.PERMUTE, ops.SLICE,
        ops.EXPAND, ops.RESHAPE, ops.FLIP, ops.PAD, ops.CONCAT, ops.INSERT, ops.TAKE, ops.GATHER,
        ops.BARRIER, ops.EXTERN, ops.GET,
    }
)  # fmt: skip


def draws_the_same_bits(graph: Graph) -> bool:
    """Whether the reference gives the very numbers that a compiled program does.

    Sums and products of integers are exact as well; a product of a product is not looked at, so one
    rounding of floats after another is taken for inexact only where something is added.
    """
    return all(map(_is_exact, schedule(*graph.outputs)))


def _is_exact(node: Node) -> bool:
    return node.op in _EXACT or node.op in _ROUNDS_ONCE or not _is_float(node)


def _is_float(node: Node) -> bool:
    """Whether it makes floats; of one that makes several values, nobody asks which."""
    several = isinstance(node.type, tuple)
    return several or bool(node.dtype.is_floating_point or node.dtype.is_complex)
