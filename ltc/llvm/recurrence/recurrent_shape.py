"""The facts that a recurrence's text depends on; counts of steps and sequences are arguments."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ltc.ir.infer import GATES
from ltc.ir.node import Node


@dataclass(frozen=True)
class Recurrence:
    """One direction of a layer.

    Attributes:
        cell: "lstm", "gru", "tanh" or "relu".
        width: Numbers of a hidden state.
        reverse: True if the last step comes first.
        packed: True if an operand says how many sequences each step has.
    """

    cell: str
    dtype: torch.dtype
    width: int
    reverse: bool
    packed: bool

    @property
    def gates(self) -> int:
        return GATES[self.cell]

    @property
    def columns(self) -> int:
        """Numbers of a row of what the gates get from the input."""
        return self.gates * self.width


def recurrence_of(node: Node) -> Recurrence:
    """`node`: a recurrence, or its gradient."""
    return Recurrence(
        node.attr("cell"), node.inputs[0].dtype, node.inputs[0].shape[1] // _first_gates(node),
        node.attr("reverse"), node.attr("packed"),
    )  # fmt: skip


def _first_gates(node: Node) -> int:
    """Return how often the first operand has the width of a state."""
    return GATES[node.attr("cell")] if node.op.name == "recurrence" else 1
