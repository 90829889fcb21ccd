"""Check that each workload's losses have the same bits for all threads, runs and caches.

    python scripts/bench/same_bits.py [WORKLOAD ...]

Every workload is trained from the same seed with 1, 2 and 4 threads, then again, five times each in
all; the last two times with programs compiled anew and with programs read from disk. The exit
status is 1 where a loss differs.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile

import torch
import workloads

import ltc.core.lazy_model as ltm
from ltc import config
from ltc.debug import metrics
from ltc.runtime.program_cache import PROGRAMS

STEPS = 3
RUNS = (1, 2, 4, 2, 1, 4, 1, 2, 4, 1, 4, 2, 1, 2, 4)  # threads: five times each


def losses(build) -> tuple[str, ...]:
    torch.manual_seed(0)
    step = build(ltm.lazy_device(), workloads.Way(mark=ltm.mark_step))
    return tuple(float(step().item()).hex() for _ in range(STEPS))


def forget() -> None:
    """Forget programs and kernels, as in a new process."""
    ltm.wait_device_ops()
    PROGRAMS.clear()
    gc.collect()


def differing(build) -> list[str]:
    """Return the runs whose losses differ from the first run's."""
    found = []
    with (
        tempfile.TemporaryDirectory() as folder,
        config.override(LTC_CACHE_DIR=folder, LTC_TIER="native"),
    ):
        expected = None
        for number, threads in enumerate(RUNS):
            torch.set_num_threads(threads)
            result = losses(build)
            expected = expected or result
            if result != expected:
                found.append(f"run {number} with {threads} threads: {result}, not {expected}")
        for kind, use in (("cold", 0), ("warm", 1)):
            forget()
            compiled = metrics.counter_value("llvm.compiled") or 0
            with config.override(LTC_CACHE=use):
                if losses(build) != expected:
                    found.append(f"{kind} cache")
            compiled = (metrics.counter_value("llvm.compiled") or 0) - compiled
            assert bool(compiled) != bool(use), f"{compiled} kernels compiled with a {kind} cache"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "names", nargs="*", default=workloads.OPEN, help="workloads to run; default: all"
    )
    wrong = 0
    for name in parser.parse_args().names:
        found = differing(getattr(workloads, name))
        wrong += bool(found)
        print(f"{name:16s} {'; '.join(found) or 'the same bits'}", flush=True)
        forget()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
