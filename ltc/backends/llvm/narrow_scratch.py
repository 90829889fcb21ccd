"""Float32 values that kernels store for one another, rounded to the narrow type of the program."""

from __future__ import annotations

from math import prod

import torch

from ltc.backends.llvm.schedule import units_of
from ltc.ir import ops
from ltc.ir.graph import Graph, schedule
from ltc.ir.loop_nest import Kernel, Product
from ltc.ir.node import Node
from ltc.passes.narrow_dtypes import round_values


def narrow_scratch(graph: Graph) -> Graph:
    """The graph with the float32 values rounded that kernels would store for one another.

    Results of reductions, and what is made of them alone, stay exact: a number for each row.
    """
    if graph.scratch == torch.float32:
        return graph
    narrow_too = {
        node.inputs[0]
        for node in schedule(*graph.outputs)
        if node.op is ops.CAST and node.dtype == graph.scratch
    }
    stored: set[Node] = set()
    for unit in units_of(graph):
        if isinstance(unit, Node):
            stored.difference_update(unit.inputs)
        elif (kernel := unit.epilogue if isinstance(unit, Product) else unit) is not None:
            stored.update(_floats(kernel, narrow_too))
    stored.difference_update(graph.outputs)
    return round_values(graph, stored) if stored else graph


def _floats(kernel: Kernel, narrow_too: set[Node]) -> list[Node]:
    """The float32 nodes it stores at every point, and those that are stored narrow besides."""
    return [
        node
        for node in kernel.writes()
        if node.dtype == torch.float32
        and node.op.kind != "reduce"
        and (node in narrow_too or node.size == prod(kernel.space))
    ]
