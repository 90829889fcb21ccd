"""A program of symbols: planned and compiled once, then made ready for each size in microseconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from ltc.backends.llvm.executable import LlvmComputation
from ltc.backends.llvm.program_plan import (
    FailedCheck,
    InBlock,
    MemoryChecks,
    PlannedCall,
    PlannedRun,
    ProgramPlan,
    ReferenceCall,
)
from ltc.backends.reference.torch_call import at_sizes, sizes_made
from ltc.errors import Unsupported
from ltc.ir import ops
from ltc.ir.node import Node, make
from ltc.llvm.native.kernel_cache import LoadedKernel
from ltc.support.shallow_copy import copied_with
from ltc.support.sizes.extent import Extent, Size, SizeTrace, number_now
from ltc.support.sizes.marks import in_turns, is_symbolic, settled


class ResizableProgram:
    """One program for all sizes at which its guards hold."""

    def __init__(
        self, trace: SizeTrace, plan: ProgramPlan, kernels: Mapping[str, LoadedKernel]
    ) -> None:
        """Called under the trace, which nothing adds to from here on.

        Raises Unsupported where something of the program is not known at other sizes.
        """
        self.trace, self.plan = trace, plan
        self._now = LlvmComputation(as_now(plan), kernels)
        numbers = Filler(trace)
        self._words = []  # of each run of kernels: which words are expressions, and which these are
        for k, run in enumerate(plan.runs):
            arguments, calls, chosen = numbers_of_run(numbers, run)
            self._words.append((self._now.words_of(k, arguments, calls), chosen))
        self._made = [
            (k, numbers.sizes(shape), dtype)
            for k, (shape, dtype) in enumerate(plan.made)
            if is_symbolic(shape)
        ]
        self._block = numbers.sizes((plan.block,))
        self._in_block = [(value, _PlaceAtSizes(where, numbers)) for value, where in plan.in_block]
        self._asking = {
            k: (numbers_of_results(numbers, check.node),
                [_PlaceAtSizes(o, numbers) if isinstance(o, InBlock) else o for o in check.operands])
            for k, check in enumerate(plan.checks)
            if not check.error
        }  # fmt: skip
        self._fits = trace.function(
            " and ".join([f"({guard})" for guard in trace.guards]) or "True"
        )
        self._messages = {
            k: numbers.text(check.message)
            for k, check in enumerate(plan.checks)
            if is_symbolic(check.message)
        }
        self._memory = None if plan.memory is None else _MemoryNumbers(numbers, plan.memory)
        self._numbers = numbers.function()

    def fits(self, values: Sequence[int]) -> bool:
        """Return True if the program is right at these values of the symbols."""
        try:
            return bool(self._fits(*values))
        except ArithmeticError:
            return False

    def at(self, values: Sequence[int]) -> LlvmComputation:
        """The program at these values, which fit."""
        found = self._numbers(*values)
        all_numbers = np.array(found, dtype=np.int64)
        (block,) = sizes_at(self._block, found)
        memory = None if self._memory is None else self._memory.at(found)
        made, checks = self._made_at(found), self._checks(found)
        there = tuple([(value, place.at(found)) for value, place in self._in_block])
        plan = copied_with(
            self._now.plan, block=block, made=made, checks=checks, memory=memory, in_block=there
        )
        words = [(places, all_numbers[chosen]) for places, chosen in self._words]
        return self._now.resized(plan, words)

    def _made_at(self, found: Sequence[int]) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        made = list(self._now.plan.made)
        for k, shape, dtype in self._made:
            made[k] = sizes_at(shape, found), dtype
        return tuple(made)

    def _checks(self, found: Sequence[int]) -> tuple[FailedCheck, ...]:
        if not self._messages and not self._asking:
            return self._now.plan.checks
        checks = list(self._now.plan.checks)
        for k, message in self._messages.items():
            checks[k] = replace(checks[k], message=text_at(message, found))
        for k, ((sizes, numbers), operands) in self._asking.items():
            node = at_sizes(checks[k].node, sizes, [found[n] for n in numbers])
            places = tuple([o.at(found) if isinstance(o, _PlaceAtSizes) else o for o in operands])
            checks[k] = replace(checks[k], node=node, operands=places)
        return tuple(checks)


class _PlaceAtSizes:
    """The place of a value in the block, at any sizes."""

    def __init__(self, where: InBlock, numbers: Filler) -> None:
        self._dtype = where.dtype
        self._offset, self._shape = (numbers.sizes(part) for part in ((where.offset,), where.shape))

    def at(self, found: Sequence[int]) -> InBlock:
        (offset,) = sizes_at(self._offset, found)
        return InBlock(offset, self._dtype, sizes_at(self._shape, found))


class _MemoryNumbers:
    """LTC_CHECK's table at other sizes."""

    def __init__(self, numbers: Filler, checks: MemoryChecks) -> None:
        self._checks = checks
        self._words = [k for k, _ in checks.sizes]
        self._sizes = numbers.sizes([size for _, size in checks.sizes])
        self._names = [numbers.text(name) for name in checks.names]

    def at(self, found: Sequence[int]) -> MemoryChecks:
        rows = np.frombuffer(self._checks.rows, np.int64).copy()
        rows[self._words] = sizes_at(self._sizes, found)
        return MemoryChecks(rows.tobytes(), tuple(text_at(name, found) for name in self._names))


# --- The numbers of a plan that are expressions, and their values at given sizes -----------------


