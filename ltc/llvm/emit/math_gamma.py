"""log(gamma(x)) and its derivative on vectors of double: recurrence, Stirling's series, reflection.

M. Abramowitz and I. Stegun, "Handbook of Mathematical Functions" (1964), 6.1 and 6.3.  Between 1 and 3
log(gamma(x)) is (x - 1) (x - 2) times a polynomial, so that it is exact beside its roots.  Greatest
error over samples: of lgamma above 0 1.7 units in the last place; below 0, and of digamma, some units
in the last place of the largest term.
"""

from __future__ import annotations

import math

from ltc.llvm.emit import math_coefficients as table
from ltc.llvm.emit import math_double
from ltc.llvm.emit.builder import Builder
from ltc.llvm.emit.float_ops import INFINITY, Floats
from ltc.llvm.emit.math_trigonometric import sine_and_cosine

PI_LOW = 1.2246467991473532e-16
FIRST_OF_STIRLING, FIRST_OF_SERIES = 8, 10
# B(2n) / (2n (2n - 1)) and B(2n) / 2n, the last first; B are Bernoulli's numbers.
STIRLING = (
    -3617 / 122400, 1 / 156, -691 / 360360, 1 / 1188, -1 / 1680, 1 / 1260, -1 / 360, 1 / 12,
)  # fmt: skip
SERIES = (1 / 12, -691 / 32760, 1 / 132, -1 / 240, 1 / 252, -1 / 120, 1 / 12)
INFINITE_FROM = 2.0**52  # below its negative there are but poles
TINY = 2.0**-60  # up to it log(gamma(x)) is -log(abs(x))


# --- log(gamma(x)) ----------------------------------------------------------------------------------


def lgamma(b: Builder, x: str) -> str:
    f = Floats(b, "double")
    a = f.abs(x)
    y = _lgamma_positive(f, a)
    left = b.binary("and", "i1", f.test("olt", x, -TINY), f.test("olt", a, INFINITE_FROM))
    (y,) = f.where_any(left, (y,), lambda: (f.sub(_log_of_reflection(f, a), y),))
    y = f.select(f.test("oeq", a, 0.0), INFINITY, y)
    y = f.select(f.test("ole", x, -INFINITE_FROM), INFINITY, y)
    y = f.select(f.test("oeq", x, INFINITY), INFINITY, y)
    return f.select(f.test("uno", x, x), x, y)


def _lgamma_positive(f: Floats, a: str) -> str:
    below, large = f.test("olt", a, 1.0), f.test("oge", a, float(FIRST_OF_STIRLING))
    z, product = a, f.constant(1.0)
    for _ in range(3, FIRST_OF_STIRLING):  # z becomes 2 to 3, gamma(a) = product * gamma(z)
        above = f.test("oge", z, 3.0)
        z = f.select(above, f.sub(z, 1.0), z)
        product = f.select(above, f.mul(product, z), product)
    argument = f.select(large, a, f.select(below, a, product))
    logarithm, rest = math_double.log_and_rest(f, argument)
    # From below 1 it is log(gamma(a + 1)) - log(a).
    t, u = f.select(below, f.sub(a, 1.0), f.sub(z, 2.0)), f.select(below, a, f.sub(z, 1.0))
    factor, roots = f.polynomial_in_halves(t, *table.LGAMMA), f.mul(t, u)
    between = f.fma(factor, roots, f.mul(factor, f.rest_of_product(t, u, roots)))
    small = f.select(
        below, f.sub(f.sub(between, rest), logarithm), f.add(f.add(between, rest), logarithm)
    )
    return f.select(large, _stirling(f, a, logarithm, rest), small)


def _stirling(f: Floats, a: str, logarithm: str, rest: str) -> str:
    """(a - 1/2) (log(a) - 1) + log(2 pi) / 2 - 1/2 + 1 / (12 a) - ..."""
    inverse = f.div(1.0, a)
    series = f.mul(f.polynomial(f.mul(inverse, inverse), *STIRLING), inverse)
    half = f.sub(a, 0.5)
    factor = f.sub(logarithm, 1.0)
    factor_low = f.add(f.rest_of_sum(logarithm, -1.0, factor), rest)
    y = f.mul(half, factor)
    low = f.fma(half, factor_low, f.rest_of_product(half, factor, y))
    sum_ = f.add(y, f.add(f.add(low, series), math.log(2 * math.pi) / 2 - 0.5))
    return f.select(f.test("oeq", y, INFINITY), INFINITY, sum_)


def _sine_and_cosine_of_pi(f: Floats, a: str) -> tuple[str, str, str]:
    """The distance of a from the nearest whole number, the sine and the cosine of pi times it."""
    distance = f.sub(a, f.round(a))  # exact
    size = f.abs(distance)
    steep = f.test("ogt", size, 0.25)
    near = f.select(steep, f.sub(0.5, size), size)
    r = f.mul(near, math.pi)
    low = f.fma(near, PI_LOW, f.rest_of_product(near, math.pi, r))
    sine, cosine = sine_and_cosine(f, r, low)
    return (
        distance,
        f.copysign(f.select(steep, cosine, sine), distance),
        f.select(steep, sine, cosine),
    )


def _log_of_reflection(f: Floats, a: str) -> str:
    """log(pi / (a abs(sin(pi a)))), infinite at whole numbers."""
    distance = f.abs(f.sub(a, f.round(a)))  # exact
    sine = f.mul(f.polynomial(f.mul(distance, distance), *table.SINE_OF_PI), distance)
    return math_double.log(f.builder, f.div(math.pi, f.mul(a, sine)))


# --- its derivative ---------------------------------------------------------------------------------


def digamma(b: Builder, x: str) -> str:
    f = Floats(b, "double")
    negative = f.test("olt", x, 0.0)
    z = f.select(negative, f.sub(1.0, x), x)
    small = f.test("olt", z, float(FIRST_OF_SERIES))
    z, total = f.where_any(small, (z, f.constant(0.0)), lambda: _raised(f, z))
    inverse = f.div(1.0, z)
    square = f.mul(inverse, inverse)
    logarithm, rest = math_double.log_and_rest(f, z)
    rest = f.fma(inverse, -0.5, f.sub(rest, f.mul(square, f.polynomial(square, *SERIES))))
    result = f.add(f.sub(logarithm, total), rest)
    result = f.select(f.test("olt", z, INFINITY), result, z)
    (result,) = f.where_any(negative, (result,), lambda: (f.add(result, _reflection(f, x)),))
    at_zero = f.copysign(INFINITY, f.negative(x))
    return f.select(f.test("oeq", x, 0.0), at_zero, result)


def _raised(f: Floats, z: str) -> tuple[str, str]:
    """z + k, which is 10 to 11, and 1 / z + ... + 1 / (z + k - 1), as one quotient."""
    top, bottom = f.constant(0.0), f.constant(1.0)
    for _ in range(FIRST_OF_SERIES):
        below = f.test("olt", z, float(FIRST_OF_SERIES))
        top = f.select(below, f.fma(top, z, bottom), top)
        bottom = f.select(below, f.mul(bottom, z), bottom)
        z = f.select(below, f.add(z, 1.0), z)
    return z, f.div(top, bottom)


def _reflection(f: Floats, x: str) -> str:
    """digamma(x) - digamma(1 - x) = -pi / tan(pi x); NaN at the poles."""
    distance, sine, cosine = _sine_and_cosine_of_pi(f, x)
    y = f.div(f.mul(cosine, -math.pi), sine)
    return f.select(f.test("oeq", distance, 0.0), math.nan, y)
