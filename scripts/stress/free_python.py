"""Measure Python's speed beside a program, and the cost of a launch besides its kernels.

    python scripts/stress/free_python.py

A Python thread counts while the device's thread runs matrix products back to back on one thread of
the machine's two or more. Its speed is compared with counting alone, and with counting while
another process runs the same products: cores that share their units are slower then too, but the
process has a lock of its own. The launch of a small program is compared with its one native call.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import torch

import ltc.core.lazy_model as ltm
from ltc.backends.llvm.backend import LlvmBackend
from ltc.ir import ops
from ltc.ir.graph import Graph
from ltc.ir.node import make

SECONDS = 1.0
WARM_UP = 0.5  # seconds: compiled, and long enough to run behind its caller
ROUNDS = 5


def counted(seconds: float) -> float:
    """Additions a second."""
    count, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(1000):
            count += 1
    return count / seconds


def run_products(is_over: Callable[[], bool]) -> None:
    x = torch.randn(1024, 1024).to("ltc")
    while not is_over():
        y = x
        for _ in range(20):
            y = y @ x
        ltm.mark_step(wait=True)


def beside_programs(seconds: float) -> float:
    stop = threading.Event()
    worker = threading.Thread(target=run_products, args=(stop.is_set,))
    worker.start()
    time.sleep(WARM_UP)
    speed = counted(seconds)
    stop.set()
    worker.join()
    return speed


def beside_a_process(seconds: float) -> float:
    other = subprocess.Popen([sys.executable, __file__, "--products"], stdout=subprocess.PIPE)
    try:
        other.stdout.readline()
        time.sleep(WARM_UP)
        return counted(seconds)
    finally:
        other.kill()
        other.wait()


def run_products_for_ever() -> None:
    torch.set_num_threads(1)
    print("ready", flush=True)
    run_products(lambda: False)


def launch_microseconds(parameters: int = 14, repeats: int = 2000) -> tuple[float, float]:
    """(a launch of a program that adds to each parameter, its native call alone)"""
    inputs = [make(ops.INPUT, index=k, dtype=torch.float32, shape=(64,)) for k in range(parameters)]
    scalar = make(ops.SCALAR, slot=0, dtype=torch.float32, wrapped=True)
    rate = make(ops.EXPAND, scalar, shape=(64,))
    graph = Graph(tuple(inputs), (scalar,), tuple(x + rate for x in inputs))
    computation = LlvmBackend().compile(graph, 0, frozenset(range(parameters)))
    buffers = [torch.zeros(64) for _ in inputs]
    whole, native = [], []
    launch = computation._runs[0].run.launch

    def timed(frame: int) -> int:
        started = time.perf_counter()
        failed = launch(frame)
        native.append(time.perf_counter() - started)
        return failed

    computation._runs[0].run.launch = timed
    for _ in range(repeats):
        started = time.perf_counter()
        computation.launch(buffers, [0.5])
        whole.append(time.perf_counter() - started)
    return statistics.median(whole) * 1e6, statistics.median(native) * 1e6


def main() -> None:
    torch.set_num_threads(1)
    if "--products" in sys.argv:
        return run_products_for_ever()
    ways = (counted, beside_programs, beside_a_process)
    rounds = [[way(SECONDS) for way in ways] for _ in range(ROUNDS)]
    alone, beside, apart = (statistics.median(speeds) for speeds in zip(*rounds, strict=True))
    print(f"Python beside a program runs at {beside / alone:.0%} of its speed alone,")
    print(f"and at {beside / apart:.0%} of that beside the same program in another process")
    whole, native = launch_microseconds()
    print(f"a launch with 14 inputs takes {whole:.1f} us, its native call {native:.1f} us of them")


if __name__ == "__main__":
    main()
