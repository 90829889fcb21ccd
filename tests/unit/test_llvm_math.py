"""Functions of generated kernels: units in the last place, special values, agreement in double."""

import math
import re
import sys
from pathlib import Path

import mpmath
import numpy as np
import pytest
import torch

from ltc.backends.llvm.backend import LlvmBackend
from ltc.backends.llvm.schedule import units_of
from ltc.ir import ops
from ltc.ir.graph import Graph
from ltc.ir.node import make
from ltc.llvm.loops.emitter import kernel_code

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path += [str(SCRIPTS / "compare"), str(SCRIPTS / "code")]
import math_coefficients
import math_ulp

COUNT = math_ulp.CHUNK
SPECIAL = [
    0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 1e-45, -1e-45, 1.1754944e-38, 3.4028235e38,
    88.72, 88.73, -87.3, -87.4, -103.9, -104.1, 0.625, 10.0, 700.0, 2.0**28, 2.0**30, 1e20, -1e30,
]  # fmt: skip


# Of functions of double, in units in the last place, where the C library has them in 80 bits.
DOUBLE_LIMITS = {
    "exp": 1, "exp2": 1, "expm1": 1.2, "log": 1, "log1p": 1, "log2": 1, "log10": 1, "sin": 1,
    "cos": 1, "tan": 1.1, "asin": 1.2, "acos": 1.2, "atan": 1.3, "sinh": 1.3, "cosh": 1.1,
    "tanh": 1.2, "asinh": 1.2, "acosh": 1.3, "atanh": 1.2,
}  # fmt: skip
BINARY_DOUBLE_LIMITS = {"pow": 1, "atan2": 1.5, "hypot": 1.1}
NUMPY_NAMES = {
    "asin": "arcsin", "acos": "arccos", "atan": "arctan", "asinh": "arcsinh", "acosh": "arccosh",
    "atanh": "arctanh", "pow": "power", "atan2": "arctan2",
}  # fmt: skip
HAS_80_BITS = np.finfo(np.longdouble).nmant >= 63
# Two libraries, each within some units in the last place; near a root, of its terms.
TOLERANCES = {"lgamma": (1e-12, 1e-15), "digamma": (1e-11, 1e-15)}


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
    rtol, atol = TOLERANCES.get(name, (2e-15, 1e-300))
    expected = getattr(torch, name)(x)
    torch.testing.assert_close(
        run(ops.ALL[name], x), expected, rtol=rtol, atol=atol, equal_nan=True
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", math_ulp.LIMITS)
def test_low_precision_functions_are_the_double_value_rounded_through_float(name, dtype):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    mine = run(ops.ALL[name], x)
    exact = getattr(torch, name)(x.double()).float().to(dtype)
    wrong = (mine != exact) & ~(mine.isnan() & exact.isnan())
    assert int(wrong.sum()) <= 16


def inputs_of_double(name: str) -> np.ndarray:
    """Random bits, and where formulas change: small numbers, those near 1, multiples of pi / 2."""
    generator = np.random.default_rng(0)
    n = 1 << 15
    scale = 2.0 ** generator.integers(-60, 0, n)
    turns = generator.integers(-600_000, 600_000, n) * (np.pi / 2)
    return np.concatenate([
        generator.integers(-(2**63), 2**63 - 1, n, dtype=np.int64).view(np.float64),
        generator.uniform(-1, 1, n), generator.uniform(-40, 40, n), generator.uniform(-760, 760, n),
        generator.uniform(-1, 1, n) * scale, 1 + generator.uniform(-1, 1, n) * scale,
        turns + generator.uniform(-1, 1, n) * scale, np.array(SPECIAL),
    ])  # fmt: skip


def assert_within(name: str, limit: float, *operands: np.ndarray) -> None:
    """Results are within that many units in the last place; zeros, infinities and NaN are exact."""
    mine = run(ops.ALL[name], *map(torch.from_numpy, operands)).numpy()
    with np.errstate(all="ignore"):
        function = getattr(np, NUMPY_NAMES.get(name, name))
        exact = function(*[x.astype(np.longdouble) for x in operands])
        rounded = exact.astype(np.float64)
        exponent = np.maximum(np.frexp(np.abs(rounded))[1] - 53, -1074)
        error = np.abs((mine - exact) / np.ldexp(np.longdouble(1), exponent))
    special = ~np.isfinite(rounded) | ~np.isfinite(mine)
    assert np.array_equal(mine[special], rounded[special], equal_nan=True)
    error[special] = 0
    worst = error.argmax()
    assert error[worst] <= limit, ([x[worst] for x in operands], error[worst])
    zeros = rounded == 0
    assert np.array_equal(np.signbit(mine[zeros]), np.signbit(rounded[zeros]))


@pytest.mark.parametrize("name", DOUBLE_LIMITS)
@pytest.mark.skipif(not HAS_80_BITS, reason="no 80-bit floats to compare with")
def test_double_functions_keep_their_bound(name):
    assert_within(name, DOUBLE_LIMITS[name], inputs_of_double(name))


@pytest.mark.parametrize("name", BINARY_DOUBLE_LIMITS)
@pytest.mark.skipif(not HAS_80_BITS, reason="no 80-bit floats to compare with")
def test_functions_of_two_doubles_keep_their_bound(name):
    generator = np.random.default_rng(1)
    n = 1 << 14
    bits = generator.integers(-(2**63), 2**63 - 1, (2, n), dtype=np.int64).view(np.float64)
    usual, near_one = generator.uniform(-10, 10, (2, n)), 1 + generator.uniform(-0.1, 0.1, n)
    special = np.array([*SPECIAL, 2.0, -2.0, 0.5, 3.0, -3.0, 7.25, 1e300, 5e-324, -1074.0, 2.0**53])
    grid = np.stack([x.ravel() for x in np.meshgrid(special, special)])
    x, y = np.concatenate([bits, usual, grid], axis=1)
    x, y = np.concatenate([x, near_one]), np.concatenate([y, generator.uniform(-7000, 7000, n)])
    assert_within(name, BINARY_DOUBLE_LIMITS[name], x, y)


# Greatest error in units in the last place, the function of mpmath, ranges of operands.  Near its roots
# below 0 lgamma has the error of its terms, and so has digamma.
EXACT_CASES = {
    "erf": (1.3, "erf", ((-6, 6), (0.9, 1.3), (-1e-3, 1e-3))),
    "erfc": (2, "erfc", ((-6, 6), (0, 27), (-1, 1))),
    "erfinv": (2.5, "erfinv", ((-1, 1), (0.99, 1), (-1e-3, 1e-3))),
    "lgamma": (2, "loggamma", ((0, 3), (0.9, 1.1), (1.9, 2.1), (3, 30), (0, 1e9))),
    "digamma": (8, "digamma", ((4, 30), (0, 0.5), (0, 1e9))),
}


@pytest.mark.parametrize("name", EXACT_CASES)
def test_double_functions_without_a_library_keep_their_bound(name):
    limit, exact_name, ranges = EXACT_CASES[name]
    generator = np.random.default_rng(2)
    x = np.concatenate([generator.uniform(*one, 300) for one in ranges])
    mine = run(ops.ALL[name], torch.from_numpy(x)).numpy()
    with mpmath.workdps(40):
        function = getattr(mpmath, exact_name)
        for operand, result in zip(x.tolist(), mine.tolist()):
            exact = function(mpmath.mpf(operand)).real
            error = abs(result - exact) / mpmath.mpf(math.ulp(float(exact)))
            assert error <= limit, operand


def test_logarithms_of_gamma_below_zero_have_the_error_of_their_terms():
    x = np.random.default_rng(3).uniform(-30, 0, 400)
    mine = run(ops.LGAMMA, torch.from_numpy(x)).numpy()
    exact = np.array([float(mpmath.loggamma(value).real) for value in x.tolist()])
    assert np.abs(mine - exact).max() <= 2e-14


@pytest.mark.parametrize("name", [*DOUBLE_LIMITS, *EXACT_CASES])
def test_no_function_is_one_of_the_c_library(name):
    """A target without that library, or a vendor's, needs nothing else."""
    x = make(ops.INPUT, index=0, dtype=torch.float64, shape=(64,))
    for operand in (x, make(ops.INPUT, index=0, dtype=torch.float32, shape=(64,))):
        (kernel,) = units_of(Graph((operand,), (), (make(ops.ALL[name], operand),)))
        called = re.findall(r"declare [^@]*@([\w.]+)\(", kernel_code(kernel).text)
        assert all(function.startswith("llvm.") for function in called), called


BINARY = {"pow": torch.pow, "atan2": torch.atan2, "hypot": torch.hypot, "fmod": torch.fmod}


@pytest.mark.parametrize("name", BINARY)
def test_functions_of_two_floats_are_the_double_value_rounded(name):
    values = torch.tensor(SPECIAL + [2.0, -2.0, 0.5, 3.0, -3.0, 7.25, -0.1])
    pairs = [v.reshape(-1) for v in torch.meshgrid(values, values, indexing="ij")]
    any_bits = [math_ulp.inputs(first, 4093) for first in (3, 1 << 31)]
    usual = [torch.rand(COUNT), torch.randn(COUNT) * 20]
    x, y = (torch.cat(parts) for parts in zip(pairs, any_bits, usual))
    error = math_ulp.errors(run(ops.ALL[name], x, y), BINARY[name](x.double(), y.double()))
    assert error.max() <= 0.51


def test_remainders_of_doubles_are_exact():
    """Multiples and what is next to them, quotients around 2**53, and any bits."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randn(40_000, generator=generator, dtype=torch.float64).exp()
    times = torch.randint(1 << 52, y.shape, generator=generator) >> torch.arange(40_000) % 52
    x = times * y
    any_bits = torch.randint(-(2**63), 2**63 - 1, (40_000,), generator=generator)
    x = torch.cat([x, x.nextafter(x * 0), x.nextafter(x * 2), y * 2.0**53, any_bits.view(y.dtype)])
    y = torch.cat([y, y, -y, y.sqrt(), any_bits.flip(0).view(y.dtype)])
    there = x.isfinite() & y.isfinite() & (y != 0)
    x, y = x[there], y[there]
    exact = [math.fmod(a, b) for a, b in zip(x.tolist(), y.tolist())]  # eager's own is not
    exact = torch.tensor(exact, dtype=torch.float64)
    assert torch.equal(run(ops.FMOD, x, y).view(torch.int64), exact.view(torch.int64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_remainders_of_special_numbers(dtype):
    x, y = torch.cartesian_prod(*[torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)] * 2).T
    exact = torch.tensor([_fmod(a, b) for a, b in zip(x.tolist(), y.tolist())], dtype=dtype)
    mine = run(ops.FMOD, x.contiguous(), y.contiguous())
    torch.testing.assert_close(mine, exact, rtol=0, atol=0, equal_nan=True)
    there = ~exact.isnan()
    assert torch.equal(mine[there].signbit(), exact[there].signbit())


def _fmod(x, y):
    is_number = not (math.isnan(x) or math.isnan(y) or math.isinf(x) or y == 0)
    return math.fmod(x, y) if is_number else math.nan


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_large_angles_in_kernels_of_any_width(dtype):
    """Sine and cosine share the function for large angles; the results are those of each alone."""
    x = torch.logspace(0, 37, 64, dtype=torch.float64).to(dtype)
    for size in (1, 3, 64):
        operand = make(ops.INPUT, index=0, dtype=dtype, shape=(size,))
        results = make(ops.SIN, operand), make(ops.COS, operand), make(ops.TAN, operand)
        computation = LlvmBackend().compile(Graph((operand,), (), results), 0, frozenset())
        for first in range(0, 64 - size + 1, size):
            part = x[first : first + size].contiguous()
            for mine, function in zip(
                computation.launch([part], []), (torch.sin, torch.cos, torch.tan)
            ):
                exact = function(part.double()).to(dtype)
                torch.testing.assert_close(mine, exact, rtol=3 * torch.finfo(dtype).eps, atol=0)


def test_coefficients_are_those_of_their_script():
    parts = [part for _, part in math_coefficients.module_text()]
    assert math_coefficients.MODULE.read_text() == "\n".join([math_coefficients.HEAD, *parts])


def test_lanes_do_not_change_a_function():
    """A scalar and a vector of one input give the same bits."""
    x = math_ulp.inputs(7, 999_983)[:4096].contiguous()
    alone = math_ulp.function_of("exp", 1)
    together = math_ulp.function_of("exp", 4096)(x)
    for i in range(0, 4096, 97):
        assert alone(x[i : i + 1]).view(torch.int32) == together[i : i + 1].view(torch.int32)
