"""Launches whose kernels are timed: the same program, which notes when each of its kernels is over.

The times stand behind the rest of the frame: of each run of kernels when it began and when each was
over, of each call of the reference when it began and ended, in the order of the plan.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ltc import config
from ltc.backends.capabilities import KernelFacts
from ltc.backends.llvm.executable import LlvmComputation, Reference
from ltc.backends.llvm.launch_queue import LlvmLaunch, LlvmQueue
from ltc.backends.llvm.plan import PlannedRun, ProgramPlan, ReferenceCall
from ltc.backends.llvm.timing.kernel_facts import facts_of_program
from ltc.backends.llvm.workspace import WorkBlock
from ltc.ir.graph import Graph
from ltc.llvm.native.kernel_cache import LoadedKernel
from ltc.llvm.native.kernel_run import WORD, KernelCall, KernelRun
from ltc.support.shallow_copy import copied_with

Told = Callable[[bytes], object]


class TimedComputation(LlvmComputation):
    """A program that tells the times of its launches: the TimedLaunches of backends/capabilities.py."""

    def __init__(
        self,
        plan: ProgramPlan,
        kernels: Mapping[str, LoadedKernel],
        passes: Callable[[Graph], Graph],
    ) -> None:
        """`passes`: what the backend makes of a graph before it plans."""
        self._passes = passes
        self._facts: dict[frozenset[int], list[KernelFacts] | None] = {}
        self._next_stamp = plan.frame // WORD
        self._stamps = slice(plan.frame, plan.frame + WORD * sum(map(_words_of, plan.runs)))
        self._no_stamps = bytes(self._stamps.stop - self._stamps.start)
        self._told: Told | None = None
        self._shown: _ShownComputation | None = None
        super().__init__(replace(plan, frame=self._stamps.stop), kernels)
        self.block_bytes = plan.block

    def launch_timed(self, buffers: list[Any], scalars: list[Any], told: Told) -> list[Any]:
        return self._told_to(told).launch(buffers, scalars)

    def prepared_timed(
        self,
        buffers: list[Any],
        scalars: list[Any],
        queue: LlvmQueue,
        lent: Mapping[int, torch.Tensor],
        told: Told,
    ) -> LlvmLaunch | None:
        return self._told_to(told).prepared(buffers, scalars, queue, lent)

    def shown(
        self,
        graph_of: Callable[[], Graph] | None,
        donated: frozenset[int],
        region: Callable[[str], Any],
    ) -> Callable[[list[Any], list[Any]], list[Any]]:
        if self._shown is None:
            facts = self.kernels(graph_of, donated)
            names = None if facts is None else [f"ltc::kernel {one.name}" for one in facts]
            self._shown = _ShownComputation(self.plan, self.loaded, names, region)
        return self._shown.launch

    def times(self, stamps: bytes) -> Iterator[tuple[int, int]]:
        words = struct.unpack(f"={len(stamps) // WORD}q", stamps)
        first = 0
        for run in self.plan.runs:
            last = first + _words_of(run)
            pairs = zip(words[first : last - 1], words[first + 1 : last])
            yield from (pair for pair in pairs if pair[1])
            first = last

    def kernels(
        self, graph_of: Callable[[], Graph] | None, donated: frozenset[int]
    ) -> list[KernelFacts] | None:
        if graph_of is None:
            return None
        if donated not in self._facts:
            checked = self.plan.memory is not None
            with config.override(LTC_DUMP=""):  # the stages have been printed
                graph = self._passes(graph_of())
            self._facts[donated] = facts_of_program(graph, donated, checked, self.plan.runs)
        return self._facts[donated]

    # --- as LlvmComputation runs them

    def _told_to(self, told: Told) -> TimedComputation:
        return copied_with(self, _told=told)

    def _made_ready(self, run: PlannedRun) -> Any:
        ready = super()._made_ready(run)
        self._next_stamp += _words_of(run)
        return ready

    def _run_from(self, calls: Sequence[KernelCall], first: int) -> KernelRun:
        checks = self.plan.places_of_checks
        return KernelRun(calls[first:], checks.stop, checks, self._next_stamp + first)

    def _reference(self, call: ReferenceCall) -> Reference:
        return _TimedReference(call, WORD * self._next_stamp)

    def _begin(self, frame: WorkBlock, *rest: Any, **more: Any) -> list[Any]:
        frame.memory[self._stamps] = self._no_stamps
        return super()._begin(frame, *rest, **more)

    def _run(self, frame: WorkBlock, block: WorkBlock, values: list[Any]) -> None:
        try:
            super()._run(frame, block, values)
        finally:
            self._tell(frame)

    def _prepared(self, *arguments: Any) -> LlvmLaunch:
        launch = super()._prepared(*arguments)
        return _TimedLaunch(
            launch.run, launch.frame, launch.outputs, launch.frames, launch.error, self._tell
        )

    def _tell(self, frame: WorkBlock) -> None:
        assert self._told is not None
        self._told(bytes(frame.memory[self._stamps]))


def _words_of(run: PlannedRun) -> int:
    return 2 if isinstance(run, ReferenceCall) else 1 + len(run)


@dataclass(slots=True)
class _TimedLaunch(LlvmLaunch):
    tell: Callable[[WorkBlock], None]

    def end(self) -> None:
        self.tell(self.frame)
        LlvmLaunch.end(self)


class _TimedReference(Reference):
    """One node through the reference; `place`: of its times, in bytes of the frame."""

    def __init__(self, call: ReferenceCall, place: int) -> None:
        super().__init__(call)
        self._place = place

    def __call__(self, plan: ProgramPlan, frame: WorkBlock, *rest: Any) -> None:
        begin = time.monotonic_ns()
        super().__call__(plan, frame, *rest)
        struct.pack_into("=2q", frame.memory, self._place, begin, time.monotonic_ns())


class _ShownComputation(LlvmComputation):
    """A program that runs each kernel by itself, in a region of its name."""

    def __init__(
        self,
        plan: ProgramPlan,
        kernels: Mapping[str, LoadedKernel],
        names: Sequence[str] | None,
        region: Callable[[str], Any],
    ) -> None:
        runs: list[PlannedRun] = []
        for run in plan.runs:
            runs += [run] if isinstance(run, ReferenceCall) else [(call,) for call in run]
        super().__init__(replace(plan, runs=tuple(runs)), kernels)
        names = ["ltc::kernel"] * len(runs) if names is None else names
        self._runs: list[Any] = [
            _Shown(run, name, region) for run, name in zip(self._runs, names, strict=True)
        ]


class _Shown:
    """A run in a region."""

    def __init__(self, run: Any, name: str, region: Callable[[str], Any]) -> None:
        self._run, self._name, self._region = run, name, region
        self.overwrites = run.overwrites

    def __call__(self, *arguments: Any) -> None:
        with self._region(self._name):
            self._run(*arguments)
