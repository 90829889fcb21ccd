"""Times of `ltc` next to eager PyTorch and PyTorch's own lazy backend, measured in turns.

    python scripts/bench.py --tracing                 recording a step, nothing executed in between
    python scripts/bench.py --workloads --only mlp    whole training steps, executed
    python scripts/bench.py --checkpoint              saving and loading (see bench_checkpoint.py)

Each system lives in a process of its own for the whole run and is asked for a few steps at a time,
so that a change in the machine's mood meets all of them.  The figures are medians over all rounds.

--tracing  microseconds that Python is busy with a step.  `ltc` throws its recording away after each
           step.  `torch._lazy` has nothing like it: its step is executed and waited for, untimed.
           Eager PyTorch computes while it is timed.  "cold" reads 16 MB between steps.
           One thread, garbage collector off while timing.
--workloads  milliseconds of a step of the six networks of workloads.py, all work included.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import bench_checkpoint

sys.path.insert(0, str(Path(__file__).parent))
import tracing_cases  # noqa: E402
import workloads  # noqa: E402

EVICTING_BYTES = 16 << 20
WARM_UP_STEPS = 6


# --- what a system is ---------------------------------------------------------------------------


@dataclass(frozen=True)
class System:
    """A way to run PyTorch.

    device    where its tensors live
    execute   ends a step: what was recorded runs
    forget    ends a step that is only to be recorded
    """

    device: str
    execute: Callable[[], object]
    forget: Callable[[], object]


def eager() -> System:
    return System("cpu", execute=lambda: None, forget=lambda: None)


def torch_lazy() -> System:
    import torch._lazy
    import torch._lazy.ts_backend

    torch._lazy.ts_backend.init()

    def execute():
        torch._lazy.mark_step(wait=True)

    return System("lazy", execute=execute, forget=execute)


def ltc_system() -> System:
    import ltc  # noqa: F401
    import ltc.core.lazy_model as ltm
    from ltc.device.step import discard
    from ltc.device.tensor import device_of

    device = ltm.lazy_device()

    def execute():
        ltm.mark_step()
        ltm.wait_device_ops()

    return System(str(device), execute=execute, forget=lambda: discard(device_of(device)))


SYSTEMS = {"eager": eager, "torch._lazy": torch_lazy, "ltc": ltc_system}


# --- modes: what is timed, in the process of one system -----------------------------------------


class Tracing:
    """Microseconds to record a step; "cold" in a case's name reads 16 MB before each."""

    unit, digits = "us", 1
    systems = ("eager", "torch._lazy", "ltc")
    cases = tuple(tracing_cases.CASES) + tuple(f"{name}, cold" for name in tracing_cases.CASES)
    steps = 40  # timed in one turn

    def __init__(self, system: System):
        self.system, self.built = system, {}
        self.evicting = torch.zeros(EVICTING_BYTES // 4)
        torch.set_num_threads(1)

    @staticmethod
    def limit(case: str) -> float | None:
        return tracing_cases.CASES[case][1] if case in tracing_cases.CASES else None

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
        for end in (self.system.execute, self.system.forget):
            for _ in range(WARM_UP_STEPS):
                step()
                end()
        return step, unit

    def _time(self, step: Callable, cold: bool) -> float:
        if cold:
            self.evicting.sum()
        start = time.perf_counter_ns()
        step()
        elapsed = time.perf_counter_ns() - start
        self.system.forget()
        return elapsed / 1e3


class Workloads:
    """Milliseconds of a whole training step, averaged over chunks that end by reading the loss."""

    unit, digits = "ms", 2
    systems = ("eager", "ltc")
    cases = workloads.OPEN
    chunks, chunk_steps = 2, 3  # in one turn

    def __init__(self, system: System):
        self.system, self.built = system, {}

    @staticmethod
    def limit(case: str) -> float | None:
        return None

    def times(self, case: str) -> list[float]:
        if case not in self.built:
            self.built.clear()  # the step before it holds its model's memory
            torch.manual_seed(0)
            step = getattr(workloads, case)(self.system.device, mark=self.system.execute)
            for _ in range(3):
                step().item()
            self.built[case] = step
        return [self._time(self.built[case]) for _ in range(self.chunks)]

    def _time(self, step: Callable) -> float:
        start = time.perf_counter_ns()
        for _ in range(self.chunk_steps):
            loss = step()
        loss.item()
        return (time.perf_counter_ns() - start) / 1e6 / self.chunk_steps


MODES = {"tracing": Tracing, "workloads": Workloads}


def serve(mode: str, system: str) -> None:
    """Answer each case named on standard input with a line of times, or of what went wrong."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    measured = MODES[mode](SYSTEMS[system]())
    for line in sys.stdin:
        try:
            answer = {"times": measured.times(line.strip())}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)


# --- the run: turns over rounds -----------------------------------------------------------------


class Turns:
    """The processes of all systems; one works while the others wait."""

    def __init__(self, mode: str, systems: tuple[str, ...]):
        path = os.pathsep.join(str(Path(p).resolve()) for p in sys.path if p)
        self.workers = {
            system: subprocess.Popen(
                [sys.executable, "-W", "ignore", __file__, f"--{mode}", "--worker", system],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=dict(os.environ, PYTHONPATH=path),
            )
            for system in systems
        }

    def take(self, system: str, case: str) -> dict:
        """`{"times": [...]}` or `{"error": ...}`."""
        worker = self.workers[system]
        try:
            print(case, file=worker.stdin, flush=True)
        except BrokenPipeError:
            return {"error": "its process has ended"}
        line = worker.stdout.readline()
        return json.loads(line) if line else {"error": f"its process ended with {worker.wait()}"}

    def close(self) -> None:
        for worker in self.workers.values():
            worker.stdin.close()
            worker.wait()


def measure(mode: str, systems, cases, rounds: int) -> dict:
    """{case: {system: {"times": [...]}}} with an "error" in place of times where there is one."""
    turns = Turns(mode, systems)
    results = {case: {system: {"times": []} for system in systems} for case in cases}
    try:
        for case in cases:  # all rounds of a case together: a workload's memory is freed after it
            for _ in range(rounds):
                for system, result in results[case].items():
                    if "error" in result:
                        continue
                    answer = turns.take(system, case)
                    result["times"] += answer.get("times", [])
                    result.update({k: v for k, v in answer.items() if k == "error"})
    finally:
        turns.close()
    return results


def median_of(result: dict) -> float | None:
    return None if "error" in result else statistics.median(result["times"])


def table(mode: str, results: dict) -> str:
    """A row for each case: every system's median, ltc's ratio to the others, and its limit."""
    kind = MODES[mode]
    systems = list(next(iter(results.values())))
    others = [s for s in systems if s != "ltc" and "ltc" in systems]
    heads = [*(f"{s} {kind.unit}" for s in systems), *(f"ltc / {s}" for s in others), "limit"]
    rows = [["", *heads]]
    for case, by_system in results.items():
        medians = {system: median_of(result) for system, result in by_system.items()}
        cells = [_number(medians[s], kind.digits) for s in systems]
        cells += [_ratio(medians["ltc"], medians[s]) for s in others]
        rows.append([case, *cells, _verdict(medians.get("ltc"), kind.limit(case))])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join([f"{r[0]:{widths[0]}}", *map(str.rjust, r[1:], widths[1:])]) for r in rows]
    return "\n".join(lines + errors_of(results))


def errors_of(results: dict) -> list[str]:
    return [
        f"{system}, {case}: {result['error']}"
        for case, by_system in results.items()
        for system, result in by_system.items()
        if "error" in result
    ]


def _number(value: float | None, digits: int) -> str:
    if value is None:
        return "failed"
    return f"{value:.{digits if value >= 10 else digits + 1}f}"


def _ratio(value: float | None, other: float | None) -> str:
    return f"{value / other:.2f}" if value and other else "-"


def _verdict(value: float | None, limit: float | None) -> str:
    if limit is None or value is None:
        return ""
    return f"{limit:g} {'kept' if value <= limit else 'MISSED'}"


def arguments_of(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    modes = parser.add_mutually_exclusive_group(required=True)
    for mode, kind in MODES.items():
        modes.add_argument(
            f"--{mode}", dest="mode", action="store_const", const=mode, help=kind.__doc__
        )
    parser.add_argument("--only", action="append", help="a case; may be repeated")
    parser.add_argument("--systems", help="comma-separated, in place of the mode's own")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", help="write all times here")
    parser.add_argument("--worker", choices=list(SYSTEMS), help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main() -> int:
    if "--checkpoint" in sys.argv[1:]:
        return bench_checkpoint.main([word for word in sys.argv[1:] if word != "--checkpoint"])
    arguments = arguments_of(sys.argv[1:])
    if arguments.worker:
        serve(arguments.mode, arguments.worker)
        return 0
    kind = MODES[arguments.mode]
    systems = tuple(arguments.systems.split(",")) if arguments.systems else kind.systems
    results = measure(arguments.mode, systems, arguments.only or kind.cases, arguments.rounds)
    print(table(arguments.mode, results))
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
