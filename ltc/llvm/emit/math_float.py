"""Functions of real numbers on vectors of float and of double.

Those of float here are polynomials after range reduction, with NaN, infinities, zeros and denormal
numbers as IEEE 754 and C's Annex F want them.  Their greatest errors in units in the last place of
the exact result are, over all 2**32 inputs, exp and exp2 1.02, log 0.83, tanh 1.33, erf 1.03, sin
and cos 1.49, and over every 101st expm1 1.01 and log1p 1.4 (`python scripts/compare/math_ulp.py` measures
them).  Others are double functions rounded once, 0.51: those of math_double.py and the last ones here,
or, for rare ones, the C library's, lane by lane.
exp, log and the polynomial parts follow W. J. Cody and W. Waite, "Software Manual for the
Elementary Functions" (1980), with the minimax coefficients of S. Moshier's Cephes library (exp,
log, tanh, sin, cos); erf is N. Juffa's (public domain, 2016).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ltc.llvm.compiler import llvm_binding
from ltc.llvm.emit import math_double
from ltc.llvm.emit.builder import LANES, Builder
from ltc.llvm.emit.conversions import from_memory, to_memory
from ltc.llvm.emit.dtype import Form
from ltc.llvm.emit.float_ops import INFINITY, Floats

# Added to a float below 2**22 it leaves the nearest whole number in the low bits of the sum.
ROUNDER = 12582912.0  # 1.5 * 2**23
LN2_HIGH, LN2_LOW = 0.693145751953125, 1.428606765330187e-06  # the first has few bits
DOUBLE_ROUNDER = 6755399441055744.0  # 1.5 * 2**52
# Above it the reduction of sin and cos in double is no longer exact enough for float.
LARGEST_REDUCED = 2.0**28


def _exp_parts(f: Floats, x):
    """exp(x) = y * 2**n for |x| < 2**21: (y, n, the sum whose low bits are n)."""
    sum_ = f.fma(x, math.log2(math.e), ROUNDER)
    n = f.sub(sum_, ROUNDER)
    r = f.fma(n, -LN2_LOW, f.fma(n, -LN2_HIGH, x))
    return _exp_of_rest(f, r), n, sum_


def _exp_of_rest(f: Floats, r):
    """exp(r) for |r| < 0.35"""
    return f.add(f.fma(_exp_series(f, r), f.mul(r, r), r), 1.0)


def _exp_series(f: Floats, r):
    """(exp(r) - 1 - r) / r**2 for |r| < 0.35"""
    return f.polynomial(
        r, 1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
        5.0000001201e-1,
    )  # fmt: skip


def _scaled(f: Floats, y, sum_):
    """y * 2**n where that is a normal number."""
    exponent = f.integer("add", f.integer("shl", f.bits(sum_), 23), 0x3F800000)
    return f.mul(y, f.from_bits(exponent))


def exp(b: Builder, x: str) -> str:
    f = Floats(b)
    y, n, sum_ = _exp_parts(f, f.at_least(f.at_most(x, 150.0), -150.0))
    return _times_power(f, y, n, sum_)


def exp2(b: Builder, x: str) -> str:
    f = Floats(b)
    near = f.at_least(f.at_most(x, 200.0), -200.0)
    sum_ = f.add(near, ROUNDER)
    n = f.sub(sum_, ROUNDER)
    y = _exp_of_rest(f, f.mul(f.sub(near, n), math.log(2)))
    return _times_power(f, y, n, sum_)


def _times_power(f: Floats, y, n, sum_):
    """y * 2**n for any n up to 254 either way: infinite, denormal or zero where that is so."""
    b = f.builder
    if b.width % LANES == 0 and llvm_binding.has_feature("avx512f"):
        return b.by_parts(_scalef, LANES, "float", y, n)
    whole = f.integer("sub", f.bits(sum_), 0x4B400000)
    half = f.integer("ashr", whole, 1)
    for part in (half, f.integer("sub", whole, half)):  # 2**n itself may be no normal number
        y = f.mul(y, f.from_bits(f.integer("shl", f.integer("add", part, 127), 23)))
    return y


def _scalef(b: Builder, y: str, n: str) -> str:
    type = b.of("float")
    return b.pure_call(
        "llvm.x86.avx512.mask.scalef.ps.512", type,
        (type, y), (type, n), (type, y), ("i16", "-1"), ("i32", "4"),
    )  # fmt: skip


def expm1(b: Builder, x: str) -> str:
    """The rounding of the reduced argument and of the series is carried to the last addition."""
    f = Floats(b)
    near = f.at_least(f.at_most(x, 89.0), -20.0)
    sum_ = f.fma(near, math.log2(math.e), ROUNDER)
    n = f.sub(sum_, ROUNDER)
    high = f.fma(n, -LN2_HIGH, near)  # exact
    lost = f.mul(n, LN2_LOW)
    r = f.sub(high, lost)
    rest = f.fma(_exp_series(f, r), f.mul(r, r), f.sub(f.sub(high, r), lost))
    p = f.add(r, rest)
    p_low = f.add(f.sub(r, p), rest)
    exponent = f.integer("add", f.integer("shl", f.bits(sum_), 23), 0x3F000000)
    half = f.from_bits(exponent)  # of 2**n: 2**128 is no number
    base = f.sub(half, 0.5)
    y = f.fma(p, half, base)
    y = f.mul(f.add(y, f.fma(p_low, half, f.fma(p, half, f.sub(base, y)))), 2.0)
    return f.select(f.test("olt", f.abs(x), 2.0**-25), x, y)


def log(b: Builder, x: str) -> str:
    f = Floats(b)
    tiny = f.test("olt", x, 1.1754943508222875e-38)
    e, m = _log_parts(f, f.select(tiny, f.mul(x, 8388608.0), x))
    e = b.convert("sitofp", "i32", e, "float")
    e = f.select(tiny, f.sub(e, 23.0), e)
    return math_double.log_limits(f, x, _log_sum(f, e, f.sub(m, 1.0)), 0.0)


def log1p(b: Builder, x: str) -> str:
    """log(u) for u = 1 + x; what is lost in u is added to what is left of it near 1."""
    f = Floats(b)
    u = f.add(x, 1.0)
    lost = f.select(f.test("ogt", x, 1.0), f.sub(1.0, f.sub(u, x)), f.sub(x, f.sub(u, 1.0)))
    e, m = _log_parts(f, u)
    # 2**-e; where that is no normal number, all that is lost is nothing.
    one = b.constant("i32", 0x3F800000)
    scale = f.from_bits(f.integer("sub", one, f.integer("shl", e, 23)))
    scale = f.select(f.test("ogt", x, 2.0**64), 0.0, scale)
    z = f.fma(lost, scale, f.sub(m, 1.0))
    y = _log_sum(f, b.convert("sitofp", "i32", e, "float"), z)
    return f.select(f.test("oeq", x, 0.0), x, math_double.log_limits(f, x, y, -1.0))


def _log_parts(f: Floats, x: str) -> tuple[str, str]:
    """x = m * 2**e with m from sqrt(1/2) to sqrt(2), for normal x: (e as i32, m)"""
    bits = f.bits(x)
    e = f.integer("ashr", f.integer("sub", bits, 0x3F3504F3), 23)
    return e, f.from_bits(f.integer("sub", bits, f.integer("shl", e, 23)))


def _log_sum(f: Floats, e: str, z: str) -> str:
    """log((1 + z) * 2**e) for a whole e."""
    z2 = f.mul(z, z)
    p = f.polynomial(
        z, 7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
        -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
    )  # fmt: skip
    y = f.mul(f.mul(p, z), z2)
    y = f.fma(e, -2.12194440e-4, y)
    y = f.add(z, f.fma(z2, -0.5, y))
    return f.fma(e, 0.693359375, y)


def tanh(b: Builder, x: str) -> str:
    f = Floats(b)
    a, x2 = f.abs(x), f.mul(x, x)
    p = f.polynomial(
        x2, -5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1,
        -3.33332819422e-1,
    )  # fmt: skip
    small = f.fma(f.mul(p, x2), x, x)
    y, _, sum_ = _exp_parts(f, f.mul(f.at_most(a, 10.0), 2.0))
    big = f.sub(1.0, f.div(2.0, f.add(_scaled(f, y, sum_), 1.0)))
    y = f.select(f.test("ogt", a, 0.625), f.copysign(big, x), small)
    return f.select(f.test("oeq", x, 0.0), x, y)  # the sum above would lose the sign of -0


def erf(b: Builder, x: str) -> str:
    f = Floats(b)
    t, x2 = f.at_most(f.abs(x), 4.0), f.mul(x, x)
    t2 = f.mul(t, t)
    r = f.fma(-1.72853470e-5, t, 3.83197126e-4)
    u = f.fma(-3.88396438e-3, t, 2.42546219e-2)
    r = f.fma(r, t2, u)
    for coefficient in (-1.06777877e-1, -6.34846687e-1, -1.28717512e-1):
        r = f.fma(r, t, coefficient)
    y, _, sum_ = _exp_parts(f, f.fma(r, t, b.value(f"fneg {b.of('float')} {t}")))
    big = f.copysign(f.sub(1.0, _scaled(f, y, sum_)), x)
    w = f.polynomial(
        x2, -5.96761703e-4, 4.99119423e-3, -2.67681349e-2, 1.12819925e-1, -3.76125336e-1,
        1.28379166e-1,
    )  # fmt: skip
    y = f.select(f.test("ogt", t, 0.927734375), big, f.fma(w, x, x))
    return f.select(f.test("oeq", x, 0.0), x, y)


def sin(b: Builder, x: str) -> str:
    return _sine(b, x, 0, "sin")


def cos(b: Builder, x: str) -> str:
    return _sine(b, x, 1, "cos")


def _sine(b: Builder, x: str, quarters: int, name: str) -> str:
    """The sine of x + quarters * pi / 2."""
    f, d = Floats(b), Floats(b, "double")
    wide = b.convert("fpext", "float", x, "double")
    sum_ = d.fma(wide, 2 / math.pi, DOUBLE_ROUNDER)
    n = d.sub(sum_, DOUBLE_ROUNDER)
    r = d.fma(n, -1.5707963267948966, wide)  # pi / 2 in two parts
    r = d.fma(n, -6.123233995736766e-17, r)
    quadrant = b.convert("trunc", "i64", b.convert("bitcast", "double", sum_, "i64"), "i32")
    if quarters:
        quadrant = f.integer("add", quadrant, quarters)
    r = b.convert("fptrunc", "double", r, "float")
    r2 = f.mul(r, r)
    sine = f.polynomial(
        r2, 2.718311493989822e-6, -1.983931e-4, 8.33332938588946e-3, -1.66666666416265e-1
    )
    sine = f.fma(f.mul(sine, r2), r, r)
    cosine = f.polynomial(r2, 2.44331571e-5, -1.38873162e-3, 4.16666456e-2, -0.5)
    cosine = f.fma(cosine, r2, 1.0)
    y = f.of_quadrant(quadrant, sine, cosine)
    if not quarters:
        y = f.select(f.test("oeq", x, 0.0), x, y)
    large = f.test("uge", f.abs(x), LARGEST_REDUCED)
    return f.where_any(large, y, lambda: through_double(b, name, x))


def through_double(b: Builder, name: str, *operands: str) -> str:
    """A function of floats computed in double, rounded once."""
    wide = [b.convert("fpext", "float", x, "double") for x in operands]
    own = FUNCTIONS.get(name)
    y = own(b, *wide) if own else call(b, name, "double", *wide)
    return b.convert("fptrunc", "double", y, "float")


OWN = {
    "exp": exp, "exp2": exp2, "expm1": expm1, "log": log, "log1p": log1p, "tanh": tanh, "erf": erf,
    "sin": sin, "cos": cos,
}  # fmt: skip


def call(b: Builder, name: str, scalar: str, *operands: str) -> str:
    """The function of that name, as the C library calls it, on float or double."""
    own = OWN if scalar == "float" else math_double.FUNCTIONS
    if name in own:
        return own[name](b, *operands)
    if scalar == "float":
        return through_double(b, name, *operands)
    return b.each_lane(name, "double", *operands)


# --- Functions of float by way of double: formulas whose error only double can afford to lose ----

# Their operands are floats that were widened, their results are rounded to float, which leaves an
# error of 0.51 units in the last place. As functions of double they would be off by more than
# that.

_EIGHTH = math.tan(math.pi / 8)


def _odd(f: Floats, x: str, y: str) -> str:
    """y with the sign of x, and x itself where it is so small that it is its own function."""
    return f.select(f.test("olt", f.abs(x), 2.0**-30), x, f.copysign(y, x))


def sinh(b: Builder, x: str) -> str:
    f = Floats(b, "double")
    t = math_double.expm1(b, f.at_most(f.abs(x), 200.0))
    return _odd(f, x, f.mul(f.add(t, f.div(t, f.add(t, 1.0))), 0.5))


def cosh(b: Builder, x: str) -> str:
    f = Floats(b, "double")
    t = math_double.exp(b, f.at_most(f.abs(x), 200.0))
    return f.mul(f.add(t, f.div(1.0, t)), 0.5)


def tan(b: Builder, x: str) -> str:
    f = Floats(b, "double")
    y = f.div(math_double.sin(b, x), math_double.cos(b, x))
    return f.select(f.test("oeq", x, 0.0), x, y)


def asinh(b: Builder, x: str) -> str:
    f = Floats(b, "double")
    a = f.abs(x)
    square = f.mul(a, a)
    root = f.add(b.intrinsic("sqrt", "double", f.add(square, 1.0)), 1.0)
    y = math_double.log1p(b, f.add(a, f.div(square, root)))
    return _odd(f, x, f.select(f.test("oeq", a, INFINITY), a, y))


def acosh(b: Builder, x: str) -> str:
    f = Floats(b, "double")
    root = b.intrinsic("sqrt", "double", f.fma(x, x, -1.0))
    return f.select(f.test("olt", x, 1.0), math.nan, math_double.log(b, f.add(x, root)))


def atanh(b: Builder, x: str) -> str:
    f = Floats(b, "double")
    a = f.abs(x)
    y = f.mul(math_double.log1p(b, f.div(f.mul(a, 2.0), f.sub(1.0, a))), 0.5)
    return _odd(f, x, f.select(f.test("ogt", a, 1.0), math.nan, y))


def atan(b: Builder, x: str) -> str:
    f = Floats(b, "double")
    a = f.abs(x)
    steep, middle = f.test("ogt", a, 1 / _EIGHTH), f.test("ogt", a, _EIGHTH)
    top = f.select(steep, -1.0, f.select(middle, f.sub(a, 1.0), a))
    bottom = f.select(steep, a, f.select(middle, f.add(a, 1.0), 1.0))
    angle = f.select(steep, math.pi / 2, f.select(middle, math.pi / 4, 0.0))
    t = f.div(top, bottom)
    t2 = f.mul(t, t)
    series = f.polynomial(t2, *[(-1) ** k / (2 * k + 1) for k in range(16, 0, -1)])
    return _odd(f, x, f.add(angle, f.fma(f.mul(series, t2), t, t)))


def asin(b: Builder, x: str) -> str:
    f = Floats(b, "double")
    rest = f.mul(f.sub(1.0, x), f.add(x, 1.0))
    return atan(b, f.div(x, b.intrinsic("sqrt", "double", rest)))


def acos(b: Builder, x: str) -> str:
    f = Floats(b, "double")
    ratio = f.div(f.sub(1.0, x), f.add(x, 1.0))
    return f.mul(atan(b, b.intrinsic("sqrt", "double", ratio)), 2.0)


def atan2(b: Builder, y: str, x: str) -> str:
    f = Floats(b, "double")
    wide, high = f.abs(x), f.abs(y)
    # The ratio of two infinities counts as 1, that of two zeros as 0.
    far = f.select(f.test("oeq", wide, INFINITY), 1.0, INFINITY)
    ratio = f.select(f.test("oeq", high, INFINITY), far, f.div(high, wide))
    ratio = f.select(f.test("oeq", high, 0.0), 0.0, ratio)
    angle = atan(b, f.select(f.test("uno", x, y), math.nan, ratio))
    left = f.test("olt", f.copysign(1.0, x), 0.0)
    return f.copysign(f.select(left, f.sub(math.pi, angle), angle), y)


def hypot(b: Builder, x: str, y: str) -> str:
    f = Floats(b, "double")
    length = b.intrinsic("sqrt", "double", f.fma(x, x, f.mul(y, y)))
    for side in (f.abs(x), f.abs(y)):  # also beside NaN
        length = f.select(f.test("oeq", side, INFINITY), INFINITY, length)
    return length


def power(b: Builder, x: str, y: str) -> str:
    f = Floats(b, "double")
    a = f.abs(x)
    result = math_double.exp(b, f.mul(y, math_double.log(b, a)))
    whole = f.test("oeq", b.intrinsic("trunc", "double", y), y)
    half = f.mul(y, 0.5)
    uneven = f.test("une", b.intrinsic("trunc", "double", half), half)
    flips = f.select(uneven, f.copysign(1.0, x), 1.0)
    result = f.select(whole, f.mul(result, flips), result)
    below = f.select(whole, result, math.nan)
    below = f.select(f.test("oeq", a, INFINITY), result, below)
    result = f.select(f.test("olt", x, 0.0), below, result)
    one = f.select(f.test("oeq", f.abs(y), INFINITY), 1.0, result)
    result = f.select(f.test("oeq", a, 1.0), f.select(f.test("oeq", x, 1.0), 1.0, one), result)
    return f.select(f.test("oeq", y, 0.0), 1.0, result)


FUNCTIONS: dict[str, Callable[..., str]] = {
    "sinh": sinh, "cosh": cosh, "tan": tan, "asinh": asinh, "acosh": acosh, "atanh": atanh,
    "atan": atan, "asin": asin, "acos": acos, "atan2": atan2, "hypot": hypot, "pow": power,
}  # fmt: skip


# --- Rare functions, computed in double -------------------------------------------------------

# Within 1 unit in the last place of float, and some 1e-14 of the result in double.


def _in_double(function):
    """A row that computes with vectors of double."""

    def row(b: Builder, form: Form, x: str) -> str:
        if form.computed == "double":
            return function(b, Floats(b, "double"), x)
        y = function(b, Floats(b, "double"), b.convert("fpext", form.computed, x, "double"))
        return b.convert("fptrunc", "double", y, form.computed)

    return row


FIRST_OF_SERIES = 10  # from there on eight terms of the series are exact to 1e-16


def _digamma(b: Builder, d: Floats, x: str) -> str:
    """The derivative of log(gamma(x)): reflection, recurrence, then Stirling's series."""
    negative = d.test("olt", x, 0.0)
    whole = b.intrinsic("trunc", "double", x)
    fraction = d.sub(x, whole)
    z = d.select(negative, d.sub(1.0, x), x)
    total = "zeroinitializer" if b.width > 1 else b.constant("double", 0.0)
    for _ in range(FIRST_OF_SERIES):
        small = d.test("olt", z, float(FIRST_OF_SERIES))
        total = d.select(small, d.sub(total, d.div(1.0, z)), total)
        z = d.select(small, d.add(z, 1.0), z)
    inverse = d.div(1.0, z)
    square = d.mul(inverse, inverse)
    # B(2n) / 2n, the last term first.
    series = d.polynomial(
        square, b.constant("double", 1 / 12), -691 / 32760, 1 / 132, -1 / 240, 1 / 252, -1 / 120,
        1 / 12,
    )  # fmt: skip
    result = d.sub(call(b, "log", "double", z), d.mul(0.5, inverse))
    result = d.add(d.sub(result, d.mul(square, series)), total)
    reflected = d.div(math.pi, call(b, "tan", "double", d.mul(math.pi, fraction)))
    result = d.select(negative, d.sub(result, reflected), result)
    pole = b.binary("and", "i1", negative, d.test("oeq", fraction, 0.0))
    result = d.select(pole, math.nan, result)
    at_zero = d.copysign(b.constant("double", math.inf), b.value(f"fneg {b.of('double')} {x}"))
    return d.select(d.test("oeq", x, 0.0), at_zero, result)


