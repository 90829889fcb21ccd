"""Functions of generated kernels: units in the last place, special values, agreement in double."""

import math
import sys
from pathlib import Path

import pytest
import torch

from ltc.backends.llvm import LlvmBackend
from ltc.ir import ops
from ltc.ir.graph import Graph
from ltc.ir.node import make

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import math_ulp  # noqa: E402

COUNT = math_ulp.CHUNK
SPECIAL = [
    0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 1e-45, -1e-45, 1.1754944e-38, 3.4028235e38,
    88.72, 88.73, -87.3, -87.4, -103.9, -104.1, 0.625, 10.0, 700.0, 2.0**28, 2.0**30, 1e20, -1e30,
]  # fmt: skip


def special_first(values: torch.Tensor) -> torch.Tensor:
    values[: len(SPECIAL)] = torch.tensor(SPECIAL)
    return values


@pytest.mark.parametrize("name", math_ulp.LIMITS)
def test_float_functions_keep_their_bound(name):
    """2**20 inputs over all bit patterns, and those where a formula changes or ends."""
    x = special_first(math_ulp.inputs(12345, (1 << 32) // COUNT))
    error = math_ulp.errors(math_ulp.function_of(name)(x), getattr(torch, name)(x.double()))
    worst = int(error.argmax())
    assert error[worst] <= math_ulp.LIMITS[name], (x[worst].item(), error[worst].item())


def run(op, *operands):
    inputs = [
        make(ops.INPUT, index=i, dtype=x.dtype, shape=tuple(x.shape))
        for i, x in enumerate(operands)
    ]
    graph = Graph(tuple(inputs), (), (make(op, *inputs),))
    return LlvmBackend().compile(graph, 0, frozenset()).launch(list(operands), [])[0]


@pytest.mark.parametrize("name", math_ulp.LIMITS)
def test_double_functions_are_the_librarys(name):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5000, generator=generator, dtype=torch.float64) * 10
    x[: len(SPECIAL)] = torch.tensor(SPECIAL, dtype=torch.float64)
    # Two libraries, each within some units in the last place; near a zero of lgamma, of its terms.
    rtol = 1e-12 if name == "lgamma" else 2e-15
    expected = getattr(torch, name)(x)
    torch.testing.assert_close(
        run(ops.ALL[name], x), expected, rtol=rtol, atol=1e-300, equal_nan=True
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["exp", "log", "tanh", "erf", "sin", "sqrt"])
def test_low_precision_functions_are_the_double_value_rounded_through_float(name, dtype):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    mine = run(ops.ALL[name], x)
    exact = getattr(torch, name)(x.double()).float().to(dtype)
    wrong = (mine != exact) & ~(mine.isnan() & exact.isnan())
    assert int(wrong.sum()) <= 16


BINARY = {"pow": torch.pow, "atan2": torch.atan2, "hypot": torch.hypot, "fmod": torch.fmod}


@pytest.mark.parametrize("name", BINARY)
def test_functions_of_two_floats_are_the_double_value_rounded(name):
    values = torch.tensor(SPECIAL + [2.0, -2.0, 0.5, 3.0, -3.0, 7.25, -0.1])
    x, y = (v.reshape(-1).contiguous() for v in torch.meshgrid(values, values, indexing="ij"))
    error = math_ulp.errors(run(ops.ALL[name], x, y), BINARY[name](x.double(), y.double()))
    assert error.max() <= 0.51


def test_lanes_do_not_change_a_function():
    """A scalar and a vector of one input give the same bits."""
    x = math_ulp.inputs(7, 999_983)[:4096].contiguous()
    alone = math_ulp.function_of("exp", 1)
    together = math_ulp.function_of("exp", 4096)(x)
    for i in range(0, 4096, 97):
        assert alone(x[i : i + 1]).view(torch.int32) == together[i : i + 1].view(torch.int32)
