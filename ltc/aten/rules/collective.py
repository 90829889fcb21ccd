"""Exchanges among replicas: what is recorded is already what runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ltc.aten.registry import traces
from ltc.ir import build, ops
from ltc.ir.node import Node, make
from ltc.ir.tensor_type import TensorType


@traces("ltc::collective_start", moves=True)
def collective_start(operands: Sequence[Node], token: Node | None, collective: Any) -> Node:
    """The operands, and the token of the exchange before this one."""
    before = () if token is None else (token,)
    return make(
        ops.COLLECTIVE_START, *before, *operands, collective=collective, count=len(operands)
    )


@traces("ltc::collective_wait", moves=True)
def collective_wait(token: Node, results: Sequence[TensorType]) -> tuple[Node, ...]:
    """One node for each result."""
    node = make(ops.COLLECTIVE_WAIT, token, results=tuple(results))
    return tuple(build.get(node, index) for index in range(len(results)))
