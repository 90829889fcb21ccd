"""Functions of real numbers on vectors of float and of double, by name.

Those of float here are polynomials after range reduction, with NaN, infinities, zeros and denormal
numbers as IEEE 754 and C's Annex F want them.  Their greatest errors in units in the last place of
the exact result are, over all 2**32 inputs, exp and exp2 1.02, log 0.83, tanh 1.33, erf 1.03, and over
every 257th log2 0.90, log10 0.82, expm1 1.01 and log1p 1.4 (`python scripts/compare/math_ulp.py` measures
them).  Where no other module has a function of float, that of double is rounded once: 0.51.
exp, log and the polynomial parts follow W. J. Cody and W. Waite, "Software Manual for the
Elementary Functions" (1980), with the minimax coefficients of S. Moshier's Cephes library (exp,
log, tanh, sin, cos); erf is N. Juffa's (public domain, 2016).  No function calls a library.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ltc.llvm.compiler import llvm_binding
from ltc.llvm.emit import (
    math_double,
    math_erf,
    math_gamma,
    math_hyperbolic,
    math_power,
    math_remainder,
    math_trigonometric,
)
from ltc.llvm.emit.builder import LANES, Builder
from ltc.llvm.emit.conversions import from_memory, to_memory
from ltc.llvm.emit.dtype import Form
from ltc.llvm.emit.float_ops import Floats

# Added to a float below 2**22 it leaves the nearest whole number in the low bits of the sum.
ROUNDER = 12582912.0  # 1.5 * 2**23
LN2_HIGH, LN2_LOW = 0.693145751953125, 1.428606765330187e-06  # the first has few bits


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
    e, z = _normal_parts(f, x)
    return math_double.log_limits(f, x, _log_sum(f, e, z), 0.0)


def _normal_parts(f: Floats, x: str) -> tuple[str, str]:
    """x = (1 + z) * 2**e for positive x: (e, z)"""
    tiny = f.test("olt", x, 1.1754943508222875e-38)
    e, m = _log_parts(f, f.select(tiny, f.mul(x, 8388608.0), x))
    e = f.builder.convert("sitofp", "i32", e, "float")
    return f.select(tiny, f.sub(e, 23.0), e), f.sub(m, 1.0)


def log2(b: Builder, x: str) -> str:
    return _log_of_base(b, x, (1.0, 0.0), (1.4426950216293335, 1.925963033500011e-08))


def log10(b: Builder, x: str) -> str:
    # The logarithm of 2 in two parts; the first has so few bits that its product with e is exact.
    per_e = (0.301025390625, 4.605039066518657e-06)
    return _log_of_base(b, x, per_e, (0.4342944920063019, -1.0103049952192578e-08))


def _log_of_base(
    b: Builder, x: str, per_e: tuple[float, float], inverse: tuple[float, float]
) -> str:
    """A logarithm by that of 2 and that of Euler's number, each in two parts."""
    f = Floats(b)
    e, z = _normal_parts(f, x)
    tail = _log_tail(f, z)
    y = f.mul(z, inverse[0])
    rest = f.fma(z, inverse[1], f.rest_of_product(z, inverse[0], y))
    whole = f.mul(e, per_e[0])
    sum_ = f.add(whole, y)
    rest = f.add(f.rest_of_sum(whole, y, sum_), f.fma(e, per_e[1], rest))
    result = f.add(sum_, f.fma(tail, inverse[0], rest))
    return math_double.log_limits(f, x, result, 0.0)


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


def _log_tail(f: Floats, z: str) -> str:
    """log(1 + z) - z"""
    return f.fma(f.mul(z, z), -0.5, _log_cubes(f, z))


def _log_cubes(f: Floats, z: str) -> str:
    """log(1 + z) - z + z**2 / 2"""
    p = f.polynomial(
        z, 7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1,
        -1.6668057665e-1, 2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1,
    )  # fmt: skip
    return f.mul(f.mul(p, z), f.mul(z, z))


def _log_sum(f: Floats, e: str, z: str) -> str:
    """log((1 + z) * 2**e) for a whole e."""
    y = f.fma(e, -2.12194440e-4, _log_cubes(f, z))
    y = f.add(z, f.fma(f.mul(z, z), -0.5, y))
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


FLOAT: dict[str, Callable[..., str]] = {
    **math_trigonometric.FLOAT, "exp": exp, "exp2": exp2, "expm1": expm1, "log": log,
    "log1p": log1p, "log2": log2, "log10": log10, "tanh": tanh, "erf": erf,
}  # fmt: skip
WIDENED: dict[str, Callable[..., str]] = {
    **math_hyperbolic.WIDENED, **math_trigonometric.WIDENED, "erfc": math_erf.erfc_widened,
    "erfinv": math_erf.erfinv_widened, "hypot": math_power.hypot_widened,
    "pow": math_power.power_widened,
}  # fmt: skip
DOUBLE: dict[str, Callable[..., str]] = {
    **math_double.DOUBLE, **math_hyperbolic.DOUBLE, **math_trigonometric.DOUBLE,
    "erf": math_erf.erf, "erfc": math_erf.erfc, "erfinv": math_erf.erfinv,
    "lgamma": math_gamma.lgamma, "digamma": math_gamma.digamma, "pow": math_power.power,
    "hypot": math_power.hypot, "fmod": math_remainder.fmod,
}  # fmt: skip


def call(b: Builder, name: str, scalar: str, *operands: str) -> str:
    """The function of that name on float or double."""
    if scalar == "double":
        return DOUBLE[name](b, *operands)
    if name in FLOAT:
        return FLOAT[name](b, *operands)
    wide = [b.convert("fpext", "float", x, "double") for x in operands]
    own = WIDENED[name] if name in WIDENED else DOUBLE[name]
    return b.convert("fptrunc", "double", own(b, *wide), "float")


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
