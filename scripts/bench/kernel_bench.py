"""Generated matrix products, convolutions and poolings against torch's own, in one process.

    python scripts/bench/kernel_bench.py                       every case, 1 and 2 threads
    python scripts/bench/kernel_bench.py --only conv2 --threads 1
    python scripts/bench/kernel_bench.py --only x --products --threads 1 --clock processor

A product or convolution is computed as programs do it, in the layout that they prefer. It may be a call of
torch's kernel: then "call" stands behind its name. With --model it is generated, as under deterministic
algorithms.

The candidates of a case take turns.  Before each turn the process rests: workers of OpenMP go on
spinning for some milliseconds after their last loop, and would take a processor from the next
candidate's threads.  Then one call, which wakes the candidate's own threads, is not timed.  A sample
during which the machine kept this process waiting is put aside; the medians of the others are
compared.  On a machine that is never quiet, --clock processor counts the time that one thread has
computed.  The first line is the machine's limit: what one thread reaches in multiply-adds that touch
no memory.  The last lines say of the products how many are slower than torch's, and the geometric mean of
the ratios where torch is below 0.8 of the limit.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from ltc.ir import ops
from ltc.ir.node import make
from ltc.llvm.compiler import llvm_binding
from ltc.llvm.conv.geometry import Geometry, KernelSequence
from ltc.llvm.emit.builder import Builder, function_text
from ltc.llvm.emit.isa import host_isa
from ltc.llvm.emit.vectors import GeneratedKernel, Vectors
from ltc.llvm.gemm.blocking import Shape, stored_plain, stored_transposed
from ltc.llvm.gemm.kernel import matmul
from ltc.llvm.native.kernel_cache import kernel_name, load
from ltc.llvm.native.kernel_run import EntryCall, KernelRun
from ltc.llvm.ops.conv_and_pool import kernels_of
from ltc.llvm.ops.dispatch import prefers_channels_last
from ltc.llvm.ops.product_call import called_product
from ltc.llvm.ops.product_choice import is_call_faster
from ltc.llvm.pooling.nchw import Pool, max_pool

ISA = host_isa(llvm_binding.has_feature)
CLEAN = 0.03  # of a sample's time that this process may have waited for a processor
SAMPLES, MOST_ROUNDS, SAMPLE_SECONDS = 7, 25, 0.004
REST_SECONDS = 0.015  # libgomp's workers spin for 5 to 7 ms
PEAK_STEPS = 1_000_000

# Batch, M, K, N, and which operands are stored transposed.
PRODUCTS = [
    ((), 64, 784, 512, "NN"), ((), 64, 784, 512, "NT"), ((), 64, 512, 512, "NN"),
    ((), 64, 512, 512, "TN"), ((), 128, 256, 10, "NN"), ((), 128, 256, 10, "NT"),
    ((), 512, 512, 512, "NN"), ((), 1024, 1024, 1024, "NN"), ((), 1024, 1024, 1024, "TN"),
    ((), 16, 1024, 4096, "NN"), ((), 4, 1024, 1024, "NT"), ((96,), 64, 32, 64, "NT"),
    # Three layers on 128 images: forward, gradients of the operand and of the weight.
    ((), 128, 784, 512, "NT"), ((), 128, 512, 512, "NT"), ((), 128, 512, 10, "NT"),
    ((), 128, 512, 512, "NN"), ((), 128, 10, 512, "NN"), ((), 512, 128, 784, "TN"),
    ((), 512, 128, 512, "TN"), ((), 10, 128, 512, "TN"),
    # The long sum after the convolutions of an MNIST net, and its gradients.
    ((), 64, 9216, 128, "NT"), ((), 64, 128, 9216, "NN"), ((), 128, 64, 9216, "TN"),
    # A transformer of width 256 on 1024 tokens.
    ((), 1024, 256, 768, "NT"), ((), 1024, 256, 256, "NT"), ((), 1024, 256, 1024, "NT"),
    ((), 1024, 1024, 256, "NT"), ((), 1024, 768, 256, "NN"), ((), 1024, 256, 256, "NN"),
    ((), 1024, 1024, 256, "NN"), ((), 1024, 256, 1024, "NN"), ((), 768, 1024, 256, "TN"),
    ((), 256, 1024, 256, "TN"), ((), 1024, 1024, 256, "TN"), ((), 256, 1024, 1024, "TN"),
    ((32,), 128, 64, 128, "NT"), ((32,), 128, 128, 64, "NN"), ((32,), 128, 128, 64, "TN"),
    # Few rows or columns.
    ((), 1, 1024, 1024, "NT"), ((), 1, 1024, 1024, "NN"), ((), 1024, 1024, 1, "NN"),
    ((), 8, 1024, 4096, "NT"), ((), 4096, 64, 16, "NN"), ((), 16, 4096, 16, "TN"),
]  # fmt: skip
OTHER_PRODUCTS = [
    ((), 64, 784, 512, "NN"), ((), 64, 784, 512, "NT"), ((), 64, 512, 512, "TN"),
    ((), 512, 512, 512, "NN"), ((), 1024, 1024, 1024, "NN"), ((), 1024, 256, 768, "NT"),
    ((), 1024, 768, 256, "NN"), ((), 768, 1024, 256, "TN"), ((), 128, 256, 10, "NT"),
    ((), 4, 1024, 1024, "NT"), ((32,), 128, 64, 128, "NT"),
]  # fmt: skip

CONVOLUTION = "convolution"  # all of their names begin so
KINDS = ("forward", "input gradient", "weight gradient")
# Images, channels, outputs, extents, kernel, stride, padding, dilation, groups.
CONVOLUTIONS = {
    "conv1": (64, 1, 32, (28, 28), 3, 1, 0, 1, 1),
    "conv2": (64, 32, 64, (26, 26), 3, 1, 0, 1, 1),
    "lenet": (64, 6, 16, (14, 14), 5, 1, 0, 1, 1),
    "cifar3": (32, 3, 64, (32, 32), 3, 1, 1, 1, 1),
    "cifar64": (32, 64, 64, (32, 32), 3, 1, 1, 1, 1),
    "cifar128": (32, 128, 128, (16, 16), 3, 1, 1, 1, 1),
    "deep": (32, 512, 512, (4, 4), 3, 1, 1, 1, 1),
    "halving": (32, 64, 128, (32, 32), 3, 2, 1, 1, 1),
    "shortcut": (32, 64, 128, (32, 32), 1, 2, 0, 1, 1),
    "stem": (8, 3, 64, (64, 64), 7, 2, 3, 1, 1),
    "stem224": (2, 3, 64, (224, 224), 7, 2, 3, 1, 1),
    "patches": (4, 3, 192, (224, 224), 16, 16, 0, 1, 1),
    "resnet56": (4, 64, 64, (56, 56), 3, 1, 1, 1, 1),
    "resnet28": (4, 128, 128, (28, 28), 3, 1, 1, 1, 1),
    "resnet14": (4, 256, 256, (14, 14), 3, 1, 1, 1, 1),
    "resnet7": (8, 512, 512, (7, 7), 3, 1, 1, 1, 1),
    "halving28": (4, 128, 256, (28, 28), 3, 2, 1, 1, 1),
    "shortcut56": (4, 256, 512, (56, 56), 1, 2, 0, 1, 1),
    "narrowing56": (4, 256, 64, (56, 56), 1, 1, 0, 1, 1),
    "widening14": (8, 256, 1024, (14, 14), 1, 1, 0, 1, 1),
    "narrowing7": (8, 2048, 512, (7, 7), 1, 1, 0, 1, 1),
    "grouped56": (4, 128, 128, (56, 56), 3, 1, 1, 1, 32),
    "grouped14": (8, 256, 256, (14, 14), 3, 1, 1, 1, 8),
    "depthwise": (16, 64, 64, (32, 32), 3, 1, 1, 1, 64),
    "depthwise56": (4, 144, 144, (56, 56), 3, 2, 1, 1, 144),
    "depthwise5": (8, 240, 240, (28, 28), 5, 1, 2, 1, 240),
    "dilated": (4, 128, 128, (28, 28), 3, 1, 2, 2, 1),
    "mask": (4, 64, 3, (64, 64), 3, 1, 1, 1, 1),
    "sound": (16, 64, 128, (400,), 9, 1, 4, 1, 1),
    "volume": (2, 32, 64, (16, 16, 16), 3, 1, 1, 1, 1),
}


@dataclass(frozen=True)
class Case:
    """One computation done in several ways; the first is ours.

    Attributes:
        element_bytes: Bytes of the numbers that a product computes with; 0 for other cases.
        is_convolution: True if it counts among the convolutions of the summary.
    """

    name: str
    flops: int
    ways: dict[str, Callable[[], object]]
    element_bytes: int = 0
    is_convolution: bool = False


# --- measuring ----------------------------------------------------------------------------------


def waited_nanoseconds() -> int:
    """Return how long threads of this process were ready to run but kept off the processors."""
    total = 0
    for thread in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{thread}/schedstat") as file:
                total += int(file.read().split()[1])
        except OSError:  # it ended
            pass
    return total


Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "processor": time.process_time}


def repeats_of(run: Callable[[], object], clock: Clock) -> int:
    """Return how many calls make a sample."""
    run()
    started = clock()
    run()
    return max(1, int(SAMPLE_SECONDS / max(clock() - started, 1e-7)))


def medians(
    ways: dict[str, Callable[[], object]], clock: Clock = time.perf_counter
) -> dict[str, float]:
    """Seconds of one call of each: medians of clean samples, or of the cleanest."""
    repeats = {name: repeats_of(run, clock) for name, run in ways.items()}
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for turn in range(MOST_ROUNDS):
        for name in list(ways)[:: 1 if turn % 2 else -1]:
            time.sleep(REST_SECONDS)
            ways[name]()
            waited, started = waited_nanoseconds(), clock()
            for _ in range(repeats[name]):
                ways[name]()
            seconds = clock() - started
            share = (waited_nanoseconds() - waited) / (seconds * 1e9)
            if clock is time.process_time:
                share = 0.0  # no wait is in it
            samples[name].append((share, seconds / repeats[name]))
        if all(sum(share < CLEAN for share, _ in s) >= SAMPLES for s in samples.values()):
            break
    return {name: statistics.median(_cleanest(s)) for name, s in samples.items()}


def _cleanest(samples: list[tuple[float, float]]) -> list[float]:
    ordered = sorted(samples)
    clean = sum(share < CLEAN for share, _ in ordered)
    return [seconds for _, seconds in ordered[: max(clean, SAMPLES)]]


# --- running generated kernels ------------------------------------------------------------------


class Trial:
    """Kernels that run in a row, by one native call, on buffers of their own."""

    def __init__(
        self, kernels: tuple[GeneratedKernel, ...], buffers: Mapping[str, torch.Tensor]
    ) -> None:
        """`buffers`: what the kernels call their arguments."""
        names = [kernel_name(kernel.text) for kernel in kernels]
        self._loaded = load(dict(zip(names, (kernel.text for kernel in kernels))))
        self._buffers = buffers  # held, so that the addresses stay right
        calls: list[Any] = []
        frame: list[int] = []
        for name, kernel in zip(names, kernels):
            words = [*[buffers[a].data_ptr() for a in kernel.arguments], *kernel.numbers]
            arguments = tuple(n for k in range(len(words)) for n in (len(frame) + k, 0))
            frame += words
            calls.append(EntryCall(self._loaded[name].entry, arguments, kernel.tasks))
        self._frame = np.array(frame + frame, dtype=np.int64)  # the addresses, then the arguments
        self._run = KernelRun(calls, len(frame))

    def __call__(self) -> None:
        self._run.launch(self._frame.ctypes.data)


def program(sequence: KernelSequence | GeneratedKernel, **buffers: torch.Tensor) -> Trial:
    """One native call that runs the kernels, as a compiled program would."""
    if isinstance(sequence, GeneratedKernel):
        sequence = KernelSequence((sequence,), {})
    for name, size in sequence.scratch.items():
        buffers[name] = torch.zeros(size // 8 + 1, dtype=torch.float64)
    return Trial(sequence.kernels, buffers)


def peak(clock: Clock) -> float:
    """Floating-point operations per second of one thread, in registers only."""
    b = Builder()
    v = Vectors(b, ISA, torch.float32)
    sums = [(v.vector, v.splat(v.scalar("%p0", i))) for i in range(12)]
    x = v.splat(v.scalar("%p0", 12))

    def step(_: str, values: list[str]) -> list[str]:
        return [v.multiply_add(x, value, x) for value in values]

    for i, value in enumerate(b.loop(0, PEAK_STEPS, 1, sums, step)):
        v.store(value, "%p0", i * v.width)
    work = 2 * len(sums) * v.width * PEAK_STEPS
    kernel = GeneratedKernel("kernel", function_text("kernel", 1, b), ("memory",), 1, work)
    run = program(kernel, memory=torch.zeros(len(sums) * v.width))
    return work / medians({"peak": run}, clock)["peak"]


# --- cases --------------------------------------------------------------------------------------


def products(dtype: torch.dtype, shapes, only: str = "", by_model: bool = False) -> Iterator[Case]:
    for batch, m, k, n, stored in shapes:
        name = f"{str(dtype)[6:]} {'x'.join(map(str, (*batch, m, k, n)))} {stored}"
        if only not in name:
            continue
        x = torch.randn(*batch, m, k).to(dtype)
        y = torch.randn(*batch, k, n).to(dtype)
        left, right = (
            t.mT.contiguous().mT if letter == "T" else t for t, letter in zip((x, y), stored)
        )
        strides = [
            (stored_transposed if letter == "T" else stored_plain)(*extents, batch)
            for letter, extents in zip(stored, ((m, k), (k, n)))
        ]
        shape = Shape(batch, m, n, k, *strides, stored_plain(m, n, batch))
        is_call = not by_model and is_call_faster(dtype, shape, ISA)
        if is_call:
            kernel = called_product(dtype, shape, ISA)
        else:
            kernel = matmul("kernel", dtype, batch, (m, n, k), *strides, shape.result, ISA)
        result, theirs = (
            torch.empty(*batch, m, n, dtype=dtype),
            torch.empty(*batch, m, n, dtype=dtype),
        )
        ours = program(kernel, left=left, right=right, result=result)
        torchs = functools.partial(torch.matmul, left, right, out=theirs)
        computed_bytes = max(4, dtype.itemsize)
        ways = {"ltc": ours, "torch": torchs}
        yield Case(name + " call" * is_call, kernel.flops, ways, computed_bytes)


def convolutions(only: str = "", by_model: bool = False) -> Iterator[Case]:
    for name, shape in CONVOLUTIONS.items():
        if not any(only in f"{CONVOLUTION} {name} {kind}" for kind in KINDS):
            continue
        images, channels, outputs, extents, kernel, stride, padding, dilation, groups = shape
        rank = len(extents)
        x = torch.randn(images, channels, *extents)
        weight = torch.randn(outputs, channels // groups, *(kernel,) * rank)
        window = ((stride,) * rank, (padding,) * rank, (dilation,) * rank)
        rest = (None, *window, False, [0] * rank, groups)
        gradient = torch.randn_like(torch.ops.aten.convolution(x, weight, *rest))
        geometry = Geometry(
            tuple(x.shape), tuple(weight.shape), tuple(gradient.shape), *window, groups
        )
        layouts = {"torch nchw": (gradient, x, weight)}
        if rank > 1:
            last = torch.channels_last if rank == 2 else torch.channels_last_3d
            layouts["torch nhwc"] = tuple(t.to(memory_format=last) for t in (gradient, x, weight))
        flops = 2 * gradient.numel() * weight[0].numel()
        for kind, (ours, is_call) in _made(geometry, gradient, x, weight, by_model).items():
            ways = {"ltc": ours}
            for layout, operands in layouts.items():
                ways[layout] = functools.partial(_torch_convolution, kind, operands, rest)
            full = f"{CONVOLUTION} {name} {kind}{' call' * is_call}"
            yield Case(full, flops, ways, is_convolution=True)


def _made(
    geometry: Geometry,
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    by_model: bool,
) -> dict[str, tuple[Trial, bool]]:
    """For each kind, the kernels that programs have in the layout that they prefer; which are calls."""
    window = {
        "stride": geometry.stride, "padding": geometry.padding, "dilation": geometry.dilation,
        "groups": geometry.groups,
    }  # fmt: skip
    made = {}
    for kind, (op, operands, result) in zip(KINDS, (
        (ops.CONVOLUTION, (x, weight), gradient),
        (ops.CONVOLUTION_INPUT_GRADIENT, (gradient, weight), x),
        (ops.CONVOLUTION_WEIGHT_GRADIENT, (gradient, x), weight),
    )):  # fmt: skip
        for is_last in (True, False):
            given = [_in_layout(t, t is not weight and is_last) for t in operands]
            out = torch.empty_like(_in_layout(result, result is not weight and is_last))
            inputs = [
                make(ops.INPUT, index=i, dtype=torch.float32, shape=tuple(t.shape))
                for i, t in enumerate(given)
            ]
            attributes = {"channels_last": True} if is_last else {}
            if op is not ops.CONVOLUTION:
                attributes["shape"] = tuple(out.shape)
            node = make(op, *inputs, **window, **attributes)
            if is_last and prefers_channels_last(node):
                break
        kernels = kernels_of(node, ISA, may_measure=not by_model)
        buffers = {f"read{i}": given[inputs.index(n)] for i, n in enumerate(kernels.reads)}
        called = tuple(
            replace(k, arguments=names) for k, names in zip(kernels.kernels, kernels.pointers)
        )
        is_call = any(k.is_call for k in called)
        made[kind] = (
            program(KernelSequence(called, kernels.scratch), result0=out, **buffers),
            is_call,
        )
    return made


def _in_layout(x: torch.Tensor, is_last: bool) -> torch.Tensor:
    return x.movedim(1, -1).contiguous() if is_last else x


def _torch_convolution(kind: str, operands, rest) -> None:
    gradient, x, weight = operands
    if kind == "forward":
        torch.ops.aten.convolution(x, weight, *rest)
        return
    wanted = [kind == "input gradient", kind == "weight gradient", False]
    torch.ops.aten.convolution_backward(gradient, x, weight, *rest, wanted)


def poolings() -> Iterator[Case]:
    x = torch.randn(64, 64, 24, 24)
    pool = Pool((24, 24), (12, 12), (2, 2), (2, 2), (0, 0), (1, 1), planes=64 * 64)
    result, indices = torch.empty(64, 64, 12, 12), torch.empty(64, 64, 12, 12, dtype=torch.int64)
    kernel = max_pool("kernel", torch.float32, pool, ISA)
    ours = program(kernel, operand=x, result=result, indices=indices)
    function = torch.ops.aten.max_pool2d_with_indices
    yield Case("max pool 64x64x24x24 by 2", x.numel(), {
        "ltc": ours, "torch nchw": functools.partial(function, x, (2, 2), (2, 2)),
    })  # fmt: skip


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    rest = arguments.only, arguments.model
    yield from products(torch.float32, PRODUCTS, *rest)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        yield from products(dtype, OTHER_PRODUCTS, *rest)
    if not arguments.products:
        yield from convolutions(*rest)
        yield from poolings()


def summary(ratios: list[tuple[float, float]]) -> str:
    """Tell of (torch's time as multiples of ours, torch's share of the limit) of products."""
    slower = sum(ratio < 0.97 for ratio, _ in ratios)
    below = [ratio for ratio, share in ratios if share < 0.8]
    mean = statistics.geometric_mean(below) if below else 1.0
    return (
        f"\n{len(ratios)} products: {slower} slower than torch's by more than 3 per cent; where torch is "
        f"below 0.8 of the limit ({len(below)}), ltc is faster by {mean:.2f} in the geometric mean"
    )


def summary_of_convolutions(ratios: list[float]) -> str:
    """Tell of torch's time, in its faster layout, as multiples of ours."""
    slower = sum(ratio < 0.97 for ratio in ratios)
    mean = statistics.geometric_mean(ratios)
    return (
        f"\n{len(ratios)} convolutions and gradients: {slower} slower than torch's faster layout by more "
        f"than 3 per cent; ltc is faster by {mean:.2f} in the geometric mean"
    )


