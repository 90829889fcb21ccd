"""How fast Python runs beside a program, and what a launch costs besides its kernels.

    python scripts/free_python.py

A Python thread counts while the device's thread runs matrix products back to back on one thread of
the machine's two or more; its speed is compared with counting alone. The launch of a small program
is compared with its one native call.
"""

from __future__ import annotations

import statistics
import threading
import time

import torch

import ltc.core.lazy_model as ltm
from ltc.backends.llvm import LlvmBackend
from ltc.ir import ops
from ltc.ir.graph import Graph
from ltc.ir.node import make

SECONDS = 1.0
ROUNDS = 5


def counted(seconds: float) -> float:
    """Additions a second."""
    count, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(1000):
            count += 1
    return count / seconds


def beside_programs(seconds: float) -> float:
    x = torch.randn(1024, 1024).to("ltc")
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            y = x
            for _ in range(20):
                y = y @ x
            ltm.mark_step(wait=True)

    worker = threading.Thread(target=run)
    worker.start()
    time.sleep(0.3)  # compiled, and long enough to run behind its caller
    speed = counted(seconds)
    stop.set()
    worker.join()
    return speed


def launch_microseconds(parameters: int = 14, repeats: int = 2000) -> tuple[float, float]:
    """(a launch of a program that adds to each parameter, its native call alone)"""
    inputs = [make(ops.INPUT, index=k, dtype=torch.float32, shape=(64,)) for k in range(parameters)]
    scalar = make(ops.SCALAR, slot=0, dtype=torch.float32, wrapped=True)
    rate = make(ops.EXPAND, scalar, shape=(64,))
    graph = Graph(tuple(inputs), (scalar,), tuple(x + rate for x in inputs))
    computation = LlvmBackend().compile(graph, 0, frozenset(range(parameters)))
    buffers = [torch.zeros(64) for _ in inputs]
    whole, native = [], []
    launch = computation._runs[0]._run.launch

    def timed(frame: int) -> int:
        started = time.perf_counter()
        failed = launch(frame)
        native.append(time.perf_counter() - started)
        return failed

    computation._runs[0]._run.launch = timed
    for _ in range(repeats):
        started = time.perf_counter()
        computation.launch(buffers, [0.5])
        whole.append(time.perf_counter() - started)
    return statistics.median(whole) * 1e6, statistics.median(native) * 1e6


def main() -> None:
    torch.set_num_threads(1)
    ratios = []
    for _ in range(ROUNDS):
        alone = counted(SECONDS / 2)
        ratios.append(beside_programs(SECONDS) / alone)
    print(f"Python beside a program runs at {statistics.median(ratios):.0%} of its speed alone")
    whole, native = launch_microseconds()
    print(f"a launch with 14 inputs takes {whole:.1f} us, its native call {native:.1f} us of them")


if __name__ == "__main__":
    main()