def numbers_of_run(filler: Filler, run: PlannedRun) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the arguments of a run that are expressions, the kernels' tasks that are, their
    numbers.

    Of a call of PyTorch's kernel: the sizes of its results that are expressions.
    """
    if isinstance(run, ReferenceCall):
        sizes, found = numbers_of_results(filler, run.node)
        return sizes, np.array((), dtype=np.int64), found
    places: list[int] = []
    added: list[int] = []
    calls: list[int] = []
    tasks: list[int] = []
    place = 0
    for position, call in enumerate(run):
        for size in call.arguments[1::2]:
            if isinstance(size, Extent):
                places.append(place)
                added.append(filler.number(size))
            place += 1
        if isinstance(call.tasks, Extent):
            calls.append(position)
            tasks.append(filler.number(call.tasks))
    return (
        np.array(places, dtype=np.int64),
        np.array(calls, dtype=np.int64),
        np.array(added + tasks, dtype=np.int64),
    )


def numbers_of_results(filler: Filler, node: Node) -> tuple[np.ndarray, np.ndarray]:
    """Return the `sizes_made` that are expressions, and their numbers."""
    found = [(k, n) for k, n in enumerate(sizes_made(node)) if isinstance(n, Extent)]
    return (
        np.array([k for k, _ in found], dtype=np.int64),
        np.array([filler.number(n) for _, n in found], dtype=np.int64),
    )


def as_now(plan: ProgramPlan) -> ProgramPlan:
    """The plan at the sizes that its symbols have now; raises Unsupported where that is not all.

    Called under the plan's trace: constants in memory are what they are, which guards say.
    """
    runs: list[PlannedRun] = []
    for run in plan.runs:
        if isinstance(run, ReferenceCall):
            runs.append(replace(run, node=_node_now(run.node)))
        else:
            runs.append(tuple(map(_call_now, run)))
    if plan.sums.all:
        raise Unsupported("it has a one-shot sum, whose sizes must be numbers")
    for check in plan.checks:
        if not check.error:
            _node_now(check.node)
    return replace(
        plan,
        made=tuple((tuple(map(number_now, shape)), dtype) for shape, dtype in plan.made),
        constants=tuple((_settled(node), place) for node, place in plan.constants),
        fixed=tuple((value, _settled(node)) for value, node in plan.fixed),
        in_block=tuple((value, _there_now(where)) for value, where in plan.in_block),
        block=number_now(plan.block),
        runs=tuple(runs),
    )


# What the reference computes of operands of any size: PyTorch's own kernel and what that gave, and
# what is complex, where its attributes say how.
_OF_ANY_SIZE = frozenset(
    {ops.EXTERN, ops.GET, ops.PERMUTE}
    | {op for op in ops.ALL.values() if op.kind == "elementwise" and op is not ops.WRAP_INDEX}
)


def _node_now(node: Node) -> Node:
    settings = [value for name, value in node.attrs if name not in ("template", "results")]
    if node.op not in _OF_ANY_SIZE or is_symbolic(settings):
        raise Unsupported(f"{node.op} has no kernel for symbolic sizes")
    if node.op is ops.EXTERN and is_symbolic(node.attr("template").text):
        raise Unsupported(
            f"{node.attr('template').overload} has symbolic sizes among its arguments"
        )
    sizes = sizes_made(node)
    return at_sizes(node, range(len(sizes)), list(map(number_now, sizes)))


def _there_now(where: InBlock) -> InBlock:
    return InBlock(number_now(where.offset), where.dtype, tuple(map(number_now, where.shape)))


def _call_now(call: Any) -> PlannedCall:
    arguments = tuple(map(number_now, call.arguments))
    made: PlannedCall = call._replace(arguments=arguments, tasks=number_now(call.tasks))
    return made


def _settled(node: Node) -> Node:
    literal = node.attr("literal")
    if node.op is not ops.CONSTANT or not is_symbolic(literal):
        return node
    number = float(settled(literal)) if node.dtype.is_floating_point else int(settled(literal))
    return make(ops.CONSTANT, literal=repr(number), dtype=node.dtype)


# --- Expressions of sizes in what was made under a trace, and what they are at given sizes -------

# A `Filler` numbers the expressions and makes one function of the symbols that gives them all.
# What holds expressions is kept as *parts* that refer to them by number; `sizes_at` and `text_at`
# fill these.


class Filler:
    """The expressions of one trace, each once."""

    def __init__(self, trace: SizeTrace) -> None:
        self._trace = trace
        self._known: dict[str, int] = {}

    def number(self, size: Extent) -> int:
        """Return the place of an expression among those that `function` gives."""
        return self._number(size.source)

    def _number(self, source: str) -> int:
        return self._known.setdefault(source, len(self._known))

    def sizes(self, sizes: Sequence[Size]) -> tuple[int, ...]:
        """Return the parts of `sizes_at`: of a number that stays, -1 less it."""
        return tuple(self.number(size) if isinstance(size, Extent) else -1 - size for size in sizes)

    def text(self, text: str) -> tuple[str | int, ...]:
        """Return the parts of `text_at`."""
        parts = in_turns(text)
        return tuple(self._number(part) if k % 2 else part for k, part in enumerate(parts))

    def function(self) -> Callable[..., tuple[int, ...]]:
        """Return the function of the symbols that gives all expressions."""
        made: Callable[..., tuple[int, ...]] = self._trace.function(
            f"({', '.join([*self._known, ''])})"
        )
        return made


def sizes_at(parts: Sequence[int], found: Sequence[int]) -> tuple[int, ...]:
    """Return the sizes where the expressions are `found`."""
    return tuple([found[part] if part >= 0 else -1 - part for part in parts])


def text_at(parts: Sequence[str | int], found: Sequence[int]) -> str:
    """Return the text where the expressions are `found`."""
    return "".join([part if isinstance(part, str) else str(found[part]) for part in parts])
