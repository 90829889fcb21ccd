"""Polynomials of the functions of generated kernels: ltc/llvm/emit/math_coefficients.py.

    python scripts/code/math_coefficients.py            # how far each is from its function
    python scripts/code/math_coefficients.py --write    # writes the module

Each polynomial interpolates its function at Chebyshev points of the range, in arithmetic of 60 digits
(mpmath, which comes with PyTorch).  That is within a factor of three of the best polynomial of this
degree.  One with a weight has the least sum of weighted squares at such points instead.  The
coefficients are rounded to double.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mpmath import mp, mpf

DIGITS, SAMPLES, NODES = 60, 80, 120
MODULE = Path(__file__).parents[2] / "ltc" / "llvm" / "emit" / "math_coefficients.py"
HEAD = '''"""Coefficients of polynomials, the highest power first, in double.

`python scripts/code/math_coefficients.py --write` makes this module: each polynomial interpolates its
function at Chebyshev points, computed with 60 digits.  A name that ends in _SHORT is for results that
are rounded to float.
"""
'''


@dataclass(frozen=True)
class Polynomial:
    """A function and the range in which a polynomial is to stand for it.

    Attributes:
        meaning: The function, as the comment says it.
        count: Number of coefficients.
        weight: The factor of an error at each point, if not everywhere the same.
    """

    meaning: str
    function: Callable[[mpf], mpf]
    low: mpf
    high: mpf
    count: int
    weight: Callable[[mpf], mpf] | None = None

    def coefficients(self) -> list[mpf]:
        """The lowest power first."""
        return self._of_least_squares() if self.weight else self._interpolated()

    def _of_least_squares(self) -> list[mpf]:
        assert self.weight
        middle, half = (mpf(self.high) + self.low) / 2, (mpf(self.high) - self.low) / 2
        nodes = [middle + half * mp.cos(mp.pi * (2 * k + 1) / (2 * NODES)) for k in range(NODES)]
        weights = [self.weight(x) for x in nodes]
        rows = mp.matrix([[w * x**j for j in range(self.count)] for w, x in zip(weights, nodes)])
        values = mp.matrix([w * self.function(x) for w, x in zip(weights, nodes)])
        return list(mp.lu_solve(rows.T * rows, rows.T * values))

    def _interpolated(self) -> list[mpf]:
        """By Newton's divided differences."""
        middle, half = (mpf(self.high) + self.low) / 2, (mpf(self.high) - self.low) / 2
        count = self.count
        nodes = [middle + half * mp.cos(mp.pi * (2 * k + 1) / (2 * count)) for k in range(count)]
        values = [self.function(x) for x in nodes]
        for order in range(1, count):
            for i in range(count - 1, order - 1, -1):
                values[i] = (values[i] - values[i - 1]) / (nodes[i] - nodes[i - order])
        result: list[mpf] = []
        for value, node in zip(reversed(values), reversed(nodes)):  # result * (x - node) + value
            below = [value, *result]
            for i, coefficient in enumerate(result):
                below[i] -= node * coefficient
            result = below
        return result

    def error(self, coefficients: list[mpf]) -> mpf:
        """The greatest weighted distance from the function over samples, relative to its greatest
        value.
        """
        highest_first = [mpf(float(c)) for c in reversed(coefficients)]
        points = [
            self.low + (self.high - self.low) * (k + mpf(1) / 3) / SAMPLES for k in range(SAMPLES)
        ]
        exact = [self.function(x) for x in points]
        weights = [self.weight(x) if self.weight else mpf(1) for x in points]
        largest = max(abs(w * y) for w, y in zip(weights, exact))
        distances = [abs(mp.polyval(highest_first, x) - y) for x, y in zip(points, exact)]
        return max(w * distance for w, distance in zip(weights, distances)) / largest


def at_root(function: Callable[[mpf], mpf], limit: float) -> Callable[[mpf], mpf]:
    """The function of the square root; at 0 its limit."""
    return lambda t: function(mp.sqrt(t)) if t else mpf(limit)


