"""From a graph to a native program for this machine's CPU: kernels that LLVM compiles, one call for many.

What no kernel computes yet runs through the reference backend's row, counted as `extern.python`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from math import prod
from typing import Any

import torch

from ltc import config
from ltc.backends.llvm.executable import LlvmComputation
from ltc.backends.llvm.explain import AFTER_PASSES, explained
from ltc.backends.llvm.plan import plan_of, stepped_plan_of
from ltc.backends.llvm.program_plan import ProgramPlan
from ltc.backends.llvm.resizable import ResizableProgram
from ltc.backends.llvm.schedule import units_of
from ltc.backends.llvm.timed import ObservedLlvmComputation, TimedComputation
from ltc.ir import ops
from ltc.ir.graph import Graph, schedule
from ltc.ir.loop_nest import Kernel, Product
from ltc.ir.node import Node
from ltc.llvm.compiler import llvm_binding
from ltc.llvm.native.kernel_cache import LoadedKernel, Loading, load
from ltc.llvm.native.machine_limits import limits
from ltc.llvm.ops.dispatch import can_multiply, isa, prefers_channels_last
from ltc.passes import pipeline
from ltc.passes.layout import channels_last, layout, order_attention
from ltc.passes.match_attention import recognise_attention
from ltc.passes.narrow_dtypes import round_values
from ltc.passes.one_shot_all_reduce import one_shot_sums
from ltc.passes.pipeline import Pass
from ltc.passes.splits import split_concats, split_reductions
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


def compiled(graph: Graph, donated: frozenset[int]) -> LlvmComputation:
    _dump(graph, donated)
    return LlvmComputation(*_planned(prepared(graph), donated))


def resizable(graph: Graph, donated: frozenset[int], trace: SizeTrace) -> ResizableProgram:
    return ResizableProgram(trace, *_planned(prepared(graph), donated))


def _planned(
    graph: Graph, donated: frozenset[int]
) -> tuple[ProgramPlan, Mapping[str, LoadedKernel]]:
    with Loading() as loading:
        loading.begin_runner()
        plan, texts = plan_of(graph, donated, loading.begin, config.value("LTC_CHECK"))
        return plan, loading.load(texts)


def observed(graph: Graph, donated: frozenset[int]) -> ObservedLlvmComputation:
    stages = []
    for one in PASSES:
        graph = one.run(graph)
        stages.append((one.name, graph))
    stepped = stepped_plan_of(graph, donated)
    return ObservedLlvmComputation(stepped, load(stepped.texts), stages)


def timed(computation: Any) -> TimedComputation | None:
    if not isinstance(computation, LlvmComputation):
        return None  # it stands around one, and does more
    return TimedComputation(computation.plan_at_sizes, computation.loaded, prepared)


def explain(graph: Graph, donated: frozenset[int] = frozenset()) -> Iterator[tuple[str, str]]:
    """(stage, text) after each pass, and of what comes behind them, made only as far as it is asked for."""
    return explained(graph, PASSES, donated)


def _dump(graph: Graph, donated: frozenset[int]) -> None:
    wanted = pipeline.dumped().intersection(AFTER_PASSES)
    for stage, text in explain(graph, donated) if wanted else ():
        if stage in wanted:
            print(f"# {stage}\n{text}")


def machine() -> dict[str, Any]:
    """Return the most that this machine does: see machine_limits.py."""
    return asdict(limits())


def processor() -> str:
    """The processor's name, and the instructions that kernels are made of."""
    host = llvm_binding.host()
    return f"{host.cpu or 'unknown to LLVM'}, kernels for {isa().name} (LLVM {host.llvm})"
