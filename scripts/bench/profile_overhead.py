"""Measure the cost of ltc.profile, and compare the sum of its kernels with the program's time.

python scripts/bench/profile_overhead.py [WORKLOAD ...] [--rounds N] [--steps N] [--threads N]

Blocks of steps with and without it take turns, and medians are compared: of time, and of this
process's processor time. Exits with 1 where the step takes more than 5 % longer, or the kernels of
programs of a millisecond or more sum to less than 97 % of their time (of shorter ones, what Python
does for a launch is most).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import more_workloads
import torch
import workloads

os.environ.setdefault("LTC_TIER", "native")

import ltc
import ltc.core.lazy_model as ltm

MOST_DIFFERENCE, MOST_OVERHEAD = 0.03, 0.05
SHORT = 1e-3  # seconds of a step


def timed(step: Callable[[], Any], steps: int) -> tuple[float, float]:
    """(seconds, processor seconds) of one step."""
    ltm.wait_device_ops()
    began, worked = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    ltm.wait_device_ops()
    return (time.perf_counter() - began) / steps, (time.process_time() - worked) / steps


def sums(trace: dict[str, Any]) -> tuple[float, float]:
    """Microseconds of kernels, and of the launches they are in, of programs that have any."""
    inside = {one["id"] for one in trace["ltc"]["programs"] if one["kernels"]}
    shown = {"kernel": 0.0, "launch": 0.0}
    for event in trace["traceEvents"]:
        if event["cat"] in shown and event["args"]["program"] in inside:
            shown[event["cat"]] += event["dur"]
    return shown["kernel"], shown["launch"]


def measured(name: str, rounds: int, steps: int) -> bool:
    """Print what a workload shows; whether it keeps what is promised."""
    build = getattr(workloads, name, None) or getattr(more_workloads, name)
    step = build(ltm.lazy_device(), workloads.Way(mark=ltm.mark_step))
    timed(step, 5)
    ratios: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        for number in range(rounds):
            block = ltc.profile(path)
            order = (True, False) if number % 2 else (False, True)
            took = {}
            for looks in order:
                if looks:
                    with block:
                        step()  # what is made once
                        took[looks] = timed(step, steps)
                else:
                    step()
                    took[looks] = timed(step, steps)
            ratios.append((took[True][0] / took[False][0], took[True][1] / took[False][1]))
        size = path.stat().st_size
    assert block.trace is not None
    kernels, launches = sums(block.trace)
    wall, processor = (statistics.median(column) for column in zip(*ratios))
    print(
        f"{name}: {took[False][0] * 1e3:.2f} ms a step; with ltc.profile x{wall:.3f}, processor time "
        f"x{processor:.3f}; kernels are {kernels / launches:.1%} of the programs' time; "
        f"{size / 1e3 / (steps + 1):.0f} kB a step",
        flush=True,
    )
    agrees = took[False][0] < SHORT or abs(kernels / launches - 1) <= MOST_DIFFERENCE
    return agrees and processor <= 1 + MOST_OVERHEAD


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workloads", nargs="*", default=["gpt"], help="workloads to run")
    parser.add_argument("--rounds", type=int, default=7, help="number of rounds")
    parser.add_argument("--steps", type=int, default=10, help="number of steps")
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="number of threads"
    )
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    kept = [measured(name, asked.rounds, asked.steps) for name in asked.workloads]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
