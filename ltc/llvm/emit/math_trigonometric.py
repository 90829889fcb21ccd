"""Sine, cosine, tangent and their inverses, on vectors of float and of double.

Greatest errors over samples, in units in the last place: of double sin and cos 0.8, tan 1.0, asin and acos
1.2, atan 1.3, atan2 1.4; of float sin and cos 1.2, asin and acos 1.1, others 0.51.  The formulas for asin and
acos beyond 1/2 are those of W. J. Cody and W. Waite, "Software Manual for the Elementary Functions" (1980).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ltc.llvm.emit import math_angle
from ltc.llvm.emit import math_coefficients as table
from ltc.llvm.emit.builder import Builder
from ltc.llvm.emit.float_ops import INFINITY, Floats

# Added to a float below 2**22 it leaves the nearest whole number in the low bits of the sum.
FLOAT_ROUNDER = 12582912.0  # 1.5 * 2**23
# pi / 2 in three parts of 24, 16 and 24 bits: products of the first two with n < 2**8 are exact.
FLOAT_HALF_PI = (1.5707963705062866, -4.3711224861908704e-08, -1.6513995574653217e-13)
FLOAT_HALF_PI_LOW = -4.371138828673793e-08  # beyond the first, in one float
FLOAT_LARGEST_REDUCED = 400.0
HALF_PI, HALF_PI_LOW = math.pi / 2, 6.123233995736766e-17
PI_LOW = 1.2246467991473532e-16


# --- double ---------------------------------------------------------------------------------------


def _sine(f: Floats, r: str, low: str) -> tuple[str, str]:
    """sin(r + low) for abs(r) < 0.79: without r, r squared."""
    square = f.mul(r, r)
    p = f.polynomial(square, *table.SINE)
    return f.fma(f.mul(square, r), p, f.fma(f.mul(square, low), -0.5, low)), square


def _cosine(f: Floats, r: str, low: str, square: str) -> tuple[str, str]:
    """cos(r + low) as 1 - r**2 / 2 rounded, and the rest."""
    half = f.mul(square, 0.5)
    one = f.sub(1.0, half)
    rest = f.sub(f.sub(f.sub(1.0, one), half), f.mul(r, low))
    return one, f.fma(f.mul(square, square), f.polynomial(square, *table.COSINE), rest)


def sin(b: Builder, x: str) -> str:
    f = Floats(b, "double")
    y = _shifted_sine(f, x, 0)
    return f.select(f.test("oeq", x, 0.0), x, y)


def cos(b: Builder, x: str) -> str:
    return _shifted_sine(Floats(b, "double"), x, 1)


def sine_and_cosine(f: Floats, r: str, low: str) -> tuple[str, str]:
    """The sine and the cosine of r + low, for abs(r) < 0.79."""
    rest, square = _sine(f, r, low)
    one, tail = _cosine(f, r, low, square)
    return f.add(r, rest), f.add(one, tail)


def _shifted_sine(f: Floats, x: str, quarters: int) -> str:
    """The sine of x + quarters * pi / 2."""
    r, low, quadrant = math_angle.reduced(f, x)
    turned = f.integer("add", f.bits(quadrant), quarters)
    return f.of_quadrant(turned, *sine_and_cosine(f, r, low))


def _is_odd(f: Floats, quadrant: str) -> str:
    return f.integer("icmp ne", f.integer("and", f.bits(quadrant), 1), 0)


def tan(b: Builder, x: str) -> str:
    """Sine and cosine keep what rounding takes from them, and so does their quotient."""
    f = Floats(b, "double")
    r, low, quadrant = math_angle.reduced(f, x)
    rest, square = _sine(f, r, low)
    sine = f.add(r, rest)
    cosine, tail = _cosine(f, r, low, square)
    whole = f.add(cosine, tail)
    sine_low, whole_low = f.rest_of_sum(r, rest, sine), f.rest_of_sum(cosine, tail, whole)
    odd = _is_odd(f, quadrant)
    top, top_low = f.select(odd, whole, sine), f.select(odd, whole_low, sine_low)
    bottom, bottom_low = f.select(odd, sine, whole), f.select(odd, sine_low, whole_low)
    inverse = f.div(1.0, bottom)
    y = f.mul(top, inverse)
    lacking = f.sub(f.sub(top_low, f.rest_of_product(y, bottom, top)), f.mul(y, bottom_low))
    y = f.fma(lacking, inverse, y)
    y = f.select(odd, f.negative(y), y)
    return f.select(f.test("oeq", x, 0.0), x, y)


def _arctangent(f: Floats, t: str, polynomial: tuple[float, ...]) -> str:
    """atan(t) / t - 1 for t from 0 to 1."""
    square = f.mul(t, t)
    return f.mul(f.polynomial(square, *polynomial), square)


def atan(b: Builder, x: str) -> str:
    f = Floats(b, "double")
    a = f.abs(x)
    steep = f.test("ogt", a, 1.0)
    t = f.select(steep, f.div(1.0, a), a)
    bend = _arctangent(f, t, table.ATAN)
    difference = f.sub(HALF_PI, t)
    lost = f.rest_of_sum(HALF_PI, f.negative(t), difference)
    far = f.add(difference, f.sub(lost, f.fma(bend, t, -HALF_PI_LOW)))
    return f.copysign(f.select(steep, far, f.fma(bend, t, t)), x)


def atan2(b: Builder, y: str, x: str) -> str:
    return _atan2(b, y, x, table.ATAN)


def _atan2(b: Builder, y: str, x: str, polynomial: tuple[float, ...]) -> str:
    f = Floats(b, "double")
    wide, high = f.abs(x), f.abs(y)
    steep = f.test("ogt", high, wide)
    top, bottom = f.select(steep, wide, high), f.select(steep, high, wide)
    t = f.div(top, bottom)
    # The ratio of two infinities counts as 1, that of two zeros as 0.
    t = f.select(f.test("oeq", top, INFINITY), 1.0, t)
    t = f.select(f.test("oeq", bottom, 0.0), 0.0, t)
    t = f.select(f.test("uno", x, y), math.nan, t)
    bend = _arctangent(f, t, polynomial)
    # The angle is base + turn * (t + bend * t).
    left = f.test("olt", f.copysign(1.0, x), 0.0)
    base = f.select(steep, HALF_PI, f.select(left, math.pi, 0.0))
    low = f.select(steep, HALF_PI_LOW, f.select(left, PI_LOW, 0.0))
    turn = f.select(steep, f.select(left, 1.0, -1.0), f.select(left, -1.0, 1.0))
    turned = f.mul(turn, t)
    return f.copysign(f.add(base, f.add(turned, f.fma(bend, turned, low))), y)


def _half_angle(f: Floats, x: str, polynomial: tuple[float, ...]) -> tuple[str, str, str, str]:
    """(where abs(x) > 1/2, abs(x), s, asin(s) / s - 1), with asin(abs(x)) = pi / 2 - 2 asin(s) there."""
    a = f.abs(x)
    far = f.test("ogt", a, 0.5)
    half = f.fma(a, -0.5, 0.5)
    square = f.select(far, half, f.mul(a, a))
    s = f.select(far, f.sqrt(half), a)
    return far, a, s, f.mul(f.polynomial(square, *polynomial), square)


def asin(b: Builder, x: str) -> str:
    return _asin(Floats(b, "double"), x, table.ASIN, HALF_PI, HALF_PI_LOW)


def acos(b: Builder, x: str) -> str:
    return _acos(Floats(b, "double"), x, table.ASIN, HALF_PI, HALF_PI_LOW)


def _asin(f: Floats, x: str, polynomial: tuple[float, ...], right: float, low: float) -> str:
    far, a, s, bend = _half_angle(f, x, polynomial)
    twice = f.add(s, s)
    difference = f.sub(right, twice)
    lost = f.rest_of_sum(right, f.negative(twice), difference)
    beyond = f.add(difference, f.sub(lost, f.fma(bend, twice, -low)))
    y = f.copysign(f.select(far, beyond, f.fma(bend, s, s)), x)
    return f.select(f.test("oeq", a, 0.0), x, y)


def _acos(f: Floats, x: str, polynomial: tuple[float, ...], right: float, low: float) -> str:
    far, _, s, bend = _half_angle(f, x, polynomial)
    signed = f.copysign(s, x)
    near = f.sub(right, f.add(signed, f.fma(bend, signed, -low)))
    twice = f.add(s, s)
    beyond = f.fma(bend, twice, twice)
    left = f.sub(2 * right, f.sub(beyond, 2 * low))
    return f.select(far, f.select(f.test("olt", x, 0.0), left, beyond), near)


# --- float ----------------------------------------------------------------------------------------


def sin_float(b: Builder, x: str) -> str:
    f = Floats(b)
    return f.select(f.test("oeq", x, 0.0), x, _shifted_float_sine(f, x, 0))


def cos_float(b: Builder, x: str) -> str:
    return _shifted_float_sine(Floats(b), x, 1)


def _shifted_float_sine(f: Floats, x: str, quarters: int) -> str:
    """The sine of x + quarters * pi / 2, with S. Moshier's coefficients (Cephes)."""
    sum_ = f.fma(x, 2 / math.pi, FLOAT_ROUNDER)
    n = f.sub(sum_, FLOAT_ROUNDER)
    first, second, third = FLOAT_HALF_PI
    t = f.fma(n, -first, x)  # exact
    w = f.mul(n, second)  # exact
    r = f.sub(t, w)
    back = f.sub(t, r)  # the rest of a difference of numbers of any order
    low = f.sub(f.sub(t, f.add(r, back)), f.sub(w, back))
    r, low = f.renewed(r, f.fma(n, -third, low))
    large = f.test("uge", f.abs(x), FLOAT_LARGEST_REDUCED)
    r, low, sum_ = f.where_any(large, (r, low, sum_), lambda: _reduced_in_double(f, x))
    r2 = f.mul(r, r)
    sine = f.polynomial(
        r2, 2.718311493989822e-6, -1.983931e-4, 8.33332938588946e-3, -1.66666666416265e-1
    )
    sine = f.add(r, f.fma(f.mul(sine, r2), r, low))
    cosine = f.polynomial(r2, 2.44331571e-5, -1.38873162e-3, 4.16666456e-2, -0.5)
    cosine = f.fma(cosine, r2, 1.0)
    return f.of_quadrant(f.integer("add", f.bits(sum_), quarters), sine, cosine)


