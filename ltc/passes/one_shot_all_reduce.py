"""One-shot sums over few replicas: each writes its operands where the others see them, and adds.

    all_reduce(x)  ->  start(to_symmetric(x)); wait gives the operands of member 0, 1, ...; their sum

Kernels then write what is sent where the others read it, and what needs the sum adds it up itself:
nothing is copied, and no thread but the program's takes part.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

from ltc.ir import build, ops
from ltc.ir.graph import Graph, schedule
from ltc.ir.node import Node, make
from ltc.ir.one_shot import ONE_SHOT, is_one_shot, sent_with


def one_shot_sums(graph: Graph) -> Graph:
    """The graph with every sum whose members share memory as a one-shot sum."""
    replaced: dict[Node, Node] = {}
    origins = dict(graph.origins)
    numbers = itertools.count()
    for node in schedule(*graph.outputs):
        inputs = [replaced[n] for n in node.inputs]
        if node.op is ops.COLLECTIVE_START and node.attr("collective").sharers:
            result = _start(node, inputs, next(numbers))
            for written, x in zip(sent_with(result), sent_with(node)):
                if x in origins:  # it is made with what is written, not when the sum was asked for
                    origins.setdefault(written, origins[x])
        elif node.op is ops.COLLECTIVE_WAIT and is_one_shot(inputs[0]):
            result = _wait(node, inputs[0])
        elif node.op is ops.GET and is_one_shot(inputs[0]):
            result = _sum(node, inputs[0])
            for part in _parts(result):
                if node in origins:
                    origins.setdefault(part, origins[node])
        else:
            result = (
                node if inputs == list(node.inputs) else make(node.op, *inputs, **dict(node.attrs))
            )
        replaced[node] = result
        if node in origins:
            origins.setdefault(result, origins[node])
    return graph.with_outputs([replaced[n] for n in graph.outputs], origins)


def _start(node: Node, inputs: list[Node], number: int) -> Node:
    """`number` tells apart what is written of one operand for two sums."""
    collective, count = node.attr("collective"), node.attr("count")
    before, sent = inputs[: len(inputs) - count], inputs[len(inputs) - count :]
    written = [make(ops.TO_SYMMETRIC, x, number=number, index=i) for i, x in enumerate(sent)]
    return make(
        ops.COLLECTIVE_START,
        *before,
        *written,
        collective=replace(collective, kind=ONE_SHOT),
        count=count,
    )


def _wait(node: Node, start: Node) -> Node:
    results = node.attr("results") * start.attr("collective").sharers
    return make(ops.COLLECTIVE_WAIT, start, results=results)


def _sum(node: Node, wait: Node) -> Node:
    """The sum of one operand of all members, in their order."""
    collective, count = wait.inputs[0].attr("collective"), wait.inputs[0].attr("count")
    parts = [
        build.get(wait, member * count + node.attr("index")) for member in range(collective.sharers)
    ]
    return functools.reduce(lambda x, y: make(ops.ADD, x, y), parts)


def _parts(total: Node) -> list[Node]:
    found, waiting = [], [total]
    while waiting:
        node = waiting.pop()
        if node.op is ops.GET:
            found.append(node)
        else:
            waiting.extend(node.inputs)
    return found
