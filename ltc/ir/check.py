"""What a graph may look like, checked between passes where LTC_CHECK is set."""

from __future__ import annotations

from ltc.errors import InvalidGraph
from ltc.ir import ops
from ltc.ir.graph import Graph, schedule
from ltc.ir.node import Node
from ltc.ir.tensor_type import TensorType


def check(graph: Graph, after: str) -> None:
    """Raises InvalidGraph, naming the pass it was found after, where the graph breaks a rule.

    Every node is typed as its rule says, every leaf is declared by the graph, a node with several
    results is read through `get` alone, and every output is one tensor.
    """
    inputs, scalars = set(graph.inputs), set(graph.scalars)
    _distinct([n.attr("index") for n in graph.inputs], "inputs", after)
    _distinct([n.attr("slot") for n in graph.scalars], "scalars", after)
    for output in graph.outputs:
        if not isinstance(output.type, TensorType):
            raise InvalidGraph(f"after {after}: output {output} is a tuple. Take one with `get`.")
    for node in schedule(*graph.outputs):
        _check_node(node, after)
        if node.op is ops.INPUT and node not in inputs:
            raise InvalidGraph(f"after {after}: {node} is read but is no input of the graph")
        if node.op is ops.SCALAR and node not in scalars:
            raise InvalidGraph(f"after {after}: {node} is read but is no scalar of the graph")


def _distinct(positions: list[int], what: str, after: str) -> None:
    if len(set(positions)) != len(positions):
        raise InvalidGraph(f"after {after}: two {what} share a position: {positions}")


def _check_node(node: Node, after: str) -> None:
    if ops.ALL.get(node.op.name) is not node.op:
        raise InvalidGraph(f"after {after}: {node.op} is not in the list of ir/ops.py")
    if node.op is not ops.GET and not all(isinstance(n.type, TensorType) for n in node.inputs):
        raise InvalidGraph(f"after {after}: {node} reads a tuple; take its elements with `get`")
    derived = node.op.infer(*[n.type for n in node.inputs], **dict(node.attrs))
    if derived != node.type:
        raise InvalidGraph(f"after {after}: {node} should have type {derived}")
