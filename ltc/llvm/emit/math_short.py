"""Exponentials and logarithms in double that are exact to 32 bits: for results rounded to float."""

from __future__ import annotations

import math

from ltc.llvm.emit import math_coefficients as table
from ltc.llvm.emit.float_ops import INFINITY, Floats
from ltc.llvm.emit.math_double import log_parts, nearest_whole, power_of_two


def _exp_parts(f: Floats, x: str) -> tuple[str, str]:
    """exp(x) = (1 + p) * power for abs(x) < 700: (p, power)"""
    n, bits = nearest_whole(f, x, math.log2(math.e))
    r = f.fma(n, -math.log(2), x)
    p = f.fma(f.polynomial(r, *table.EXP_SHORT), f.mul(r, r), r)
    return p, power_of_two(f, bits)


def exp(f: Floats, x: str) -> str:
    p, power = _exp_parts(f, x)
    return f.fma(p, power, power)


def expm1(f: Floats, x: str) -> str:
    p, power = _exp_parts(f, x)
    return f.fma(p, power, f.sub(power, 1.0))


def log_of_finite(f: Floats, x: str) -> str:
    """The logarithm of a positive normal number; any result for other operands."""
    return _log_sum(f, *log_parts(f, x))


def log(f: Floats, x: str) -> str:
    """The logarithm of a positive normal number, infinity or NaN."""
    return _not_finite(f, x, log_of_finite(f, x))


def log1p(f: Floats, x: str) -> str:
    """log(1 + x) for x from 0 up to infinity, or NaN."""
    u = f.add(x, 1.0)
    e, z = log_parts(f, u)
    z = f.select(f.test("olt", u, math.sqrt(2)), x, z)  # there e is 0, and 1 + x may be rounded
    return _not_finite(f, x, _log_sum(f, e, z))


def _log_sum(f: Floats, e: str, z: str) -> str:
    s = f.div(z, f.add(z, 2.0))
    square = f.mul(s, s)
    return f.fma(e, math.log(2), f.mul(s, f.polynomial(square, *table.LOG_SHORT, 2.0)))


def _not_finite(f: Floats, x: str, y: str) -> str:
    return f.select(f.test("olt", x, INFINITY), y, x)
