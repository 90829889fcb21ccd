"""Measurements of bench.py, in the process of one system: a class for each kind."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import kernel_cases
import more_workloads
import torch
import tracing_cases
import workloads
from bench_systems import System

EVICTING_BYTES = 16 << 20
WARM_UP_STEPS = 6
SETTLE_SECONDS = 1.0  # of steps, in which a path that comes back asks for its program
PEERS = ("eager", "eager foreach", "eager fused", "compile", "compile all")


class Tracing:
    """Microseconds to record a step; "cold" in a case's name reads 16 MB before each."""

    unit, digits = "us", 1
    systems = ("eager", "torch._lazy", "ltc")
    cases = tuple(tracing_cases.CASES) + tuple(f"{name}, cold" for name in tracing_cases.CASES)
    steps = 40  # timed in one turn

    def __init__(self, system: System, threads: int):
        self.system, self.built = system, {}
        self.evicting = torch.zeros(EVICTING_BYTES // 4)
        torch.set_num_threads(1)

    def times(self, case: str) -> list[float]:
        name = case.removesuffix(", cold")
        if name not in self.built:
            self.built[name] = self._warm(tracing_cases.CASES[name][0])
        step, unit = self.built[name]
        gc.collect()
        gc.disable()
        try:
            return [self._time(step, name != case) / unit for _ in range(self.steps)]
        finally:
            gc.enable()

    def _warm(self, build: Callable) -> tuple[Callable, int]:
        torch.manual_seed(0)
        step, unit = build(self.system.device)
        for end in (self._execute, self.system.forget):
            for _ in range(WARM_UP_STEPS):
                step()
                end()
        return step, unit

    def _execute(self) -> None:
        self.system.way.mark()
        self.system.finish()

    def _time(self, step: Callable, cold: bool) -> float:
        if cold:
            self.evicting.sum()
        start = time.perf_counter_ns()
        step()
        elapsed = time.perf_counter_ns() - start
        self.system.forget()
        return elapsed / 1e3


class Steps:
    """Milliseconds of a step, averaged over chunks that end by reading the loss."""

    unit, digits = "ms", 2
    systems = (*PEERS, "ltc", "ltc program")
    builders: dict[str, Callable] = {}
    turn_seconds, least_steps = 0.6, 3

    def __init__(self, system: System, threads: int):
        self.system, self.built = system, {}
        torch.set_num_threads(threads)

    def times(self, case: str) -> list[float]:
        if case not in self.built:
            self.built.clear()  # the step before it holds its model's memory
            torch.manual_seed(0)
            self.built[case] = self._warm(self.builders[case](self.system.device, self.system.way))
        run, steps = self.built[case]
        return [self._time(run, steps)]

    def _warm(self, step: Callable) -> tuple[Callable, int]:
        """The function that runs so many steps, and how many fit in one turn."""
        for number in range(WARM_UP_STEPS):
            if number == WARM_UP_STEPS - 2:
                self.system.restart()
            step().item()
        while self._settles(lambda: step().item()):
            pass
        run = self._repeating(step)
        while self._settles(
            lambda: run(self.least_steps)
        ):  # a step that is not read may be another path
            pass
        each = self._time(run, self.least_steps) / 1e3
        return run, max(self.least_steps, int(self.turn_seconds / max(each, 1e-6)))

    def _settles(self, run: Callable) -> bool:
        """Run steps until each repeats what it is compiled for; True if programs came meanwhile."""
        until = time.perf_counter() + SETTLE_SECONDS
        while self.system.again is None and time.perf_counter() < until:
            run()
        return self.system.settle()

    def _repeating(self, step: Callable) -> Callable[[int], object]:
        if self.system.again is not None:
            return lambda steps: [self.system.again() for _ in range(steps)]

        def run(steps: int) -> None:
            for _ in range(steps):
                loss = step()
            loss.item()

        return run

    @staticmethod
    def _time(run: Callable[[int], object], steps: int) -> float:
        start = time.perf_counter_ns()
        run(steps)
        return (time.perf_counter_ns() - start) / 1e6 / steps


class Workloads(Steps):
    """Milliseconds of a whole training step, averaged over chunks that end by reading the loss."""

    builders = {name: getattr(workloads, name) for name in workloads.OPEN}
    builders.update({name: getattr(more_workloads, name) for name in more_workloads.FURTHER})
    builders.update(tiny=more_workloads.tiny, mlp_fed=more_workloads.mlp_fed)
    cases = tuple(builders)


class Kernels(Steps):
    """Milliseconds of a single layer or formula, for `ltc program` without recording it."""

    digits = 3
    systems = ("eager", "compile", "ltc program")
    builders = kernel_cases.CASES
    cases = tuple(builders)


MODES = {"tracing": Tracing, "workloads": Workloads, "kernels": Kernels}
