"""A whole graph as data that JSON holds, so that another process can compile it."""

from __future__ import annotations

from typing import Any

from ltc.ir.graph import Graph, Origin, schedule
from ltc.ir.json_codec import OPS, record_of, value_of
from ltc.ir.node import Node, make


def record_of_graph(graph: Graph) -> dict[str, Any]:
    """Return the record of a graph; raise Unrecordable if it holds objects of this process alone.

    Of origins the positions stay; the reader of the graph knows no lines.
    """
    order = schedule(*graph.inputs, *graph.scalars, *graph.outputs)
    place = {node: position for position, node in enumerate(order)}
    return {
        "nodes": [
            [node.op.name, [place[operand] for operand in node.inputs], record_of(node.attrs)]
            for node in order
        ],
        "inputs": [place[node] for node in graph.inputs],
        "scalars": [place[node] for node in graph.scalars],
        "outputs": [place[node] for node in graph.outputs],
        "origins": [[place[n], o.position] for n, o in graph.origins.items() if n in place],
        "scratch": record_of(graph.scratch),
        "reproducible": graph.reproducible,
    }


def graph_of_record(record: dict[str, Any]) -> Graph:
    """The graph that `record_of_graph` wrote down."""
    nodes: list[Node] = []
    for name, operands, attrs in record["nodes"]:
        inputs = [nodes[position] for position in operands]
        nodes.append(make(OPS[name], *inputs, **dict(value_of(attrs))))

    def those(name: str) -> tuple[Node, ...]:
        return tuple([nodes[position] for position in record[name]])

    origins = {nodes[node]: Origin("", "", position) for node, position in record["origins"]}
    return Graph(
        those("inputs"), those("scalars"), those("outputs"), origins,
        value_of(record["scratch"]), record["reproducible"],
    )  # fmt: skip
