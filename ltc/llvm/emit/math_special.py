"""Rare functions, computed in double whatever the dtype: digamma, the inverse of erf, nextafter.

Within 1 unit in the last place of float, and some 1e-14 of the result in double.
"""

from __future__ import annotations

import math

from ltc.llvm.emit.builder import Builder
from ltc.llvm.emit.conversions import from_memory, to_memory
from ltc.llvm.emit.dtype import Form
from ltc.llvm.emit.float_ops import Floats
from ltc.llvm.emit.math_float import call


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
