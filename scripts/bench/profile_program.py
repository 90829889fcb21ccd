"""Time each kernel of a workload's step, in the order in which they run.

python scripts/bench/profile_program.py WORKLOAD [--threads N] [--rounds N] [--texts FOLDER] [--all]

WORKLOAD is a function of scripts/bench/workloads.py or more_workloads.py. Each program that a
steady step runs is planned again, and its kernels are launched one by one on buffers of their own,
all of them in each round, so that what one leaves in the caches is what the next finds. What no
kernel computes is left out.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

import more_workloads
import numpy as np
import torch
import workloads

os.environ.setdefault("LTC_BACKEND", "llvm")
os.environ["LTC_CACHE"] = "0"  # graphs are seen when they are compiled
os.environ["LTC_TIER"] = "native"

import ltc.core.lazy_model as ltm
from ltc.backends.eager import LOWERING
from ltc.backends.llvm import backend, compiling
from ltc.backends.llvm.schedule import planned_steps
from ltc.backends.llvm.timed import nest_text
from ltc.ir import ops
from ltc.ir.loop_nest import Product
from ltc.llvm.native.kernel_run import EntryCall, Fault, KernelRun, entry_address


def programs_of(workload: str) -> list[compiling.LlvmComputation]:
    """(graph, donated) of each program that the second and later steps of a workload run."""
    compiled: dict[int, tuple] = {}
    launched: list[tuple] = []
    compile, launch = backend.LlvmBackend.compile, compiling.LlvmComputation.launch

    def remembered(self, graph, device, donated):
        computation = compile(self, graph, device, donated)
        compiled[id(computation)] = (graph, donated)
        return computation

    def counted(self, buffers, scalars):
        launched.append(compiled[id(self)])
        return launch(self, buffers, scalars)

    backend.LlvmBackend.compile, compiling.LlvmComputation.launch = remembered, counted
    build = getattr(workloads, workload, None) or getattr(more_workloads, workload)
    step = build(ltm.lazy_device(), workloads.Way(mark=ltm.mark_step))
    for _ in range(3):
        step().item()
    launched.clear()
    step().item()
    backend.LlvmBackend.compile, compiling.LlvmComputation.launch = compile, launch
    return launched


class Timed:
    """One kernel of a program, to be launched alone."""

    def __init__(self, step, code, buffers: dict):
        self.step, self.code = step, code
        self.nodes = tuple(dict.fromkeys(code.nodes))
        self.buffers = [buffers[node] for node in self.nodes]
        shifts = code.shifts + (0,) * (len(code.nodes) - len(code.shifts))
        places = {node: k for k, node in enumerate(self.nodes)}
        pairs = [(places[node], shift) for node, shift in zip(code.nodes, shifts)]
        pairs += [(len(places), number) for number in code.numbers]
        arguments = tuple(word for pair in pairs for word in pair)
        call = EntryCall(entry_address(code.text, code.name), arguments, code.tasks)
        self.run = KernelRun([call], len(places) + 1)
        self.frame = np.zeros(len(places) + 1 + len(pairs), dtype=np.int64)
        self.frame[: len(places)] = [buffer.data_ptr() for buffer in self.buffers]
        self.seconds: list[float] = []

    def launch(self) -> None:
        started = time.perf_counter()
        self.run.launch(self.frame.ctypes.data)
        self.seconds.append(time.perf_counter() - started)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def megabytes(self) -> float:
        return sum(bytes_of(node) for node in self.nodes) / 1e6

    def __str__(self) -> str:
        unit = self.step.unit
        if isinstance(unit, Product):
            operands = " ".join(str(list(n.shape)) for n in unit.node.inputs)
            follows = f" then {nest_text(unit.epilogue)}" if unit.epilogue else ""
            return f"{unit.node.op.name} {operands}{follows}"
        return nest_text(unit)


def bytes_of(node) -> int:
    if isinstance(node, Fault):
        return 8
    return node.nbytes if hasattr(node, "nbytes") else node.type.size * node.type.dtype.itemsize


def buffer_of(node) -> torch.Tensor:
    """Memory for a node: small normal numbers, and zeros where an index may be meant."""
    if isinstance(node, Fault) or hasattr(node, "nbytes"):
        return torch.zeros(bytes_of(node), dtype=torch.uint8)
    if node.op is ops.CONSTANT:
        return LOWERING.lower(node)()
    if node.dtype.is_floating_point:
        return (torch.randn(node.shape) * 0.1).abs().to(node.dtype)
    return torch.zeros(node.shape, dtype=node.dtype)


def timed_kernels(graph, donated) -> tuple[list[Timed], int]:
    """(kernels of one program, how many nodes have none)"""
    steps = planned_steps(compiling.prepared(graph), donated)
    buffers: dict = {}
    result = []
    for step in steps:
        for code in step.codes:
            for node in code.nodes:
                over = step.overwrites.get(node)
                if node not in buffers:
                    buffers[node] = buffers[over] if over in buffers else buffer_of(node)
            result.append(Timed(step, code, buffers))
    return result, sum(not step.is_native for step in steps)


def measure(kernels: list[Timed], rounds: int) -> None:
    for number in range(rounds + 1):
        for kernel in kernels:
            kernel.launch()
        if number == 0:
            for kernel in kernels:
                kernel.seconds.clear()


def report(kernels: list[Timed], show_all: bool) -> None:
    total = sum(kernel.median for kernel in kernels)
    fewest = 0.0 if show_all else total / 200
    print(f"{total * 1e3:.3f} ms in {len(kernels)} kernels")
    print("  us      share GB/s  tasks  kernel")
    for number, kernel in enumerate(kernels):
        if kernel.median < fewest:
            continue
        speed = kernel.megabytes() / 1e3 / kernel.median
        print(
            f"{kernel.median * 1e6:8.1f} {kernel.median / total:6.1%} {speed:5.1f} "
            f"{kernel.code.tasks:4d}  #{number} {kernel}"
        )
    small = [k.median for k in kernels if k.median < fewest]
    if small:
        print(f"{sum(small) * 1e6:8.1f} {sum(small) / total:6.1%}  in {len(small)} smaller ones")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", help="the workload to run")
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="number of threads"
    )
    parser.add_argument("--rounds", type=int, default=20, help="number of rounds")
    parser.add_argument("--texts", help="a folder for the LLVM text of each kernel")
    parser.add_argument("--all", action="store_true", help="kernels below half a percent too")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    for graph, donated in programs_of(asked.workload):
        kernels, others = timed_kernels(graph, donated)
        if not kernels:
            continue
        measure(kernels, asked.rounds)
        report(kernels, asked.all)
        if others:
            print(f"{others} nodes that no kernel computes are not in it")
        if asked.texts:
            folder = Path(asked.texts)
            folder.mkdir(parents=True, exist_ok=True)
            for number, kernel in enumerate(kernels):
                (folder / f"{number}.ll").write_text(kernel.code.text)


if __name__ == "__main__":
    main()
