"""The calls of a recording, run in order; its buffers are contiguous CPU tensors."""

from __future__ import annotations

import functools
import itertools
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ltc.aten.call import Call, CallResult, Numbering
from ltc.backends.capabilities import KernelFacts
from ltc.backends.eager import EagerComputation
from ltc.backends.interpreter.call_facts import TimedCall, as_recorded, facts_of_call, operands_of
from ltc.backends.interpreter.call_kernel import (
    ALONE,
    Expand,
    NotInterpretable,
    Slots,
    TorchCall,
    Values,
    kernel_of,
)
from ltc.backends.interpreter.large_values import has_too_large_values
from ltc.backends.interpreter.straight_line import Run, Step, StraightLine
from ltc.backends.interpreter.stride_rules import cannot_fail
from ltc.backends.plain_dispatch import PlainDispatch, is_plain_now
from ltc.support.shallow_copy import elements_at
from ltc.support.torch_private import storage_identity, storage_use_count

INPUT = "ltc::input"
_FEW_CALLS = 4  # to pass autograd by takes longer than so many calls pass it
_EVERY_KERNEL_HAS = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64}
)


class InterpretedComputation:
    """What the calls of a recording compute, on PyTorch's own kernels.

    An input that may be written over is, but only once no call is left that can fail.
    Raises NotInterpretable where a call needs a compiled program.

    start  what a launch has in its slots when it begins
    sized  makes what gives an argument or a result of a call as it is at the sizes of a launch;
           only profiles ask
    """

    sized: Callable[[], Callable[[Any], Any]] = staticmethod(lambda: as_recorded)

    upload = staticmethod(EagerComputation.upload)
    download = staticmethod(EagerComputation.download)
    wait = staticmethod(EagerComputation.wait)

    def __init__(
        self,
        calls: Sequence[Call],
        outputs: Sequence[CallResult],
        numbering: Numbering,
        donated: frozenset[int],
        expanded: Expand,
    ) -> None:
        """
        calls, outputs, numbering  as runtime/compile.py has them
        donated                    positions of inputs
        expanded                   what runs a call as its rule says
        """
        if has_too_large_values(calls):
            raise NotInterpretable("a value is larger than all memory")
        slots = Slots(calls, numbering.slots)
        self._inputs = {
            numbering.inputs[call.args[0]]: slots.of_results(call)
            for call in calls
            if call.overload == INPUT
        }
        self._outputs = [slots.of_value(value) for value in outputs]
        self._made = elements_at(self._outputs)
        self._donated = {self._inputs[position]: position for position in donated}
        self._kept = elements_at([k for k in sorted(self._inputs) if k not in donated])
        self._steps = self._made_ready(calls, slots, expanded)
        self._overwritten = [p for step in self._steps for p in step.overwrites]
        shapes = {slots.of_value(value): slots.of_constant(value.shape) for value in outputs}
        self._straight = StraightLine(self._steps, shapes)
        self.start, self._scalars = slots.start, slots.scalars

    def _made_ready(self, calls: Sequence[Call], slots: Slots, expanded: Expand) -> list[Step]:
        """The steps, found from the last to the first."""
        needed, found, nothing_fails = set(self._outputs), [], True
        kept = set(self._inputs.values()).difference(self._donated)
        for call in reversed(calls):
            if call.overload == INPUT:
                continue
            operands = operands_of(call)
            nothing_fails = (
                nothing_fails
                and cannot_fail(call.name)
                and all(value.dtype in _EVERY_KERNEL_HAS for value in operands)
            )
            times_read = Counter(map(slots.of_value, operands))
            read = set(times_read)
            made = {slots.of_value(value) for value in call.results if value is not None}
            dead = read - needed
            writable = {slot for slot in dead - kept if times_read[slot] == 1}
            if not nothing_fails:
                writable -= self._donated.keys()
            kernel = kernel_of(call, slots, frozenset(writable), expanded)
            overwrites = tuple(p for s, p in self._donated.items() if s in writable)
            found.append(Step(kernel, tuple(dead | made - needed), overwrites))
            needed |= read
        found.reverse()
        return found

    @property
    def calls(self) -> int:
        """How many it makes."""
        return len(self._steps)

    @property
    def is_one_kernel(self) -> bool:
        """Whether all it does is to make one tensor by one of PyTorch's kernels."""
        if len(self._steps) != 1 or not isinstance(self._steps[0].kernel, TorchCall):
            return False
        call = self._steps[0].kernel.call
        return len(call.results) == 1 and not call.mutated and call.name.startswith("aten::")

    def launch(self, buffers: list[torch.Tensor], scalars: list[Any]) -> list[torch.Tensor]:
        straight = self._straight.found()
        if straight is not None:
            try:
                return self._launched(straight, buffers, scalars)
            except Exception as error:
                self._straight.forget()
                if getattr(error, "overwritten", ()):
                    raise
        return self._launched(functools.partial(_run_each, self._steps), buffers, scalars)

    def launch_timed(
        self, buffers: list[torch.Tensor], scalars: list[Any], told: Callable[[bytes], object]
    ) -> list[torch.Tensor]:
        """`launch`, and the time at which each call ended, behind that at which the first began."""
        times = array("q", [time.monotonic_ns()])
        steps = [Step(TimedCall(step.kernel, times), *step[1:]) for step in self._steps]
        try:
            return self._launched(functools.partial(_run_each, steps), buffers, scalars)
        finally:
            told(times.tobytes())

    def times(self, stamps: bytes) -> Iterable[tuple[int, int]]:
        """(begin, end) of each call, of what `launch_timed` told."""
        return itertools.pairwise(array("q", stamps))

    def kernels(self) -> list[KernelFacts]:
        """What each call does, in the order in which they run."""
        known = self.sized()
        return [facts_of_call(step.kernel.call, known) for step in self._steps]

    def _launched(
        self, run: Run, buffers: list[torch.Tensor], scalars: list[Any]
    ) -> list[torch.Tensor]:
        values = self.start.copy()
        for position, slot in self._inputs.items():
            values[slot] = buffers[position]
        values[self._scalars] = scalars
        overwritten: list[int] = []
        try:
            if len(self._steps) <= _FEW_CALLS and self._may_stay_in_autograd(buffers):
                run(values, overwritten)
                return self._made_outputs(buffers, values)
            with PlainDispatch():
                run(values, overwritten)
                return self._made_outputs(buffers, values)
        except BaseException as error:
            error.overwritten = tuple(overwritten)  # type: ignore[attr-defined]  # see Computation.launch
            raise

    def _may_stay_in_autograd(self, buffers: list[torch.Tensor]) -> bool:
        """Whether torch's kernels give the same as in PlainDispatch.

        Autograd refuses to write over what was made in inference mode, once that is left.
        """
        return is_plain_now() and not any([buffers[p].is_inference() for p in self._overwritten])

    def _made_outputs(self, buffers: list[torch.Tensor], values: list[Any]) -> list[torch.Tensor]:
        """Each output contiguous, and alone in its memory."""
        made = list(self._made(values))
        if _are_buffers(made, self._kept(buffers)):
            return made
        taken = {_memory(buffer) for buffer in buffers}
        given = {(b.data_ptr(), b.nbytes) for b in map(buffers.__getitem__, self._donated.values())}
        return [_settled(x, taken, given) for x in made]


