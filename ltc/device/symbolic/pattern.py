"""Two recordings of one program at different sizes, as one: what differs are expressions of symbols.

Sizes that inputs bring are symbols of their own.  Whatever else differs, the sizes of a view say, is
taken for an expression of these that fits both recordings; it need not be right, since each call is
compared with what the expression gives before it is taken for the recorded one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ltc.aten.call import CallResult, Scalar
from ltc.support.sizes.extent import SMALLEST

INPUT = "ltc::input"
_MOST_SHIFT = 2  # by which a size is taken for another one that is a little longer
_ATOMS = (int, float, bool, str, complex, type(None))


class Differs(Exception):
    """The recordings are not one program at two sizes; the text says how."""


@dataclass(frozen=True, slots=True)
class SizeHole:
    """A number that differs: a Python expression of the symbols s0, s1, ..."""

    source: str


@dataclass
class SymbolSizes:
    """The known facts of the symbols: their values in both recordings.

    Attributes:
        born: Number of the call at which each symbol is first met.
    """

    pairs: list[tuple[int, int]] = field(default_factory=list)
    born: list[int] = field(default_factory=list)

    def of_input(self, a: int, b: int, call: int) -> int | SizeHole:
        """The extent of an input: a number, a symbol known already, or a new one."""
        if a == b:
            return a
        for k, (x, y) in enumerate(self.pairs):
            if a - x == b - y and 0 <= a - x <= _MOST_SHIFT:
                return SizeHole(f"s{k}" if a == x else f"s{k}+{a - x}")
        return self._new(a, b, call)

    def of_attribute(self, a: int, b: int, call: int) -> int | SizeHole:
        """A number of a call, as an expression of the sizes met so far."""
        if a == b:
            return a
        for source in self._expressions(a, b):
            return SizeHole(source)
        return self._new(a, b, call)

    def _new(self, a: int, b: int, call: int) -> SizeHole:
        if min(a, b) < SMALLEST:
            raise Differs(f"a size is {min(a, b)} in one recording and {max(a, b)} in the other")
        self.pairs.append((a, b))
        self.born.append(call)
        return SizeHole(f"s{len(self.pairs) - 1}")

    def _expressions(self, a: int, b: int) -> Iterator[str]:
        """Give the expressions that are `a` in one recording and `b` in the other, the simplest
        first.
        """
        single = [(f"s{k}", x, y) for k, (x, y) in enumerate(self.pairs)]
        double = [
            (f"{m}*{n}", x * u, y * v)
            for i, (m, x, y) in enumerate(single)
            for n, u, v in single[i:]
        ]
        for source, x, y in (*single, *double):
            if (x, y) == (a, b):
                yield source
        for source, x, y in (*single, *double):
            if x and a % x == 0 and a == x * (a // x) and b == y * (a // x):
                yield f"{source}*{a // x}"
            elif a - x == b - y:
                yield f"{source}+{a - x}" if a > x else f"{source}-{x - a}"
            elif a + x == b + y:
                yield f"{a + x}-{source}"


@dataclass
class PatternCall:
    """One call of the pattern.

    Attributes:
        call: The call of the first recording.
        key, args, kwargs, link: The entry's, with holes, and with the first recording's values.
        shape: The shape of an input, with holes; else None.
        types: The types of the results in both recordings.
        is_open: True if an operand's size differs, or a number: then its types are derived.
    """

    call: Any
    key: Any
    args: Any
    kwargs: Any
    link: Any
    shape: tuple[int | SizeHole, ...] | None
    types: tuple[tuple[Any, Any] | None, ...]
    is_open: bool = False


def pattern_of(
    first: Sequence[Any], second: Sequence[Any]
) -> tuple[list[PatternCall], SymbolSizes]:
    """The pattern of two runs of entries; raises Differs."""
    if len(first) != len(second):
        raise Differs(f"one recording has {len(first)} calls, the other {len(second)}")
    comparison = _Comparison()
    calls = [comparison.call(n, a, b) for n, (a, b) in enumerate(zip(first, second))]
    if not comparison.sizes.pairs:
        raise Differs("no size differs")
    return calls, comparison.sizes


class _Comparison:
    """Both recordings so far: which value of the second stands for which of the first."""

    def __init__(self) -> None:
        self.sizes = SymbolSizes()
        self._second: dict[CallResult, CallResult] = {}
        self._open: set[CallResult] = set()  # results of calls whose types are derived
        self._number = 0
        self._seen: dict[tuple[int, int], int | SizeHole] = {}

    def call(self, number: int, a: Any, b: Any) -> PatternCall:
        self._number, self._seen = number, {}
        x, y = a.call, b.call
        if x.overload != y.overload or len(x.results) != len(y.results):
            raise Differs(f"one recording calls {x.name}, the other {y.name}")
        if x.name.startswith("ltc::collective"):
            raise Differs("it has a collective, whose sizes must be numbers")
        shape = None
        if x.overload == INPUT:
            shape = self._input(x, y)
            key = args = link = None
            kwargs: Any = {}
        else:
            key = self.both(a.key, b.key)
            args, kwargs = self.both(tuple(x.args), tuple(y.args)), self.both(x.kwargs, y.kwargs)
            link = self.both(a.link, b.link)
        types = []
        for u, v in zip(x.results, y.results):
            if (u is None) != (v is None):
                raise Differs(f"{x.name} gives results in one recording alone")
            types.append(None if u is None else ((u.shape, u.dtype), (v.shape, v.dtype)))
            if u is not None and (u.dtype != v.dtype or len(u.shape) != len(v.shape)):
                raise Differs(f"{x.name} gives {u} in one recording and {v} in the other")
            if u is not None:
                self._second[u] = v
        is_open = has_hole((args, kwargs, shape)) or self._reads_open(
            (args, tuple(kwargs.values()))
        )
        if is_open:
            self._open.update(u for u in x.results if u is not None)
        elif any(pair is not None and pair[0] != pair[1] for pair in types):
            raise Differs(f"{x.name} gives results of other sizes for operands of equal sizes")
        return PatternCall(x, key, args, kwargs, link, shape, tuple(types), is_open)

    def _reads_open(self, part: Any) -> bool:
        if isinstance(part, (list, tuple)):
            return any(map(self._reads_open, part))
        return isinstance(part, CallResult) and part in self._open

    def _input(self, x: Any, y: Any) -> tuple[int | SizeHole, ...]:
        (u,), (v,) = x.results, y.results
        if x.args != y.args or u.dtype != v.dtype or len(u.shape) != len(v.shape):
            raise Differs(f"an input is {u} in one recording and {v} in the other")
        return tuple(self.sizes.of_input(m, n, self._number) for m, n in zip(u.shape, v.shape))

    def both(self, a: Any, b: Any) -> Any:
        """Return the common form of two parts of a call, with holes where integers differ."""
        kind = a.__class__
        if kind is not b.__class__:
            raise Differs(f"one recording has {a!r}, the other {b!r}")
        if kind is list or kind is tuple:
            _need(len(a) == len(b), a, b)
            return kind([self.both(x, y) for x, y in zip(a, b)])
        if kind is dict:
            _need(list(a) == list(b), a, b)
            return {name: self.both(a[name], b[name]) for name in a}
        if kind is CallResult:
            _need(self._second.get(a, a) is b, a, b)
        elif kind is Scalar:
            _need(_told(a) == _told(b), a, b)
        elif kind is int and a != b:
            if (a, b) not in self._seen:
                self._seen[a, b] = self.sizes.of_attribute(a, b, self._number)
            return self._seen[a, b]
        elif kind in _ATOMS:
            _need(repr(a) == repr(b), a, b)  # 0.0 and -0.0 are equal
        else:
            _need(a == b, a, b)
        return a


def _need(holds: bool, a: Any, b: Any) -> None:
    if not holds:
        raise Differs(f"one recording has {a!r}, the other {b!r}")


def _told(scalar: Scalar) -> tuple[Any, ...]:
    return scalar.slot, scalar.dtype, scalar.wrapped, scalar.origin


def filled(pattern: Any, fill: Any) -> Any:
    """A part of a pattern with `fill(hole)` in place of each hole and `fill(value)` of each value."""
    kind = pattern.__class__
    if kind is SizeHole or kind is CallResult:
        return fill(pattern)
    if kind is list or kind is tuple:
        return kind([filled(part, fill) for part in pattern])
    if kind is dict:
        return {name: filled(part, fill) for name, part in pattern.items()}
    return pattern


def has_hole(pattern: Any) -> bool:
    if isinstance(pattern, dict):
        return any(map(has_hole, pattern.values()))
    if isinstance(pattern, (list, tuple)):
        return any(map(has_hole, pattern))
    return isinstance(pattern, SizeHole)
