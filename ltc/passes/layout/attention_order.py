"""Attention's results in the order of dimensions in which they are read."""

from __future__ import annotations

from collections import defaultdict

from ltc.ir import ops
from ltc.ir.graph import Graph, schedule
from ltc.ir.node import Node, make

READ_THROUGH_STRIDES = frozenset({ops.ATTENTION, ops.ATTENTION_GRADIENT})


def order_attention(graph: Graph) -> Graph:
    """The graph with each result of an attention made as its readers permute it.

    permute(get(attention, i)) -> get(attention with that order, i); a gradient, which reads the
    result through strides, reads it permuted back.
    """
    order = schedule(*graph.outputs)
    readers: dict[Node, list[Node]] = defaultdict(list)
    for node in order:
        for operand in node.inputs:
            readers[operand].append(node)
    kept = set(graph.outputs)
    wanted = {
        node: dims
        for node in order
        if node.op is ops.GET and node.inputs[0].op in READ_THROUGH_STRIDES and node not in kept
        if (dims := _order_read(node, readers[node])) is not None
    }
    if not wanted:
        return graph
    return _Reordered(graph, order, wanted).graph()


def _order_read(result: Node, readers: list[Node]) -> tuple[int, ...] | None:
    """The one permutation through which all but attentions read a result."""
    whole, index = result.inputs[0], result.attr("index")
    if index not in ((0,) if whole.op is ops.ATTENTION else (0, 1, 2)):
        return None
    dims: set[tuple[int, ...] | None] = {
        n.attr("dims") if n.op is ops.PERMUTE else None
        for n in readers
        if n.op not in READ_THROUGH_STRIDES
    }
    order = dims.pop() if len(dims) == 1 else None
    if order is None:
        return None
    return order if order[-1] == len(order) - 1 else None  # rows stay rows of vectors


class _Reordered:
    """The graph made again; `wanted` is the order of each result that gets another one."""

    def __init__(
        self, graph: Graph, order: list[Node], wanted: dict[Node, tuple[int, ...]]
    ) -> None:
        self.graph_before, self.wanted = graph, wanted
        self.orders: dict[Node, dict[int, tuple[int, ...]]] = defaultdict(dict)
        for result, dims in wanted.items():
            self.orders[result.inputs[0]][result.attr("index")] = dims
        self.made: dict[Node, Node] = {}
        for node in order:
            self.made[node] = self._make(node)

    def graph(self) -> Graph:
        before = self.graph_before
        origins = dict(before.origins)
        for node, made in self.made.items():
            if node in before.origins:
                origins.setdefault(made, before.origins[node])
        return before.with_outputs([self.made[n] for n in before.outputs], origins)

    def _make(self, node: Node) -> Node:
        if node.op is ops.PERMUTE and node.inputs[0] in self.wanted:
            return self.made[node.inputs[0]]
        inputs = tuple(self._plain(n) for n in node.inputs)
        attrs = dict(node.attrs)
        chosen = self.orders.get(node, {})
        if node.op is ops.ATTENTION:
            attrs["order"] = chosen.get(0, attrs["order"])
        elif node.op is ops.ATTENTION_GRADIENT:
            attrs["orders"] = tuple(chosen.get(i, o) for i, o in enumerate(attrs["orders"]))
        return make(node.op, *inputs, **attrs) if inputs != node.inputs or chosen else node

    def _plain(self, operand: Node) -> Node:
        """An operand with its dimensions as they were."""
        made, dims = self.made[operand], self.wanted.get(operand)
        if dims is None:
            return made
        back = tuple(dims.index(d) for d in range(len(dims)))
        return make(ops.PERMUTE, made, dims=back)
