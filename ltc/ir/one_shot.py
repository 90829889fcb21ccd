"""One-shot sums: exchanges in which each member writes operands where the others read them.

Only a backend that can do so makes them: see passes/one_shot_all_reduce.py.
"""

from __future__ import annotations

from ltc.ir import ops
from ltc.ir.node import Node

ONE_SHOT = "one_shot_sum"  # the kind of such a collective
HEAD_BYTES = 64  # before the operands, with the tag of the sum: a cache line of its own


def is_one_shot(node: Node) -> bool:
    """Return True if a node is the start of a one-shot sum, or the wait for one."""
    start = node.inputs[0] if node.op is ops.COLLECTIVE_WAIT else node
    return start.op is ops.COLLECTIVE_START and start.attr("collective").kind == ONE_SHOT


def sent_with(start: Node) -> tuple[Node, ...]:
    """Return the operands that a collective's start sends: its inputs but for the token."""
    return start.inputs[len(start.inputs) - start.attr("count") :]
