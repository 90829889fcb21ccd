"""The error function, its complement and its inverse, on vectors of double and of widened floats.

erfc(x) is exp(-x**2) times a polynomial in (x - k) / (x + k), over 1 + 2 x: M. M. Shepherd and
J. G. Laframboise, "Chebyshev approximation of (1 + 2x) exp(x**2) erfc x in 0 <= x < inf" (1981).  The
inverse is a polynomial in w = -log(1 - x**2) or in its root, as in M. Giles, "Approximating the erfinv
function" (2010).  Greatest errors of double over samples, in units in the last place: erf 1.2, erfc 1.7,
erfinv 2.2; rounded to float 0.52.
"""

from __future__ import annotations

import math

from ltc.llvm.emit import math_coefficients as table
from ltc.llvm.emit import math_double, math_short
from ltc.llvm.emit.builder import Builder
from ltc.llvm.emit.float_ops import INFINITY, Floats
from ltc.llvm.emit.math_double import exp_series, nearest_whole, power_of_two, reduced, scaled

ERF_ENDS, ERFC_ENDS = 5.95, 27.3  # beyond them erf is 1 and erfc is 0 in double
SLOPE, SLOPE_LOW = 0.886226925452758, -3.8332932499128993e-17  # sqrt(pi) / 2
MIDDLE, MIDDLE_ROOT = 3.125, 4.3  # of the ranges of erfinv's polynomials


def _complement(f: Floats, a: str) -> str:
    """erfc(a) for a from 0 up to its end."""
    top = f.sub(a, 4.0)
    t = f.div(top, f.add(a, 4.0))
    *upper, last = table.ERFC
    bend = f.mul(f.polynomial_in_halves(t, *upper), t)
    p = f.add(bend, last)
    p_low = f.rest_of_sum(last, bend, p)
    bottom = f.fma(a, 2.0, 1.0)
    inverse = f.div(1.0, bottom)
    q = f.mul(p, inverse)
    q_low = f.mul(f.sub(p_low, f.rest_of_product(q, bottom, p)), inverse)
    square = f.mul(a, a)
    n, r, low = reduced(f, f.negative(square))
    r, low = f.renewed(r, f.sub(low, f.rest_of_product(a, a, square)))
    growth = f.add(r, f.fma(exp_series(f, r), f.mul(r, r), low))
    return scaled(f, f.add(q, f.fma(q, growth, q_low)), n)


def _near(f: Floats, x: str) -> str:
    """erf(x) for abs(x) < 1."""
    return f.fma(f.polynomial_in_halves(f.mul(x, x), *table.ERF), x, x)


def erf(b: Builder, x: str) -> str:
    """Beyond 1 it is 1 - exp(-p) with a polynomial p, near enough for such a difference."""
    f = Floats(b, "double")
    a = f.abs(x)
    logarithm = f.negative(
        f.polynomial_in_halves(f.sub(f.at_most(a, ERF_ENDS), 1.0), *table.ERF_FAR)
    )
    whole, n = nearest_whole(f, logarithm, math.log2(math.e))
    r = f.fma(whole, -math.log(2), logarithm)
    growth = f.fma(exp_series(f, r), f.mul(r, r), r)
    power = power_of_two(f, n)
    far = f.fma(f.negative(growth), power, f.sub(1.0, power))
    y = f.select(f.test("ogt", a, 1.0), f.copysign(far, x), _near(f, x))
    return f.select(f.test("oeq", x, 0.0), x, y)


def erfc(b: Builder, x: str) -> str:
    f = Floats(b, "double")
    a = f.abs(x)
    y = _complement(f, f.at_most(a, ERFC_ENDS))
    y = f.select(f.test("olt", x, 0.0), f.sub(2.0, y), y)
    return f.select(f.test("olt", a, 0.5), f.sub(1.0, _near(f, x)), y)


def erfc_widened(b: Builder, x: str) -> str:
    f = Floats(b, "double")
    a = f.at_most(f.abs(x), 10.2)
    t = f.div(f.sub(a, 3.0), f.add(a, 3.0))
    exponential = math_short.exp(f, f.negative(f.mul(a, a)))
    y = f.div(f.mul(f.polynomial_in_halves(t, *table.ERFC_SHORT), exponential), f.fma(a, 2.0, 1.0))
    return f.select(f.test("olt", x, 0.0), f.sub(2.0, y), y)


def erfinv(b: Builder, x: str) -> str:
    f = Floats(b, "double")
    left = _left_of_square(f, x)
    return _erfinv_of_log(f, x, left, math_double.log(b, left), table.ERFINV, table.ERFINV_FAR)


def erfinv_widened(b: Builder, x: str) -> str:
    f = Floats(b, "double")
    left = _left_of_square(f, x)
    logarithm = math_short.log_of_finite(f, left)
    return _erfinv_of_log(f, x, left, logarithm, table.ERFINV_SHORT, table.ERFINV_FAR_SHORT)


def _left_of_square(f: Floats, x: str) -> str:
    """1 - x**2"""
    a = f.abs(x)
    return f.mul(f.sub(1.0, a), f.add(a, 1.0))


def _erfinv_of_log(
    f: Floats,
    x: str,
    left: str,
    logarithm: str,
    near: tuple[float, ...],
    far: tuple[float, ...],
) -> str:
    """By the polynomial of w, which is 0 to 6.25, or that of its root, in rare lanes."""
    a, w = f.abs(x), f.negative(logarithm)
    bend = f.fma(f.polynomial_in_halves(f.sub(w, MIDDLE), *near), w, SLOPE_LOW)
    y = f.fma(a, SLOPE, f.mul(a, bend))

    def beyond() -> tuple[str]:
        y = f.polynomial(f.sub(f.sqrt(w), MIDDLE_ROOT), *far)
        y = f.select(f.test("oeq", a, 1.0), INFINITY, y)
        return (f.select(f.test("ule", a, 1.0), y, math.nan),)

    rare = f.test("ult", left, math.exp(-2 * MIDDLE))  # also beyond 1
    (y,) = f.where_any(rare, (y,), beyond)
    return f.copysign(y, x)