def _erfinv(b: Builder, d: Floats, y: str) -> str:
    """M. Giles, "Approximating the erfinv function" (2010), then Halley's method on erf or erfc."""
    size = d.abs(y)
    rest = d.sub(1.0, size)  # exact where it is used
    w = call(b, "log", "double", d.mul(rest, d.add(1.0, size)))
    w = b.value(f"fneg {b.of('double')} {w}")
    near = d.polynomial(
        d.sub(w, 2.5), b.constant("double", 2.81022636e-08), 3.43273939e-07, -3.5233877e-06,
        -4.39150654e-06, 0.00021858087, -0.00125372503, -0.00417768164, 0.246640727, 1.50140941,
    )  # fmt: skip
    far = d.polynomial(
        d.sub(b.intrinsic("sqrt", "double", w), 3.0), b.constant("double", -0.000200214257),
        0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613,
        0.00943887047, 1.00167406, 2.83297682,
    )  # fmt: skip
    x = d.mul(d.select(d.test("olt", w, 5.0), near, far), size)
    for _ in range(3):
        below = d.sub(call(b, "erf", "double", x), size)
        above = d.sub(rest, call(b, "erfc", "double", x))
        error = d.select(d.test("olt", size, 0.5), below, above)
        slope = call(b, "exp", "double", d.mul(x, x))
        step = d.mul(d.mul(error, slope), math.sqrt(math.pi) / 2)
        x = d.sub(x, d.div(step, d.add(1.0, d.mul(x, step))))
    x = d.select(d.test("oeq", size, 1.0), math.inf, x)
    x = d.select(d.test("ugt", size, 1.0), math.nan, x)
    return d.select(d.test("oeq", size, 0.0), y, d.copysign(x, y))