def scaled_erfc(middle: int) -> Callable[[mpf], mpf]:
    def function(t: mpf) -> mpf:
        x = middle * (1 + t) / (1 - t)
        return (1 + 2 * x) * mp.exp(x * x) * mp.erfc(x)

    return function


def erfinv_of_log(w: mpf) -> mpf:
    """(erfinv(y) / y - sqrt(pi) / 2) / w for w = -log(1 - y * y)."""
    y = mp.sqrt(-mp.expm1(-w))
    return (_erfinv_beside_one(w) / y - mp.sqrt(mp.pi) / 2) / w


def _erfinv_beside_one(w: mpf) -> mpf:
    """By Newton's method, with digits enough for what 1 - y keeps."""
    with mp.workdps(DIGITS + 30):
        y = mp.sqrt(-mp.expm1(-w))
        left = mp.exp(-w) / (1 + y)  # 1 - y
        x = mp.sqrt(w) * mpf("0.88")
        for _ in range(60):
            step = (mp.erfc(x) - left) * mp.exp(x * x) * mp.sqrt(mp.pi) / 2
            x += step / (1 - x * step) if abs(x * step) < 0.5 else step
            if abs(step) < mpf(10) ** -(DIGITS + 5) * x:
                break
        return +x


def minus_log_erfc(x: mpf) -> mpf:
    with mp.workdps(DIGITS + 30):
        return -mp.log(mp.erfc(x))


def lgamma_between_roots(z: mpf) -> mpf:
    return mp.loggamma(2 + z) / ((1 + z) * z)


