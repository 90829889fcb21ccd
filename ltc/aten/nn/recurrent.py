"""Rules of ltc::recurrence and of its gradient: the steps of one direction of a recurrent layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch

from ltc.aten.registry import traces
from ltc.ir import build, ops
from ltc.ir.node import Node, make

RECURRENCE, GRADIENT = "ltc::recurrence", "ltc::recurrence_gradient"
Sizes = Sequence[int]


def _table(sizes: Sizes) -> list[Node]:
    """Return the sequences of each step, as an operand; none if all steps have all."""
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


def _trace(overload: str, op: ops.Op, cell: str) -> None:
    """Make the rule of an overload: its operands, then `sizes` and `reverse`.

    The cell of a plain layer is the last operand of all: "tanh" or "relu".
    """

    def rule(rows: Node, *given: Any) -> tuple[Node, ...]:
        *operands, sizes, reverse = given
        # Of a gradient the last state's gradient, which comes second, is of as many sequences.
        batch = operands[0 if op is ops.RECURRENCE_GRADIENT else 1].shape[0]
        kind = operands.pop() if cell == "elman" else cell
        return _made(op, rows, batch, [rows, *operands], kind, sizes, reverse)

    traces(f"{overload}.{cell}")(rule)


for _cell in ("lstm", "gru", "elman"):
    _trace(RECURRENCE, ops.RECURRENCE, _cell)
    _trace(GRADIENT, ops.RECURRENCE_GRADIENT, _cell)
