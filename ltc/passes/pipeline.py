"""The passes in their order; this list alone times, checks and prints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ltc import config
from ltc.errors import InvalidGraph
from ltc.ir import ops
from ltc.ir.graph import Graph, schedule
from ltc.ir.node import Node
from ltc.ir.tensor_type import TensorType
from ltc.passes.simplify import simplify
from ltc.support.observation import metrics


@dataclass(frozen=True)
class Pass:
    """A function from graph to graph, its name in metrics and dumps, why it is worth its time."""

    name: str
    run: Callable[[Graph], Graph]
    why: str


PIPELINE = (Pass("simplify", simplify, "fewer nodes for every later pass and for the backend"),)


def run(graph: Graph, passes: tuple[Pass, ...] = PIPELINE) -> Graph:
    """The graph after every pass, verified between them under LTC_CHECK."""
    if config.value("LTC_CHECK"):
        check(graph, after="tracing")
    wanted = dumped()
    for p in passes:
        with metrics.timed(f"pass.{p.name}"):
            graph = p.run(graph)
        if config.value("LTC_CHECK"):
            check(graph, after=p.name)
        if p.name in wanted:
            print(f"# after {p.name}: {p.why}\n{graph}")
    return graph


def dumped() -> frozenset[str]:
    """The stages that LTC_DUMP names."""
    return frozenset(map(str.strip, config.value("LTC_DUMP").split(","))) - {""}


# --- checks between passes ---------------------------------------------------------------------


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
            raise InvalidGraph(f"after {after}: {node} is read but is not an input of the graph")
        if node.op is ops.SCALAR and node not in scalars:
            raise InvalidGraph(f"after {after}: {node} is read but is not a scalar of the graph")


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
