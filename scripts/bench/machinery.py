"""Measure the gain of each switch of docs/machinery.md: steps with and without it, in turns.

    python scripts/bench/machinery.py [--only LTC_RESERVE_CORE=0] [--workload mlp] [--rounds 5] [--runs 3]

Every variant lives in a process of its own, which is asked for a few steps at a time; the order is
drawn anew for each round. A ratio is the median, over the rounds of a run, of the time without
divided by the time with the machine: above 1, the machine gains. Each run starts new processes,
because where their memory lies makes a difference of some per cent. LTC_PREFAULT_MB acts once in a
process: its figures are those of the first step, in a process that finds compiled kernels on disk.

A process may use as many processors as it has threads.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import bench_first_step
import bench_modes
import bench_systems

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Machine:
    """The machinery that a switch turns off, and the files that are there for it alone."""

    name: str
    files: tuple[str, ...]


MACHINES = {
    "LTC_RESERVE_CORE=0": Machine("core reservation", ("runtime/core_reservation.py",)),
    "LTC_THREADS=openmp": Machine("thread pool", ("llvm/native/thread_pool.py",)),
    "LTC_PREFAULT_MB=0": Machine("pages ahead", ("backends/llvm/host_computation.py",)),
}
FIRST_STEP = "LTC_PREFAULT_MB=0"
WORKLOADS = ("mlp", "mlp_fed", "mnist_cnn", "resnet18", "gpt", "lstm", "tiny", "adamw_many")
FIRST_STEP_WORKLOADS = ("mlp", "resnet18", "gpt")  # with tensors as large as the machine acts on


def lines_of(machine: Machine) -> int:
    return sum(len((ROOT / "ltc" / file).read_text().splitlines()) for file in machine.files)


# --- in a process of its own --------------------------------------------------------------------


def serve(threads: int, turn_seconds: float) -> None:
    """Answer each workload named on standard input with milliseconds of a step."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    keep_to(threads)
    measured = bench_modes.Workloads(bench_systems.ltc_system(), threads)
    measured.turn_seconds = turn_seconds
    for line in sys.stdin:
        print(json.dumps(measured.times(line.strip())[0]), file=answers)


def first_step(workload: str, threads: int) -> None:
    keep_to(threads)
    print(json.dumps(bench_first_step.first_step(workload, threads)["seconds"] * 1e3))


def keep_to(processors: int) -> None:
    """Before anything has made threads, or asked how many processors there are."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:processors])


# --- turns --------------------------------------------------------------------------------------


def environment_of(switch: str) -> dict[str, str]:
    name, _, setting = switch.partition("=")
    return {"LTC_TIER": "native"} | os.environ | ({name: setting} if name else {})


def command(kind: str, asked: argparse.Namespace, *more: str) -> list[str]:
    turn = str(asked.turn_seconds)
    options = ["--threads", str(asked.threads), "--turn-seconds", turn]
    return [sys.executable, "-W", "ignore", __file__, "--worker", kind, *options, *more]


def times_of_steps(switches: Sequence[str], workloads: Sequence[str], asked) -> dict:
    """(workload, switch) -> milliseconds of each turn; "" is the process that has everything."""
    workers = {
        switch: subprocess.Popen(
            command("steps", asked), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment_of(switch),
        )
        for switch in ("", *switches)
    }  # fmt: skip
    times: dict = {(workload, switch): [] for workload in workloads for switch in workers}
    for workload in workloads:
        for _ in range(asked.rounds):
            for switch in random.sample(list(workers), len(workers)):
                print(workload, file=workers[switch].stdin, flush=True)
                times[workload, switch].append(json.loads(workers[switch].stdout.readline()))
    for worker in workers.values():
        worker.stdin.close()
        worker.wait()
    return times


def times_of_first_steps(workloads: Sequence[str], asked) -> dict:
    """Time first steps with and without; the first process of a workload only fills the cache."""
    times: dict = {(workload, switch): [] for workload in workloads for switch in ("", FIRST_STEP)}
    for workload in workloads:
        for number in range(asked.rounds + 1):
            for switch in random.sample(("", FIRST_STEP), 2):
                done = subprocess.run(
                    command("first", asked, "--workload", workload),
                    stdout=subprocess.PIPE, text=True, check=True, env=environment_of(switch),
                )  # fmt: skip
                if number:
                    times[workload, switch].append(json.loads(done.stdout.splitlines()[-1]))
    return times


def one_run(switches: Sequence[str], asked) -> dict:
    workloads = asked.workload or WORKLOADS
    of_steps = [switch for switch in switches if switch != FIRST_STEP]
    times = times_of_steps(of_steps, workloads, asked) if of_steps else {}
    found = {
        (switch, workload): compared(times[workload, ""], times[workload, switch])
        for switch in of_steps
        for workload in workloads
    }
    if FIRST_STEP in switches:
        large = [workload for workload in workloads if workload in FIRST_STEP_WORKLOADS]
        first = times_of_first_steps(large, asked)
        for workload in large:
            found[FIRST_STEP, workload] = compared(first[workload, ""], first[workload, FIRST_STEP])
    return found


def compared(on: Sequence[float], off: Sequence[float]) -> tuple[float, float, float]:
    """Medians with the machine and without it, and the median ratio of a round."""
    ratio = statistics.median(without / with_it for with_it, without in zip(on, off, strict=True))
    return statistics.median(on), statistics.median(off), ratio


def report(runs: Sequence[dict]) -> None:
    print(f"{'machine':17}{'lines':>6}  {'workload':12}{'on ms':>9}{'off ms':>9}   off / on")
    for switch, workload in runs[0]:
        machine = MACHINES[switch]
        on, off = (statistics.median(run[switch, workload][k] for run in runs) for k in (0, 1))
        ratios = "  ".join(f"{run[switch, workload][2]:.3f}" for run in runs)
        print(
            f"{machine.name:17}{lines_of(machine):6}  {workload:12}{on:9.3f}{off:9.3f}   {ratios}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--only",
        action="append",
        choices=list(MACHINES),
        help="a switch to measure; may be repeated",
    )
    parser.add_argument("--workload", action="append", help="may be repeated")
    parser.add_argument("--rounds", type=int, default=7, help="number of rounds")
    parser.add_argument("--runs", type=int, default=3, help="processes of each switch")
    parser.add_argument("--threads", type=int, default=2, help="number of threads")
    parser.add_argument("--turn-seconds", type=float, default=0.6, help="seconds of each turn")
    parser.add_argument("--worker", choices=("steps", "first"), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.worker == "steps":
        serve(asked.threads, asked.turn_seconds)
    elif asked.worker == "first":
        first_step(asked.workload[0], asked.threads)
    else:
        switches = asked.only or list(MACHINES)
        report([one_run(switches, asked) for _ in range(asked.runs)])


if __name__ == "__main__":
    main()
