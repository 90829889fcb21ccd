"""Powers, and the length of a vector of two, on vectors of double and of floats that were widened.

The power of doubles is exp(y log(x)) with a logarithm of two doubles, whose error is below 2**-65 of
its size: T. J. Dekker, "A floating-point technique for extending the available precision" (1971).
Greatest errors over samples, in units in the last place: 0.9, and hypot 1.1; rounded to float 0.51.
"""

from __future__ import annotations

import math

from ltc.llvm.emit import math_coefficients as table
from ltc.llvm.emit import math_short
from ltc.llvm.emit.builder import Builder
from ltc.llvm.emit.float_ops import INFINITY, Floats
from ltc.llvm.emit.math_double import LN2_HIGH, LN2_LOW, exp_of_rest, normal_parts, reduced, scaled

TWO_THIRDS, TWO_THIRDS_LOW = 2 / 3, 3.700743415417188e-17


def power(b: Builder, x: str, y: str) -> str:
    f = Floats(b, "double")
    a = f.abs(x)
    high, low = _log_pair(f, a)
    high = f.select(f.test("olt", a, INFINITY), high, a)
    high = f.select(f.test("oeq", a, 0.0), -INFINITY, high)
    product = f.mul(y, high)
    rest = f.fma(y, low, f.rest_of_product(y, high, product))
    rest = f.select(f.test("olt", f.abs(product), 1000.0), rest, 0.0)
    n, r, lost = reduced(f, f.at_least(f.at_most(product, 710.0), -746.0))
    r, lost = f.renewed(r, f.add(lost, rest))
    return _with_sign(f, x, y, scaled(f, exp_of_rest(f, r, lost), n))


def _log_pair(f: Floats, x: str) -> tuple[str, str]:
    """log(x) of a positive finite number: 2 s + 2 s**3 / 3 + ... with s = (m - 1) / (m + 1)."""
    e, z = normal_parts(f, x)
    bottom = f.add(z, 2.0)
    inverse = f.div(1.0, bottom)
    s = f.mul(z, inverse)
    lacking = f.fma(s, f.rest_of_sum(2.0, z, bottom), f.rest_of_product(s, bottom, z))
    s_low = f.mul(f.negative(lacking), inverse)
    square = f.mul(s, s)
    square_low = f.fma(f.add(s, s), s_low, f.rest_of_product(s, s, square))
    third = f.fma(square, f.polynomial(square, *table.LOG_FROM_FIFTH), TWO_THIRDS_LOW)
    factor = f.add(third, TWO_THIRDS)
    factor_low = f.rest_of_sum(TWO_THIRDS, third, factor)
    cube, cube_low = _product(f, (square, square_low), (s, s_low))
    tail, tail_low = _product(f, (cube, cube_low), (factor, factor_low))
    first = f.add(s, s)
    m = f.add(first, tail)
    m_low = f.add(f.rest_of_sum(first, tail, m), f.fma(s_low, 2.0, tail_low))
    whole = f.mul(e, LN2_HIGH)  # exact
    high = f.add(whole, m)
    return f.renewed(high, f.add(f.rest_of_sum(whole, m, high), f.fma(e, LN2_LOW, m_low)))


def _product(f: Floats, x: tuple[str, str], y: tuple[str, str]) -> tuple[str, str]:
    high = f.mul(x[0], y[0])
    return high, f.fma(x[0], y[1], f.fma(x[1], y[0], f.rest_of_product(x[0], y[0], high)))


def _with_sign(f: Floats, x: str, y: str, result: str) -> str:
    """The power of x, given that of its size: the cases of C's Annex F."""
    whole = f.test("oeq", f.trunc(y), y)
    half = f.mul(y, 0.5)
    uneven = f.test("une", f.trunc(half), half)
    flips = f.select(uneven, f.copysign(1.0, x), 1.0)
    below = f.select(f.test("oeq", x, -INFINITY), result, math.nan)
    below = f.select(f.test("olt", x, 0.0), below, result)
    result = f.select(whole, f.mul(result, flips), below)
    endless = f.select(f.test("oeq", f.abs(y), INFINITY), 1.0, result)
    result = f.select(f.test("oeq", x, -1.0), endless, result)
    result = f.select(f.test("oeq", x, 1.0), 1.0, result)
    return f.select(f.test("oeq", y, 0.0), 1.0, result)


def power_widened(b: Builder, x: str, y: str) -> str:
    f = Floats(b, "double")
    a = f.abs(x)
    logarithm = f.select(f.test("oeq", a, 0.0), -INFINITY, math_short.log(f, a))
    product = f.at_least(f.at_most(f.mul(y, logarithm), 200.0), -200.0)
    return _with_sign(f, x, y, math_short.exp(f, product))


def hypot(b: Builder, x: str, y: str) -> str:
    """The root of the sum of the squares, of numbers that a power of two brings into range."""
    f = Floats(b, "double")
    wide, high = f.abs(x), f.abs(y)
    larger = f.select(f.test("ogt", wide, high), wide, high)
    huge, tiny = f.test("ogt", larger, 2.0**500), f.test("olt", larger, 2.0**-400)
    scale = f.select(huge, 2.0**-600, f.select(tiny, 2.0**600, 1.0))
    back = f.select(huge, 2.0**600, f.select(tiny, 2.0**-600, 1.0))
    return _length(
        f, (wide, high), f.mul(hypot_widened(b, f.mul(wide, scale), f.mul(high, scale)), back)
    )


def hypot_widened(b: Builder, x: str, y: str) -> str:
    f = Floats(b, "double")
    return _length(f, (f.abs(x), f.abs(y)), f.sqrt(f.fma(x, x, f.mul(y, y))))


def _length(f: Floats, sides: tuple[str, str], length: str) -> str:
    """Infinite where a side is, also beside NaN."""
    for side in sides:
        length = f.select(f.test("oeq", side, INFINITY), INFINITY, length)
    return length
