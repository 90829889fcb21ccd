"""A concatenation of many parts as one of concatenations of some, each of which is in memory.

A kernel asks of every element which part it is of, one part after the other: it is as long as there
are parts, and takes as much longer.
"""

from __future__ import annotations

from ltc.ir import ops
from ltc.ir.graph import Graph
from ltc.ir.node import Node, make
from ltc.passes.rewrite import rewrite

MOST_PARTS = 32  # of one kernel: from here on a copy of its own takes less time


def split_concats(graph: Graph) -> Graph:
    """The graph with no concatenation of more than MOST_PARTS."""
    return rewrite(graph, {ops.CONCAT: (concat_in_groups,)})


def concat_in_groups(node: Node) -> Node | None:
    """concat(a, b, c, d, ...) -> concat(concat(a, b), concat(c, d), ...)"""
    parts, dim = node.inputs, node.attr("dim")
    if len(parts) <= MOST_PARTS:
        return None
    groups = -(-len(parts) // MOST_PARTS)
    each = -(-len(parts) // groups)  # all of one length but the last: their kernels are alike
    return make(
        ops.CONCAT,
        *[_joined(parts[first : first + each], dim) for first in range(0, len(parts), each)],
        dim=dim,
    )


def _joined(parts: tuple[Node, ...], dim: int) -> Node:
    whole = parts[0] if len(parts) == 1 else make(ops.CONCAT, *parts, dim=dim)
    return make(ops.BARRIER, whole)