def arguments_of(description: str) -> argparse.Namespace:
    """Parse the command line of a bench of kernels."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="numbers of threads")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="processor: of one thread")
    parser.add_argument("--products", action="store_true", help="matrix products alone")
    parser.add_argument("--model", action="store_true", help="products are all generated")
    arguments = parser.parse_args()
    if arguments.clock == "processor" and arguments.threads != [1]:
        parser.error("--clock processor adds up what all threads compute: take --threads 1")
    return arguments


def main() -> None:
    arguments = arguments_of(__doc__)
    clock, ratios_of_products = CLOCKS[arguments.clock], []
    ratios_of_convolutions: list[float] = []
    limit = peak(clock)
    print(f"{ISA.name}; one thread's multiply-adds: {limit / 1e9:.0f} GF/s")
    print("| case | threads | GF/s: ltc | others | ltc is faster by |\n|---|---|---|---|---|")
    for case in cases(arguments):
        if arguments.only not in case.name:
            continue
        for count in arguments.threads:
            torch.set_num_threads(count)
            seconds = medians(case.ways, clock)
            rates = {name: case.flops / s / 1e9 for name, s in seconds.items()}
            ours = seconds.pop("ltc")
            others = ", ".join(f"{name} {rates[name]:.0f}" for name in seconds)
            ratios = ", ".join(f"{s / ours:.2f}" for s in seconds.values())
            if case.element_bytes:
                share = rates["torch"] * 1e9 / (limit * count * 4 / case.element_bytes)
                ratios_of_products.append((seconds["torch"] / ours, share))
            if case.is_convolution:
                ratios_of_convolutions.append(min(seconds.values()) / ours)
            print(
                f"| {case.name} | {count} | {rates['ltc']:.0f} | {others} | {ratios} |", flush=True
            )
    if ratios_of_products:
        print(summary(ratios_of_products))
    if ratios_of_convolutions:
        print(summary_of_convolutions(ratios_of_convolutions))


if __name__ == "__main__":
    main()