def _run_each(steps: Iterable[Step], values: Values, overwritten: list[int]) -> None:
    for kernel, dead, overwrites in steps:
        if overwrites:
            overwritten.extend(overwrites)
        kernel.run(values)
        for slot in dead:
            values[slot] = None


def _are_buffers(made: list[torch.Tensor], kept: Sequence[torch.Tensor]) -> bool:
    """Whether all that was made can stay as it is; so it is most often, and soon looked at.

    kept  others, which are none of it
    """
    if len({*map(id, made), *map(id, kept)}) < len(made) + len(kept):
        return False
    for x in made:
        storage = x.untyped_storage()
        if storage_use_count(storage_identity(storage)) != ALONE or len(storage) != x.nbytes:
            return False
        if not x.is_contiguous() or x.is_neg():
            return False
    return True


def _memory(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _settled(x: torch.Tensor, taken: set[int], given: set[tuple[int, int]]) -> torch.Tensor:
    """The value as a buffer.

    taken  memory that others lie in
    given  address and bytes of what the program may keep, each once
    """
    x = x.resolve_neg().contiguous()
    place = x.data_ptr(), x.nbytes
    if place in given:
        given.discard(place)
        return x
    if _memory(x) in taken or x.untyped_storage().nbytes() > x.nbytes:
        x = x.clone(memory_format=torch.contiguous_format)
    taken.add(_memory(x))
    return x
