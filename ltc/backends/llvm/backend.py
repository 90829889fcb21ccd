"""Graphs as native programs for this machine's CPU: kernels that LLVM compiles, one call for many.

What no kernel computes yet runs through the reference backend's row, counted as `extern.python`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict
from math import prod
from typing import Any

import torch

from ltc import config
from ltc.backends.eager import LOWERING, EagerBackend
from ltc.backends.interface import (
    BackendCapabilities,
    BackendImplInterface,
    Computation,
    DeviceInfo,
    NodeLowering,
    OneShotSums,
)  # fmt: skip
from ltc.backends.llvm import saved_program
from ltc.backends.llvm.executable import LlvmComputation
from ltc.backends.llvm.explain import AFTER_PASSES, explained
from ltc.backends.llvm.plan import plan_of, stepped_plan_of
from ltc.backends.llvm.resizable import ResizableProgram
from ltc.backends.llvm.schedule import units_of
from ltc.backends.llvm.timed import ObservedLlvmComputation, TimedComputation
from ltc.ir import ops
from ltc.ir.graph import Graph, Origin, schedule
from ltc.ir.loop_nest import Kernel, Product
from ltc.ir.node import Node
from ltc.llvm.compiler import llvm_binding
from ltc.llvm.compiler.object_loader import is_code_allowed
from ltc.llvm.native.kernel_cache import Loading, load
from ltc.llvm.native.machine_limits import limits
from ltc.llvm.native.runner import leave_processor
from ltc.llvm.ops.dispatch import can_multiply, isa, prefers_channels_last
from ltc.llvm.ops.one_shot_sync import is_possible
from ltc.passes import pipeline
from ltc.passes.layout import channels_last, layout, order_attention
from ltc.passes.match_attention import recognise_attention
from ltc.passes.narrow_dtypes import round_values
from ltc.passes.one_shot_all_reduce import one_shot_sums
from ltc.passes.pipeline import Pass
from ltc.passes.splits import split_concats, split_reductions
from ltc.support.process import processors
from ltc.support.sizes.extent import SizeTrace


def with_channels_last(graph: Graph) -> Graph:
    return channels_last(graph, prefers_channels_last)


def recognised(graph: Graph) -> Graph:
    return recognise_attention(graph, can_multiply)


# --- Narrow tensors stay narrow between kernels -----------------------------------------------


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


PASSES = (
    Pass("recognise", recognised, "attention that is written out makes no matrix of scores"),
    Pass("order", order_attention, "the results of attention are not copied before they are read"),
    Pass("channels_last", with_channels_last, "the lanes of convolutions are channels"),
    Pass("layout", layout, "values that are read transposed are made transposed"),
    Pass("split", split_reductions, "long sums have work for every thread, and stay accurate"),
    Pass("split_concats", split_concats, "no kernel chooses among more parts than is quick"),
    Pass("narrow_scratch", narrow_scratch, "narrow tensors stay narrow between kernels"),
    Pass("one_shot_sums", one_shot_sums, "sums over few replicas are made where they are needed"),
)


def prepared(graph: Graph) -> Graph:
    """The graph after the passes that only this backend wants."""
    return pipeline.run(graph, PASSES)


class SavedPrograms:
    """The `KeepsPrograms` of backends/capabilities.py: plans and objects in the disk cache."""

    def remember(self, key: str, computation: LlvmComputation) -> None:
        saved_program.keep(key, computation.plan)

    def recall(self, key: str, origin_of: Callable[[int], Origin]) -> LlvmComputation | None:
        found = saved_program.find(key, origin_of)
        return None if found is None else LlvmComputation(*found)

    def remember_resizable(self, key: str, program: ResizableProgram) -> None:
        saved_program.keep_resizable(key, program)

    def recall_resizable(
        self, key: str, origin_of: Callable[[int], Origin]
    ) -> ResizableProgram | None:
        return saved_program.find_resizable(key, origin_of)


# A sum of few is added up by everyone: each more is one more operand to read for all of them.
ONE_SHOT_SUMS = OneShotSums(
    dtypes=frozenset({torch.float32, torch.float64, torch.int32, torch.int64}), most_members=4
)


class LlvmBackend:
    """Compiles graphs for this machine's CPU."""

    name = "llvm"
    computation: type[Computation] = LlvmComputation

    def __init__(self) -> None:
        # Every op runs: what has no kernel goes through the reference.
        self.lowering = NodeLowering(LOWERING.table)
        self.capabilities = BackendCapabilities(
            resizable=self.resizable,
            leave_processor=leave_processor,
            programs=SavedPrograms(),
            observed=self.observed,
            stages=(*[one.name for one in PASSES], *AFTER_PASSES),
            explain=self.explain,
            any_device=True,
            host_tensors=True,
            one_shot_sums=ONE_SHOT_SUMS if is_possible() else None,
            timed=self.timed,
            limits=lambda: asdict(limits()),
            describe=processor,
        )

    def devices(self) -> tuple[DeviceInfo, ...]:
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return (DeviceInfo("CPU", processors.name(), memory_bytes),)

    def compile(self, graph: Graph, device: int, donated: frozenset[int]) -> LlvmComputation:
        self._dump(graph, donated)
        graph = prepared(graph)
        with Loading() as loading:
            loading.begin_runner()
            plan, texts = plan_of(graph, donated, loading.begin, config.value("LTC_CHECK"))
            kernels = loading.load(texts)
        return LlvmComputation(plan, kernels)

    def resizable(
        self, graph: Graph, device: int, donated: frozenset[int], trace: SizeTrace
    ) -> ResizableProgram:
        graph = prepared(graph)
        with Loading() as loading:
            loading.begin_runner()
            plan, texts = plan_of(graph, donated, loading.begin, config.value("LTC_CHECK"))
            kernels = loading.load(texts)
        return ResizableProgram(trace, plan, kernels)

    def observed(
        self, graph: Graph, device: int, donated: frozenset[int]
    ) -> ObservedLlvmComputation:
        stages = []
        for one in PASSES:
            graph = one.run(graph)
            stages.append((one.name, graph))
        stepped = stepped_plan_of(graph, donated)
        return ObservedLlvmComputation(stepped, load(stepped.texts), stages)

    def timed(self, computation: Any) -> TimedComputation | None:
        if not isinstance(computation, LlvmComputation):
            return None  # it stands around one, and does more
        return TimedComputation(computation.plan_at_sizes, computation.loaded, prepared)

    def explain(
        self, graph: Graph, donated: frozenset[int] = frozenset()
    ) -> Iterator[tuple[str, str]]:
        """(stage, text) for each of `stages`, made only as far as it is asked for."""
        return explained(graph, PASSES, donated)

    def _dump(self, graph: Graph, donated: frozenset[int]) -> None:
        wanted = pipeline.dumped().intersection(AFTER_PASSES)
        for stage, text in self.explain(graph, donated) if wanted else ():
            if stage in wanted:
                print(f"# {stage}\n{text}")

    def prepare_to_exit(self) -> None:
        """Nothing runs between launches."""


def processor() -> str:
    """The processor's name, and the instructions that kernels are made of."""
    host = llvm_binding.host()
    return f"{host.cpu or 'unknown to LLVM'}, kernels for {isa().name} (LLVM {host.llvm})"


def llvm_or_reference() -> BackendImplInterface:
    """Return the LLVM backend; warn and return the reference where no memory may become code."""
    if is_code_allowed():
        return LlvmBackend()
    warnings.warn(
        "This system forbids executable memory, as hardened systems do, so ltc cannot run compiled "
        "programs. It runs PyTorch's own CPU kernels, one call at a time, which is slower. Set "
        "LTC_BACKEND=eager to choose this without the warning.",
        stacklevel=2,
    )
    return EagerBackend()