def polynomials() -> dict[str, Polynomial]:
    half_ln2 = mp.log(2) / 2 * mpf("1.0001")
    log_end = ((mp.sqrt(2) - 1) / (mp.sqrt(2) + 1)) ** 2 * mpf("1.001")
    eighth = (mp.pi / 4) ** 2 * mpf("1.001")

    def expm1_rest(r: mpf) -> mpf:
        return (mp.expm1(r) - r) / r**2

    def log_rest(s: mpf) -> mpf:
        return (mp.atanh(s) / s - 1) * 2 / s**2

    def log_third(s: mpf) -> mpf:
        return (log_rest(s) - mpf(2) / 3) / s**2

    def sine_rest(r: mpf) -> mpf:
        return (mp.sin(r) / r - 1) / r**2

    def cosine_rest(r: mpf) -> mpf:
        return (mp.cos(r) - 1 + r**2 / 2) / r**4

    def atan_rest(x: mpf) -> mpf:
        return (mp.atan(x) / x - 1) / x**2

    def asin_rest(x: mpf) -> mpf:
        return (mp.asin(x) / x - 1) / x**2

    def erfinv_of_root(s: mpf) -> mpf:
        return _erfinv_beside_one(s * s)

    def erf_rest(x: mpf) -> mpf:
        return mp.erf(x) / x - 1

    exp, log = "(exp(r) - 1 - r) / r**2", "(2 atanh(s) / s - 2) / s**2 in s**2"
    sine, cosine = "(sin(r) / r - 1) / r**2 in r**2", "(cos(r) - 1 + r**2 / 2) / r**4 in r**2"
    atan, asin = "(atan(x) / x - 1) / x**2 in x**2", "(asin(x) / x - 1) / x**2 in x**2"
    erfc = "(1 + 2 x) exp(x**2) erfc(x) in (x - {0}) / (x + {0}), up to {1}"
    inverse, beyond = (
        "(erfinv(y) / y - sqrt(pi) / 2) / w in w - {0}, w = -log(1 - y**2)",
        "erfinv(y) in sqrt(w) - {0}",
    )
    fourth = "(log(m) - 2 s - 2 s**3 / 3) / s**5 in s**2"

    def moved(function: Callable[[mpf], mpf], by: float) -> Callable[[mpf], mpf]:
        return lambda x: function(x + by)

    def ranged(meaning: str, function: Callable[[mpf], mpf], low: float, high: float, count: int):
        """In the distance from the middle of the range."""
        middle = (low + high) / 2
        ends = mpf(low) - middle, mpf(high) - middle
        return Polynomial(meaning.format(middle), moved(function, middle), *ends, count)

    return {
        "EXP": Polynomial(exp, expm1_rest, -half_ln2, half_ln2, 10),
        "EXP_SHORT": Polynomial(exp, expm1_rest, -half_ln2, half_ln2, 6),
        "LOG": Polynomial(log, at_root(log_rest, 2 / 3), 0, log_end, 7),
        "LOG_SHORT": Polynomial(log, at_root(log_rest, 2 / 3), 0, log_end, 4),
        "LOG_FROM_FIFTH": Polynomial(fourth, at_root(log_third, 0.4), 0, log_end, 8),
        "SINE": Polynomial(sine, at_root(sine_rest, -1 / 6), 0, eighth, 6),
        "SINE_SHORT": Polynomial(sine, at_root(sine_rest, -1 / 6), 0, eighth, 4),
        "COSINE": Polynomial(cosine, at_root(cosine_rest, 1 / 24), 0, eighth, 6),
        "COSINE_SHORT": Polynomial(cosine, at_root(cosine_rest, 1 / 24), 0, eighth, 4),
        "SINE_OF_PI": Polynomial(
            "sin(pi d) / d in d**2, up to 1/2", at_root(lambda d: mp.sin(mp.pi * d) / d, 3.14159),
            0, 0.25, 9,
        ),
        "ATAN": Polynomial(atan, at_root(atan_rest, -1 / 3), 0, 1, 22),
        "ATAN_SHORT": Polynomial(atan, at_root(atan_rest, -1 / 3), 0, 1, 11),
        "ASIN": Polynomial(asin, at_root(asin_rest, 1 / 6), 0, 0.25, 13),
        "ASIN_SHORT": Polynomial(asin, at_root(asin_rest, 1 / 6), 0, 0.25, 6),
        "ERF": Polynomial("erf(x) / x - 1 in x**2, up to 1", at_root(erf_rest, 0.1284), 0, 1, 12),
        "ERF_FAR": Polynomial(
            "-log(erfc(1 + u)), weighted by erfc, up to 5.95",
            moved(minus_log_erfc, 1), mpf("-0.01"), mpf("4.96"), 18, lambda u: mp.erfc(1 + u),
        ),
        "ERFC": Polynomial(erfc.format(4, 27.3), scaled_erfc(4), -1, mpf(233) / 313, 22),
        "ERFC_SHORT": Polynomial(erfc.format(3, 10.2), scaled_erfc(3), -1, mpf(72) / 132, 12),
        "ERFINV": ranged(inverse, erfinv_of_log, 0, 6.25, 24),
        "ERFINV_FAR": ranged(beyond, erfinv_of_root, 2.5, 6.1, 25),
        "ERFINV_SHORT": ranged(inverse, erfinv_of_log, 0, 6.25, 12),
        "ERFINV_FAR_SHORT": ranged(beyond, erfinv_of_root, 2.5, 6.1, 12),
        "LGAMMA": Polynomial(
            "log(gamma(2 + z)) / (z (1 + z)), from -1 to 1", lgamma_between_roots, -1, 1, 28
        ),
    }  # fmt: skip


def module_text() -> Iterator[tuple[str, str]]:
    """A line on each polynomial, and its part of the module."""
    mp.dps = DIGITS
    for name, one in polynomials().items():
        coefficients = one.coefficients()
        distance = float(mp.log(one.error(coefficients), 2))
        lines = "".join(f"    {float(c)!r},\n" for c in reversed(coefficients))
        yield (
            f"{name:20}{one.count:4} 2**{distance:.1f}",
            f"# {one.meaning}\n{name} = (\n{lines})\n",
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the module")
    arguments = parser.parse_args()
    parts = [HEAD]
    for line, part in module_text():
        print(line, flush=True)
        parts.append(part)
    if arguments.write:
        MODULE.write_text("\n".join(parts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
