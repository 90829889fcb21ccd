"""Times of one workload in all ways of PyTorch: lines of JSON, for scripts/accelerator_check.

    python scripts/bench/accelerator_times.py gpt_bf16 [WAY ...]

It waits for a line of input, "go", before it takes the times.

ltc is not imported here: accelerator_parts.py times its ways by the same functions.
"""

from __future__ import annotations

import cProfile
import fcntl
import json
import os
import pstats
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from accelerator_workloads import BUILDERS
from workloads import Way

WARM_STEPS = 12  # until a step is replayed, and a graph of torch's captured
ROUNDS, ROUND_SECONDS = 3, 0.2
PROFILED_STEPS, MOST_HOT_SPOTS = 20, 25
OF_TORCH = ("fused", "eager", "reduce-overhead", "compile")


class Device(NamedTuple):
    """The device that a way runs on.

    Attributes:
        finish: Waits until it is done.
        memory_now: Bytes in use, from which on the peak counts; None where that cannot be told.
        peak_memory: The most bytes that were in use since.
    """

    name: str
    finish: Callable[[], object]
    memory_now: Callable[[], int | None] = lambda: None
    peak_memory: Callable[[], int] = lambda: 0


class Warm(NamedTuple):
    """A workload that is ready to be timed in one way."""

    step: Callable
    finish: Callable


def workload(name: str, device: str, way: Way) -> Callable[[], torch.Tensor]:
    torch.manual_seed(0)
    step: Callable[[], torch.Tensor] = BUILDERS[name](device, way)
    return step


def tell(**found: object) -> None:
    print(json.dumps(found), flush=True)


def times(name: str, device: Device, ways: Mapping[str, Way]) -> None:
    """Tell the times of each way, in ms a step.

    It says when all ways are warm, and waits for "go", so that others may get warm as well; then the
    processes take turns.
    """
    allow_tf32()
    said, warm = Said(), {}
    for chosen, way in ways.items():
        if said.enough.is_set():
            break
        try:
            warm[chosen] = warmed(name, device, chosen, way)
        except Exception as error:
            tell(way=chosen, failed=f"{type(error).__name__}: {error}"[:600])
    tell(ready=True)
    said.go.wait()
    with alone():
        for chosen, one in warm.items():
            tell(way=chosen, **measured(one))
        for chosen, one in warm.items():
            tell(way=chosen, hot_spots=hot_spots(one))
    tell(over=True)


def allow_tf32() -> None:
    """Have torch and XLA compute products of float32 as the device does best."""
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.benchmark = True


class Said:
    """The lines that come on the standard input.

    Attributes:
        enough: Set by "enough": what is not yet warm is left out.
        go: Set by "go", and at the end of the input.
    """

    def __init__(self) -> None:
        self.enough, self.go = threading.Event(), threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in sys.stdin:
            (self.enough if line == "enough\n" else self.go).set()
        self.go.set()


@contextmanager
def alone() -> Iterator[None]:
    """Among the processes that are timed: the others wait."""
    folder = Path(os.environ.get("LTC_CACHE_DIR", tempfile.gettempdir()))
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "alone.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def warmed(name: str, device: Device, chosen: str, way: Way) -> Warm:
    """Run the first steps; tell how long the first one took, the loss and the memory after all."""
    before, began = device.memory_now(), time.perf_counter()
    step = workload(name, device.name, way)
    loss_of(step())
    first = time.perf_counter() - began
    for _ in range(WARM_STEPS - 2):
        step()
    loss = loss_of(step())
    device.finish()
    tell(
        way=chosen, device=device.name, first_s=round(first, 3), loss=loss,
        peak_bytes=None if before is None else device.peak_memory() - before,
    )  # fmt: skip
    return Warm(step, device.finish)


def loss_of(found: torch.Tensor) -> float:
    """The first element of what a step gives: most give a loss, some a tensor of results."""
    loss: float = found.detach().flatten()[0].double().item()
    return loss


def measured(warm: Warm) -> dict:
    """Steps behind one another, each waited for, and until the host may go on."""
    step, finish = warm
    rounds = [pipelined(step, finish) for _ in range(ROUNDS)]
    return {
        "pipelined_ms": round(statistics.median(rounds), 4),
        "rounds_ms": [round(one, 4) for one in rounds],
        "synchronised_ms": median_ms(lambda: (step(), finish()), finish),
        "host_ms": median_ms(step, finish),
    }


def pipelined(step: Callable, finish: Callable) -> float:
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < ROUND_SECONDS:
        step()
        count += 1
    finish()
    return (time.perf_counter() - began) / count * 1e3


def median_ms(call: Callable, finish: Callable) -> float:
    """The median time of a call, of which none is under way when the next one begins."""
    found = []
    began = time.perf_counter()
    while time.perf_counter() - began < ROUND_SECONDS or len(found) < 3:
        finish()
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    finish()
    return round(statistics.median(found) * 1e3, 4)


def hot_spots(warm: Warm) -> list[str]:
    """The functions in which the host spends most of a step, in microseconds with a profiler."""
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(PROFILED_STEPS):
        warm.step()
    profile.disable()
    warm.finish()
    found = pstats.Stats(profile).stats.items()  # type: ignore[attr-defined]  # as print_stats
    costs = sorted(((own, where) for where, (_, _, own, _, _) in found), reverse=True)
    return [
        f"{own / PROFILED_STEPS * 1e6:.0f} {Path(file).name}:{line} {name}"
        for own, (file, line, name) in costs[:MOST_HOT_SPOTS]
    ]


def of_torch() -> Device:
    if not torch.cuda.is_available():
        return Device("cpu", lambda: None)

    def memory_now() -> int:
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()

    return Device("cuda", torch.cuda.synchronize, memory_now, torch.cuda.max_memory_allocated)


def way_of(name: str, chosen: str) -> Way:
    options = {} if chosen == "eager" else {"fused": True}
    if chosen in ("eager", "fused"):
        return Way(optimizer_options=options)
    mode = {} if chosen == "compile" else {"mode": chosen}

    def compiled(function: Callable) -> Callable:
        return torch.compile(function, **mode)

    if name == "adamw_4m":  # which has no model: its optimizer is compiled
        return Way(compile_optimizer=compiled)
    return Way(compile_model=compiled, optimizer_options=options)


if __name__ == "__main__":
    workload_name, *chosen_ways = sys.argv[1:]
    ways = {chosen: way_of(workload_name, chosen) for chosen in chosen_ways or OF_TORCH}
    times(workload_name, of_torch(), ways)
