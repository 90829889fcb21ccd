"""Sizes that are numbers now and expressions at other sizes: what is decided by them is written down.

A program that was planned for one batch size may serve others, if its offsets, extents and counts are
known as expressions, and if every decision on the way would have come out the same.  An `Extent` has
both: a value, by which the code that meets it goes on as ever, and an expression of symbols.  What
arithmetic makes of it is an Extent again.  A comparison gives True or False, and its `SizeTrace` notes
the guard under which it would again.  Where a number alone will do (`int`, `range`, `struct`), the
guard says that the value is just this one.  So nothing is guessed: where all guards hold, the same
code would have taken the same way.

In text an Extent is a mark, ⟦n * 64⟧, which `settled` turns into a number and a guard, and `filled`
into the number at other sizes.

>>> trace = SizeTrace()
>>> n = trace.symbol(5)
>>> (n * 64 + 64) // 32, n * 2 == n + n, n < 16
(⟦2+2*s0⟧, True, True)
>>> list(trace.guards)
['-16+s0 < 0']
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Union


def double_bits(number: float) -> int:
    """The bits of a float64, as an integer."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def float_bits(number: float) -> int:
    """The bits of a float32, as an integer."""
    return int(struct.unpack("<i", struct.pack("<f", number))[0])


FUNCTIONS: dict[str, Callable[..., int]] = {
    "max": max,
    "min": min,
    "double_bits": double_bits,
    "float_bits": float_bits,
}


# The atoms that are multiplied: symbols, and what is no polynomial of them.
Monomial = tuple[str, ...]
Bounds = tuple[int | None, int | None]
Size = Union[int, "Extent"]

SMALLEST = 2  # of a symbol: none and one are seldom treated as other sizes are
_NAME = re.compile(r"\bt\d+\b")


class SizeTrace:
    """The symbols of one program, and the decisions by their values.

    Attributes:
        values: The present values of the symbols.
        guards: Conditions as Python expressions of the symbols s0, s1, ..., each once, in order.
        parts: Expressions that are no polynomials -> the names t0, t1, ... that others use for
            them.
    """

    def __init__(self) -> None:
        self.values: list[int] = []
        self.guards: dict[str, None] = {}
        self.parts: dict[str, str] = {}
        self.bounds: dict[str, Bounds] = {}
        self.is_guarding = True

    def symbol(self, value: int) -> Extent:
        """A new symbol, of a value from SMALLEST on."""
        name = f"s{len(self.values)}"
        self.values.append(value)
        self.bounds[name] = (SMALLEST, None)
        return Extent(self, (((name,), 1),), value)

    def note(self, condition: str, holds: bool) -> None:
        if self.is_guarding:
            self.guards.setdefault(condition if holds else f"not ({condition})")

    def atom(self, source: str, value: int, bounds: Bounds) -> Extent:
        """Return an Extent for a Python expression that is no polynomial."""
        name = self.parts.setdefault(source, f"t{len(self.parts)}")
        self.bounds.setdefault(name, bounds)
        return Extent(self, (((name,), 1),), value)

    def function(self, expression: str) -> Callable[..., Any]:
        """Return a Python expression as a function of the symbols."""
        return self.procedure([f"return {expression}"], {})

    def procedure(self, lines: Sequence[str], names: Mapping[str, Any]) -> Callable[..., Any]:
        """Lines of Python as a function of the symbols; `names`: what else they may refer to."""
        needed: set[str] = set()
        waiting = [name for line in lines for name in _NAME.findall(line)]
        sources = {name: source for source, name in self.parts.items()}
        while waiting:
            name = waiting.pop()
            if name not in needed:
                needed.add(name)
                waiting.extend(_NAME.findall(sources.get(name, "")))
        parts = [f"{name} = {source}" for source, name in self.parts.items() if name in needed]
        symbols = ", ".join(f"s{k}" for k in range(len(self.values)))
        text = "\n    ".join([f"def function({symbols}):", *parts, *lines, "return"])
        namespace: dict[str, Any] = {**FUNCTIONS, **names}
        exec(compile(text, "<ltc sizes>", "exec"), namespace)
        made: Callable[..., Any] = namespace["function"]
        return made

    def value_of(self, expression: str) -> Any:
        """Return an expression's value at the present values of the symbols."""
        return self.function(expression)(*self.values)


