"""Meetings: exchanges in which each member lays operands where the others see them.

Only a backend that can do so makes them, of sums: see passes/one_shot_all_reduce.py.
"""

from __future__ import annotations

from ltc.ir import ops
from ltc.ir.node import Node

MEETING = "meeting"  # the kind of such a collective
HEAD_BYTES = 64  # before the operands, with the word of the meeting: a cache line of its own


def is_meeting(node: Node) -> bool:
    """Whether a node is the start of a meeting, or the wait for one."""
    start = node.inputs[0] if node.op is ops.COLLECTIVE_WAIT else node
    return start.op is ops.COLLECTIVE_START and start.attr("collective").kind == MEETING


def sent_with(start: Node) -> tuple[Node, ...]:
    """What the start of a collective sends: its inputs but for the token."""
    return start.inputs[len(start.inputs) - start.attr("count") :]
