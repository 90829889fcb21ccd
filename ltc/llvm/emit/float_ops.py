"""Formulas on vectors of float or double, written as calls instead of instructions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ltc.llvm.emit.builder import Builder
from ltc.llvm.emit.dtype import literal

INFINITY = math.inf
_INTEGER = {"float": "i32", "double": "i64"}
_SUFFIX = {"float": "f32", "double": "f64"}

Operand = str | float  # a register, the text of a constant, or a number


class Floats:
    """Arithmetic on vectors of so many lanes of float or double; on scalars where it is one.

    Attributes:
        element: The type of a lane.
        vector: The type of a vector.
        mask_type: The type of a vector of truth values.
        words: The type of its bits.
    """

    zero = "zeroinitializer"

    def __init__(self, builder: Builder, element: str = "float", width: int = 0):
        self.builder, self.element, self.width = builder, element, width or builder.width
        self.whole = _INTEGER[element]
        self.vector, self.mask_type, self.words = map(self._of, (element, "i1", self.whole))
        lanes = "" if self.width == 1 else f"v{self.width}"
        self.suffix = lanes + _SUFFIX[element]

    def _of(self, scalar: str) -> str:
        return scalar if self.width == 1 else f"<{self.width} x {scalar}>"

    # --- operands

    def constant(self, number: float) -> str:
        text = literal(number, self.element)
        return text if self.width == 1 else f"splat ({self.element} {text})"

    def _text(self, x: Operand) -> str:
        return x if isinstance(x, str) else self.constant(x)

    def _whole_text(self, x: int | str) -> str:
        if isinstance(x, str):
            return x
        return str(x) if self.width == 1 else f"splat ({self.whole} {x})"

    # --- arithmetic

    def _binary(self, op: str, x: Operand, y: Operand) -> str:
        return self.builder.value(f"{op} {self.vector} {self._text(x)}, {self._text(y)}")

    def _intrinsic(self, name: str, *operands: Operand) -> str:
        typed = [(self.vector, self._text(x)) for x in operands]
        return self.builder.pure_call(f"llvm.{name}.{self.suffix}", self.vector, *typed)

    def add(self, x: Operand, y: Operand) -> str:
        return self._binary("fadd", x, y)

    def sub(self, x: Operand, y: Operand) -> str:
        return self._binary("fsub", x, y)

    def mul(self, x: Operand, y: Operand) -> str:
        return self._binary("fmul", x, y)

    def div(self, x: Operand, y: Operand) -> str:
        return self._binary("fdiv", x, y)

    def fma(self, x: Operand, y: Operand, z: Operand) -> str:
        """x * y + z, rounded once."""
        return self._intrinsic("fma", x, y, z)

    def multiply_add(self, x: Operand, y: Operand, z: Operand) -> str:
        """x * y + z, with one rounding where the processor has that."""
        return self._intrinsic("fmuladd", x, y, z)

    def sqrt(self, x: Operand) -> str:
        return self._intrinsic("sqrt", x)

    def trunc(self, x: Operand) -> str:
        return self._intrinsic("trunc", x)

    def round(self, x: Operand) -> str:
        """To the nearest whole number, of two the even one."""
        return self._intrinsic("roundeven", x)

    def negative(self, x: Operand) -> str:
        return self.builder.value(f"fneg {self.vector} {self._text(x)}")

    def abs(self, x: Operand) -> str:
        return self._intrinsic("fabs", x)

    def copysign(self, x: Operand, sign: str) -> str:
        """`x` with the sign of the other; a NaN has one, too."""
        if self.width > 1:
            return self._intrinsic("copysign", x, sign)
        # Of a scalar LLVM takes the sign before it was rounded, and then, where the result becomes a
        # half, rounds that double to one by a function that no library has to have.
        highest = {"i32": -(1 << 31), "i64": -(1 << 63)}[self.whole]
        alone = self.integer("and", self.bits(sign), highest)
        rest = self.integer("and", self.bits(self._text(x)), ~highest)
        return self.from_bits(self.integer("or", rest, alone))

    def rest_of_sum(self, x: Operand, y: Operand, sum_: Operand) -> str:
        """The rounding error of a sum of x and y, for abs(x) >= abs(y): x + y - sum."""
        return self.add(self.sub(x, sum_), y)

    def renewed(self, x: str, low: Operand) -> tuple[str, str]:
        """x + low as a rounded sum and its error, for abs(x) >= abs(low)."""
        sum_ = self.add(x, low)
        return sum_, self.rest_of_sum(x, low, sum_)

    def rest_of_product(self, x: Operand, y: Operand, product: str) -> str:
        """The rounding error of a product: x * y - product."""
        return self.fma(x, y, self.negative(product))

    def polynomial(self, x: str, *coefficients: Operand) -> str:
        """By Horner's rule, the highest power first."""
        result = coefficients[0]
        for coefficient in coefficients[1:]:
            result = self.fma(result, x, coefficient)
        return self._text(result)

    def polynomial_in_halves(self, x: str, *coefficients: Operand) -> str:
        """The same as the sums of even and of odd powers, whose instructions overlap.

        For long ones whose terms are small beside the last.
        """
        square = self.mul(x, x)
        even = self.polynomial(square, *coefficients[-1::-2][::-1])
        odd = self.polynomial(square, *coefficients[-2::-2][::-1])
        return self.fma(odd, x, even)

    def total(self, x: str) -> str:
        """The sum of the lanes, as a scalar, added pairwise."""
        function = f"llvm.vector.reduce.fadd.{self.suffix}"
        self.builder.declare(function, self.element, self.element, self.vector)
        return self.builder.value(
            f"call reassoc {self.element} @{function}({self.element} 0.0, {self.vector} {x})"
        )

    # --- choices

    def test(self, predicate: str, x: Operand, y: Operand) -> str:
        """The mask of the lanes where an fcmp predicate holds."""
        return self._binary(f"fcmp {predicate}", x, y)

    def select(self, condition: str, x: Operand, y: Operand) -> str:
        x, y = self._text(x), self._text(y)
        return self.builder.value(
            f"select {self.mask_type} {condition}, {self.vector} {x}, {self.vector} {y}"
        )

    def at_most(self, x: Operand, limit: Operand) -> str:
        """x, or the limit where it is larger; NaN stays."""
        return self.select(self.test("ogt", x, limit), limit, x)

    def at_least(self, x: Operand, limit: Operand) -> str:
        return self.select(self.test("olt", x, limit), limit, x)

    def where_any(
        self, condition: str, usual: Sequence[str], slowly: Callable[[], Sequence[str]]
    ) -> list[str]:
        """Return the usual values, in lanes where the condition holds those of `slowly`.

        The instructions of `slowly` run if it holds in any.
        """
        b, any_lane = self.builder, condition
        if self.width > 1:
            function = f"llvm.vector.reduce.or.v{self.width}i1"
            any_lane = b.pure_call(function, "i1", (self.mask_type, condition))

        def chosen() -> list[str]:
            return [self.select(condition, x, y) for x, y in zip(slowly(), usual, strict=True)]

        return b.when(any_lane, [(self.vector, y) for y in usual], chosen)

    # --- bits

    def bits(self, x: str) -> str:
        return self.builder.value(f"bitcast {self.vector} {x} to {self.words}")

    def from_bits(self, x: str) -> str:
        return self.builder.value(f"bitcast {self.words} {x} to {self.vector}")

    def word(self, number: int) -> str:
        """A whole number in every lane."""
        return self._whole_text(number)

    def select_words(self, condition: str, x: str, y: str) -> str:
        return self.builder.value(
            f"select {self.mask_type} {condition}, {self.words} {x}, {self.words} {y}"
        )

    def integer(self, op: str, x: str, y: int | str) -> str:
        return self.builder.value(f"{op} {self.words} {x}, {self._whole_text(y)}")

    def of_quadrant(self, quadrant: str, sine: str, cosine: str) -> str:
        """The sine of an angle `quadrant` quarter turns beyond the one whose sine is given."""
        is_odd = self.integer("icmp ne", self.integer("and", quadrant, 1), 0)
        y = self.bits(self.select(is_odd, cosine, sine))
        to_sign = {"i32": 30, "i64": 62}[self.whole]  # from bit 1 to the highest
        sign = self.integer("shl", self.integer("and", quadrant, 2), to_sign)
        return self.from_bits(self.integer("xor", y, sign))
