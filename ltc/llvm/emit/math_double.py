"""Exponentials and logarithms of double vectors: argument reduction, then a polynomial.

Greatest error over samples against 80-bit arithmetic, in units in the last place: 1.1 for expm1, 0.9
for exp and exp2, 0.8 for log, log1p, log2 and log10; rounded to float all are within 0.51.  NaN,
infinities, zeros and denormal numbers are as C's Annex F wants them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ltc.llvm.emit import math_coefficients as table
from ltc.llvm.emit.builder import Builder
from ltc.llvm.emit.float_ops import INFINITY, Floats, Operand
from ltc.llvm.emit.math_angle import ROUNDER, ROUNDER_BITS

LN2_HIGH, LN2_LOW = 0.693147180369123816490, 1.90821492927058770002e-10  # the first has few bits
LOG10_2 = 0.3010299955494702, 1.1451100899212592e-10  # log10(2), the first part with few bits
SQRT_HALF_BITS = 0x3FE6A09E667F3BCD
SMALLEST_NORMAL = 2.0**-1022


def nearest_whole(f: Floats, x: str, factor: float) -> tuple[str, str]:
    """The whole number nearest to x * factor: (as a double, as i64)"""
    sum_ = f.fma(x, factor, ROUNDER)
    return f.sub(sum_, ROUNDER), f.integer("sub", f.bits(sum_), ROUNDER_BITS)


def power_of_two(f: Floats, n: str) -> str:
    """2**n for a whole n that gives a normal number."""
    return f.from_bits(f.integer("shl", f.integer("add", n, 1023), 52))


def scaled(f: Floats, y: str, n: str) -> str:
    """y * 2**n, rounded once where that is no normal number."""
    half = f.integer("ashr", n, 1)
    return f.mul(f.mul(y, power_of_two(f, half)), power_of_two(f, f.integer("sub", n, half)))


def exp_series(f: Floats, r: str) -> str:
    """(exp(r) - 1 - r) / r**2 for |r| < 0.35"""
    return f.polynomial(r, *table.EXP)


def exp_of_rest(f: Floats, r: str, low: str) -> str:
    """exp(r + low) for |r| < 0.35"""
    return f.add(f.add(f.fma(exp_series(f, r), f.mul(r, r), low), r), 1.0)


def reduced(f: Floats, x: str) -> tuple[str, str, str]:
    """x = n ln 2 + r + low: (n as i64, r, low)"""
    n, bits = nearest_whole(f, x, math.log2(math.e))
    high = f.fma(n, -LN2_HIGH, x)  # exact
    low = f.mul(n, LN2_LOW)
    r = f.sub(high, low)
    return bits, r, f.sub(f.sub(high, r), low)


def exp(b: Builder, x: str) -> str:
    f = Floats(b, "double")
    n, r, low = reduced(f, f.at_least(f.at_most(x, 710.0), -746.0))
    return scaled(f, exp_of_rest(f, r, low), n)


def exp2(b: Builder, x: str) -> str:
    f = Floats(b, "double")
    near = f.at_least(f.at_most(x, 1025.0), -1076.0)
    n, bits = nearest_whole(f, near, 1.0)
    rest = f.sub(near, n)  # exact
    r = f.mul(rest, math.log(2))
    low = f.fma(rest, math.log(2), f.negative(r))
    low = f.fma(rest, 2.3190468138462996e-17, low)
    return scaled(f, exp_of_rest(f, r, low), bits)


def quarter_of_expm1(f: Floats, x: str) -> tuple[str, str]:
    """(exp(x) - 1) / 4 for -40 < x < 711 as a number, and what it lacks."""
    n, r, low = reduced(f, x)
    q = f.fma(exp_series(f, r), f.mul(r, r), low)
    p = f.add(r, q)
    p_low = f.rest_of_sum(r, q, p)
    quarter = power_of_two(f, f.integer("sub", n, 2))  # 2**1024 is no number
    base = f.sub(quarter, 0.25)
    y = f.fma(p, quarter, base)
    return y, f.fma(p_low, quarter, f.fma(p, quarter, f.sub(base, y)))


def expm1(b: Builder, x: str) -> str:
    f = Floats(b, "double")
    y, low = quarter_of_expm1(f, f.at_least(f.at_most(x, 710.0), -40.0))
    y = f.mul(f.add(y, low), 4.0)
    return f.select(f.test("olt", f.abs(x), 2.0**-54), x, y)


def log_parts(f: Floats, x: str) -> tuple[str, str]:
    """x = m * 2**e with m from sqrt(1/2) to sqrt(2), for normal x: (e, m - 1)"""
    bits = f.bits(x)
    e = f.integer("ashr", f.integer("sub", bits, SQRT_HALF_BITS), 52)
    m = f.from_bits(f.integer("sub", bits, f.integer("shl", e, 52)))
    e = f.sub(f.from_bits(f.integer("add", e, ROUNDER_BITS)), ROUNDER)
    return e, f.sub(m, 1.0)


def log_series(f: Floats, z: str) -> tuple[str, str]:
    """log(1 + z) = z - (half - tail): (half, tail), by the series of atanh(z / (2 + z))."""
    s = f.div(z, f.add(z, 2.0))
    s2, half = f.mul(s, s), f.mul(f.mul(z, z), 0.5)
    series = f.mul(f.polynomial(s2, *table.LOG), s2)
    return half, f.mul(s, f.add(half, series))


def log_limits(f: Floats, x: str, y: str, zero: float) -> str:
    """y, but the limits of a logarithm that is minus infinite at `zero`."""
    y = f.select(f.test("oeq", x, INFINITY), INFINITY, y)
    y = f.select(f.test("oeq", x, zero), -INFINITY, y)
    y = f.select(f.test("olt", x, zero), math.nan, y)
    return f.select(f.test("uno", x, x), x, y)


def normal_parts(f: Floats, x: str) -> tuple[str, str]:
    tiny = f.test("olt", x, SMALLEST_NORMAL)
    e, z = log_parts(f, f.select(tiny, f.mul(x, 2.0**54), x))
    return f.select(tiny, f.sub(e, 54.0), e), z


def log(b: Builder, x: str) -> str:
    f = Floats(b, "double")
    e, z = normal_parts(f, x)
    half, tail = log_series(f, z)
    small = f.sub(half, f.fma(e, LN2_LOW, tail))
    return log_limits(f, x, f.fma(e, LN2_HIGH, f.sub(z, small)), 0.0)


def log_and_rest(f: Floats, x: str) -> tuple[str, str]:
    """The logarithm of a positive finite number, and what rounding took from it."""
    e, z = normal_parts(f, x)
    half, tail = log_series(f, z)
    small = f.sub(half, f.fma(e, LN2_LOW, tail))
    m = f.sub(z, small)
    whole = f.mul(e, LN2_HIGH)  # exact
    y = f.add(whole, m)
    return y, f.add(f.rest_of_sum(whole, m, y), f.sub(f.sub(z, m), small))


def _log_of_base(b: Builder, x: str, per_e: tuple[float, float], inverse: tuple) -> str:
    """The logarithm of x for another base.

    Args:
        per_e: The logarithm of 2, in two parts; the first has so few bits that its product with the
        exponent is exact.
        inverse: The logarithm of Euler's number, rounded, and the rounding's remainder.
    """
    f = Floats(b, "double")
    e, z = normal_parts(f, x)
    half, tail = log_series(f, z)
    down = f.sub(half, tail)
    m = f.sub(z, down)
    rest = f.sub(f.sub(f.sub(z, m), down), f.sub(f.sub(half, down), tail))
    y = f.mul(m, inverse[0])
    error = f.fma(m, inverse[0], f.negative(y))
    error = f.add(error, f.fma(m, inverse[1], f.mul(rest, inverse[0])))
    first = f.mul(e, per_e[0])
    result = f.add(first, y)
    error = f.add(error, f.add(f.sub(first, result), y))
    return log_limits(f, x, f.add(result, f.fma(e, per_e[1], error)), 0.0)


def log2(b: Builder, x: str) -> str:
    return _log_of_base(b, x, (1.0, 0.0), (1.4426950408889634, 2.0355273740931033e-17))


def log10(b: Builder, x: str) -> str:
    return _log_of_base(b, x, LOG10_2, (0.4342944819032518, 1.098319650216765e-17))


def log1p(b: Builder, x: str) -> str:
    f = Floats(b, "double")
    y = log_limits(f, x, log1p_of_sum(f, x, 0.0), -1.0)
    return f.select(f.test("olt", f.abs(x), 2.0**-54), x, y)


def log1p_of_sum(f: Floats, x: str, low: Operand) -> str:
    """log(1 + x + low) for a finite x and a low part that rounding took from it."""
    u = f.add(x, 1.0)
    # What was lost in u, in the units of its logarithm; the larger operand is subtracted first.
    lost = f.select(f.test("ogt", x, 1.0), f.sub(1.0, f.sub(u, x)), f.sub(x, f.sub(u, 1.0)))
    lost = f.add(lost, low) if low else lost
    e, z = log_parts(f, u)
    half, tail = log_series(f, z)
    small = f.sub(half, f.add(tail, f.fma(e, LN2_LOW, f.div(lost, u))))
    return f.fma(e, LN2_HIGH, f.sub(z, small))


DOUBLE: dict[str, Callable[..., str]] = {
    "exp": exp, "exp2": exp2, "expm1": expm1, "log": log, "log1p": log1p, "log2": log2,
    "log10": log10,
}  # fmt: skip