digamma = _in_double(_digamma)
erfinv = _in_double(_erfinv)


def nextafter(b: Builder, form: Form, x: str, y: str) -> str:
    """The neighbour of x towards y, among the numbers of the dtype in memory."""
    type = form.computed
    word = f"i{8 * form.bytes}"

    def bits(value: str) -> str:
        stored = to_memory(b, form, value)
        return stored if form.stored == word else b.convert("bitcast", form.stored, stored, word)

    def number(value: str) -> str:
        stored = value if form.stored == word else b.convert("bitcast", word, value, form.stored)
        return from_memory(b, form, stored)

    zero, one = b.constant(type, 0.0), b.constant(word, 1)
    x_bits = bits(x)
    away = b.compare("ogt", type, y, x)  # from zero, where x is positive
    positive = b.compare("ogt", type, x, zero)
    grows = b.value(f"icmp eq {b.of('i1')} {away}, {positive}")
    up, down = b.binary("add", word, x_bits, one), b.binary("sub", word, x_bits, one)
    moved = number(b.select(grows, word, up, down))
    sign = b.binary("and", word, bits(y), b.constant(word, 1 << (8 * form.bytes - 1)))
    least = number(b.binary("or", word, sign, one))
    result = b.select(b.compare("oeq", type, x, zero), type, least, moved)
    result = b.select(b.compare("oeq", type, x, y), type, y, result)
    sum_ = b.binary("fadd", type, x, y)
    return b.select(b.compare("uno", type, x, y), type, sum_, result)
