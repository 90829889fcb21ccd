"""Graphs inside a traced graph run as code, where torch would interpret them node by node.

Dynamo keeps the forward and the backward of a torch.autograd.Function, and what is checkpointed, as
graphs of their own, and torch hands these to fx's interpreter: each step then pays for every node.
In its place the interpreter is given a graph of one node, which calls the other's code; a function's are
called without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn

from ltc.device.dynamo.applied_function import applied, can_apply
from ltc.device.dynamo.traced_lines import at_the_users_lines

INTERPRETED = frozenset({"autograd_function_apply", "tag_activation_checkpoint"})


def run_as_code(graph: fx.GraphModule) -> None:
    """Put a graph of one call in the place of each that would be interpreted, at any depth."""
    for name in dict.fromkeys(_interpreted(graph)):
        nested = getattr(graph, name)
        run_as_code(nested)
        setattr(graph, name, _called(nested))
    function = torch.ops.higher_order.autograd_function_apply
    functions = graph.graph.find_nodes(op="call_function", target=function)
    found = [node for node in functions if can_apply(node.kwargs)]
    for node in found:
        node.target = applied
    if found:
        graph.recompile()


def _interpreted(graph: fx.GraphModule) -> Iterator[str]:
    for node in graph.graph.nodes:
        if node.op == "call_function" and str(node.target) in INTERPRETED:
            for operand in node.args:
                if isinstance(operand, fx.Node) and operand.op == "get_attr":
                    assert isinstance(operand.target, str)
                    if isinstance(getattr(graph, operand.target), fx.GraphModule):
                        yield operand.target


class _Code(nn.Module):
    """What a graph computes, by its code."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__()
        self.run: Callable[..., Any] = at_the_users_lines(graph)

    def forward(self, *operands: Any) -> Any:
        return self.run(*operands)


def _called(nested: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    given = [node for node in nested.graph.nodes if node.op == "placeholder"]
    operands = tuple([graph.placeholder(node.name) for node in given])
    graph.output(graph.call_module("body", operands))
    return fx.GraphModule({"body": _Code(nested)}, graph)
