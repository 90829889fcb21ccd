"""Primitives that a backend lacks: written in smaller ones, or cut out and run by the reference, counted.

A node's stage is the number of changes of side on the way to it: even stages run on the backend,
odd ones on the CPU.  Values cross by download and upload. Where all replicas launch the same program,
its exchanges may be part of it.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ltc.backends.capabilities import LaunchToken
from ltc.backends.collective_runner import ProgramOfReplicas, agree, comparing
from ltc.backends.eager import EagerBackend
from ltc.backends.interface import (
    BackendCapabilities,
    BackendImplInterface,
    ComputationCapabilities,
)  # fmt: skip
from ltc.ir import ops
from ltc.ir.collective import Collective
from ltc.ir.graph import Graph, schedule
from ltc.ir.node import Node, make
from ltc.ir.ops import Op
from ltc.passes.smaller_primitives import in_smaller_primitives
from ltc.runtime.backend_errors import buffers_of
from ltc.support.observation import metrics

_GIVEN = frozenset({ops.INPUT, ops.SCALAR})  # both sides have them
_REFERENCE = EagerBackend()


def runs_on(backend: BackendImplInterface, node: Node) -> bool:
    """Return True if the backend itself runs this node; the launch's inputs need no running."""
    return node.op in _GIVEN or backend.lowering.supports(node)


def compiled(
    backend: BackendImplInterface, graph: Graph, device: int, donated: frozenset[int]
) -> Any:
    """A Computation: the backend's own, or in segments where it cannot run every node.

    What it lacks is written in smaller primitives first, as far as there are formulas.
    """
    if not _runs_all(backend, graph):
        graph = in_smaller_primitives(graph, lambda node: not runs_on(backend, node))
        if not _runs_all(backend, graph):
            return _together(backend, graph, device, donated) or _over_host(backend, graph, device)
    return backend.compile(graph, device, donated)


def _runs_all(
    backend: BackendImplInterface, graph: Graph, except_for: frozenset[Op] = frozenset()
) -> bool:
    nodes = [node for node in schedule(*graph.outputs) if node.op not in except_for]
    return all(runs_on(backend, node) for node in nodes) and all(
        backend.lowering.takes(node) for node in graph.inputs
    )


_EXCHANGES = frozenset({ops.COLLECTIVE_START, ops.COLLECTIVE_WAIT})


def _together(
    backend: BackendImplInterface, graph: Graph, device: int, donated: frozenset[int]
) -> ReplicatedComputation | None:
    """The program of all replicas, if exchanges are all that the backend lacks, and it offers that."""
    together = BackendCapabilities.of(backend).together
    if together is None or not _runs_all(backend, graph, _EXCHANGES):
        return None
    computation = together(graph, donated)
    if computation is None:
        return None
    program = _compared(graph, f"of all devices, {sorted(donated)}")
    program = replace(program, is_compiled=computation.is_compiled, compile=computation.compile)

    def over_host() -> SegmentedComputation:
        return compile_in_segments(backend, graph, device)

    return ReplicatedComputation(computation, program, over_host, _aliased(graph))


def _compared(graph: Graph, way: str) -> ProgramOfReplicas:
    """Return the facts that replicas compare of a graph that they run in this way.

    The exchanges end before the first one in groups, since each group has an order of its own, and
    before one whose values are compared.
    """
    found: list[tuple[Collective, list[Any]]] = []
    for node in schedule(*graph.outputs):
        if node.op is ops.COLLECTIVE_START and node.attr("collective").is_among_all():
            collective, count = node.attr("collective"), node.attr("count")
            if collective.groups or collective.checked:
                break
            operands = node.inputs[len(node.inputs) - count :]
            found.append((collective, [operand.type for operand in operands]))
    name = hashlib.sha256(f"{graph} {way}".encode()).digest()[:16]
    return ProgramOfReplicas(name, tuple(found))


