"""A graph compiled so that a launch gives every value: what any backend can show of its work."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ltc.backends.interface import BackendImplInterface, Observer
from ltc.ir import ops
from ltc.ir.graph import Graph, schedule
from ltc.ir.node import Node, make
from ltc.ir.tensor_type import TensorType
from ltc.runtime.partition import compiled, runs_on

_NOT_COMPUTED = frozenset({"leaf", "view", "barrier"})


class EveryNode:
    """See backends/interface.py's ObservedComputation; what a backend fuses is kept apart here."""

    stages: Sequence[tuple[str, Graph]] = ()

    def __init__(self, backend: BackendImplInterface, graph: Graph, device: int) -> None:
        self._backend, self._count = backend, len(graph.outputs)
        self._nodes = [n for n in schedule(*graph.outputs) if is_computed(n)]
        wanted = graph.with_outputs((*graph.outputs, *self._nodes), graph.origins)
        self._computation = compiled(backend, wanted, device, frozenset())

    def launch(self, buffers: list[Any], scalars: list[Any], observer: Observer) -> list[Any]:
        results: list[Any] = self._computation.launch(buffers, scalars)
        for node, value in zip(self._nodes, results[self._count :], strict=True):
            there = self._computation.download(value)
            observer.makes({node: there}, is_reference=not runs_on(self._backend, node))
        return results[: self._count]


def is_computed(node: Node) -> bool:
    """Whether a kernel makes its value, and that is one tensor."""
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
