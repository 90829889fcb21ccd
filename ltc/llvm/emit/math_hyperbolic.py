"""Hyperbolic functions and their inverses, on vectors of double and of floats that were widened.

Greatest errors over samples, in units in the last place: of double tanh, cosh 1.0, asinh, acosh, atanh 1.2,
sinh 1.3; of the others, rounded to float, 0.51.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ltc.llvm.emit import math_short
from ltc.llvm.emit.builder import Builder
from ltc.llvm.emit.float_ops import INFINITY, Floats
from ltc.llvm.emit.math_double import (
    exp_series,
    log1p_of_sum,
    power_of_two,
    quarter_of_expm1,
    reduced,
)  # fmt: skip

LARGEST = 710.5  # beyond it sinh and cosh are infinite
LARGEST_SQUARED = 2.0**60  # up to it 1 + x**2 and x + 1 are computed


def tanh(b: Builder, x: str) -> str:
    f = Floats(b, "double")
    t, low = quarter_of_expm1(f, f.mul(f.at_most(f.abs(x), 22.0), 2.0))
    t, low = f.mul(t, 4.0), f.mul(low, 4.0)
    d = f.add(t, 2.0)
    two = f.sub(d, t)
    low_d = f.add(f.add(f.sub(t, f.sub(d, two)), f.sub(2.0, two)), low)
    y = f.div(t, d)
    error = f.sub(f.sub(low, f.rest_of_product(y, d, t)), f.mul(y, low_d))
    y = f.at_most(f.fma(error, f.fma(y, -0.5, 0.5), y), 1.0)  # 1 / d is (1 - y) / 2
    return _odd(f, x, y)


def _odd(f: Floats, x: str, y: str) -> str:
    """y with the sign of x, and x itself where it is so small that it is its own function."""
    return f.select(f.test("olt", f.abs(x), 2.0**-30), x, f.copysign(y, x))


def sinh(b: Builder, x: str) -> str:
    """With t for exp(abs(x)) - 1 and q for t / (1 + t): (t + q) / 2, or t - t q / 2 for small t."""
    f = Floats(b, "double")
    quarter, low = quarter_of_expm1(f, f.at_most(f.abs(x), LARGEST))
    q = f.div(quarter, f.add(quarter, 0.25))
    rest = f.sub(1.0, q)
    low = f.fma(f.mul(rest, rest), low, low)
    large = f.add(quarter, f.fma(q, 0.25, low))
    small = f.fma(quarter, 2.0, f.fma(f.negative(quarter), q, low))
    return _odd(f, x, f.mul(f.select(f.test("olt", quarter, 0.25), small, large), 2.0))


def cosh(b: Builder, x: str) -> str:
    f = Floats(b, "double")
    n, r, low = reduced(f, f.at_most(f.abs(x), LARGEST))
    growth = f.add(r, f.fma(exp_series(f, r), f.mul(r, r), low))
    y = f.add(growth, 1.0)
    quarter = power_of_two(f, f.integer("sub", n, 2))
    whole = f.mul(y, quarter)  # exact
    rest = f.fma(f.rest_of_sum(1.0, growth, y), quarter, f.div(0.0625, whole))
    return f.mul(f.add(whole, rest), 2.0)


def asinh(b: Builder, x: str) -> str:
    """log(1 + a + a**2 / (1 + sqrt(1 + a**2))), or log(2 a) where that is the same."""
    f = Floats(b, "double")
    a = f.abs(x)
    large = f.test("ogt", a, LARGEST_SQUARED)
    square = f.mul(a, a)
    second = f.div(square, f.add(f.sqrt(f.add(square, 1.0)), 1.0))
    second = f.select(large, 0.0, second)
    sum_ = f.add(a, second)
    y = log1p_of_sum(f, sum_, f.rest_of_sum(a, second, sum_))
    y = f.select(large, f.add(y, math.log(2)), y)
    y = f.select(f.test("oeq", a, INFINITY), a, y)
    return _odd(f, x, f.select(f.test("uno", x, x), x, y))


def acosh(b: Builder, x: str) -> str:
    """log(1 + d + sqrt(d**2 + 2 d)) with d = x - 1, or log(2 x) where that is the same."""
    f = Floats(b, "double")
    d = f.sub(x, 1.0)
    large = f.test("ogt", x, LARGEST_SQUARED)
    root = f.select(large, 0.0, f.sqrt(f.fma(d, d, f.mul(d, 2.0))))
    larger = f.select(f.test("ogt", d, root), d, root)
    sum_ = f.add(d, root)
    low = f.rest_of_sum(larger, f.select(f.test("ogt", d, root), root, d), sum_)
    y = log1p_of_sum(f, sum_, low)
    y = f.select(large, f.add(y, math.log(2)), y)
    y = f.select(f.test("oeq", x, INFINITY), x, y)
    return f.select(f.test("ult", x, 1.0), math.nan, y)


def atanh(b: Builder, x: str) -> str:
    """log(1 + 2 a / (1 - a)) / 2, the quotient with what rounding takes from it."""
    f = Floats(b, "double")
    a = f.abs(x)
    below = f.sub(1.0, a)
    below_low = f.rest_of_sum(1.0, f.negative(a), below)
    twice = f.mul(a, 2.0)
    inverse = f.div(1.0, below)
    q = f.mul(twice, inverse)
    lacking = f.add(f.rest_of_product(q, below, twice), f.mul(q, below_low))
    y = f.mul(log1p_of_sum(f, q, f.negative(f.mul(lacking, inverse))), 0.5)
    y = f.select(f.test("oeq", a, 1.0), INFINITY, y)
    return _odd(f, x, f.select(f.test("ugt", a, 1.0), math.nan, y))


DOUBLE: dict[str, Callable[..., str]] = {
    "sinh": sinh, "cosh": cosh, "tanh": tanh, "asinh": asinh, "acosh": acosh, "atanh": atanh,
}  # fmt: skip


# --- floats that were widened -----------------------------------------------------------------------


def sinh_widened(b: Builder, x: str) -> str:
    f = Floats(b, "double")
    t = math_short.expm1(f, f.at_most(f.abs(x), 200.0))
    return _odd(f, x, f.mul(f.add(t, f.div(t, f.add(t, 1.0))), 0.5))


def cosh_widened(b: Builder, x: str) -> str:
    f = Floats(b, "double")
    t = math_short.exp(f, f.at_most(f.abs(x), 200.0))
    return f.mul(f.add(t, f.div(1.0, t)), 0.5)


def asinh_widened(b: Builder, x: str) -> str:
    f = Floats(b, "double")
    a = f.abs(x)
    square = f.mul(a, a)
    root = f.add(f.sqrt(f.add(square, 1.0)), 1.0)
    y = math_short.log1p(f, f.add(a, f.div(square, root)))
    return _odd(f, x, f.select(f.test("oeq", a, INFINITY), a, y))


def acosh_widened(b: Builder, x: str) -> str:
    f = Floats(b, "double")
    d = f.sub(x, 1.0)  # not exact, but near enough for float
    y = math_short.log1p(f, f.add(d, f.sqrt(f.fma(d, d, f.mul(d, 2.0)))))
    return f.select(f.test("ult", x, 1.0), math.nan, y)


def atanh_widened(b: Builder, x: str) -> str:
    f = Floats(b, "double")
    a = f.abs(x)
    y = f.mul(math_short.log1p(f, f.div(f.mul(a, 2.0), f.sub(1.0, a))), 0.5)
    return _odd(f, x, f.select(f.test("ugt", a, 1.0), math.nan, y))


WIDENED: dict[str, Callable[..., str]] = {
    "sinh": sinh_widened, "cosh": cosh_widened, "asinh": asinh_widened, "acosh": acosh_widened,
    "atanh": atanh_widened,
}  # fmt: skip
