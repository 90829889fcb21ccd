"""The one loop by which everything consumes a graph: each node once, by its op's row of a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ltc.errors import Unsupported
from ltc.ir.graph import schedule
from ltc.ir.node import Node
from ltc.ir.ops import Op


class NodeLowering:
    """A backend's table: primitive -> how to emit it.

    table    op -> row; a row is called with the node and what its operands were lowered to
    accepts  further condition on a node whose op is in the table, such as its dtype; None: any
    """

    def __init__(
        self, table: Mapping[Op, Callable[..., Any]], accepts: Callable[[Node], bool] | None = None
    ) -> None:
        self.table = table
        self._accepts = accepts

    def supports(self, node: Node) -> bool:
        """Whether the backend runs this node itself; others are run for it on the CPU, counted."""
        return node.op in self.table and (self._accepts is None or self._accepts(node))

    def lower(self, node: Node, *operands: Any) -> Any:
        """Raises Unsupported naming the op where the table has no row for it."""
        row = self.table.get(node.op)
        if row is None:
            raise Unsupported(
                f"{node.op} giving {node.type} has no row in this backend's NodeLowering. "
                f"Add one; its meaning is in ltc/backends/eager.py."
            )
        return row(node, *operands)


class LoweringContext:
    """What each node of one graph has become so far: a tensor, an LLVM value, a vendor's handle."""

    def __init__(self, lowering: NodeLowering, known: Mapping[Node, Any] | None = None) -> None:
        """`known`: what some nodes, usually the leaves, are already."""
        self.lowering = lowering
        self.lowered: dict[Node, Any] = dict(known or {})

    def lower(self, *outputs: Node) -> tuple[Any, ...]:
        """Lower what the outputs need, each node once."""
        for node in schedule(*outputs):
            if node not in self.lowered:
                operands = [self.lowered[n] for n in node.inputs]
                self.lowered[node] = self.lowering.lower(node, *operands)
        return tuple(self.lowered[output] for output in outputs)
