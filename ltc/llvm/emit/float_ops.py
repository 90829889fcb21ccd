"""Formulas on vectors of float or double, written as calls instead of instructions."""

from __future__ import annotations

import math
from collections.abc import Callable

from ltc.llvm.emit.builder import Builder

INFINITY = math.inf
_INTEGER = {"float": "i32", "double": "i64"}


class Floats:
    """Arithmetic on vectors of float or double, operands being names or Python numbers."""

    def __init__(self, builder: Builder, scalar: str = "float"):
        self.b, self.scalar, self.whole = builder, scalar, _INTEGER[scalar]

    def _text(self, x) -> str:
        return x if isinstance(x, str) else self.b.constant(self.scalar, x)

    def number(self, value: float) -> str:
        """The operand that a Python number is."""
        return self._text(value)

    def add(self, x, y):
        return self.b.binary("fadd", self.scalar, self._text(x), self._text(y))

    def sub(self, x, y):
        return self.b.binary("fsub", self.scalar, self._text(x), self._text(y))

    def mul(self, x, y):
        return self.b.binary("fmul", self.scalar, self._text(x), self._text(y))

    def div(self, x, y):
        return self.b.binary("fdiv", self.scalar, self._text(x), self._text(y))

    def fma(self, x, y, z):
        """x * y + z, rounded once."""
        return self.b.intrinsic("fma", self.scalar, *map(self._text, (x, y, z)))

    def negative(self, x):
        return self.b.value(f"fneg {self.b.of(self.scalar)} {self._text(x)}")

    def abs(self, x):
        return self.b.intrinsic("fabs", self.scalar, x)

    def copysign(self, x, sign):
        return self.b.intrinsic("copysign", self.scalar, x, sign)

    def test(self, predicate, x, y):
        return self.b.compare(predicate, self.scalar, self._text(x), self._text(y))

    def select(self, condition, x, y):
        return self.b.select(condition, self.scalar, self._text(x), self._text(y))

    def at_most(self, x, limit):
        """x, or the limit where it is larger; NaN stays."""
        return self.select(self.test("ogt", x, limit), limit, x)

    def at_least(self, x, limit):
        return self.select(self.test("olt", x, limit), limit, x)

    def polynomial(self, x, *coefficients):
        """By Horner's rule, the highest power first."""
        result = coefficients[0]
        for coefficient in coefficients[1:]:
            result = self.fma(result, x, coefficient)
        return result

    def bits(self, x):
        return self.b.convert("bitcast", self.scalar, x, self.whole)

    def from_bits(self, x):
        return self.b.convert("bitcast", self.whole, x, self.scalar)

    def integer(self, op, x, y: int | str):
        return self.b.binary(
            op, self.whole, x, y if isinstance(y, str) else self.b.constant(self.whole, y)
        )

    def of_quadrant(self, quadrant: str, sine: str, cosine: str) -> str:
        """The sine of an angle `quadrant` quarter turns beyond the one whose sine is given."""
        is_odd = self.b.compare(
            "ne", self.whole, self.integer("and", quadrant, 1), self.b.constant(self.whole, 0)
        )
        y = self.bits(self.select(is_odd, cosine, sine))
        to_sign = {"i32": 30, "i64": 62}[self.whole]  # from bit 1 to the highest
        sign = self.integer("shl", self.integer("and", quadrant, 2), to_sign)
        return self.from_bits(self.integer("xor", y, sign))

    def where_any(self, condition: str, y: str, slowly: Callable[[], str]) -> str:
        """y, but what `slowly` gives in lanes where the condition holds; it runs if in any."""
        b, any_lane = self.b, condition
        if b.width > 1:
            function = f"llvm.vector.reduce.or.v{b.width}i1"
            any_lane = b.pure_call(function, "i1", (b.of("i1"), condition))

        def chosen() -> list[str]:
            return [self.select(condition, slowly(), y)]

        (result,) = b.when(any_lane, [(b.of(self.scalar), y)], chosen)
        return result
