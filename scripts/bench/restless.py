"""Restless programs on ltc and torch.compile, each beside eager PyTorch: first steps, later ones, steady ones.

    python scripts/bench/restless.py [PROGRAM ...] [--systems ltc,core,compile] [--rounds 3]
                                     [--steps 200] [--settle 3] [--threads 2] [--clock processor]

`core` is ltc with its native core, which is built before.

Every system runs in a process of its own, in turns with the same program in eager PyTorch, with each of its ways to
update parameters (default, foreach, fused): a few steps each, so that what else the machine does slows down both.
Every figure is a median over processes. `first` is the first step in milliseconds; `sum` the first steps together in
seconds, from an empty LTC_CACHE_DIR; `later` the median of the next 50 steps in milliseconds, and `steady` that of
these 50 once more, after so many seconds of the system's steps (--settle): short ones are over before a compiler is.
All these read the result of each step; `unread` is a step where ten follow each other and the last is read. Eager is
the quickest of its ways, and what stands below it is a multiple of its time: above 1 is a loss. For ltc, what was
interpreted and compiled meanwhile. On a busy machine processor time (of all threads) says more than the clock on the
wall: --clock processor.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from restless_programs import HAVE_OPTIMIZER, RESTLESS, Step

WAYS: dict[str, dict[str, bool]] = {"": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}
LATER, UNREAD = 50, 10
TURN = 5  # steps of each before the next one's
COUNTED = (
    "ImmediateSteps", "SymbolicPrograms", "SymbolicSizes", "CallByCallRuns", "UncachedCompile",
    "CompileBehind", "RecordedEntries", "ImpliedMark", "SideExits",
)  # fmt: skip
SECONDS = 900  # of one process
OURS = {
    "ltc": {"LTC_NATIVE": "0"},
    "core": {"LTC_NATIVE": "require"},
}  # ltc in Python, and with the core
_folders = contextlib.ExitStack()
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


class Runner:
    """A program that runs in one way, and its times in seconds."""

    def __init__(self, step: Step, finish: Callable[[], object], clock: str) -> None:
        self._step, self._finish, self._now = step, finish, CLOCKS[clock]
        self.times: dict[str, list[float]] = {}

    def run(self, phase: str, numbers: Sequence[int]) -> None:
        """Run and read each step; keep the times."""
        self.times.setdefault(phase, []).extend(map(self._timed, numbers))

    def run_unread(self, first: int) -> None:
        """Run some steps, and read the last."""
        started = self._now()
        for number in range(first, first + UNREAD):
            made = self._step(number)
        made.sum().item()
        self._finish()
        self.times.setdefault("unread", []).append((self._now() - started) / UNREAD)

    def _timed(self, number: int) -> float:
        started = self._now()
        self._step(number).sum().item()
        self._finish()
        return self._now() - started

    def figures(self) -> dict[str, float]:
        first, *_ = self.times["first"]
        medians = {
            phase: statistics.median(self.times[phase]) * 1e3
            for phase in ("later", "steady", "unread")
        }
        return {"first": first * 1e3, "sum": sum(self.times["first"]), **medians}


def runners(name: str, system: str, clock: str) -> list[Runner]:
    """Return the system's runner, and those of eager PyTorch."""
    torch.manual_seed(0)
    device, mark, finish = "cpu", lambda: None, lambda: None
    if system in OURS:
        import ltc.core.lazy_model as ltm

        device, mark, finish = "ltc", ltm.mark_step, ltm.wait_device_ops
    step = RESTLESS[name](device, mark)
    if system == "compile":
        step = torch.compile(step, dynamic=True)
    ways = WAYS if name in HAVE_OPTIMIZER else {"": {}}
    if name == "tiny":
        ways = {way: WAYS[way] for way in ("", "foreach")}
    eager = [RESTLESS[name]("cpu", lambda: None, **options) for options in ways.values()]
    return [Runner(step, finish, clock), *[Runner(one, lambda: None, clock) for one in eager]]


def measured(name: str, system: str, chosen: argparse.Namespace) -> dict[str, Any]:
    """Return this process's measurements of one program: the system's, and the best of eager PyTorch's."""
    torch.set_num_threads(chosen.threads)
    RESTLESS[name]("cpu", lambda: None)(0).sum().item()  # what torch begins once is nobody's
    ours, *eager = every = runners(name, system, chosen.clock)

    def in_turns(phase: str, numbers: range) -> None:
        for first in range(numbers.start, numbers.stop, TURN):
            for runner in every:
                runner.run(phase, range(first, min(first + TURN, numbers.stop)))

    following = range(chosen.steps, chosen.steps + LATER)
    in_turns("first", range(chosen.steps))
    in_turns("later", following)
    settled = time.monotonic() + chosen.settle
    for number in itertools.cycle(range(chosen.steps)):
        if time.monotonic() > settled:
            break
        ours.run("settling", [number])
    in_turns("steady", following)
    for number in following:
        for runner in every:
            runner.run_unread(number)
    of_eager = [runner.figures() for runner in eager]
    best = {key: min(figures[key] for figures in of_eager) for key in FIGURES}
    return {
        "figures": ours.figures(),
        "eager": best,
        "counted": counted() if system in OURS else {},
    }