def _over_host(backend: BackendImplInterface, graph: Graph, device: int) -> SegmentedComputation:
    """The same, whose exchanges the host makes; other replicas may come with one of all devices."""
    made = compile_in_segments(backend, graph, device)
    if BackendCapabilities.of(backend).together is not None:
        made.compared = _compared(graph, "over the host")
    return made


def compile_in_segments(
    backend: BackendImplInterface, graph: Graph, device: int
) -> SegmentedComputation:
    """A Computation that alternates between the backend and the CPU; nothing is donated."""
    order = schedule(*graph.outputs)
    stage = _stages(backend, order)
    by_stage: dict[int, list[Node]] = defaultdict(list)
    for node in order:
        if node.op not in _GIVEN:
            by_stage[stage[node]].append(node)
    for number, nodes in by_stage.items():
        if number % 2:
            for node in nodes:
                if node.op is not ops.GET:
                    metrics.count(f"CutOut::{node.op}")
    needed = _needed_later(order, stage, graph.outputs)
    segments = [
        _segment(backend, graph, device, by_stage[number], needed, on_cpu=number % 2 == 1)
        for number in sorted(by_stage)
    ]
    return SegmentedComputation(backend, segments, graph, device)


def _stages(backend: BackendImplInterface, order: list[Node]) -> dict[Node, int]:
    stage: dict[Node, int] = {}
    for node in order:
        if node.op in _GIVEN:
            stage[node] = -1
            continue
        earliest = max((stage[n] for n in node.inputs), default=-1)
        # one result of several stays with its producer: tuples do not cross
        on_cpu = bool(earliest % 2) if node.op is ops.GET else not runs_on(backend, node)
        earliest = max(earliest, 0)
        stage[node] = earliest if bool(earliest % 2) == on_cpu else earliest + 1
    return stage


def _needed_later(
    order: Sequence[Node], stage: dict[Node, int], outputs: Sequence[Node]
) -> set[Node]:
    """Return the nodes whose value leaves the stage that computes it."""
    needed = {node for node in outputs if node.op not in _GIVEN}
    for node in order:
        needed.update(n for n in node.inputs if n.op not in _GIVEN and stage[n] != stage[node])
    return needed


@dataclass(frozen=True)
class Segment:
    """Nodes of one stage, compiled.

    Attributes:
        inputs: The nodes it is given, as buffers.
        results: The nodes it gives.
    """

    computation: Any
    on_cpu: bool
    inputs: tuple[Node, ...]
    results: tuple[Node, ...]


def _segment(
    backend: BackendImplInterface,
    graph: Graph,
    device: int,
    nodes: Sequence[Node],
    needed: set[Node],
    on_cpu: bool,
) -> Segment:
    inputs: dict[Node, Node] = {}
    made: dict[Node, Node] = {}

    def operand(node: Node) -> Node:
        if node in made:
            return made[node]
        if node.op is ops.SCALAR:
            return node
        if node not in inputs:
            inputs[node] = make(ops.INPUT, index=len(inputs), dtype=node.dtype, shape=node.shape)
        return inputs[node]

    for node in nodes:
        made[node] = make(node.op, *[operand(n) for n in node.inputs], **dict(node.attrs))
    results = tuple(node for node in nodes if node in needed)
    part = Graph(
        tuple(inputs.values()),
        graph.scalars,
        tuple(made[node] for node in results),
        {made[node]: graph.origins[node] for node in nodes if node in graph.origins},
        reproducible=graph.reproducible,
    )
    side: BackendImplInterface = _REFERENCE if on_cpu else backend
    return Segment(side.compile(part, device, frozenset()), on_cpu, tuple(inputs), results)


