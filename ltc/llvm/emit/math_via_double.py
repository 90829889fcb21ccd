"""Functions of float by way of double: formulas whose error only double can afford to lose.

Their operands are floats that were widened, their results are rounded to float, which leaves an
error of 0.51 units in the last place.  As functions of double they would be off by more than that.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ltc.llvm.emit import math_double
from ltc.llvm.emit.builder import Builder
from ltc.llvm.emit.float_ops import INFINITY, Floats

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
