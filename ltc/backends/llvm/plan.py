"""From the steps of a graph to its plan: the place of every value, and the kernels in their order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from ltc.backends.llvm.checked_steps import CheckedSteps
from ltc.backends.llvm.liveness import Lifetimes
from ltc.backends.llvm.program_plan import (
    ALIAS,
    COPIED,
    GUARD_BYTES,
    ITSELF,
    OWN_VALUES,
    OWNED,
    FailedCheck,
    InBlock,
    PlannedCall,
    PlannedRun,
    PlannedSum,
    PlannedSums,
    ProgramPlan,
    ReferenceCall,
)
from ltc.backends.llvm.scalar_arguments import word_places
from ltc.backends.llvm.schedule import ProgramStep, memory_of, planned_steps
from ltc.ir import ops
from ltc.ir.graph import Graph
from ltc.ir.loop_nest import Product
from ltc.ir.node import Node
from ltc.ir.one_shot import is_one_shot, sent_with
from ltc.ir.tensor_type import TensorType
from ltc.llvm.emit.kernel_code import KernelCode
from ltc.llvm.native.kernel_cache import kernel_name
from ltc.llvm.native.kernel_run import WORD, Fault
from ltc.llvm.ops.memory_checks import FRAME, ROW_WORDS
from ltc.llvm.ops.one_shot_sync import MEMBERS, OWN, Words, word_count
from ltc.passes import memory_planner
from ltc.passes.memory_planner import ALIGNMENT

SHORT_LIVES = 32  # a program has so many one after the other: what lives longer left the caches


def plan_of(
    graph: Graph, donated: frozenset[int], written: Callable[[str], None] = lambda text: None,
    checked: bool = False,
) -> tuple[ProgramPlan, dict[str, str]]:  # fmt: skip
    """The program of a graph, and the text of each of its kernels by name.

    Args:
        donated: Positions of the inputs that may be written over.
        written: Is told each text of the program as soon as it is there.
        checked: True if every step looks at what its kernels do to memory.
    """
    planner = _Planner(graph, planned_steps(graph, donated, written), donated, checked)
    return planner.plan(), planner.texts


def kernels_of(
    graph: Graph, donated: frozenset[int], checked: bool
) -> Iterator[tuple[ProgramStep, KernelCode | None]]:
    """Give the kernel of each call of that program's runs, in order; None for the reference's."""
    planner = _Planner(graph, planned_steps(graph, donated), donated, checked)
    planner.plan()
    for step in planner._steps:
        yield from ((step, code) for code in (step.codes if step.is_native else (None,)))


@dataclass(frozen=True)
class SteppedPlan:
    """The same program with a run for each step.

    Attributes:
        steps: The step of each run.
        place: The place of a node's value: the number of the word in the frame that holds an
            address, and the bytes to add.
        value: The number of a value that the reference reads or makes, as a tensor.
    """

    plan: ProgramPlan
    texts: dict[str, str]
    steps: tuple[ProgramStep, ...]
    place: Mapping[Any, tuple[int, int]]
    value: Mapping[Node, int]


def stepped_plan_of(graph: Graph, donated: frozenset[int]) -> SteppedPlan:
    """Plan as `plan_of` does, for observed launches."""
    return _Planner(graph, planned_steps(graph, donated), donated, checked=False).stepped()


class _Planner:
    """The state of planning: `_place` has the buffer of each node: (value, offset)."""

    def __init__(
        self, graph: Graph, steps: list[ProgramStep], donated: frozenset[int], checked: bool
    ) -> None:
        self.texts: dict[str, str] = {}
        self._checked = checked
        self._checks: CheckedSteps | None = None
        self._names: dict[str, str] = {}  # of texts
        self._graph, self._steps = graph, steps
        self._given_up = {n for n in graph.inputs if n.attr("index") in donated}
        self._shares = memory_of(steps)
        self._place: dict[Any, tuple[int, int]] = {}
        self._sums = SumPlaces(steps)
        self._number: dict[Node, int] = {}  # of a node's value as a tensor
        native = [step for step in steps if step.is_native]
        self._by_kernels = {n for s in native for n in s.reads}
        self._faults = _faults_of(native)
        self._by_reference = {n for s in steps if not s.is_native for n in s.reads}
        self._by_reference.update(graph.outputs)
        self._by_reference.update(n for f in self._faults if not f.error for n in f.node.inputs)

    def plan(self) -> ProgramPlan:
        self._place_inputs_and_outputs()
        self._place_constants()
        self._place_scalars()
        self._place.update(self._sums.places(0, self._frame_value))  # known in `_place_block`
        self._number_results()
        self._place_block()
        self._place_frame()
        runs = tuple(self._runs())
        return ProgramPlan(
            tuple(n.attr("index") for n in self._inputs),
            tuple((n.shape, n.dtype) for n in self._made),
            self._values,
            tuple((n, self._place[n][1]) for n in self._constants),
            tuple(self._fixed),
            tuple((n.attr("slot"), n.dtype) for n in self._cells),
            tuple(self._scalars),
            tuple(self._check(fault) for fault in self._faults),
            max((_words(run) for run in runs), default=0),
            self._frame_bytes,
            self._block_bytes,
            tuple(self._in_block),
            runs,
            tuple(self._outputs()),
            self._sums.planned,
            self._checks.table(self._place) if self._checks is not None else None,
            sum(code.is_call for step in self._steps for code in step.codes),
        )

    def stepped(self) -> SteppedPlan:
        plan = replace(self.plan(), runs=tuple(self._run_of_each_step()))
        return SteppedPlan(plan, self.texts, tuple(self._steps), self._place, self._number)

    # --- where things are ------------------------------------------------------------------------

    def _place_inputs_and_outputs(self) -> None:
        used = {n for s in self._steps for n in s.reads} | self._by_reference
        self._inputs = [n for n in self._graph.inputs if n in used]
        over = {n: t for s in self._steps for n, t in s.overwrites.items()}
        stored = {n for s in self._steps if s.is_native for n in s.writes}
        outputs = dict.fromkeys(self._graph.outputs)
        self._made = [n for n in outputs if n in stored and n not in over]
        for number, node in enumerate((*self._inputs, *self._made)):
            self._place[node], self._number[node] = (number, 0), number
        for node, target in over.items():
            self._place[node] = self._place[target]
            self._number[node] = self._number[target]
        count = len(self._inputs) + len(self._made)
        self._values = count + OWN_VALUES
        own = range(count, self._values)
        self._frame_value, self._constants_value, self._nothing, self._block_value = own

    def _place_constants(self) -> None:
        """Constants that kernels read lie in one tensor; the reference has each as its own."""
        leaves = dict.fromkeys(n for s in self._steps for n in s.reads)
        leaves.update(dict.fromkeys(n for n in self._by_reference))
        constants = [n for n in leaves if n.op is ops.CONSTANT]
        self._constants = [n for n in constants if n in self._by_kernels]
        for k, node in enumerate(self._constants):
            self._place[node] = (self._constants_value, ALIGNMENT * k)
        self._fixed = [(self._new_value(n), n) for n in constants if n in self._by_reference]

    def _place_scalars(self) -> None:
        scalars = self._graph.scalars
        self._cells = [n for n in scalars if n in self._by_kernels]
        for k, node in enumerate(self._cells):
            self._place[node] = (self._frame_value, k)  # its word: `_place_frame` adds the first
        self._scalars = [
            (self._new_value(n), n.attr("slot"), n.dtype)
            for n in scalars
            if n in self._by_reference
        ]

    def _number_results(self) -> None:
        """Values of their own for what the reference makes."""
        for step in self._steps:
            if isinstance(step.unit, Node):
                self._place[step.unit] = (self._new_value(step.unit), 0)

    def _new_value(self, node: Node) -> int:
        number = self._number[node] = self._values
        self._values += 1
        return number

    def _place_block(self) -> None:
        """Place kernels' inner results: in the block, or in outputs that are filled later."""
        long = max(1, len(self._steps) // SHORT_LIVES)
        lives = Lifetimes(self._steps, self._graph, self._shares, self._place, self._by_reference)
        values = lives.all()
        if self._checked:
            values.append(self._check_memory(lives))
        places, self._block_bytes = memory_planner.plan(
            values, lives.hosts(self._made), long, GUARD_BYTES if self._checked else 0
        )
        places.update({node: places[other] for node, other in lives.over.items()})
        in_block = [n for n in places if isinstance(n, Node) and n in self._by_reference]
        numbers = [self._new_value(n) for n in in_block]
        for name, (host, offset) in places.items():
            value = self._number[host] if isinstance(host, Node) else self._block_value
            self._place[name] = (value, offset)
        self._in_block = [(number, self._there(n)) for number, n in zip(numbers, in_block)]

    def _place_frame(self) -> None:
        """Place the words that kernels read in the frame; called when the number of values is
        known.
        """
        types = [node.dtype for node in self._cells]
        *words_of_cells, first_sum = word_places(types, self._values)
        first_check = first_sum + self._sums.planned.words
        for word, node in zip(words_of_cells, self._cells):
            self._place[node] = (self._frame_value, WORD * word)
        for k, fault in enumerate(self._faults):
            self._place[fault] = (self._frame_value, WORD * (first_check + k))
        self._place.update(self._sums.places(first_sum, self._frame_value))
        words = first_check + len(self._faults) + self._most_arguments()
        self._frame_bytes = WORD * words

    def _check_memory(self, lives: Lifetimes) -> memory_planner.Lifetime:
        """The steps check what they do; what they need in the block for it."""
        checks = CheckedSteps(self._steps, lives, self._made, self._graph.origins)
        self._checks = checks
        self._faults = _faults_of(self._steps)
        self._place[FRAME] = (self._frame_value, 0)
        first = ALIGNMENT * len(self._constants)
        for rows in checks.parts:
            place = first + WORD * ROW_WORDS * rows.first
            self._place[rows] = (self._constants_value, place)
        room = checks.room
        return memory_planner.Lifetime(room, room.nbytes, 0, len(self._steps), in_block=True)

    def _there(self, node: Node) -> InBlock:
        return InBlock(self._place[node][1], node.dtype, node.shape)

    def _most_arguments(self) -> int:
        most = count = 0
        for step in self._steps:
            words = sum(len(c.nodes) + len(c.numbers) for c in step.codes)
            count = count + words if step.is_native else 0
            most = max(most, count)
        return most

    # --- what runs -------------------------------------------------------------------------------

    def _runs(self) -> Iterable[PlannedRun]:
        waiting: list[PlannedCall] = []
        for run in self._run_of_each_step():
            if not isinstance(run, ReferenceCall):
                waiting.extend(run)
                continue
            if waiting:
                yield tuple(waiting)
                waiting.clear()
            yield run
        if waiting:
            yield tuple(waiting)

    def _run_of_each_step(self) -> Iterator[PlannedRun]:
        dead = self._dead_after()
        for step in self._steps:
            node = step.unit
            if not isinstance(node, Node):
                yield tuple(self._calls(step))
                continue
            yield ReferenceCall(
                node, tuple(self._number[n] for n in node.inputs), self._number[node],
                node in self._by_kernels, tuple(self._number[n] for n in dead[step]),
                self._graph.origins.get(node),
            )  # fmt: skip

    def _calls(self, step: ProgramStep) -> Iterable[PlannedCall]:
        overwrites = tuple(target.attr("index") for target in step.overwrites.values())
        for code in step.codes:
            shifts = code.shifts + (0,) * (len(code.nodes) - len(code.shifts))
            places = [self._place[node] for node in code.nodes]
            arguments: list[int] = []
            for (value, offset), shift in zip(places, shifts):
                arguments += value, offset + shift
            for number in code.numbers:
                arguments += self._nothing, number
            checks = [self._faults[n] for n in code.nodes if isinstance(n, Fault)]
            yield PlannedCall(
                self._named(code.text), tuple(arguments), code.tasks,
                checks[0] if checks else -1, overwrites, self._sums.awaited_by(step),
            )  # fmt: skip

    def _named(self, text: str) -> str:
        name = self._names.get(text)
        if name is None:
            name = self._names[text] = kernel_name(text)
            self.texts[name] = text
        return name

    def _check(self, fault: Fault) -> FailedCheck:
        operands: tuple[int | InBlock, ...] = ()
        if not fault.error:
            operands = tuple(
                self._number[n] if n in self._number else self._there(n) for n in fault.node.inputs
            )
        origin = self._graph.origins.get(fault.node)
        return FailedCheck(fault.node, fault.error, fault.message, origin, operands)

    def _dead_after(self) -> dict[ProgramStep, list[Node]]:
        """Return the reference's results, by the reference step after which they are dead."""
        made = {n for s in self._steps if not s.is_native for n in s.writes}
        dead: dict[ProgramStep, list[Node]] = {step: [] for step in self._steps}
        seen = set(self._graph.outputs)
        following: ProgramStep | None = None
        for step in reversed(self._steps):
            if not step.is_native:
                following = step
            for node in step.reads:
                if node in made and node not in seen:
                    seen.add(node)
                    if following is not None:
                        dead[following].append(node)
        return dead

    def _outputs(self) -> Iterable[tuple[int, int]]:
        """Give each output's buffer: one of its own, or an alias of an earlier one."""
        stored = {n for s in self._steps if s.is_native for n in s.writes}
        replacing = {n for s in self._steps for n in s.overwrites}
        seen: set[Node] = set()
        for node in self._graph.outputs:
            fresh = node not in seen
            seen.add(node)
            how = COPIED
            if fresh and (node in stored or node in self._given_up):
                how = ITSELF
            elif node in stored and node not in replacing:
                how = ALIAS
            elif fresh and self._shares.get(node) is node:
                how = OWNED
            yield self._number[node], how


def _faults_of(steps: Iterable[ProgramStep]) -> dict[Fault, int]:
    """The faults of all kernels, numbered."""
    nodes = (node for step in steps for code in step.codes for node in code.nodes)
    found = dict.fromkeys(node for node in nodes if isinstance(node, Fault))
    return {fault: number for number, fault in enumerate(found)}


def _words(run: PlannedRun) -> int:
    if isinstance(run, ReferenceCall):
        return 0
    return sum(len(call.arguments) for call in run) // 2


class SumPlaces:
    """The places of the one-shot sums of a program's steps in the frame and in shared memory.

    Attributes:
        planned: All of them.
    """

    def __init__(self, steps: Iterable[Any]) -> None:
        nodes = [step.unit.node for step in steps if isinstance(step.unit, Product)]
        self._starts = [node for node in nodes if node.op is ops.COLLECTIVE_START]
        awaited = {node.inputs[0] for node in nodes if node.op is ops.COLLECTIVE_WAIT}
        self._number = {node: number for number, node in enumerate(self._starts)}
        self._parts = [
            n for step in steps for n in step.writes if n.op is ops.GET and is_one_shot(n.inputs[0])
        ]
        self.planned = PlannedSums(
            tuple(
                PlannedSum(
                    node.attr("collective"),
                    _types(node),
                    word_count(node),
                    node in awaited,
                )
                for node in self._starts
            )
        )

    def awaited_by(self, step: Any) -> int:
        """The number of the sum that a step waits for, or -1."""
        node = step.unit.node if isinstance(step.unit, Product) else None
        if node is None or node.op is not ops.COLLECTIVE_WAIT:
            return -1
        return self._number[node.inputs[0]]

    def places(self, first: int, frame: int) -> dict[Any, tuple[int, int]]:
        """Return (word of the frame that holds an address, bytes to add) for each buffer.

        Args:
            first: The first word of the sums in the frame.
            frame: The value that is the frame.
        """
        found: dict[Any, tuple[int, int]] = {}
        firsts: dict[Node, int] = {}
        for start, one in zip(self._starts, self.planned.all):
            firsts[start] = first
            found[Words(start)] = (frame, WORD * first)
            for node, offset in zip(sent_with(start), _offsets(one.types)):
                found[node] = (first + OWN, offset)
            first += one.words
        for part in self._parts:
            start = part.inputs[0].inputs[0]
            member, index = divmod(part.attr("index"), start.attr("count"))
            sharers, types = start.attr("collective").sharers, _types(start)
            word = firsts[start] + MEMBERS + sharers + member
            found[part] = (word, _offsets(types)[index])
        return found


def _types(start: Node) -> tuple[TensorType, ...]:
    return tuple(TensorType(n.dtype, n.shape) for n in sent_with(start))


def _offsets(types: Iterable[TensorType]) -> list[int]:
    """Return where each operand lies, one after the other."""
    sizes = [-(-t.size * t.dtype.itemsize // ALIGNMENT) * ALIGNMENT for t in types]
    return [0, *accumulate(sizes)][:-1]
