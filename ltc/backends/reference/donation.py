"""The outputs that may take the buffer of an input that is dead after the launch.

A write over an input comes after every node that can fail, so a launch that raises leaves its
donated inputs as they were.
"""

from __future__ import annotations

from ltc.ir import ops
from ltc.ir.graph import Graph
from ltc.ir.node import Node

# The result may be a view of the first operand.
SHARES_MEMORY = frozenset(
    {ops.PERMUTE, ops.SLICE, ops.EXPAND, ops.RESHAPE, ops.BITCAST, ops.BARRIER}
)

# How far back an update is followed: its formula is short, a whole network is not.
MOST_STEPS_BACK = 64


def memory_roots(order: list[Node]) -> dict[Node, Node]:
    """For each node, the one whose memory its value may lie in."""
    roots: dict[Node, Node] = {}
    for node in order:
        roots[node] = roots[node.inputs[0]] if node.op in SHARES_MEMORY else node
    return roots


def overwrites(graph: Graph, order: list[Node], donated: frozenset[int]) -> dict[Node, Node]:
    """Elementwise output -> the donated input of its type, that it is made from, to write over."""
    roots = memory_roots(order)
    kept = {roots[output] for output in graph.outputs}
    free = {n for n in graph.inputs if n.attr("index") in donated and n not in kept}
    chosen: dict[Node, Node] = {}
    for output in graph.outputs:
        if output.op.kind == "elementwise" and not ops.may_fail(output) and output not in chosen:
            source = _source(output, free)
            if source is not None:
                chosen[output] = source
                free.discard(source)
    return chosen


def _source(output: Node, free: set[Node]) -> Node | None:
    """The nearest free input of the output's type that elementwise nodes lead to it from."""
    waiting, seen = [output], set[Node]()
    for node in waiting:
        for operand in node.inputs:
            if operand in free and operand.type == output.type:
                return operand
            is_new = operand not in seen and operand.op.kind == "elementwise"
            if is_new and len(seen) < MOST_STEPS_BACK:
                seen.add(operand)
                waiting.append(operand)
    return None


def writes_last(order: list[Node], chosen: dict[Node, Node]) -> tuple[list[Node], dict[Node, Node]]:
    """The order with overwriting outputs, and what depends on them, after all that can fail.

    An overwrite that some later node contradicts, by reading the old value or by being able to
    fail, is dropped.
    """
    chosen, roots = dict(chosen), memory_roots(order)
    while True:
        late = _dependants(order, chosen)
        moved = [n for n in order if n not in late] + [n for n in order if n in late]
        wrong = _contradicted(moved, late, chosen, roots)
        if not wrong:
            return moved, chosen
        for output in wrong:
            del chosen[output]


def _dependants(order: list[Node], nodes: dict[Node, Node]) -> set[Node]:
    late: set[Node] = set()
    for node in order:
        if node in nodes or any(n in late for n in node.inputs):
            late.add(node)
    return late


def _contradicted(
    moved: list[Node], late: set[Node], chosen: dict[Node, Node], roots: dict[Node, Node]
) -> set[Node]:
    wrong: set[Node] = set()
    writer_of: dict[Node, Node] = {}  # inputs overwritten so far
    for node in moved:
        if node not in late:
            continue
        if ops.may_fail(node):
            return set(chosen)
        for operand in node.inputs:
            root = roots[operand]
            if root in writer_of:
                wrong.add(writer_of[root])
            if node in chosen and root is chosen[node] and operand is not root:
                wrong.add(node)  # it would read through a view what it has written already
        if node in chosen:
            writer_of[chosen[node]] = node
    return wrong
