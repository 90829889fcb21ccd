"""A program of symbols: planned and compiled once, then made ready for each size in microseconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from ltc.backends.llvm.any_size.numbers_of import Numbers, as_now, sizes_at
from ltc.backends.llvm.checked_steps import MemoryChecks
from ltc.backends.llvm.executable import LlvmComputation
from ltc.backends.llvm.plan import FailedCheck, InBlock, ProgramPlan
from ltc.backends.reference.torch_call import at_sizes
from ltc.llvm.native.kernel_cache import LoadedKernel
from ltc.support.shallow_copy import copied_with
from ltc.support.sizes.extent import SizeTrace
from ltc.support.sizes.marks import is_symbolic, text_function


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
        numbers = Numbers(trace)
        self._words = []  # of each run of kernels: which words are expressions, and which these are
        for k, run in enumerate(plan.runs):
            arguments, calls, chosen = numbers.of_run(run)
            self._words.append((self._now.words_of(k, arguments, calls), chosen))
        self._made = [
            (k, numbers.places_of(shape), dtype)
            for k, (shape, dtype) in enumerate(plan.made)
            if is_symbolic(shape)
        ]
        self._block = numbers.places_of((plan.block,))
        self._in_block = [(value, _PlaceAtSizes(where, numbers)) for value, where in plan.in_block]
        self._asking = {
            k: (numbers.of_results(check.node),
                [_PlaceAtSizes(o, numbers) if isinstance(o, InBlock) else o for o in check.operands])
            for k, check in enumerate(plan.checks)
            if not check.error
        }  # fmt: skip
        self._numbers = numbers.function()
        self._fits = trace.function(
            " and ".join([f"({guard})" for guard in trace.guards]) or "True"
        )
        self._messages = {
            k: text_function(trace, check.message)
            for k, check in enumerate(plan.checks)
            if is_symbolic(check.message)
        }
        self._memory = None if plan.memory is None else _MemoryNumbers(trace, plan.memory)

    def fits(self, values: Sequence[int]) -> bool:
        """Whether the program is right at these values of the symbols."""
        try:
            return bool(self._fits(*values))
        except ArithmeticError:
            return False

    def at(self, values: Sequence[int]) -> LlvmComputation:
        """The program at these values, which fit."""
        found = self._numbers(*values)
        all_numbers = np.array(found, dtype=np.int64)
        (block,) = sizes_at(self._block, found)
        memory = None if self._memory is None else self._memory.at(values)
        made, checks = self._made_at(found), self._checks(values, found)
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

    def _checks(self, values: Sequence[int], found: Sequence[int]) -> tuple[FailedCheck, ...]:
        if not self._messages and not self._asking:
            return self._now.plan.checks
        checks = list(self._now.plan.checks)
        for k, message in self._messages.items():
            checks[k] = replace(checks[k], message=message(*values))
        for k, ((sizes, numbers), operands) in self._asking.items():
            node = at_sizes(checks[k].node, sizes, [found[n] for n in numbers])
            places = tuple([o.at(found) if isinstance(o, _PlaceAtSizes) else o for o in operands])
            checks[k] = replace(checks[k], node=node, operands=places)
        return tuple(checks)


class _PlaceAtSizes:
    """Where a value lies in the block, at any sizes."""

    def __init__(self, where: InBlock, numbers: Numbers) -> None:
        self._dtype = where.dtype
        self._offset, self._shape = (
            numbers.places_of(part) for part in ((where.offset,), where.shape)
        )

    def at(self, found: Sequence[int]) -> InBlock:
        (offset,) = sizes_at(self._offset, found)
        return InBlock(offset, self._dtype, sizes_at(self._shape, found))


class _MemoryNumbers:
    """What LTC_CHECK's table says at other sizes."""

    def __init__(self, trace: SizeTrace, checks: MemoryChecks) -> None:
        self._checks = checks
        self._words = [k for k, _ in checks.sizes]
        self._numbers = trace.function(f"({', '.join([*[s.source for _, s in checks.sizes], ''])})")
        self._names = [text_function(trace, name) for name in checks.names]

    def at(self, values: Sequence[int]) -> MemoryChecks:
        rows = np.frombuffer(self._checks.rows, np.int64).copy()
        rows[self._words] = self._numbers(*values)
        return MemoryChecks(rows.tobytes(), tuple(name(*values) for name in self._names))