def _aliased(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """Positions of outputs that are one value."""
    places: dict[Node, list[int]] = defaultdict(list)
    for position, node in enumerate(graph.outputs):
        places[node].append(position)
    return tuple(tuple(found) for found in places.values() if len(found) > 1)


class SegmentedComputation:
    """Runs the segments in turn; a value crosses over when it is first wanted on the other side.

    Attributes:
        compared: The facts of the program that are compared with the other replicas'.
    """

    compared: ProgramOfReplicas | None = None

    def __init__(
        self, backend: BackendImplInterface, segments: list[Segment], graph: Graph, device: int
    ) -> None:
        computation = backend.computation
        self.computation, self.segments, self.graph = computation, segments, graph
        self.device, self._copy = device, BackendCapabilities.of(backend).copy
        self.upload, self.download = computation.upload, computation.download
        self.wait = computation.wait
        self.capabilities = ComputationCapabilities(_aliased(graph))
        self._given_back = list(set(graph.inputs) & set(graph.outputs))

    def launch(self, buffers: list[Any], scalars: list[Any]) -> list[Any]:
        on_device: dict[Node, Any] = {
            node: buffers[node.attr("index")] for node in self.graph.inputs
        }
        on_cpu: dict[Node, torch.Tensor] = {}
        with comparing(self.compared):
            for segment in self.segments:
                values = [self._value(n, segment.on_cpu, on_device, on_cpu) for n in segment.inputs]
                results = self._apart(segment, self._launched(segment, values, scalars))
                (on_cpu if segment.on_cpu else on_device).update(zip(segment.results, results))
        for node in self._given_back:
            on_device[node] = self._copied(on_device[node], on_cpu=False)
        return [self._value(node, False, on_device, on_cpu) for node in self.graph.outputs]

    @staticmethod
    def _launched(segment: Segment, values: list[Any], scalars: list[Any]) -> list[Any]:
        results = segment.computation.launch(values, scalars)
        return list(buffers_of(results, segment.computation, len(segment.results)))

    def _apart(self, segment: Segment, results: list[Any]) -> list[Any]:
        """The results, each in a place of its own."""
        own = ComputationCapabilities.of(segment.computation)
        for _, *others in own.aliased_outputs:
            for position in others:
                results[position] = self._copied(results[position], segment.on_cpu)
        return results

    def _copied(self, value: Any, on_cpu: bool) -> Any:
        if on_cpu:
            return value.clone()
        if self._copy is not None:
            return self._copy(value)
        return self.upload(self.download(value).clone(), self.device)

    def _value(
        self, node: Node, wanted_on_cpu: bool, on_device: dict[Node, Any], on_cpu: dict[Node, Any]
    ) -> Any:
        here, there = (on_cpu, on_device) if wanted_on_cpu else (on_device, on_cpu)
        if node not in here:
            value = there[node]
            here[node] = (
                self.download(value).clone()
                if wanted_on_cpu
                else self.upload(value.contiguous(), self.device)
            )
        return here[node]


class ReplicatedComputation:
    """One replica's part.

    Replicas say each other the names of their programs at each launch. It is compiled when all have
    come to its first one with the same name. Where names differ, exchanges go over the host.
    """

    def __init__(
        self,
        together: Any,
        program: ProgramOfReplicas,
        over_host: Callable[[], Any],
        aliased: tuple[tuple[int, ...], ...],
    ) -> None:
        """Take both ways to run a graph.

        Args:
            together: The computation whose exchanges are part of it.
            program: The facts of the program, which replicas compare.
            over_host: Compiles the other one, at its first launch.
            aliased: The positions of outputs that lie in the same memory there.
        """
        self._together, self._program, self._compile_over_host = together, program, over_host
        self._over_host: Any = None
        self.upload, self.download = together.upload, together.download
        self.wait = together.wait
        self.capabilities = ComputationCapabilities(aliased, begin=self.begin)

    def begin(self, buffers: list[Any], scalars: list[Any]) -> tuple[list[Any], LaunchToken | None]:
        if agree(self._program):
            begun: tuple[list[Any], LaunchToken] = self._together.begin(buffers, scalars)
            return begun
        if self._over_host is None:
            self._over_host = self._compile_over_host()
        outputs: list[Any] = self._over_host.launch(buffers, scalars)
        return outputs, None

    def launch(self, buffers: list[Any], scalars: list[Any]) -> list[Any]:
        outputs, token = self.begin(buffers, scalars)
        if token is not None:
            token.wait()
        return outputs
