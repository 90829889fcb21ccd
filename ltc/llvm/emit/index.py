"""Index arithmetic in the text of a kernel: `(c * taps + d) * high + h` writes the instructions.

An index is a number that is known now, whose arithmetic Python does, or the register of an i64
value, whose operators write an instruction each. Where one operand decides the result, none is
written: x + 0, x * 1 and x // 1 are x, and x * 0 is 0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

from ltc.support.sizes.choices import least as least_size
from ltc.support.sizes.choices import most as most_size
from ltc.support.sizes.extent import Extent


def _is(number: int, x: object) -> bool:
    """Return True if x is that number; False for a size that is an expression, without a guard."""
    return x.__class__ is int and x == number


def _is_bit(x: object) -> bool:
    return x.__class__ is int and x in (0, 1)


class Register(str):
    """The name of a value of the function being written: no text, to be joined to other text."""

    __slots__ = ()

    def _refused(self, other: object) -> NoReturn:
        raise TypeError(
            f"{self!r}, a {type(self).__name__}, and {other!r}, a {type(other).__name__}, cannot be "
            f"operands of index arithmetic, which takes numbers and registers of i64. "
            f"Builder.index(name) makes an index from the name of an i64 value, least and most "
            f"compare two indices, and every other value has instructions of its own."
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _refused
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __divmod__ = __rdivmod__ = _refused
    __lt__ = __le__ = __gt__ = __ge__ = _refused


class IndexRegister(Register):
    """The name of an i64 value.

    Args:
        write: Writes a pure instruction and gives the name of its result.
    """

    __slots__ = ("write",)

    write: Callable[[str], str]

    def __new__(cls, name: str, write: Callable[[str], str]) -> IndexRegister:
        one = str.__new__(cls, name)
        one.write = write
        return one

    def __add__(self, other: Index) -> Index:
        return self if _is(0, other) else self._written("add", self, other)

    def __radd__(self, other: int) -> Index:
        return self if _is(0, other) else self._written("add", other, self)

    def __sub__(self, other: Index) -> Index:
        return self if _is(0, other) else self._written("sub", self, other)

    def __rsub__(self, other: int) -> Index:
        return self._written("sub", other, self)

    def __mul__(self, other: Index) -> Index:
        return self._times(other) if _is_bit(other) else self._written("mul", self, other)

    def __rmul__(self, other: int) -> Index:
        return self._times(other) if _is_bit(other) else self._written("mul", other, self)

    def __floordiv__(self, other: Index) -> Index:
        """The quotient of numbers that are not negative."""
        return self if _is(1, other) else self._written("udiv", self, other)

    def __rfloordiv__(self, other: int) -> Index:
        return self._written("udiv", other, self)

    def __mod__(self, other: Index) -> Index:
        """The remainder of numbers that are not negative."""
        return 0 if _is(1, other) else self._written("urem", self, other)

    def __divmod__(self, other: Index) -> tuple[Index, Index]:
        """Both, by one division."""
        if _is(1, other):
            return self, 0
        quotient = self // other
        return quotient, self - quotient * other

    def _times(self, other: int) -> Index:
        return self if other else 0

    def _written(self, op: str, x: Index, y: Index) -> IndexRegister:
        self._require_indices(x, y)
        return IndexRegister(self.write(f"{op} i64 {x}, {y}"), self.write)

    def _require_indices(self, *operands: object) -> None:
        for one in operands:
            if not isinstance(one, _KINDS):
                self._refused(one)

    def chosen(self, predicate: str, x: Index, y: Index) -> IndexRegister:
        """x where `icmp predicate x, y` holds, else y."""
        self._require_indices(x, y)
        first = self.write(f"icmp {predicate} i64 {x}, {y}")
        return IndexRegister(self.write(f"select i1 {first}, i64 {x}, i64 {y}"), self.write)


Index = int | IndexRegister
_KINDS = (int, IndexRegister, Extent)  # asked for at every instruction: a tuple takes half the time


def least(x: Index, y: Index) -> Index:
    return _chosen("slt", x, y, least_size)


def most(x: Index, y: Index) -> Index:
    return _chosen("sgt", x, y, most_size)


def _chosen(predicate: str, x: Index, y: Index, known: Callable[[int, int], int]) -> Index:
    if isinstance(x, IndexRegister):
        return x.chosen(predicate, x, y)
    if isinstance(y, IndexRegister):
        return y.chosen(predicate, x, y)
    return known(x, y)
