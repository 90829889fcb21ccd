"""Functions of double vectors: argument reduction, then a series summed by Horner's rule.

The coefficients are those of the Taylor series, long enough that what is left out is below a tenth
of a unit in the last place over the reduced range.  Greatest error over samples against 80-bit
arithmetic, in units in the last place: 1.1 for expm1, 0.9 for exp, exp2, log, log1p, log2, log10,
sin and cos, 1.2 for tanh, none for fmod; rounded to float all are within 0.51.  NaN, infinities, zeros and
denormal numbers are as C's Annex F wants them.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ltc.llvm.emit.builder import Builder
from ltc.llvm.emit.float_ops import INFINITY, Floats

ROUNDER = 6755399441055744.0  # 1.5 * 2**52: added to a number it leaves the nearest whole one
ROUNDER_BITS = 0x4338000000000000
LN2_HIGH, LN2_LOW = 0.693147180369123816490, 1.90821492927058770002e-10  # the first has few bits
LOG10_2 = 0.3010299955494702, 1.1451100899212592e-10  # log10(2), the first part with few bits
SQRT_HALF_BITS = 0x3FE6A09E667F3BCD
SMALLEST_NORMAL = 2.0**-1022
# pi / 2 in three parts, the first two of 33 bits, so that their products with n < 2**20 are exact.
HALF_PI = (1.57079632673412561417, 6.07710050630396597660e-11, 2.02226624879595063154e-21)
LARGEST_REDUCED = 2.0**20


def _whole(f: Floats, x: str, factor: float) -> tuple[str, str]:
    """The whole number nearest to x * factor: (as a double, as i64)"""
    sum_ = f.fma(x, factor, ROUNDER)
    return f.sub(sum_, ROUNDER), f.integer("sub", f.bits(sum_), ROUNDER_BITS)


def _power_of_two(f: Floats, n: str) -> str:
    """2**n for a whole n that gives a normal number."""
    return f.from_bits(f.integer("shl", f.integer("add", n, 1023), 52))


def _scaled(f: Floats, y: str, n: str) -> str:
    """y * 2**n, rounded once where that is no normal number."""
    half = f.integer("ashr", n, 1)
    return f.mul(f.mul(y, _power_of_two(f, half)), _power_of_two(f, f.integer("sub", n, half)))


def _exp_series(f: Floats, r: str) -> str:
    """(exp(r) - 1 - r) / r**2 for |r| < 0.35"""
    return f.polynomial(r, *[1 / math.factorial(k) for k in range(14, 1, -1)])


def _reduced(f: Floats, x: str) -> tuple[str, str, str]:
    """x = n ln 2 + r + low: (n as i64, r, low)"""
    n, bits = _whole(f, x, math.log2(math.e))
    high = f.fma(n, -LN2_HIGH, x)  # exact
    low = f.mul(n, LN2_LOW)
    r = f.sub(high, low)
    return bits, r, f.sub(f.sub(high, r), low)


def exp(b: Builder, x: str) -> str:
    f = Floats(b, "double")
    n, r, low = _reduced(f, f.at_least(f.at_most(x, 710.0), -746.0))
    y = f.add(f.add(f.fma(_exp_series(f, r), f.mul(r, r), low), r), 1.0)
    return _scaled(f, y, n)


def exp2(b: Builder, x: str) -> str:
    f = Floats(b, "double")
    near = f.at_least(f.at_most(x, 1025.0), -1076.0)
    n, bits = _whole(f, near, 1.0)
    rest = f.sub(near, n)  # exact
    r = f.mul(rest, math.log(2))
    low = f.fma(rest, math.log(2), f.negative(r))
    low = f.fma(rest, 2.3190468138462996e-17, low)
    y = f.add(f.add(f.fma(_exp_series(f, r), f.mul(r, r), low), r), 1.0)
    return _scaled(f, y, bits)


def _expm1_parts(f: Floats, x: str) -> tuple[str, str]:
    """exp(x) - 1 for -40 < x < 710 as a number, and what it lacks."""
    n, r, low = _reduced(f, x)
    q = f.fma(_exp_series(f, r), f.mul(r, r), low)
    p = f.add(r, q)
    p_low = f.add(f.sub(r, p), q)
    half = _power_of_two(f, f.integer("sub", n, 1))  # 2**1024 is no number
    base = f.sub(half, 0.5)
    y = f.fma(p, half, base)
    y_low = f.fma(p_low, half, f.fma(p, half, f.sub(base, y)))
    return f.mul(y, 2.0), f.mul(y_low, 2.0)


def expm1(b: Builder, x: str) -> str:
    f = Floats(b, "double")
    y, low = _expm1_parts(f, f.at_least(f.at_most(x, 710.0), -40.0))
    y = f.select(f.test("ogt", x, 709.0), y, f.add(y, low))  # infinity lacks a NaN
    return f.select(f.test("olt", f.abs(x), 2.0**-54), x, y)


def _log_parts(f: Floats, x: str) -> tuple[str, str]:
    """x = m * 2**e with m from sqrt(1/2) to sqrt(2), for normal x: (e, m - 1)"""
    bits = f.bits(x)
    e = f.integer("ashr", f.integer("sub", bits, SQRT_HALF_BITS), 52)
    m = f.from_bits(f.integer("sub", bits, f.integer("shl", e, 52)))
    e = f.sub(f.from_bits(f.integer("add", e, ROUNDER_BITS)), ROUNDER)
    return e, f.sub(m, 1.0)


def _log_series(f: Floats, z: str) -> tuple[str, str]:
    """log(1 + z) = z - (half - tail): (half, tail), by the series of atanh(z / (2 + z))."""
    s = f.div(z, f.add(z, 2.0))
    s2, half = f.mul(s, s), f.mul(f.mul(z, z), 0.5)
    series = f.mul(f.polynomial(s2, *[2 / (2 * k + 1) for k in range(11, 0, -1)]), s2)
    return half, f.mul(s, f.add(half, series))


def log_limits(f: Floats, x: str, y: str, zero: float) -> str:
    """y, but the limits of a logarithm that is minus infinite at `zero`."""
    y = f.select(f.test("oeq", x, INFINITY), INFINITY, y)
    y = f.select(f.test("oeq", x, zero), -INFINITY, y)
    y = f.select(f.test("olt", x, zero), math.nan, y)
    return f.select(f.test("uno", x, x), x, y)


def _normal_parts(f: Floats, x: str) -> tuple[str, str]:
    tiny = f.test("olt", x, SMALLEST_NORMAL)
    e, z = _log_parts(f, f.select(tiny, f.mul(x, 2.0**54), x))
    return f.select(tiny, f.sub(e, 54.0), e), z


def log(b: Builder, x: str) -> str:
    f = Floats(b, "double")
    e, z = _normal_parts(f, x)
    half, tail = _log_series(f, z)
    small = f.sub(half, f.fma(e, LN2_LOW, tail))
    return log_limits(f, x, f.fma(e, LN2_HIGH, f.sub(z, small)), 0.0)


def _log_of_base(b: Builder, x: str, per_e: tuple[float, float], inverse: tuple) -> str:
    """The logarithm of x for another base.

    Args:
        per_e: The logarithm of 2, in two parts; the first has so few bits that its product with the
        exponent is exact.
        inverse: The logarithm of Euler's number, rounded, and the rounding's remainder.
    """
    f = Floats(b, "double")
    e, z = _normal_parts(f, x)
    half, tail = _log_series(f, z)
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
    u = f.add(x, 1.0)
    # What was lost in u, in the units of its logarithm; the larger operand is subtracted first.
    lost = f.select(f.test("ogt", x, 1.0), f.sub(1.0, f.sub(u, x)), f.sub(x, f.sub(u, 1.0)))
    e, z = _log_parts(f, u)
    half, tail = _log_series(f, z)
    lost = f.div(lost, u)
    small = f.sub(half, f.add(tail, f.fma(e, LN2_LOW, lost)))
    y = log_limits(f, x, f.fma(e, LN2_HIGH, f.sub(z, small)), -1.0)
    return f.select(f.test("olt", f.abs(x), 2.0**-54), x, y)


def tanh(b: Builder, x: str) -> str:
    f = Floats(b, "double")
    t, low = _expm1_parts(f, f.mul(f.at_most(f.abs(x), 22.0), 2.0))
    d = f.add(t, 2.0)
    two = f.sub(d, t)
    low_d = f.add(f.add(f.sub(t, f.sub(d, two)), f.sub(2.0, two)), low)
    y = f.div(t, d)
    error = f.sub(f.sub(low, f.fma(y, d, f.negative(t))), f.mul(y, low_d))
    y = f.at_most(f.fma(error, f.fma(y, -0.5, 0.5), y), 1.0)  # 1 / d is (1 - y) / 2
    return f.select(f.test("olt", f.abs(x), 2.0**-30), x, f.copysign(y, x))


def sin(b: Builder, x: str) -> str:
    return _sine(b, x, 0, "sin")


def cos(b: Builder, x: str) -> str:
    return _sine(b, x, 1, "cos")


def _sine(b: Builder, x: str, quarters: int, name: str) -> str:
    """The sine of x + quarters * pi / 2."""
    f = Floats(b, "double")
    n, quadrant = _whole(f, x, 2 / math.pi)
    first, second, third = HALF_PI
    t = f.fma(n, -first, x)  # exact
    w = f.mul(n, second)
    high = f.sub(t, w)  # with what it loses, and the third part
    low = f.fma(n, -third, f.sub(f.sub(t, high), w))
    r = f.add(high, low)
    low = f.add(f.sub(high, r), low)
    r2 = f.mul(r, r)
    signs = [(-1) ** k for k in range(12)]
    sine = f.polynomial(r2, *[signs[k] / math.factorial(2 * k + 1) for k in range(9, 0, -1)])
    sine = f.add(r, f.fma(f.mul(r2, r), sine, f.fma(f.mul(r2, low), -0.5, low)))
    tail = f.polynomial(r2, *[signs[k] / math.factorial(2 * k) for k in range(9, 1, -1)])
    half = f.mul(r2, 0.5)
    one = f.sub(1.0, half)
    rest = f.sub(f.sub(1.0, one), half)
    cosine = f.add(one, f.fma(f.mul(r2, r2), tail, f.sub(rest, f.mul(r, low))))
    if quarters:
        quadrant = f.integer("add", quadrant, quarters)
    y = f.of_quadrant(quadrant, sine, cosine)
    if not quarters:
        y = f.select(f.test("oeq", x, 0.0), x, y)
    large = f.test("uge", f.abs(x), LARGEST_REDUCED)
    return f.where_any(large, y, lambda: b.each_lane(name, "double", x))


def fmod(b: Builder, x: str, y: str) -> str:
    """Exact where the quotient is below 2**53: it may be rounded up to the next whole number."""
    f = Floats(b, "double")
    a, d = f.abs(x), f.abs(y)
    quotient = f.div(a, d)
    rest = f.fma(f.negative(b.intrinsic("trunc", "double", quotient)), d, a)
    rest = f.copysign(f.select(f.test("olt", rest, 0.0), f.add(rest, d), rest), x)
    large = f.test("uge", quotient, 2.0**53)
    without = b.binary("or", "i1", large, f.test("oeq", d, INFINITY))
    return f.where_any(without, rest, lambda: b.each_lane("fmod", "double", x, y))


FUNCTIONS: dict[str, Callable[..., str]] = {
    "exp": exp, "exp2": exp2, "expm1": expm1, "log": log, "log1p": log1p, "log2": log2,
    "log10": log10, "tanh": tanh, "sin": sin, "cos": cos, "fmod": fmod,
}  # fmt: skip
