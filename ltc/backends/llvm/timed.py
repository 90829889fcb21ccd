"""Launches whose kernels are looked at: timed, or run one by one with all that they leave in memory.

A program whose kernels are timed is the same one, which notes when each of its kernels is over.

The times stand behind the rest of the frame: of each run of kernels when it began and when each was
over, of each call of the reference when it began and ended, in the order of the plan.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import torch

from ltc import config
from ltc.backends.capabilities import FrameLaunch, KernelFacts
from ltc.backends.interface import Observer
from ltc.backends.llvm.executable import LlvmComputation, words_of_stamps
from ltc.backends.llvm.plan import SteppedPlan, kernels_of
from ltc.backends.llvm.program_plan import PlannedRun, ProgramPlan, ReferenceCall
from ltc.backends.llvm.schedule import ProgramStep, planned_steps
from ltc.backends.llvm.workspace import WorkBlock
from ltc.ir import ops
from ltc.ir.graph import Graph, Origin
from ltc.ir.loop_nest import READS, Kernel, Product
from ltc.ir.node import Node
from ltc.ir.tensor_type import TensorType
from ltc.llvm.emit.kernel_code import KernelCode
from ltc.llvm.native.kernel_cache import LoadedKernel, kernel_name
from ltc.llvm.native.kernel_run import WORD

Told = Callable[[bytes], object]


class TimedComputation:
    """A program that tells the times of its launches: the TimedLaunches of backends/capabilities.py."""

    def __init__(
        self,
        plan: ProgramPlan,
        kernels: Mapping[str, LoadedKernel],
        passes: Callable[[Graph], Graph],
    ) -> None:
        """`passes`: what the backend makes of a graph before it plans."""
        self._plan, self._kernels, self._passes = plan, kernels, passes
        self._facts: dict[frozenset[int], list[KernelFacts] | None] = {}
        words = [words_of_stamps(run) for run in plan.runs]
        self._first = list(itertools.accumulate(words, initial=plan.frame // WORD))
        self._stamps = slice(plan.frame, WORD * self._first[-1])
        longer = replace(plan, frame=self._stamps.stop, called_products=0)  # they were counted
        self._computation = LlvmComputation(longer, kernels, plan.frame // WORD)
        self._shown: tuple[LlvmComputation, list[str]] | None = None
        self.block_bytes = plan.block

    def in_frame(self) -> FrameLaunch | None:
        return self._computation.in_frame()

    def stamps_in(self, frame: int) -> bytes:
        return ctypes.string_at(frame + self._stamps.start, self._stamps.stop - self._stamps.start)

    def launch_timed(self, buffers: list[Any], scalars: list[Any], told: Told) -> list[Any]:
        return self._computation.launch(buffers, scalars, partial(self._noted, told))

    @contextmanager
    def _noted(self, told: Told, number: int, frame: WorkBlock, _: object) -> Iterator[None]:
        """The block that a run is in: at the end, or where the run fails, the times are told."""
        if number == 0:
            frame.memory[self._stamps] = bytes(self._stamps.stop - self._stamps.start)
        begin, is_last = time.monotonic_ns(), True
        try:
            yield
            is_last = number + 1 == len(self._plan.runs)
        finally:
            if isinstance(self._plan.runs[number], ReferenceCall):
                place = WORD * self._first[number]
                struct.pack_into("=2q", frame.memory, place, begin, time.monotonic_ns())
            if is_last:
                told(bytes(frame.memory[self._stamps]))

    def shown(
        self,
        graph_of: Callable[[], Graph] | None,
        donated: frozenset[int],
        region: Callable[[str], Any],
    ) -> Callable[[list[Any], list[Any]], list[Any]]:
        if self._shown is None:
            runs = [one for run in self._plan.runs for one in _one_by_one(run)]
            facts = self.kernels(graph_of, donated)
            names = [""] * len(runs) if facts is None else [f" {one.name}" for one in facts]
            alone = LlvmComputation(
                replace(self._plan, runs=tuple(runs), called_products=0), self._kernels
            )
            self._shown = alone, names
        computation, names = self._shown

        def in_region(number: int, *_: object) -> AbstractContextManager[Any]:
            block: AbstractContextManager[Any] = region(f"ltc::kernel{names[number]}")
            return block

        return partial(computation.launch, around=in_region)

    def times(self, stamps: bytes) -> Iterator[tuple[int, int]]:
        words = struct.unpack(f"={len(stamps) // WORD}q", stamps)
        for first, last in itertools.pairwise(place - self._first[0] for place in self._first):
            pairs = itertools.pairwise(words[first:last])
            yield from (pair for pair in pairs if pair[1])

    def kernels(
        self, graph_of: Callable[[], Graph] | None, donated: frozenset[int]
    ) -> list[KernelFacts] | None:
        if graph_of is None:
            return None
        if donated not in self._facts:
            checked = self._plan.memory is not None
            with config.override(LTC_DUMP=""):  # the stages have been printed
                graph = self._passes(graph_of())
            self._facts[donated] = facts_of_program(graph, donated, checked, self._plan.runs)
        return self._facts[donated]

    def values_at_peak(
        self, graph_of: Callable[[], Graph], donated: frozenset[int]
    ) -> list[tuple[TensorType, Origin]]:
        """Return the values inside the program at the step where they are largest together.

        Each with the call that it comes from; the largest first.
        """
        with config.override(LTC_DUMP=""):
            graph = self._passes(graph_of())
        alive = _largest_moment(graph, planned_steps(graph, donated))
        found = [
            (node.type, graph.origins.get(node, Origin("", "")))
            for node in alive
            if isinstance(node.type, TensorType)
        ]
        return sorted(found, key=lambda one: -_bytes_of(one[0]))


def _largest_moment(graph: Graph, steps: Sequence[ProgramStep]) -> list[Node]:
    """Return the values that no caller gets, at the step where they are largest together."""
    outside = {*graph.outputs, *(node for step in steps for node in step.reads if not node.inputs)}
    last_reader = {node: step for step in steps for node in step.reads}
    alive: dict[Node, None] = {}
    most, found = 0, list[Node]()
    for step in steps:
        alive |= dict.fromkeys(node for node in step.writes if node not in outside)
        size = sum(_bytes_of(node.type) for node in alive)
        if size > most:
            most, found = size, list(alive)
        for node in [one for one in alive if last_reader.get(one) in (step, None)]:
            del alive[node]
    return found


def _bytes_of(type: Any) -> int:
    if not isinstance(type, TensorType):
        return 0
    return prod(type.shape) * type.dtype.itemsize


def _one_by_one(run: PlannedRun) -> list[PlannedRun]:
    """A run for each kernel of it."""
    return [run] if isinstance(run, ReferenceCall) else [(call,) for call in run]


# --- The facts of each kernel of a compiled program, found by planning its graph again -----------

MOST_NODES = 4096  # that one kernel is looked through for: it stands for a few dozen


def facts_of_program(
    graph: Graph, donated: frozenset[int], checked: bool, runs: Sequence[PlannedRun]
) -> list[KernelFacts] | None:
    """Return the facts of each call of `runs`, in order; None if these are of another graph."""
    planned = list(kernels_of(graph, donated, checked))
    names = [name for run in runs for name in _names(run)]
    if [None if code is None else kernel_name(code.text) for _, code in planned] != names:
        return None
    last = {id(step): _main_code(step) for step, _ in planned}
    return [_facts(graph, step, code, last[id(step)]) for step, code in planned]


def _names(run: PlannedRun) -> Iterable[str | None]:
    return (None,) if isinstance(run, ReferenceCall) else (call.kernel for call in run)


def _main_code(step: ProgramStep) -> KernelCode | None:
    """Return the main kernel of a step with several: the others pack, or copy."""
    return max(step.codes, key=lambda code: len(code.text), default=None)


def _facts(
    graph: Graph, step: ProgramStep, code: KernelCode | None, main: KernelCode | None
) -> KernelFacts:
    nodes = _nodes_of(step)
    origins = [graph.origins[node] for node in nodes if node in graph.origins]
    first = origins[0] if origins else Origin("", "")
    modules = _unique(origin.module_path for origin in origins)
    name = summary(step)
    is_main = code is main
    if code is not None and len(step.codes) > 1 and not is_main:
        name = f"part {step.codes.index(code) + 1} of {name}"
    reads, writes = _touched(step, code)
    return KernelFacts(
        name=name,
        ops=_unique(origin.overload for origin in origins if origin.overload != "ltc::input"),
        line=first.line,
        forward=first.forward,
        lines=_unique(origin.forward or origin.line for origin in origins),
        module=next(iter(modules), ""),
        modules=modules,
        read_bytes=reads,
        written_bytes=writes,
        multiply_adds=multiply_adds(step.unit) if is_main else 0,
        operations=_operations(step.unit) if is_main else 0,
        tasks=1 if code is None else code.tasks,
        is_double=any(_itemsize(node) == 8 for node in step.writes),
    )


def _unique(words: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(word for word in words if word))


# --- what a kernel stands for --------------------------------------------------------------------


def _nodes_of(step: ProgramStep) -> list[Node]:
    """The nodes that the step computes, the main one first."""
    first = step.unit.node if isinstance(step.unit, Product) else None
    found = dict.fromkeys([] if first is None else [first])
    waiting = [*step.writes]
    ends = set(step.reads)
    while waiting and len(found) < MOST_NODES:
        node = waiting.pop()
        if node in found and node is not first:
            continue
        found[node] = None
        if node is not first:
            waiting.extend(n for n in node.inputs if n not in ends and n.op is not ops.INPUT)
    if first is not None:
        waiting = [n for n in first.inputs if n not in ends and n.op is not ops.INPUT]
        found.update(dict.fromkeys(waiting))
    return list(found)


def summary(step: ProgramStep) -> str:
    """ "matmul [64, 32] [32, 10] then [64 10] 2->1 add maximum": what it computes, of what shapes."""
    unit = step.unit
    if isinstance(unit, Product):
        operands = " ".join(_shape_text(node) for node in unit.node.inputs)
        follows = f" then {nest_text(unit.epilogue)}" if unit.epilogue else ""
        return f"{unit.node.op.name} {operands}{follows}"
    if isinstance(unit, Kernel):
        return nest_text(unit)
    operands = " ".join(_shape_text(node) for node in unit.inputs)
    name = unit.attr("template").overload if unit.op is ops.EXTERN else unit.op.name
    return f"{name} {operands}, by PyTorch"


def _shape_text(node: Node) -> str:
    return str(list(node.shape)) if isinstance(node.type, TensorType) else "[...]"


def nest_text(kernel: Kernel) -> str:
    """The space of a loop nest, a bar before what it reduces, and how often it does what."""
    space = [str(extent) for extent in kernel.space]
    if kernel.depth < len(space):
        space.insert(kernel.depth, "|")
    did = Counter(
        value.op.name if value.op else value.kind
        for value in kernel.values()
        if value.kind not in ("constant", "load")
    )
    what = " ".join(name if n == 1 else f"{n}*{name}" for name, n in did.most_common(9))
    sides = f"{len(kernel.reads())}->{len(kernel.writes())}"
    return f"[{' '.join(space)}] {sides} {what or 'copy'}"


# --- how much it does ----------------------------------------------------------------------------


def _touched(step: ProgramStep, code: KernelCode | None) -> tuple[int, int]:
    """Bytes that it reads and writes, each element once, as far as its loops reach."""
    made = set(step.writes)
    if code is None:
        return sum(map(_nbytes, step.reads)), sum(map(_nbytes, made))
    most = _reached(step)
    nodes = dict.fromkeys(code.nodes)
    given = [node for node in nodes if node not in made and _is_memory(node)]
    return (
        sum(min(_nbytes(node), most.get(node, _nbytes(node))) for node in given),
        sum(_nbytes(node) for node in nodes if node in made),
    )


def _is_memory(node: Any) -> bool:
    return isinstance(node, Node) or hasattr(node, "nbytes")


def _reached(step: ProgramStep) -> Mapping[Node, int]:
    """Return the most bytes that each load of a loop nest can reach."""
    if not isinstance(step.unit, Kernel):
        return {}
    loads = Counter(v.data[0] for v in step.unit.values() if v.kind in READS)
    points = prod(step.unit.space)
    return {node: count * points * _itemsize(node) for node, count in loads.items()}


def _itemsize(node: Node) -> int:
    return node.type.dtype.itemsize if isinstance(node.type, TensorType) else 0


def _nbytes(node: Any) -> int:
    if not isinstance(node, Node):
        return int(getattr(node, "nbytes", 0))
    return node.size * _itemsize(node) if isinstance(node.type, TensorType) else 0


def _operations(unit: Any) -> int:
    """One for each elementwise or reducing operation at each point."""
    nest = unit.epilogue if isinstance(unit, Product) else unit
    if isinstance(nest, Kernel):
        return prod(nest.space) * sum(value.op is not None for value in nest.values())
    if isinstance(unit, Node) and isinstance(unit.type, TensorType):
        return unit.size
    return 0


def multiply_adds(unit: Any) -> int:
    """Return the multiply-adds of a product, by its shapes; 0 of any other unit."""
    node = unit.node if isinstance(unit, Product) else unit
    count = _MULTIPLY_ADDS.get(node.op) if isinstance(node, Node) else None
    return 0 if count is None else int(count(node))


def _of_matmul(node: Node) -> int:
    return node.size * node.inputs[0].shape[-1]


def _of_convolution(node: Node) -> int:
    return node.size * prod(node.inputs[1].shape[1:])


def _of_input_gradient(node: Node) -> int:
    return node.inputs[0].size * prod(node.inputs[1].shape[1:])


def _of_weight_gradient(node: Node) -> int:
    return node.inputs[0].size * prod(node.shape[1:])


def _of_attention(operands: Sequence[Node], causal: bool, products: int) -> int:
    """`operands`: query, key, value; `products`: how many there are, of one's size or the other's."""
    query, key, value = operands
    scores = prod(query.shape[:-1]) * key.shape[-2]
    every = scores * products * (query.shape[-1] + value.shape[-1]) // 2
    return every // 2 if causal else every


def _of_attention_forward(node: Node) -> int:
    return _of_attention(node.inputs[:3], node.attr("causal"), 2)


def _of_attention_gradient(node: Node) -> int:
    return _of_attention(node.inputs[1:4], node.attr("causal"), 5)


def _of_recurrence(node: Node) -> int:
    return node.inputs[0].shape[0] * prod(node.inputs[1].shape)


def _of_recurrence_gradient(node: Node) -> int:
    return node.inputs[0].shape[0] * prod(node.inputs[2].shape)


_MULTIPLY_ADDS: dict[ops.Op, Callable[[Node], int]] = {
    ops.MATMUL: _of_matmul,
    ops.CONVOLUTION: _of_convolution,
    ops.CONVOLUTION_INPUT_GRADIENT: _of_input_gradient,
    ops.CONVOLUTION_WEIGHT_GRADIENT: _of_weight_gradient,
    ops.ATTENTION: _of_attention_forward,
    ops.ATTENTION_GRADIENT: _of_attention_gradient,
    ops.RECURRENCE: _of_recurrence,
    ops.RECURRENCE_GRADIENT: _of_recurrence_gradient,
}


# --- Launches kernel by kernel ----------------------------------------------------------------


_GIVEN = frozenset({ops.CONSTANT, ops.SCALAR})  # what nothing has computed


class ObservedLlvmComputation:
    """See backends/interface.py's ObservedComputation."""

    def __init__(
        self,
        stepped: SteppedPlan,
        kernels: Mapping[str, LoadedKernel],
        stages: Sequence[tuple[str, Graph]],
    ) -> None:
        self.stages = stages
        self._stepped = stepped
        self._computation = LlvmComputation(stepped.plan, kernels)

    def launch(self, buffers: list[Any], scalars: list[Any], observer: Observer) -> list[Any]:
        return self._computation.launch(buffers, scalars, partial(self._observed, observer))

    @contextmanager
    def _observed(
        self, observer: Observer, number: int, frame: WorkBlock, values: list[Any]
    ) -> Iterator[None]:
        """The block that a step is in."""
        step = self._stepped.steps[number]
        for node in filter(self._is_shown, step.reads):
            observer.reads(node, self._value(node, frame, values))
        yield
        shown = step.writes if not step.is_native else filter(self._is_shown, step.writes)
        made = {node: self._value(node, frame, values) for node in shown}
        observer.makes(made, is_reference=not step.is_native)

    def _is_shown(self, node: Node) -> bool:
        is_there = node in self._stepped.place or node in self._stepped.value
        return is_there and node.op not in _GIVEN and isinstance(node.type, TensorType)

    def _value(self, node: Node, frame: WorkBlock, values: list[Any]) -> Any:
        number = self._stepped.value.get(node, -1)
        if number >= 0 and values[number] is not None:
            return values[number]
        return self._in_memory(node, frame)

    def _in_memory(self, node: Node, frame: WorkBlock) -> torch.Tensor:
        word, offset = self._stepped.place[node]
        (address,) = struct.unpack_from("=q", frame.memory, WORD * word)
        nbytes = node.size * node.dtype.itemsize
        if not nbytes:
            return torch.empty(node.shape, dtype=node.dtype)
        memory = (ctypes.c_uint8 * nbytes).from_address(address + offset)
        return torch.frombuffer(memory, dtype=node.dtype).view(node.shape)
