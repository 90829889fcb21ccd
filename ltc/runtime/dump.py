"""The graph of every step, appended to the file that LTC_SAVE_TENSORS_FILE names."""

from __future__ import annotations

import threading

from ltc import config
from ltc.backends.interface import ComputationCapabilities
from ltc.ir.graph import Graph, schedule, show
from ltc.ir.node import Node
from ltc.runtime.program import Program

_writing = threading.Lock()


def save_graph(program: Program, name: str, line: str) -> None:
    """Append the program's graph; `line` is where the user asked for it to be run."""
    path = config.value("LTC_SAVE_TENSORS_FILE")
    if config.value("XRT_SHARD_WORLD_SIZE") > 1:
        path = f"{path}.{config.value('XRT_SHARD_ORDINAL')}"
    block = "\n".join(
        [
            "[ScheduleSyncTensorsGraph]",
            "TensorsGraphInfo:",
            f"  {line}",
            f"Hashes: ({name})",
            "## BEGIN_GRAPH",
            _text(program),
            "## END_GRAPH",
            "",
            "",
        ]
    )
    with _writing, open(path, "a") as file:
        file.write(block)


def _text(program: Program) -> str:
    form = config.value("LTC_SAVE_TENSORS_FMT")
    own_text = ComputationCapabilities.of(program.computation).text
    if form == "backend" and own_text is not None:
        return own_text()
    assert program.graph_of is not None
    graph = program.graph_of()
    return dot(graph) if form == "dot" else text(graph)


def text(graph: Graph) -> str:
    """One node a line; results end in ROOT=i; LTC_IR_DEBUG adds the user's line to each."""
    notes: dict[Node, list[str]] = {}  # what is to stand behind a node
    for position, node in enumerate(graph.outputs):
        notes.setdefault(node, []).append(f"ROOT={position}")
    if config.value("LTC_IR_DEBUG"):
        for node, line in graph.lines.items():
            notes.setdefault(node, []).append(f"location={line}")
    return show(*graph.outputs, notes={node: " ".join(note) for node, note in notes.items()})


def dot(graph: Graph) -> str:
    """The graph for Graphviz; an edge's label is the position of the operand."""
    order = schedule(*graph.outputs)
    names = {node: f"node{position}" for position, node in enumerate(order)}
    rows = [f'  {names[node]} [label="{node.op} {node.type}"]' for node in order]
    for node in order:
        rows += [
            f'  {names[operand]} -> {names[node]} [label="i={position}"]'
            for position, operand in enumerate(node.inputs)
        ]
    return "\n".join(["digraph G {", *rows, "}"])