def counted() -> dict[str, int]:
    from ltc.debug import metrics

    return {name: metrics.counter_value(name) or 0 for name in COUNTED}


# --- processes -----------------------------------------------------------------------------------


def in_a_new_process(name: str, system: str, chosen: argparse.Namespace) -> dict | None:
    command = [sys.executable, "-W", "ignore", __file__, "--worker", name, system]
    sizes = ["--steps", str(chosen.steps), "--threads", str(chosen.threads)]
    sizes += ["--clock", chosen.clock, "--settle", str(chosen.settle)]
    with tempfile.TemporaryDirectory() as folder:
        caches = {"LTC_CACHE_DIR": f"{folder}/ltc", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        if system == "core":
            shutil.copytree(built_core(), f"{folder}/ltc")
        environment = os.environ | OURS.get(system, {}) | caches
        try:
            done = subprocess.run(
                [*command, *sizes], env=environment, capture_output=True, text=True,
                check=True, timeout=SECONDS,
            )  # fmt: skip
        except subprocess.CalledProcessError as failed:
            print(f"{name} on {system}: {failed.stderr.strip().splitlines()[-1]}", file=sys.stderr)
            return None
        except subprocess.TimeoutExpired:
            print(f"{name} on {system}: not over after {SECONDS} s", file=sys.stderr)
            return None
    return json.loads(done.stdout.splitlines()[-1])


@functools.cache
def built_core() -> str:
    """A cache folder that has nothing but the native core."""
    folder = _folders.enter_context(tempfile.TemporaryDirectory())
    settings = {"LTC_CACHE_DIR": folder, "LTC_NATIVE": "0"}
    subprocess.run([sys.executable, "-m", "ltc", "build"], env=os.environ | settings, check=True)
    return folder


def report(name: str, systems: list[str], chosen: argparse.Namespace) -> None:
    """Measure a program on each system, and print it."""
    found: dict[str, list[dict]] = {system: [] for system in systems}
    for _, system in itertools.product(range(chosen.rounds), systems):
        answer = in_a_new_process(name, system, chosen)
        if answer is not None:
            found[system].append(answer)
    eager = [answer["eager"] for answers in found.values() for answer in answers]
    if eager:
        times = {key: statistics.median(one[key] for one in eager) for key in FIGURES}
        cells = "  ".join(f"{key} {times[key]:8.2f} {unit:2s}" for key, unit in FIGURES.items())
        print(f"{name:26s} {'eager':8s} {cells}")
    for system, answers in found.items():
        print(f"{'':26s} {system:8s} {multiples(answers) if answers else 'did not run'}")
    sys.stdout.flush()


def multiples(answers: list[dict]) -> str:
    """Return the figures as multiples of those of eager PyTorch beside them, and the last counts."""
    cells = []
    for key in FIGURES:
        ratio = statistics.median(one["figures"][key] / one["eager"][key] for one in answers)
        cells.append(f"{key} {ratio:8.2f} x ")
    counts = [f"{name} {count}" for name, count in answers[-1]["counted"].items()]
    return "  ".join([*cells, "", *counts])


FIGURES = {"first": "ms", "sum": "s", "later": "ms", "steady": "ms", "unread": "ms"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "programs",
        nargs="*",
        choices=[[], *RESTLESS],
        metavar="PROGRAM",
        help="programs to run; default: all",
    )
    parser.add_argument(
        "--systems", default="ltc,core,compile", help="the systems to compare, separated by commas"
    )
    parser.add_argument("--rounds", type=int, default=3, help="number of rounds")
    parser.add_argument("--steps", type=int, default=200, help="number of steps")
    parser.add_argument(
        "--settle",
        type=float,
        default=3.0,
        help="seconds of steps before the later ones are measured",
    )
    parser.add_argument("--threads", type=int, default=2, help="number of threads")
    parser.add_argument("--clock", choices=[*CLOCKS], default="wall", help="wall or processor time")
    parser.add_argument("--worker", nargs=2, metavar=("PROGRAM", "SYSTEM"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        print(json.dumps(measured(*chosen.worker, chosen)))
        return
    with _folders:
        for name in chosen.programs or RESTLESS:
            report(name, chosen.systems.split(","), chosen)


if __name__ == "__main__":
    main()
