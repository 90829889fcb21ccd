"""The greatest error of every float32 function of generated kernels, over all 2**32 inputs.

    python scripts/compare/math_ulp.py                   # all functions, all inputs: about an hour
    python scripts/compare/math_ulp.py exp erf --stride 61
    python scripts/compare/math_ulp.py --state ulp.json --seconds 170    # in slices: again until done

Prints a row for each: the greatest error in units in the last place of the exact result, where it
is, how many results are NaN, infinite or zero where the exact one is not (or the other way round),
and how long an element takes.  Exit code 1 where an error is above what LIMITS promises.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
from ltc.backends.llvm.backend import LlvmBackend
from ltc.ir import ops
from ltc.ir.graph import Graph
from ltc.ir.node import make

# Units in the last place that a function may be off by.
LIMITS = {
    "exp": 1.02, "exp2": 1.2, "expm1": 1.2, "log": 0.83, "log1p": 1.4, "log2": 0.9,
    "log10": 0.9, "sin": 1.3, "cos": 1.3, "tan": 0.51, "asin": 1.6, "acos": 1.2, "atan": 0.51,
    "sinh": 0.51, "cosh": 0.51, "tanh": 1.4, "asinh": 0.51, "acosh": 0.51, "atanh": 0.51,
    "erf": 1.1, "erfc": 0.52, "erfinv": 0.55, "sqrt": 0.5, "rsqrt": 1.5, "lgamma": 0.51,
    "digamma": 0.51,
}  # fmt: skip
CHUNK = 1 << 20
SMALLEST_EXPONENT = -126


def function_of(name: str, count: int = CHUNK) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function as a compiled kernel over `count` floats."""
    x = make(ops.INPUT, index=0, dtype=torch.float32, shape=(count,))
    graph = Graph((x,), (), (make(ops.ALL[name], x),))
    computation = LlvmBackend().compile(graph, 0, frozenset())
    return lambda values: computation.launch([values], [])[0]


def errors(mine: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return each error from the exact value in units in the last place; infinite for wrong kinds.

    Args:
        exact: float64.
    """
    rounded = exact.float()
    exponent = torch.frexp(exact).exponent.double() - 1
    unit = torch.exp2(exponent.clamp(min=SMALLEST_EXPONENT) - 23)
    error = (mine.double() - exact).abs() / unit
    error[mine == rounded] = error[mine == rounded].clamp(max=0.5)  # equal infinities too
    error[mine.isnan() & exact.isnan()] = 0
    wrong = (mine.isnan() != exact.isnan()) | (mine.isinf() != rounded.isinf())
    wrong |= (rounded == 0) & (exact == 0) & (mine.signbit() != rounded.signbit())
    error[wrong] = math.inf
    return error.nan_to_num(nan=0.0, posinf=math.inf)


def inputs(first: int, stride: int) -> torch.Tensor:
    """CHUNK floats whose bits are first, first + stride, ..., as 32-bit numbers."""
    bits = first + stride * torch.arange(CHUNK, dtype=torch.int64)
    return (bits & 0xFFFFFFFF).to(torch.int32).view(torch.float32)


@dataclasses.dataclass
class Finding:
    """The state of one function: inputs below `next`, in steps of the stride, were measured."""

    next: int = 0
    worst: float = 0.0
    where: float = 0.0
    wrong: int = 0
    count: int = 0
    seconds: float = 0.0


def measure(name: str, stride: int, found: Finding, until: float) -> bool:
    """Go on where `found` ends, at most until that time; whether all inputs are done."""
    run, reference = function_of(name), getattr(torch, name)
    while found.next < 1 << 32:
        if time.perf_counter() > until:
            return False
        x = inputs(found.next, stride)
        started = time.perf_counter()
        mine = run(x)
        found.seconds += time.perf_counter() - started
        error = errors(mine, reference(x.double()))
        found.wrong += int(error.isinf().sum())
        error[error.isinf()] = 0
        at = int(error.argmax())
        if error[at] > found.worst:
            found.worst, found.where = float(error[at]), float(x[at])
        found.next += CHUNK * stride
        found.count += CHUNK
    return True


def load(path: Path | None) -> dict[str, Finding]:
    if path is None or not path.exists():
        return {}
    return {name: Finding(**found) for name, found in json.loads(path.read_text()).items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("functions", nargs="*", default=list(LIMITS), help="all by default")
    parser.add_argument(
        "--stride", type=int, default=1, help="distance between the inputs tried; 1: all inputs"
    )
    parser.add_argument("--state", type=Path, help="file of findings, to continue from")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after this time")
    options = parser.parse_args()
    until = time.perf_counter() + options.seconds
    found = load(options.state)
    failed = False
    print(f"{'function':10}{'ULP':>8}{'at':>16}{'wrong kind':>12}{'ns':>8}{'inputs':>13}")
    for name in options.functions:
        one = found.setdefault(name, Finding())
        measure(name, options.stride, one, until)
        if one.count:
            nanoseconds = one.seconds / one.count * 1e9
            print(
                f"{name:10}{one.worst:8.3f}{one.where:16.7g}{one.wrong:12}{nanoseconds:8.2f}"
                f"{one.count:13}",
                flush=True,
            )
        failed |= one.worst > LIMITS[name] or one.wrong > 0
    if options.state:
        known = {name: dataclasses.asdict(one) for name, one in found.items()}
        options.state.write_text(json.dumps(known))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
