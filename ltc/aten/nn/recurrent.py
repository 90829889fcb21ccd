"""Rules of ltc::recurrence and of its gradient: the steps of one direction of a recurrent layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch

from ltc.aten.registry import traces
from ltc.ir import build, ops
from ltc.ir.node import Node, make

RECURRENCE, GRADIENT = "ltc::recurrence", "ltc::recurrence_gradient"
Sizes = Sequence[int]


def _table(sizes: Sizes) -> list[Node]:
    """How many sequences each step has, as an operand; none where all steps have all."""
    runs = [(size, len(list(equal))) for size, equal in groupby(sizes)]
    parts = [build.full((count,), size, torch.int64) for size, count in runs]
    return [build.concat(parts, 0)] if parts else []


def _made(
    op: ops.Op,
    rows: Node,
    batch: int,
    operands: Sequence[Node],
    cell: str,
    sizes: Sizes,
    back: bool,
) -> tuple[Node, ...]:
    table = _table(sizes)
    node = make(
        op, *operands, *table, cell=cell, steps=len(sizes) or rows.shape[0] // batch,
        reverse=back, packed=bool(table),
    )  # fmt: skip
    assert isinstance(node.type, tuple)
    return tuple(build.get(node, k) for k in range(len(node.type)))


@traces(f"{RECURRENCE}.lstm")
def recurrence_of_lstm(
    pre: Node, weight: Node, hidden: Node, cell: Node, sizes: Sizes, reverse: bool
) -> tuple[Node, ...]:
    """Outputs, last hidden state, last cell state, gates, cell states."""
    operands = (pre, weight, hidden, cell)
    return _made(ops.RECURRENCE, pre, hidden.shape[0], operands, "lstm", sizes, reverse)


@traces(f"{RECURRENCE}.gru")
def recurrence_of_gru(
    pre: Node, weight: Node, hidden: Node, bias: Node, sizes: Sizes, reverse: bool
) -> tuple[Node, ...]:
    """Outputs, last hidden state, gates."""
    operands = (pre, weight, hidden, bias)
    return _made(ops.RECURRENCE, pre, hidden.shape[0], operands, "gru", sizes, reverse)


@traces(f"{RECURRENCE}.elman")
def recurrence_of_elman(
    pre: Node, weight: Node, hidden: Node, function: str, sizes: Sizes, reverse: bool
) -> tuple[Node, ...]:
    """Outputs, last hidden state; the function is "tanh" or "relu"."""
    operands = (pre, weight, hidden)
    return _made(ops.RECURRENCE, pre, hidden.shape[0], operands, function, sizes, reverse)


@traces(f"{GRADIENT}.lstm")
def recurrence_gradient_of_lstm(
    gradient: Node,
    last: Node,
    weight: Node,
    hidden: Node,
    outputs: Node,
    last_cell: Node,
    cell: Node,
    gates: Node,
    cells: Node,
    sizes: Sizes,
    reverse: bool,
) -> tuple[Node, ...]:
    """Gradients of `pre` and of the hidden state, hidden states before, the cell state's."""
    operands = (gradient, last, weight, hidden, outputs, last_cell, cell, gates, cells)
    batch = hidden.shape[0]
    return _made(ops.RECURRENCE_GRADIENT, gradient, batch, operands, "lstm", sizes, reverse)


@traces(f"{GRADIENT}.gru")
def recurrence_gradient_of_gru(
    gradient: Node,
    last: Node,
    weight: Node,
    hidden: Node,
    outputs: Node,
    gates: Node,
    sizes: Sizes,
    reverse: bool,
) -> tuple[Node, ...]:
    """Gradients of `pre` and of the hidden state, hidden states before, that of weight @ state."""
    operands = (gradient, last, weight, hidden, outputs, gates)
    batch = hidden.shape[0]
    return _made(ops.RECURRENCE_GRADIENT, gradient, batch, operands, "gru", sizes, reverse)


@traces(f"{GRADIENT}.elman")
def recurrence_gradient_of_elman(
    gradient: Node,
    last: Node,
    weight: Node,
    hidden: Node,
    outputs: Node,
    function: str,
    sizes: Sizes,
    reverse: bool,
) -> tuple[Node, ...]:
    """Gradients of `pre` and of the hidden state, hidden states before."""
    operands = (gradient, last, weight, hidden, outputs)
    batch = hidden.shape[0]
    return _made(ops.RECURRENCE_GRADIENT, gradient, batch, operands, function, sizes, reverse)
