"""From a graph to a native program for this machine's CPU: kernels that LLVM compiles, one call for many.

What no kernel computes yet runs through the reference backend's row, counted as `extern.python`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from math import prod
from typing import Any

import torch

from ltc import config
from ltc.backends.llvm.executable import LlvmComputation
from ltc.backends.llvm.plan import plan_of, stepped_plan_of
from ltc.backends.llvm.program_plan import ProgramPlan
from ltc.backends.llvm.resizable import ResizableProgram
from ltc.backends.llvm.schedule import ProgramStep, planned_steps, units_of
from ltc.backends.llvm.timed import ObservedLlvmComputation, TimedComputation
from ltc.ir import ops
from ltc.ir.graph import Graph, schedule, show
from ltc.ir.loop_nest import Affine, Guard, Kernel, Product, Unit, Value
from ltc.ir.node import Node, attr_text
from ltc.ir.tensor_type import dtype_name, type_text
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


AFTER_PASSES = ("kernels", "llvm", "assembly")
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
    """(stage, text) after each pass, then of AFTER_PASSES; made only as far as it is asked for.

    Args:
        donated: Positions of the inputs that may be written over.
    """
    for one in PASSES:
        graph = one.run(graph)
        yield one.name, show(*graph.outputs)
    steps = planned_steps(graph, donated)
    yield "kernels", units_text([step.unit for step in steps], graph.lines)
    yield "llvm", _of_each_kernel(steps, graph, lambda text: text)
    yield "assembly", _of_each_kernel(steps, graph, llvm_binding.assembly)


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


# --- stages as text ---------------------------------------------------------------------------------


def _of_each_kernel(steps: list[ProgramStep], graph: Graph, form: Callable[[str], str]) -> str:
    """The form of every kernel's text, equal ones once, behind the users' lines it computes."""
    lines: dict[str, dict[str, None]] = {}
    for step in steps:
        for code in step.codes:
            found = (graph.lines[node] for node in step.writes if node in graph.lines)
            lines.setdefault(code.text, {}).update(dict.fromkeys(found))
    return "\n".join(
        "".join(f"; {line}\n" for line in found) + form(text) for text, found in lines.items()
    )


# --- Kernels and products as text: what they loop over, what they load, compute and store --------


def units_text(units: list[Unit], lines: Mapping[Node, str]) -> str:
    """Units in the order in which they run, with the users' lines they come from.

    A buffer is called %0, %1, ... in the order of its first use.
    """
    names: dict[Node, str] = {}
    blocks = []
    for unit in units:
        if isinstance(unit, Kernel):
            shown = [f"loops over {_extents(unit.space)}", *_body(unit, names)]
            made = unit.writes()
        elif isinstance(unit, Product):
            shown = _product(unit, names)
            made = unit.writes()
        else:
            operands = " ".join(_name(n, names) for n in unit.inputs)
            shown = [f"{_name(unit, names)} = {unit.op} {operands}    {type_text(unit.type)}"]
            made = (unit,)
        found = dict.fromkeys(lines[node] for node in made if node in lines)
        blocks.append(
            "\n  ".join([shown[0] + "".join(f"    {line}" for line in found), *shown[1:]])
        )
    return "\n".join(blocks)


def _product(product: Product, names: dict[Node, str]) -> list[str]:
    operands = " ".join(
        f"{_name(access.node, names)}[{_form(access.offset)}]" for access in product.operands
    )
    head = f"{product.node.op} {operands}    {type_text(product.node.type)}"
    if product.epilogue is None:
        made = ", ".join(_name(node, names) for node in product.results if node is not None)
        return [f"{made} = {head}"]
    return [f"{_name(product.node, names)} = {head}", *_body(product.epilogue, names)]


def _body(kernel: Kernel, names: dict[Node, str]) -> list[str]:
    numbers: dict[Value, str] = {}
    rows = []
    if kernel.base is not None:
        rows.append(f"{_name(kernel.stores[0].node, names)} begins as {_name(kernel.base, names)}")
    for value in kernel.values():
        numbers[value] = f"v{len(numbers)}"
        operands = "".join(f" {numbers[x]}" for x in value.operands)
        what = _computed(value, names) + operands + _guards(value.guards)
        over = f" over i{kernel.depth}..." if value.kind == "reduced" else ""
        rows.append(f"{numbers[value]} = {what}{over}    {dtype_name(value.dtype)}")
    for store in kernel.stores:
        place = f"{_name(store.node, names)}[{_form(store.offset)}]"
        sets = f"{place} {store.sums}=" if store.sums else f"{place} ="
        rows.append(f"{sets} {numbers[store.value]}    {type_text(store.node.type)}")
    return rows


def _computed(value: Value, names: dict[Node, str]) -> str:
    if value.kind == "load":
        node, offset = value.data
        return f"load {_name(node, names)}[{_form(offset)}]"
    if value.kind == "lookup":
        node, offset, step, extent = value.data
        return f"look up {_name(node, names)}[{_form(offset)} + {step}*], of {extent}, at"
    if value.kind == "position":
        return _form(value.data)
    if value.kind == "random":
        return f"random bits at {_form(value.data[0])}"
    if value.kind == "constant":
        return str(value.data)
    if value.kind == "choose":
        return "choose"
    attrs = value.data.attrs if isinstance(value.data, Node) else value.data or ()
    attributes = "".join(f" {key}={attr_text(one)}" for key, one in attrs)
    return f"{value.op}{attributes}"


def _name(node: Node, names: dict[Node, str]) -> str:
    return names.setdefault(node, f"%{len(names)}")


def _extents(space: tuple[int, ...]) -> str:
    return " x ".join(map(str, space)) or "one point"


def _form(form: Affine) -> str:
    terms = [f"i{v}" if c == 1 else f"{c}*i{v}" for v, c in form.terms]
    if form.constant or not terms:
        terms.append(str(form.constant))
    return " + ".join(terms)


def _guards(guards: tuple[Guard, ...]) -> str:
    inside = [f"{guard.low} <= {_form(guard.form)} < {guard.high}" for guard in guards]
    return f" where {' and '.join(inside)}" if inside else ""
