"""Restless programs on ltc, eager PyTorch and torch.compile: first steps, later ones, steady ones.

    python scripts/bench/restless.py [PROGRAM ...] [--systems eager,ltc,core,compile] [--rounds 3]
                                     [--steps 200] [--settle 3] [--threads 2] [--clock processor]

`core` is ltc with its native core, which is built before.

Every figure is a median over new processes, the systems in turns. `first` is the first step in
milliseconds; `sum` the first steps together in seconds, from an empty LTC_CACHE_DIR; `later` the
median of the next 50 steps in milliseconds, and `steady` that of these 50 once more, after so many
seconds of steps (--settle): short ones are over before a compiler is. All these read the result of
each step; `unread` is a step where ten follow each other and the last is read. Eager is the quickest
of its ways to update parameters (default, foreach, fused), and what stands below it is a multiple of
its time: above 1 is a loss. For ltc, what was interpreted and compiled meanwhile. On a busy machine
processor time (of all threads) says more than the clock on the wall: --clock processor.
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
from typing import Any

import torch
from restless_programs import HAVE_OPTIMIZER, RESTLESS

WAYS: dict[str, dict[str, bool]] = {"": {}, "foreach": {"foreach": True}, "fused": {"fused": True}}
LATER, UNREAD = 50, 10
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


def measured(
    name: str, system: str, way: str, steps: int, settle: float, threads: int, clock: str
) -> dict[str, Any]:
    """Return this process's measurements of one program."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    device, mark, finish = "cpu", lambda: None, lambda: None
    if system in OURS:
        import ltc.core.lazy_model as ltm

        device, mark, finish = "ltc", ltm.mark_step, ltm.wait_device_ops
    step = RESTLESS[name](device, mark, **WAYS[way])
    if system == "compile":
        step = torch.compile(step, dynamic=True)
    now = CLOCKS[clock]

    def timed(number: int) -> float:
        started = now()
        step(number).sum().item()
        finish()
        return now() - started

    def unread(first: int) -> float:
        started = now()
        for number in range(first, first + UNREAD):
            made = step(number)
        made.sum().item()
        finish()
        return (now() - started) / UNREAD

    seconds = [timed(number) for number in range(steps)]
    following = range(steps, steps + LATER)
    later = [timed(number) for number in following]
    settled = time.monotonic() + settle
    for number in itertools.cycle(range(steps)):
        if time.monotonic() > settled:
            break
        timed(number)
    found = {
        "first": seconds[0] * 1e3,
        "sum": sum(seconds),
        "later": statistics.median(later) * 1e3,
        "steady": statistics.median([timed(number) for number in following]) * 1e3,
        "unread": statistics.median([unread(number) for number in following]) * 1e3,
    }
    return {"figures": found, "counted": counted() if system in OURS else {}}


def counted() -> dict[str, int]:
    from ltc.debug import metrics

    return {name: metrics.counter_value(name) or 0 for name in COUNTED}


# --- processes -----------------------------------------------------------------------------------


def in_a_new_process(name: str, system: str, way: str, chosen: argparse.Namespace) -> dict | None:
    command = [sys.executable, "-W", "ignore", __file__, "--worker", name, system, way]
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
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired):
            return None
    return json.loads(done.stdout.splitlines()[-1])


@functools.cache
def built_core() -> str:
    """A cache folder that has nothing but the native core."""
    folder = _folders.enter_context(tempfile.TemporaryDirectory())
    settings = {"LTC_CACHE_DIR": folder, "LTC_NATIVE": "0"}
    subprocess.run([sys.executable, "-m", "ltc", "build"], env=os.environ | settings, check=True)
    return folder


def in_turns(name: str, systems: list[str], chosen: argparse.Namespace) -> dict[str, list[dict]]:
    """Return every process's measurements, by system; eager's ways are systems of their own."""
    ways = list(WAYS) if name in HAVE_OPTIMIZER else [""]
    if name == "tiny":
        ways = ["", "foreach"]
    turns = [(s, w) for s in systems for w in (ways if s == "eager" else [""])]
    found: dict[str, list[dict]] = {f"{system} {way}".strip(): [] for system, way in turns}
    for _ in range(chosen.rounds):
        for system, way in turns:
            answer = in_a_new_process(name, system, way, chosen)
            if answer is not None:
                found[f"{system} {way}".strip()].append(answer)
    return found


def medians(answers: list[dict]) -> dict[str, float]:
    return {
        figure: statistics.median(answer["figures"][figure] for answer in answers)
        for figure in answers[0]["figures"]
    }


FIGURES = {"first": "ms", "sum": "s", "later": "ms", "steady": "ms", "unread": "ms"}


def report(name: str, found: dict[str, list[dict]]) -> None:
    figures = {system: medians(answers) for system, answers in found.items() if answers}
    of_eager = [f for system, f in figures.items() if system.startswith("eager")]
    best = {key: min(f[key] for f in of_eager) for key in FIGURES}
    times = "  ".join(f"{key} {best[key]:8.2f} {unit:2s}" for key, unit in FIGURES.items())
    print(f"{name:26s} eager    {times}")
    for system, answers in found.items():
        if system.startswith("eager"):
            continue
        if not answers:
            print(f"{'':26s} {system:8s} did not run")
            continue
        times = "  ".join(f"{key} {figures[system][key] / best[key]:8.2f} x " for key in FIGURES)
        counts = "  ".join(f"{k} {v}" for k, v in answers[-1]["counted"].items())
        print(f"{'':26s} {system:8s} {times}  {counts}")
    sys.stdout.flush()


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
        "--systems", default="eager,ltc,compile", help="the systems to compare, separated by commas"
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
    parser.add_argument(
        "--worker", nargs=3, metavar=("PROGRAM", "SYSTEM", "WAY"), help=argparse.SUPPRESS
    )
    chosen = parser.parse_args()
    if chosen.worker:
        sizes = chosen.steps, chosen.settle, chosen.threads
        print(json.dumps(measured(*chosen.worker, *sizes, chosen.clock)))
        return
    with _folders:
        for name in chosen.programs or RESTLESS:
            report(name, in_turns(name, chosen.systems.split(","), chosen))


if __name__ == "__main__":
    main()
