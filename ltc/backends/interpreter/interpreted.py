"""The calls of a recording, run in order; its buffers are contiguous CPU tensors."""

from __future__ import annotations

import itertools
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from ltc.aten.call import Call, CallResult, Numbering
from ltc.backends.capabilities import KernelFacts
from ltc.backends.eager import EagerComputation
from ltc.backends.interpreter.by_rule import ByRule, Compile
from ltc.backends.interpreter.call_facts import facts_of_call, operands_of
from ltc.backends.interpreter.recorded_call import OWN_CALLS, Results, is_by_rule, run_by_kernel
from ltc.backends.kernel_call import cannot_fail
from ltc.backends.plain_dispatch import PlainDispatch
from ltc.support.process import machine_memory
from ltc.support.sizes.marks import is_symbolic

INPUT = "ltc::input"
_EVERY_KERNEL_HAS = frozenset(
    {torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64}
)


class NotInterpretable(Exception):
    """A call that only a compiled program can run: an exchange among replicas, a value that fits nowhere."""


class Step(NamedTuple):
    """One call of a launch.

    dead        values that nothing reads behind it
    writable    operands that it may write over
    overwrites  positions of the inputs among these
    """

    call: Call
    dead: tuple[CallResult, ...]
    writable: frozenset[CallResult]
    overwrites: tuple[int, ...]


class InterpretedComputation:
    """The computation of a recording's calls, on PyTorch's own kernels.

    An input that may be written over is, but only once no call is left that can fail.
    """

    upload = staticmethod(EagerComputation.upload)
    download = staticmethod(EagerComputation.download)
    wait = staticmethod(EagerComputation.wait)

    def __init__(
        self,
        calls: Sequence[Call],
        outputs: Sequence[CallResult],
        numbering: Numbering,
        donated: frozenset[int],
        compile: Compile,
    ) -> None:
        """
        Args:
            calls, outputs, numbering: The program's, as in `program_for` of runtime/compile.py.
            donated: Positions of inputs.
            compile: Gives the program of one call that PyTorch's kernels do not make.

        Raises:
            NotInterpretable: A call needs a compiled program.
        """
        _require_interpretable(calls)
        self._inputs = {
            call.results[0]: numbering.inputs[call.args[0]]
            for call in calls
            if call.overload == INPUT
        }
        self._slots, self._outputs = tuple(numbering.slots), outputs
        self._donated = {one: at for one, at in self._inputs.items() if at in donated}
        self._compile, self._rules = compile, dict[Call, ByRule]()
        self._steps = self._made_ready(calls)

    def _made_ready(self, calls: Sequence[Call]) -> list[Step]:
        """The steps, found from the last to the first."""
        needed, found, nothing_fails = set(self._outputs), [], True
        kept = self._inputs.keys() - self._donated.keys()
        for call in reversed(calls):
            if call.overload == INPUT:
                continue
            times_read = Counter(operands_of(call))
            nothing_fails = (
                nothing_fails
                and cannot_fail(call.name)
                and all(value.dtype in _EVERY_KERNEL_HAS for value in times_read)
            )
            dead = times_read.keys() - needed
            writable = {value for value in dead - kept if times_read[value] == 1}
            if not nothing_fails:
                writable -= self._donated.keys()
            overwrites = tuple(at for one, at in self._donated.items() if one in writable)
            unread = {one for one in call.results if one is not None and one not in needed}
            found.append(Step(call, tuple(dead | unread), frozenset(writable), overwrites))
            needed |= times_read.keys()
        found.reverse()
        return found

    @property
    def calls(self) -> int:
        """Return how many calls it makes."""
        return len(self._steps)

    def launch(self, buffers: list[torch.Tensor], scalars: list[Any]) -> list[torch.Tensor]:
        return self._launched(buffers, scalars, None)

    def launch_timed(
        self, buffers: list[torch.Tensor], scalars: list[Any], told: Callable[[bytes], object]
    ) -> list[torch.Tensor]:
        """`launch`, and the time at which each call ended, behind that at which the first began."""
        times = array("q", [time.monotonic_ns()])
        try:
            return self._launched(buffers, scalars, times)
        finally:
            told(times.tobytes())

    def times(self, stamps: bytes) -> Iterable[tuple[int, int]]:
        """(begin, end) of each call, of what `launch_timed` told."""
        return itertools.pairwise(array("q", stamps))

    def kernels(self) -> list[KernelFacts]:
        """One function for each call, in the order in which they run."""
        return [facts_of_call(step.call) for step in self._steps]

    def _launched(
        self, buffers: list[torch.Tensor], scalars: list[Any], times: array[int] | None
    ) -> list[torch.Tensor]:
        values: dict[Any, Any] = {one: buffers[at] for one, at in self._inputs.items()}
        numbers = dict(zip(self._slots, scalars))
        overwritten: list[int] = []
        try:
            with PlainDispatch():
                for step in self._steps:
                    overwritten.extend(step.overwrites)
                    self._run(step, values, numbers)
                    if times is not None:
                        times.append(time.monotonic_ns())
                return self._made_outputs(buffers, values)
        except BaseException as error:
            error.overwritten = tuple(overwritten)  # type: ignore[attr-defined]  # see Computation.launch
            raise

    def _run(self, step: Step, values: dict[Any, Any], numbers: dict[int, Any]) -> None:
        call, found = step.call, None
        if isinstance(call.overload, str):
            found = OWN_CALLS[call.overload](call, values, step.writable)
        elif call not in self._rules and not is_by_rule(call):
            found = run_by_kernel(call, values, numbers, step.writable)
        if found is None:
            found = self._by_rule(call, values, numbers)
        values.update(zip(call.results, found))
        for value in step.dead:
            del values[value]

    def _by_rule(self, call: Call, values: dict[Any, Any], numbers: Any) -> Results:
        rule = self._rules.get(call)
        if rule is None:
            rule = self._rules[call] = ByRule(call, self._compile)
        return rule.run(call, values, numbers)

    def _made_outputs(
        self, buffers: list[torch.Tensor], values: dict[Any, Any]
    ) -> list[torch.Tensor]:
        """Each output contiguous, and alone in its memory."""
        taken = {_memory(buffer) for buffer in buffers}
        given = {(b.data_ptr(), b.nbytes) for b in map(buffers.__getitem__, self._donated.values())}
        return [_settled(values[value], taken, given) for value in self._outputs]


def _require_interpretable(calls: Iterable[Call]) -> None:
    most = machine_memory.total()
    for call in calls:
        if isinstance(call.overload, str) and call.overload not in (INPUT, *OWN_CALLS):
            raise NotInterpretable(call.overload)
        for value in call.results:
            if value is not None and not is_symbolic(value.shape):
                if prod(value.shape) * value.dtype.itemsize > most:
                    raise NotInterpretable("a value is larger than all memory")


def _memory(x: torch.Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _settled(x: torch.Tensor, taken: set[int], given: set[tuple[int, int]]) -> torch.Tensor:
    """The value as a buffer.

    Args:
        taken: Memory that others lie in.
        given: Address and bytes of what the program may keep, each once.
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
