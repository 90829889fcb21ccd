"""Rebuilding a graph by small rules, without recursion."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ltc.ir.graph import Graph, Origin, schedule
from ltc.ir.node import Node, make
from ltc.ir.ops import Op
from ltc.support.observation import metrics

# A rule gives the node to put in place of its argument, or None where it does not apply.
Rule = Callable[[Node], Node | None]

# A rule's result may be rewritten again; a pair of rules that undo each other stops here.
MOST_REWRITES = 16


def rewrite(graph: Graph, rules: Mapping[Op, tuple[Rule, ...]]) -> Graph:
    """The graph with every rule applied until none applies, operands first.

    Each rule that fires is counted as `rule.<its name>`.
    """
    replaced: dict[Node, Node] = {}
    origins: dict[Node, Origin] = dict(graph.origins)
    for node in schedule(*graph.outputs):
        result = replaced[node] = _settle(_with_inputs(node, replaced), rules)
        if result not in origins and node in graph.origins:
            origins[result] = graph.origins[node]
    return graph.with_outputs([replaced[n] for n in graph.outputs], origins)


def _with_inputs(node: Node, replaced: Mapping[Node, Node]) -> Node:
    inputs = tuple([replaced[n] for n in node.inputs])
    if inputs == node.inputs:
        return node
    return make(node.op, *inputs, **dict(node.attrs))


def _settle(node: Node, rules: Mapping[Op, tuple[Rule, ...]]) -> Node:
    for _ in range(MOST_REWRITES):
        for rule in rules.get(node.op, ()):
            result = rule(node)
            if result is not None and result is not node:
                metrics.count(f"rule.{rule.__name__}")
                node = result
                break
        else:
            break
    return node
