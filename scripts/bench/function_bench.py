"""Elementwise functions of generated kernels beside eager PyTorch's, on the same contiguous tensors.

    python scripts/bench/function_bench.py                          every function, float32 and float64
    python scripts/bench/function_bench.py pow erfc --dtypes bfloat16 --sizes 4194304
    python scripts/bench/function_bench.py --slower                 rows below 1 alone

One thread, processor time, both in turns, medians (`medians` of kernel_bench.py).  A row has the
nanoseconds of an element by ltc and by PyTorch, and how many times as fast ltc is.  Results go to
memory that is there already; the microseconds of a launch, or of PyTorch's call, are in the times.  By
default a tensor has 2^15 elements, which stay in the second cache.
Under "C" stand the functions of the C library that the kernel calls, and there should be none.
"""

from __future__ import annotations

import argparse
import functools
import re
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from kernel_bench import Trial, medians

from ltc.backends.llvm.schedule import units_of
from ltc.ir import ops
from ltc.ir.graph import Graph
from ltc.ir.loop_nest import Kernel
from ltc.ir.node import make
from ltc.llvm.emit.vectors import GeneratedKernel
from ltc.llvm.loops.emitter import kernel_code

IN_CACHE = 1 << 15
Range = tuple[float, float]

# The ranges from which each operand is drawn, uniformly: the usual one, then others.
UNARY: dict[str, tuple[Range, ...]] = {
    "exp": ((-10, 10),), "exp2": ((-10, 10),), "expm1": ((-10, 10),), "log": ((0, 100),),
    "log1p": ((0, 100),), "log2": ((0, 100),), "log10": ((0, 100),), "sqrt": ((0, 100),),
    "rsqrt": ((0, 100),), "sin": ((-10, 10), (-1e6, 1e6), (-1e30, 1e30)),
    "cos": ((-10, 10), (-1e6, 1e6), (-1e30, 1e30)), "tan": ((-10, 10), (-1e6, 1e6), (-1e30, 1e30)),
    "asin": ((-1, 1),), "acos": ((-1, 1),), "atan": ((-10, 10),), "sinh": ((-10, 10),),
    "cosh": ((-10, 10),), "tanh": ((-4, 4),), "asinh": ((-10, 10),), "acosh": ((1, 100),),
    "atanh": ((-1, 1),), "erf": ((-3, 3),), "erfc": ((-3, 3), (-20, 20)), "erfinv": ((-1, 1),),
    "lgamma": ((0, 10), (-30, 30), (0, 1e6)), "digamma": ((0, 10), (-30, 30), (0, 1e6)),
    "floor": ((-10, 10),), "round": ((-10, 10),), "sign": ((-10, 10),),
}  # fmt: skip
BINARY: dict[str, tuple[tuple[Range, Range], ...]] = {
    "pow": (((0, 10), (-3, 3)), ((-10, 10), (-3, 3))), "atan2": (((-10, 10), (-10, 10)),),
    "hypot": (((-10, 10), (-10, 10)),), "nextafter": (((-10, 10), (-10, 10)),),
    "fmod": (((-10, 10), (1, 4)), ((-1e30, 1e30), (1, 4))),
    "remainder": (((-10, 10), (1, 4)),), "floor_divide": (((-10, 10), (1, 4)),),
    "copysign": (((-10, 10), (-10, 10)),), "maximum": (((-10, 10), (-10, 10)),),
}  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A function on operands drawn from ranges."""

    name: str
    ranges: tuple[Range, ...]
    dtype: torch.dtype
    size: int


def cases(names: list[str], dtypes: list[torch.dtype], sizes: list[int]) -> Iterator[Case]:
    choices = {
        **{name: [(one,) for one in ranges] for name, ranges in UNARY.items()},
        **{name: list(pairs) for name, pairs in BINARY.items()},
    }
    for dtype in dtypes:
        for size in sizes:
            for name in names or choices:
                for ranges in choices[name]:
                    if max(map(max, ranges)) < torch.finfo(dtype).max:
                        yield Case(name, ranges, dtype, size)


def drawn(case: Case) -> list[torch.Tensor]:
    torch.manual_seed(0)
    parts = []
    for low, high in case.ranges:
        parts.append(
            (torch.rand(case.size, dtype=torch.float64) * (high - low) + low).to(case.dtype)
        )
    return parts


def ours(case: Case, operands: list[torch.Tensor]) -> tuple[Trial, set[str]]:
    """The generated kernel, and the names of the C functions that it calls."""
    inputs = tuple(
        make(ops.INPUT, index=i, dtype=case.dtype, shape=(case.size,)) for i in range(len(operands))
    )
    result = make(ops.ALL[case.name], *inputs)
    (unit,) = units_of(Graph(inputs, (), (result,)))
    assert isinstance(unit, Kernel), f"{case.name} has no instructions"
    code = kernel_code(unit).settled()
    called = set(re.findall(r"declare [^@]*@(?!llvm\.)([\w.]+)\(", code.text))
    named = {node: f"p{k}" for k, node in enumerate((*inputs, result))}
    buffers = {f"p{k}": x for k, x in enumerate((*operands, torch.empty_like(operands[0])))}
    arguments = tuple(named[node] for node in code.nodes)
    kernel = GeneratedKernel("kernel", code.text, arguments, code.tasks, 0, code.numbers)
    return Trial((kernel,), buffers), called


def theirs(case: Case, operands: list[torch.Tensor]) -> Callable[[], object]:
    return functools.partial(
        getattr(torch, case.name), *operands, out=torch.empty_like(operands[0])
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("functions", nargs="*", help="all by default")
    parser.add_argument(
        "--dtypes", nargs="+", default=["float32", "float64"], help="names of element types"
    )
    parser.add_argument("--sizes", nargs="+", type=int, default=[IN_CACHE], help="of elements")
    parser.add_argument("--slower", action="store_true", help="print rows below 1 alone")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dtypes = [getattr(torch, name) for name in arguments.dtypes]
    ratios = []
    print("| function | operands | dtype | elements | ltc, ns | PyTorch, ns | faster by | C |")
    print("|---|---|---|---|---|---|---|---|")
    for case in cases(arguments.functions, dtypes, arguments.sizes):
        operands = drawn(case)
        kernel, called = ours(case, operands)
        ways = {"ltc": kernel, "torch": theirs(case, operands)}
        seconds = medians(ways, time.process_time)
        ratios.append(seconds["torch"] / seconds["ltc"])
        if arguments.slower and ratios[-1] >= 1:
            continue
        ranges = ", ".join(f"{low:g} to {high:g}" for low, high in case.ranges)
        times = " | ".join(f"{seconds[way] / case.size * 1e9:.2f}" for way in ways)
        print(
            f"| {case.name} | {ranges} | {str(case.dtype)[6:]} | {case.size} | {times} "
            f"| {ratios[-1]:.2f} | {' '.join(sorted(called))} |",
            flush=True,
        )
    print(
        f"\n{len(ratios)} rows: {sum(ratio < 1 for ratio in ratios)} below 1, least {min(ratios):.2f}, "
        f"geometric mean {statistics.geometric_mean(ratios):.2f}"
    )


if __name__ == "__main__":
    main()
