"""A graph compiled node by node: what any backend can show of its work."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ltc.backends.interface import BackendImplInterface, Observer
from ltc.backends.verification.double_precision import Formula
from ltc.ir import ops
from ltc.ir.graph import Graph, schedule
from ltc.ir.node import Node, make
from ltc.ir.tensor_type import TensorType
from ltc.runtime.partition import compiled, runs_on

_NOT_COMPUTED = frozenset({"leaf", "view", "barrier"})


class EveryNode:
    """See backends/interface.py's ObservedComputation; what a backend fuses is kept apart here.

    Each node is a program of its own. Of one that gives every value, a compiler may compute a value
    again where it is read, and round it otherwise than where it is given.
    """

    stages: Sequence[tuple[str, Graph]] = ()

    def __init__(self, backend: BackendImplInterface, graph: Graph, device: int) -> None:
        self._backend, self._graph, self._device = backend, graph, device

    @functools.cached_property
    def _parts(self) -> list[tuple[Node, Formula, Any]]:
        """The nodes to compute, in order: its formula, and the formula compiled."""
        order = schedule(*self._graph.outputs)
        outputs, known = set(self._graph.outputs), set(self._graph.inputs)
        parts = []
        for node in order:
            if node not in known and (node in outputs or is_computed(node)):
                formula = Formula([node], known)
                part, _ = cut_out(formula.nodes, formula.operands, formula.scalars, [node])
                computation = compiled(self._backend, part, self._device, frozenset())
                parts.append((node, formula, computation))
                known.add(node)
        return parts

    def launch(self, buffers: list[Any], scalars: list[Any], observer: Observer) -> list[Any]:
        made = {node: buffers[node.attr("index")] for node in self._graph.inputs}
        for node, formula, computation in self._parts:
            (made[node],) = computation.launch([made[n] for n in formula.operands], scalars)
            if is_computed(node):
                there = computation.download(made[node])
                observer.makes({node: there}, is_reference=not runs_on(self._backend, node))
        return [made[node] for node in self._graph.outputs]


def is_computed(node: Node) -> bool:
    """Return True if a kernel makes its value, and that is one tensor."""
    return isinstance(node.type, TensorType) and node.op.kind not in _NOT_COMPUTED


def cut_out(
    nodes: Iterable[Node],
    operands: Sequence[Node],
    scalars: Sequence[Node],
    results: Sequence[Node],
) -> tuple[Graph, Mapping[Node, Node]]:
    """A graph of these nodes alone, with the operands as its inputs; and what each has become."""
    made: dict[Node, Node] = {
        node: make(ops.INPUT, index=k, dtype=node.dtype, shape=node.shape)
        for k, node in enumerate(operands)
    }
    inputs = tuple(made.values())
    made.update((node, node) for node in scalars)
    for node in nodes:
        made[node] = make(node.op, *[made[n] for n in node.inputs], **dict(node.attrs))
    return Graph(inputs, tuple(scalars), tuple(made[n] for n in results)), made
