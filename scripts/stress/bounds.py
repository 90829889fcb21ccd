"""Check that memory, its maps, open files and threads stay flat once every table is full.

    python scripts/stress/bounds.py [--only shapes] [--shapes 100000] [--compiled 3000] [--drawn 10000]
                                    [--threads 1000]

shapes    steps of as many different shapes, run by the default policy
compiled  steps of as many different shapes, each compiled: more programs than the cache keeps
drawn     training steps of shapes drawn at random from 10000: one program of symbols
threads   threads that each record one step and end

Each runs in a process of its own. A line is printed for every tenth, with the figures and the
largest tables of ltc's modules; a finding is growth between the half and the end of a run. Of
`drawn` the processor time of a step is flat as well: "us", the median of a tenth's steps.
"""

from __future__ import annotations

import argparse
import collections
import functools
import gc
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import torch

LIMIT_MB, LIMIT_MAPS, LIMIT_FILES = 16, 64, 4
LIMIT_TIME = 1.5  # times as long as at the half: others use the machine too
SIDE = 317  # shapes of a side: so many by so many, none of them twice
MIXING = (
    7919  # in no order of size: what is kept of the last ones is as much at the half as at the end
)
LARGEST = 4  # tables that a line names


def figures() -> dict[str, int]:
    """Resident megabytes, memory maps, open files, threads of this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "MB": pages * os.sysconf("SC_PAGE_SIZE") >> 20,
        "maps": Path("/proc/self/maps").read_text().count("\n"),
        "files": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
    }


def tables() -> list[str]:
    """The largest tables at the top of ltc's modules, in words."""
    found: collections.Counter[str] = collections.Counter()
    for module in [m for name, m in list(sys.modules.items()) if name.partition(".")[0] == "ltc"]:
        for name, value in vars(module).items():
            if isinstance(value, functools._lru_cache_wrapper):
                found[f"{module.__name__}.{name}"] = value.cache_info().currsize
            elif isinstance(
                value, (dict, list, set, weakref.WeakValueDictionary, weakref.WeakKeyDictionary)
            ):
                found[f"{module.__name__}.{name}"] = len(value)
    return [f"{name} {size}" for name, size in found.most_common(LARGEST)]


def in_tenths(count: int, step: Callable[[int], None]) -> list[dict[str, int]]:
    """The figures after every tenth of so many steps."""
    import ltc.core.lazy_model as ltm

    seen, started = [], time.monotonic()
    taken: list[float] = []
    for number in range(count):
        began = time.process_time()
        step(number)
        taken.append(time.process_time() - began)
        if (number + 1) % max(count // 10, 1) == 0:
            ltm.wait_device_ops()
            seen.append({**figures(), "us": int(statistics.median(taken) * 1e6)})
            taken.clear()
            seconds = time.monotonic() - started
            print(f"{number + 1} in {seconds:.0f} s: {seen[-1]}; {', '.join(tables())}", flush=True)
    return seen


def of_another_shape(number: int) -> None:
    import ltc.core.lazy_model as ltm

    place = number * MIXING % SIDE**2
    x = torch.ones(2 + place % SIDE, 1 + place // SIDE, device="ltc")
    total = (x * 2 + 1).sum(0).mean()
    ltm.mark_step()
    if number % 100 == 0:
        assert total.item() == 3 * x.shape[0]


def trained_on_drawn_shapes() -> Callable[[int], None]:
    """One of 100 lengths and one of 100 numbers of rows each step."""
    import ltc.core.lazy_model as ltm

    torch.manual_seed(0)
    drawn = random.Random(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.GELU(), torch.nn.Linear(16, 4)
    ).to("ltc")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(number: int) -> None:
        x = torch.randn(drawn.randint(2, 101), drawn.randint(2, 101), 8).to("ltc")
        optimizer.zero_grad()
        loss = model(x).softmax(1).square().mean()
        loss.backward()
        optimizer.step()
        ltm.mark_step()
        if number % 100 == 0:
            assert 0 < loss.item() < 1

    return step


def in_another_thread(number: int) -> None:
    import ltc.core.lazy_model as ltm

    found = []

    def work() -> None:
        x = torch.full((4, 4), float(number % 7), device="ltc", requires_grad=True)
        (x * x).sum().backward()
        ltm.mark_step()
        found.append(x.grad.sum().item())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [32.0 * (number % 7)]


RUNS: dict[str, tuple[Callable[[], Callable[[int], None]], dict[str, str]]] = {
    "shapes": (lambda: of_another_shape, {}),
    "compiled": (lambda: of_another_shape, {"LTC_TIER": "native"}),
    "drawn": (trained_on_drawn_shapes, {}),
    "threads": (lambda: in_another_thread, {}),
}


def findings(name_of_run: str, seen: list[dict[str, int]]) -> list[str]:
    half, end = seen[len(seen) // 2 - 1], seen[-1]
    limits = {"MB": LIMIT_MB, "maps": LIMIT_MAPS, "files": LIMIT_FILES, "threads": 0}
    slower = name_of_run == "drawn" and end["us"] > half["us"] * LIMIT_TIME
    time_found = [f"us: {half['us']} at the half, {end['us']} at the end"] if slower else []
    return time_found + [
        f"{name}: {half[name]} at the half, {end[name]} at the end"
        for name, limit in limits.items()
        if end[name] - half[name] > limit
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=RUNS, help="run this one alone")
    parser.add_argument("--shapes", type=int, default=100_000, help="number of different shapes")
    parser.add_argument("--compiled", type=int, default=3_000, help="number of compiled shapes")
    parser.add_argument("--drawn", type=int, default=10_000, help="number of drawn shapes")
    parser.add_argument("--threads", type=int, default=1_000, help="number of threads")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        import ltc  # noqa: F401  adds the device

        step = RUNS[options.only][0]()
        found = findings(options.only, in_tenths(getattr(options, options.only), step))
        print(options.only, *(found or ["flat"]), sep="\n  ", flush=True)
        return bool(found)
    statuses = []
    for name in [options.only] if options.only else RUNS:
        with tempfile.TemporaryDirectory() as folder:
            settings = {"LTC_CACHE_DIR": folder, "OMP_NUM_THREADS": "1", **RUNS[name][1]}
            command = [sys.executable, __file__, "--here", "--only", name]
            command += [f"--{name}={getattr(options, name)}"]
            statuses.append(subprocess.run(command, env={**os.environ, **settings}).returncode)
    return any(statuses)


if __name__ == "__main__":
    sys.exit(main())