class Extent:
    """A polynomial of symbols, and its value."""

    __slots__ = ("trace", "terms", "value")

    def __init__(
        self, trace: SizeTrace, terms: tuple[tuple[Monomial, int], ...], value: int
    ) -> None:
        self.trace, self.terms, self.value = trace, terms, value

    @property
    def source(self) -> str:
        """A Python expression of the symbols."""
        parts = ["*".join((*([] if c == 1 and m else [str(c)]), *m)) for m, c in self.terms]
        return "+".join(parts).replace("+-", "-")

    @property
    def bounds(self) -> Bounds:
        """The least and the greatest value at any sizes, as far as they are known."""
        low: int | None = 0
        high: int | None = 0
        for monomial, factor in self.terms:
            least, most = self._bounds_of(monomial)
            if factor < 0:
                least, most = most, least
            low = None if low is None or least is None else low + least * factor
            high = None if high is None or most is None else high + most * factor
        return low, high

    def _bounds_of(self, monomial: Monomial) -> Bounds:
        low: int | None = 1
        high: int | None = 1
        for atom in monomial:
            least, most = self.trace.bounds[atom]
            if least is None or least < 0:  # of a product of these nothing is said
                return (least, most) if len(monomial) == 1 else (None, None)
            low = None if low is None else low * least
            high = None if high is None or most is None else high * most
        return low, high

    # --- arithmetic

    def __add__(self, other: Any) -> Any:
        if not isinstance(other, (int, Extent)):
            return NotImplemented
        total = dict(self.terms)
        for monomial, factor in _terms(other):
            total[monomial] = total.get(monomial, 0) + factor
        return _made(self.trace, total, self.value + number_now(other))

    __radd__ = __add__

    def __neg__(self) -> Any:
        return self * -1

    def __pos__(self) -> Extent:
        return self

    def __sub__(self, other: Any) -> Any:
        return self + -other if isinstance(other, (int, Extent)) else NotImplemented

    def __rsub__(self, other: Any) -> Any:
        return -self + other if isinstance(other, int) else NotImplemented

    def __mul__(self, other: Any) -> Any:
        if not isinstance(other, (int, Extent)):
            return NotImplemented
        total: dict[Monomial, int] = {}
        for m, a in self.terms:
            for n, b in _terms(other):
                both = tuple(sorted((*m, *n)))
                total[both] = total.get(both, 0) + a * b
        return _made(self.trace, total, self.value * number_now(other))

    __rmul__ = __mul__

    def __pow__(self, power: int) -> Any:
        result: Any = 1
        for _ in range(power):
            result = result * self
        return result

    def __floordiv__(self, other: Any) -> Any:
        if not isinstance(other, (int, Extent)):
            return NotImplemented
        exact = self._divided(other)
        return exact if exact is not None else _quotient(self.trace, self, other)

    def __rfloordiv__(self, other: Any) -> Any:
        return _quotient(self.trace, other, self) if isinstance(other, int) else NotImplemented

    def _divided(self, other: Size) -> Any:
        """The quotient where it is exact at all sizes: a polynomial without a rest."""
        divisor = dict(_terms(other))
        if not divisor:
            return None
        lead = max(divisor, key=_order)
        left, total = dict(self.terms), dict[Monomial, int]()
        while left:
            highest = max(left, key=_order)
            part = _without(highest, lead)
            if part is None or left[highest] % divisor[lead]:
                return None
            total[part] = factor = left[highest] // divisor[lead]
            for monomial, c in divisor.items():
                both = tuple(sorted((*monomial, *part)))
                left[both] = left.get(both, 0) - factor * c
            left = {monomial: c for monomial, c in left.items() if c}
        if other == 0:
            return None
        return _made(self.trace, total, self.value // number_now(other))

    def __mod__(self, other: Any) -> Any:
        if not isinstance(other, (int, Extent)):
            return NotImplemented
        if self._divided(other) is not None:
            return 0
        if _is_part(self, other):
            return self
        if isinstance(other, Extent) or other <= 0:
            return self - self // other * other
        rest = _made(self.trace, {m: c % other for m, c in self.terms}, 0)
        if isinstance(rest, int):
            return rest % other
        source = f"({rest.source})%{other}"
        return self.trace.atom(source, self.value % other, (0, other - 1))

    def __rmod__(self, other: Any) -> Any:
        if not isinstance(other, int):
            return NotImplemented
        return other if _is_part(other, self) else other - other // self * self

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __abs__(self) -> Any:
        return self if self >= 0 else -self

    # --- decisions

    def __eq__(self, other: object) -> Any:
        """Tuples are compared from the left, not by their lengths first: those that differ in rank ask
        whether sizes are equal that stand for different things."""
        if isinstance(other, Extent) and other.trace is not self.trace:
            return False
        return _holds("==", self, other) if isinstance(other, (int, Extent)) else NotImplemented

    def __lt__(self, other: Any) -> Any:
        return _holds("<", self, other) if isinstance(other, (int, Extent)) else NotImplemented

    def __le__(self, other: Any) -> Any:
        return _holds("<=", self, other) if isinstance(other, (int, Extent)) else NotImplemented

    def __gt__(self, other: Any) -> Any:
        return _holds(">", self, other) if isinstance(other, (int, Extent)) else NotImplemented

    def __ge__(self, other: Any) -> Any:
        return _holds(">=", self, other) if isinstance(other, (int, Extent)) else NotImplemented

    def __hash__(self) -> int:
        """Hash the expression: a table finds the same expression, and may miss one that is equal by
        chance.

        Tables join what is alike, so one that finds less is right at all sizes.
        """
        return hash((id(self.trace), self.terms))

    def __bool__(self) -> bool:
        return bool(self != 0)

    # --- numbers

    def __index__(self) -> int:
        self.trace.note(f"{self.source} == {self.value}", True)
        return self.value

    __int__ = __index__

    def __float__(self) -> float:
        return float(self.__index__())

    def __str__(self) -> str:
        return f"⟦{self.source}⟧"

    __repr__ = __str__

    def __format__(self, spec: str) -> str:
        return str(self) if not spec else format(self.__index__(), spec)

    def __reduce__(self) -> Any:
        raise TypeError("an Extent is known in its process alone")


def _order(monomial: Monomial) -> tuple[int, Monomial]:
    """An order of monomials that holds for their products with any other, the highest degree last."""
    return len(monomial), monomial


def _without(monomial: Monomial, divisor: Monomial) -> Monomial | None:
    """The atoms that are left of a product divided by another; None where that leaves a rest."""
    left = list(monomial)
    for atom in divisor:
        if atom not in left:
            return None
        left.remove(atom)
    return tuple(left)


def _terms(x: Size) -> tuple[tuple[Monomial, int], ...]:
    if isinstance(x, Extent):
        return x.terms
    return (((), int(x)),) if x else ()


def _made(trace: SizeTrace, total: Mapping[Monomial, int], value: int) -> Size:
    terms = tuple(sorted((m, c) for m, c in total.items() if c))
    if not terms:
        return 0
    if len(terms) == 1 and not terms[0][0]:
        return terms[0][1]
    return Extent(trace, terms, value)


def bounds_of(x: Size) -> Bounds:
    return x.bounds if isinstance(x, Extent) else (x, x)


def source_of(x: Size) -> str:
    return x.source if isinstance(x, Extent) else str(x)


def _is_part(x: Size, y: Size) -> bool:
    """Return True if 0 <= x < y at all sizes."""
    low, _ = bounds_of(x)
    rest, _ = bounds_of(y - x)
    return low is not None and low >= 0 and rest is not None and rest > 0


def _quotient(trace: SizeTrace, x: Size, y: Size) -> Any:
    if _is_part(x, y):
        return 0
    value = number_now(x) // number_now(y)
    (low, high), (least, most) = bounds_of(x), bounds_of(y)
    bounds: Bounds = (None, None)
    if least is not None and least > 0:
        lowest = low // least if low is not None and low < 0 else _by_most(low, most, 0)
        highest = high // least if high is not None and high >= 0 else _by_most(high, most, -1)
        bounds = lowest, highest
    return trace.atom(f"({source_of(x)})//({source_of(y)})", value, bounds)


def _by_most(end: int | None, most: int | None, of_any: int) -> int | None:
    """An end of a quotient whose divisor is `most` at most; `of_any` if that is not known."""
    return None if end is None else of_any if most is None else end // most


def _holds(relation: str, x: Extent, y: Size) -> bool:
    difference = x - y
    value = number_now(difference)
    holds = bool(_RELATIONS[relation](value))
    if isinstance(difference, int):
        return holds
    low, high = difference.bounds
    if relation == "==":
        certain = (low is not None and low > 0) or (high is not None and high < 0)
    else:
        ends = [e for e in (low, high) if e is not None]
        test = _RELATIONS[relation]
        upward = relation in (">", ">=")
        certain = bool(ends) and (
            (low is not None and test(low) is upward)
            or (high is not None and test(high) is not upward)
        )
    if not certain:
        difference.trace.note(f"{difference.source} {relation} 0", holds)
    return holds


_RELATIONS: dict[str, Callable[[int], bool]] = {
    "==": lambda d: d == 0,
    "<": lambda d: d < 0,
    "<=": lambda d: d <= 0,
    ">": lambda d: d > 0,
    ">=": lambda d: d >= 0,
}


def known(x: Any) -> Any:
    """Numbers alone: an Extent, also in a tuple, becomes its value, and a guard says so."""
    if isinstance(x, Extent):
        return x.__index__()
    if isinstance(x, tuple) and any(isinstance(part, (Extent, tuple)) for part in x):
        parts = [known(part) for part in x]
        return x.__class__(*parts) if hasattr(x, "_fields") else tuple(parts)
    return x


def number_now(x: Size) -> int:
    """Return a size's present value, with no guard: for code right at any size, or filled in again."""
    return x.value if isinstance(x, Extent) else x
