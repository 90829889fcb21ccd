"""Values in the order in which their readers want them in memory."""

from __future__ import annotations

from collections import Counter

from ltc.ir import ops
from ltc.ir.graph import Graph, schedule
from ltc.ir.node import Node, make


def layout(graph: Graph) -> Graph:
    """The graph with each product made in the order in which it is read.

    A product that is only read transposed, as the gradient of a linear layer's weight is, is the
    product of its transposed operands: permute(x @ y) -> permute(y) @ permute(x).
    """
    order = schedule(*graph.outputs)
    readers = Counter(n for node in order for n in node.inputs)
    readers.update(graph.outputs)
    replaced: dict[Node, Node] = {}
    origins = dict(graph.origins)
    for node in order:
        if _transposes_a_product(node) and readers[node.inputs[0]] == 1:
            x, y = (_transposed(replaced[n]) for n in node.inputs[0].inputs)
            result = make(ops.MATMUL, y, x)
        else:
            inputs = tuple(replaced[n] for n in node.inputs)
            same = inputs == node.inputs
            result = node if same else make(node.op, *inputs, **dict(node.attrs))
        replaced[node] = result
        if node in graph.origins:
            origins.setdefault(result, graph.origins[node])
    return graph.with_outputs([replaced[n] for n in graph.outputs], origins)


def _last_two_swapped(rank: int) -> tuple[int, ...]:
    return (*range(rank - 2), rank - 1, rank - 2)


def _transposes_a_product(node: Node) -> bool:
    is_transposition = node.op is ops.PERMUTE and len(node.shape) >= 2
    if not is_transposition or node.attr("dims") != _last_two_swapped(len(node.shape)):
        return False
    return node.inputs[0].op is ops.MATMUL


def _transposed(node: Node) -> Node:
    dims = _last_two_swapped(len(node.shape))
    if node.op is ops.PERMUTE and node.attr("dims") == dims:
        return node.inputs[0]
    return make(ops.PERMUTE, node, dims=dims)
