"""Programs whose launches are judged: what LTC_VERIFY asks for.

A launch runs as usual.  Then the same kernels run again from the same inputs, one by one, and what
each of them leaves in memory is judged by what it has read: in double precision, rounded as the
nodes' types say, within what errors of rounding can make of it.  So errors do not add up from
kernel to kernel, and what hangs on a comparison is compared as the backend saw it.  At its first
launch the passes are judged as well: the graph before and after them gives the same in double
precision.

A program that exchanges with other replicas runs once, one kernel after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ltc.backends.interface import (
    BackendCapabilities,
    BackendImplInterface,
    ComputationCapabilities,
    ObservedComputation,
)  # fmt: skip
from ltc.backends.plain_dispatch import PlainDispatch
from ltc.backends.verification.double_precision import Formula
from ltc.backends.verification.judgement import Difference, difference, far_apart, unequal
from ltc.backends.verification.perturbation import Perturbation
from ltc.ir.graph import Graph, Origin, schedule
from ltc.ir.node import Node
from ltc.passes import pipeline
from ltc.runtime.partition import runs_on
from ltc.runtime.verification.every_node import EveryNode, cut_out, is_computed
from ltc.runtime.verification.finding_text import error_of
from ltc.runtime.verification.judge import COMPUTED, Finding, Judge, same_bits
from ltc.support.observation import metrics

LAUNCHED = "is right where the kernels run one by one, and wrong where they run as one program"
FUSED = "is computed wrong, where it is made together with others; alone it is right"


class VerifiedComputation:
    """A Computation that raises VerificationError where the one it holds computes something wrong.

    The inputs that it may write over are left as they were.
    """

    def __init__(
        self,
        computation: Any,
        backend: BackendImplInterface,
        traced: Graph,
        device: int,
        donated: frozenset[int],
    ) -> None:
        """`traced`: the graph that the computation was made of, before the passes."""
        self.upload, self.download = computation.upload, computation.download
        self.wait = computation.wait
        aliased = ComputationCapabilities.of(computation).aliased_outputs
        self.capabilities = ComputationCapabilities(aliased)  # nothing runs ahead of its judgement
        self._computation, self._backend, self._device = computation, backend, device
        self._donated = donated
        self._formulas: dict[tuple[Node, ...], Formula] = {}
        self._stages = [("tracing", traced)]
        for one in pipeline.PIPELINE:
            self._stages.append((one.name, one.run(self._stages[-1][1])))
        graph = self._stages[-1][1]
        order = schedule(*graph.outputs)
        self._exchanges = any(node.op.kind == "collective" for node in order)
        self._observed = self._observable(graph, order)
        self._stages += self._observed.stages
        self._passes_are_right = False

    def _observable(self, graph: Graph, order: list[Node]) -> ObservedComputation:
        observed = BackendCapabilities.of(self._backend).observed
        if observed is not None and all(runs_on(self._backend, node) for node in order):
            return observed(graph, self._device, self._donated)
        return EveryNode(self._backend, graph, self._device)

    def launch(self, buffers: list[Any], scalars: list[Any]) -> list[Any]:
        with PlainDispatch():
            if self._exchanges:
                return self._exchanged(buffers, scalars)
            results = self._untouched(self._computation.launch, buffers, scalars)
            judge = self._judge_of(buffers, scalars)
            again = self._untouched(self._observed.launch, buffers, scalars, judge)
            finding = (
                judge.finding
                or self._finding_of_launch(buffers, scalars, results, again)
                or self._finding_of_passes(buffers, scalars)
            )
            self._conclude(finding, scalars)
            return results

    def _untouched(
        self,
        launch: Callable[..., list[Any]],
        buffers: list[Any],
        scalars: list[Any],
        *observer: Any,
    ) -> list[Any]:
        """Return the launch's results, run on copies of the inputs it may write over."""
        given = list(buffers)
        for position in self._donated:
            given[position] = self.upload(self.download(given[position]), self._device)
        try:
            return launch(given, scalars, *observer)
        except Exception as error:
            error.overwritten = ()  # type: ignore[attr-defined]  # see Computation.launch
            raise

    def _exchanged(self, buffers: list[Any], scalars: list[Any]) -> list[Any]:
        """A launch that other replicas take part in: it happens once."""
        if isinstance(self._observed, EveryNode):
            metrics.count("verify.skipped")
            unjudged: list[Any] = self._computation.launch(buffers, scalars)
            return unjudged
        metrics.count("verify.passes_unjudged")
        judge = self._judge_of(buffers, scalars)
        results = self._untouched(self._observed.launch, buffers, scalars, judge)
        self._conclude(judge.finding, scalars)
        return results

    def _judge_of(self, buffers: list[Any], scalars: list[Any]) -> Judge:
        return Judge(self._inputs(self._stages[-1][1], buffers), scalars, self._formulas)

    def _inputs(self, graph: Graph, buffers: list[Any]) -> Mapping[Node, torch.Tensor]:
        return {node: self.download(buffers[node.attr("index")]) for node in graph.inputs}

    def _conclude(self, finding: Finding | None, scalars: list[Any]) -> None:
        metrics.count("verify.programs")
        if finding is None:
            return
        metrics.count("verify.findings")
        raise error_of(self._in_one_node(finding, scalars), self._origins(), self._backend.name)

    def _origins(self) -> Mapping[Node, Origin]:
        found: dict[Node, Origin] = {}
        for _, graph in reversed(self._stages):
            found.update(graph.origins)
        return found

    # --- the launch as a whole

    def _finding_of_launch(
        self, buffers: list[Any], scalars: list[Any], results: list[Any], again: list[Any]
    ) -> Finding | None:
        graph = self._stages[-1][1]
        pairs = [(self.download(x), self.download(y)) for x, y in zip(results, again)]
        if all(same_bits(x, y) for x, y in pairs):
            return None
        if isinstance(self._observed, EveryNode):  # rounding may differ where others are fused
            inputs = self._inputs(graph, buffers)
            formula = Formula(graph.outputs, inputs)
            places = [graph.outputs.index(node) for node in formula.results]
            wrong = difference(formula, inputs, scalars, [pairs[k][0] for k in places])
            return None if wrong is None else Finding(wrong, LAUNCHED)
        found = (unequal(node, y, x) for node, (x, y) in zip(graph.outputs, pairs))
        wrong = next(filter(None, found), None)
        return None if wrong is None else Finding(wrong, LAUNCHED)

    # --- the passes

    def _finding_of_passes(self, buffers: list[Any], scalars: list[Any]) -> Finding | None:
        """Return a change of the results by the passes, which must make none; looked for once."""
        if self._passes_are_right:
            return None
        try:
            return self._changed_by_a_pass(buffers, scalars)
        except (IndexError, RuntimeError):  # an index that only double precision makes wrong
            metrics.count("verify.passes_unjudged")
            return None

    def _changed_by_a_pass(self, buffers: list[Any], scalars: list[Any]) -> Finding | None:
        _, traced = self._stages[0]
        inputs = self._inputs(traced, buffers)
        formula = Formula(traced.outputs, inputs)
        exact = formula.values(inputs, scalars, rounded=False)
        sample = formula.values(inputs, scalars, Perturbation(0, in_double=True), rounded=False)

        def change(graph: Graph) -> Difference | None:
            others = dict(zip(traced.outputs, graph.outputs))
            other = Formula([others[node] for node in formula.results], inputs)
            by_node = dict(zip(other.results, other.values(inputs, scalars, rounded=False)))
            found = [by_node[others[node]] for node in formula.results]
            return far_apart(formula.results, exact, found, sample)

        if change(self._stages[-1][1]) is None:
            self._passes_are_right = True
            return None
        for name, graph in self._stages[1:]:
            wrong = change(graph)
            if wrong is not None:
                return Finding(wrong, f"is changed by the pass {name!r}, which may not change it")
        return None

    # --- the node of a kernel

    def _in_one_node(self, finding: Finding, scalars: list[Any]) -> Finding:
        """The first node of the kernel, if it is one's, that is wrong where each is kept apart."""
        formula = finding.formula
        if formula is None:
            return finding
        nodes = [n for n in formula.nodes if is_computed(n)]
        if len(nodes) < 2:
            return finding
        part, made = cut_out(formula.nodes, formula.operands, formula.scalars, nodes)
        values = [finding.known[n].contiguous() for n in formula.operands]
        judge = Judge(dict(zip(part.inputs, values)), scalars, {})
        apart = EveryNode(self._backend, part, self._device)
        apart.launch([self.upload(x, self._device) for x in values], scalars, judge)
        if judge.finding is None:
            return Finding(finding.difference, FUSED, formula, finding.known)
        was = {new: old for old, new in made.items()}
        wrong = judge.finding.difference
        known = {was[node]: value for node, value in judge.finding.known.items()}
        node = was[wrong.node]
        return Finding(replace(wrong, node=node), COMPUTED, Formula([node], known), known)