def _reduced_in_double(f: Floats, x: str) -> tuple[str, str, str]:
    b, d = f.builder, Floats(f.builder, "double")
    wide, wide_low, quadrant = math_angle.reduced(d, b.convert("fpext", "float", x, "double"), True)
    r = b.convert("fptrunc", "double", wide, "float")
    low = d.add(d.sub(wide, b.convert("fpext", "float", r, "double")), wide_low)
    turns = b.convert("trunc", "i64", d.bits(quadrant), "i32")
    return r, b.convert("fptrunc", "double", low, "float"), f.from_bits(turns)


def asin_float(b: Builder, x: str) -> str:
    return _asin(Floats(b), x, table.ASIN_SHORT, FLOAT_HALF_PI[0], FLOAT_HALF_PI_LOW)


def acos_float(b: Builder, x: str) -> str:
    return _acos(Floats(b), x, table.ASIN_SHORT, FLOAT_HALF_PI[0], FLOAT_HALF_PI_LOW)


# --- floats that were widened: results that are rounded to float -------------------------------------


def tan_widened(b: Builder, x: str) -> str:
    f = Floats(b, "double")
    r, low, quadrant = math_angle.reduced(f, x, True)
    r = f.add(r, low)
    square = f.mul(r, r)
    sine = f.fma(f.mul(square, r), f.polynomial(square, *table.SINE_SHORT), r)
    cosine = f.polynomial(square, *table.COSINE_SHORT, -0.5, 1.0)
    odd = _is_odd(f, quadrant)
    y = f.div(f.select(odd, f.negative(cosine), sine), f.select(odd, sine, cosine))
    return f.select(f.test("oeq", x, 0.0), x, y)


def atan_widened(b: Builder, x: str) -> str:
    f = Floats(b, "double")
    a = f.abs(x)
    steep = f.test("ogt", a, 1.0)
    t = f.select(steep, f.div(-1.0, a), a)
    angle = f.fma(_arctangent(f, t, table.ATAN_SHORT), t, t)
    return f.copysign(f.select(steep, f.add(angle, HALF_PI), angle), x)


def atan2_widened(b: Builder, y: str, x: str) -> str:
    return _atan2(b, y, x, table.ATAN_SHORT)


FLOAT: dict[str, Callable[..., str]] = {
    "sin": sin_float, "cos": cos_float, "asin": asin_float, "acos": acos_float,
}  # fmt: skip
WIDENED: dict[str, Callable[..., str]] = {
    "tan": tan_widened, "atan": atan_widened, "atan2": atan2_widened,
}  # fmt: skip
DOUBLE: dict[str, Callable[..., str]] = {
    "sin": sin, "cos": cos, "tan": tan, "asin": asin, "acos": acos, "atan": atan, "atan2": atan2,
}  # fmt: skip
