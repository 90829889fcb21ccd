"""Floats that note on a tape all that is computed from them.

A learning rate reaches a program as -lr, or lr / (1 - beta ** step).  While a function is watched,
the numbers that may change between its calls are `TracedFloat`s: Python's arithmetic with one gives
another, and each result is put on a tape.  A decision that hangs on one is put there as well.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple


class Known(NamedTuple):
    """The operand that is one of the known numbers."""

    place: int


class Computed(NamedTuple):
    """The operand that an earlier operation has given, by its place on the tape."""

    place: int


class Operation(NamedTuple):
    """One operation.

    Attributes:
        name: The name of Python's operator in the module `operator`; "value" if Python's code has
        read the number itself; "product" for a float32 counter.
        operands: Known, Computed, or a plain number.
        result: A float; for a decision, its outcome.
    """

    name: str
    operands: tuple[Any, ...]
    result: Any

    def without_numbers(self) -> tuple[Any, ...]:
        """Return a key that is equal for operations that differ in floats alone."""
        operands = [x.__class__ if isinstance(x, (float, int)) else x for x in self.operands]
        return self.name, operands, None if isinstance(self.result, float) else self.result


class Tape:
    """All operations on known numbers while one call was watched."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.is_on = True

    def note(self, name: str, operands: tuple[Any, ...], result: Any) -> Any:
        """Note an operation; return its result, traced if it is a float."""
        self.operations.append(Operation(name, operands, result))
        if result.__class__ is float:
            return traced(self, Computed(len(self.operations) - 1), result)
        return result


class TracedFloat(float):
    """A float on a tape; a plain one once the tape is off."""

    __slots__ = ("tape", "operand")
    tape: Tape
    operand: Any

    def __bool__(self) -> bool:
        return bool(_truth(self))

    def __hash__(self) -> int:
        return _looked_at(self, float.__hash__)


def traced(tape: Tape, operand: Any, value: float) -> TracedFloat:
    """Return a number on a tape, which is that operand there."""
    made = TracedFloat(value)
    made.tape, made.operand = tape, operand
    return made


def plain(value: Any) -> Any:
    """Return a number that is no longer traced; any other value as it is."""
    return float.__pos__(value) if value.__class__ is TracedFloat else value


def _operand(value: Any) -> Any:
    return value.operand if value.__class__ is TracedFloat else value


def _binary(name: str, reflected: bool) -> Callable[[TracedFloat, Any], Any]:
    compute = getattr(operator, name)

    def method(self: TracedFloat, other: Any) -> Any:
        if not isinstance(other, (float, int)):
            return NotImplemented
        pair = (other, self) if reflected else (self, other)
        result = compute(*map(_plain_number, pair))
        if not self.tape.is_on:
            return result
        return self.tape.note(name, tuple(map(_operand, pair)), result)

    return method


def _plain_number(value: Any) -> Any:
    return plain(value) if isinstance(value, float) else value


def _unary(name: str) -> Callable[[TracedFloat], Any]:
    compute = getattr(operator, name)

    def method(self: TracedFloat) -> Any:
        result = compute(plain(self))
        return self.tape.note(name, (self.operand,), result) if self.tape.is_on else result

    return method


_truth = _unary("truth")


def _looked_at(self: TracedFloat, method: Callable, *arguments: Any) -> Any:
    """Call a method of float; all that follows from its result holds for this value alone."""
    value = plain(self)
    if self.tape.is_on:
        self.tape.note("value", (self.operand,), repr(value))
    return method(value, *arguments)


def _looking(name: str) -> Callable[..., Any]:
    inherited = getattr(float, name)

    def method(self: TracedFloat, *arguments: Any) -> Any:
        return _looked_at(self, inherited, *arguments)

    return method


ARITHMETIC = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "pow": "**", "floordiv": "//",
              "mod": "%"}  # fmt: skip
COMPARISONS = {"lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!="}
_OTHERS = (
    "__int__ __trunc__ __round__ __floor__ __ceil__ __repr__ __str__ __format__ __float__ "
    "__divmod__ __rdivmod__ is_integer as_integer_ratio hex conjugate __getnewargs__"
)

for _name in ARITHMETIC:
    setattr(TracedFloat, f"__{_name}__", _binary(_name, False))
    setattr(TracedFloat, f"__r{_name}__", _binary(_name, True))
for _name in COMPARISONS:
    setattr(TracedFloat, f"__{_name}__", _binary(_name, False))
for _name in ("neg", "pos", "abs"):
    setattr(TracedFloat, f"__{_name}__", _unary(_name))
for _name in _OTHERS.split():
    setattr(TracedFloat, _name, _looking(_name))
