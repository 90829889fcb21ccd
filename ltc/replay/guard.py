"""The guard of a recorded call: the conditions under which it is replayed, as Python expressions."""

from __future__ import annotations

import re
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device,
          torch.Size, torch.memory_format, range, slice)  # fmt: skip
_LITERAL = (str, int, bool, bytes, type(None))  # keys that stand in an expression themselves
_MOST = 100_000  # objects that are followed
_MOST_TOLD = 200  # characters of a text that are shown
_TOGETHER = 40  # conditions of one `if`
NOT_THERE = (
    AttributeError,
    LookupError,
    TypeError,
    ValueError,
)  # such as an attribute that is gone


class Changed(Exception):
    """The call is not one that was recorded; nothing was done."""


class Obstacle(Exception):
    """Calls of the function can never be replayed, for the reason that is given."""


class FoundTensor(NamedTuple):
    """A tensor that a call can reach.

    Attributes:
        tensor: None once the call is over, where the next one has others in its place.
        expression: Finds it again.
        is_fixed: True if the guard holds for this tensor alone.
        told: Its name in words.
    """

    tensor: Any
    expression: str
    is_fixed: bool
    told: str


class Handed(NamedTuple):
    """A value that is handed over, holder[key]: a float, a tuple of floats, or a step count.

    Attributes:
        holder: A table; "args" or "kwargs" for an argument.
        expressions: The expressions of its floats; none for a step count.
    """

    value: Any
    holder: Any
    key: Any
    expressions: tuple[str, ...] = ()


class ReplayGuard:
    """Objects are compared by identity, plain values by type and value; tensors are inputs.

    Attributes:
        constants: The objects that the expressions name.
        conditions: Expressions that are true as long as the call is a recorded one.
        gradients: Conditions on gradients, which come and go.
        pinned: (expression, value) of plain values.
        lazy, host: Tensors on a device, and others.
        handed: Floats of param_groups, and floats among the arguments.
        counters: Step counts of optimizers.
        names: The names of attributes in code that the call may run.
        classes: (class, part) that were followed.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self.names: set[str] = set()
        self.forget()

    def forget(self) -> None:
        """Begin anew, with the names that are known."""
        self.constants: dict[str, Any] = {}
        self.conditions: list[str] = []
        self.gradients: list[str] = []
        self.pinned: list[tuple[str, Any]] = []
        self.lazy: list[FoundTensor] = []
        self.host: list[FoundTensor] = []
        self.handed: list[Handed] = []
        self.counters: list[Handed] = []
        self.classes: set[tuple[type, Any]] = set()
        self._seen: dict[int, str] = {}

    def constant(self, value: Any) -> str:
        """Return the name of that object in expressions."""
        name = self._seen.get(id(value))
        if name is None:
            if len(self.constants) > _MOST:
                raise Obstacle(f"it closes over more than {_MOST} objects")
            name = self._seen[id(value)] = f"c{len(self.constants)}"
            self.constants[name] = value
        return name

    def require(self, *conditions: str) -> None:
        self.conditions += conditions

    def pin(self, expression: str, value: Any) -> None:
        """Require a plain value of the same type; of a zero, the same sign."""
        if value is None or value is True or value is False:
            self.require(f"{expression} is {value}")
            return
        self.pinned.append((expression, value))
        if isinstance(value, (float, complex)) and value == 0:
            self.require(f"repr({expression}) == {repr(value)!r}")

    def visit(self, value: Any, expression: str, told: str = "") -> None:
        """Require the same value or object there; follow what it holds."""
        if isinstance(value, PLAIN):
            self.pin(expression, value)
        else:
            self.require(f"{expression} is {self.follow(value, told or expression)}")

    def follow(self, value: Any, told: str = "") -> str:
        """Follow what an object holds, which is known to be the same one; returns its name."""
        is_new = id(value) not in self._seen or isinstance(value, type)
        name = self.constant(value)
        if is_new and not isinstance(value, PLAIN):
            self.visit_inside(value, name, told)
        return name

    def visit_inside(self, value: Any, name: str, told: str) -> None:
        """Follow what the object of that name holds."""
        raise NotImplementedError

    def visit_table(self, table: Any, name: str, keys: Iterable[Any] | None = None) -> None:
        """Visit the entries of a table: all in their order, or those of some keys."""
        if keys is None:
            self.require(self.same_keys(table, name))
        for key in table if keys is None else keys:
            place = repr(key) if key.__class__ in _LITERAL else self.follow(key)
            self.visit(table[key], f"{name}[{place}]", f"the object at {key!r}")

    def same_length(self, values: Any, name: str) -> str:
        return f"len({name}) == {len(values)}" if values else f"not {name}"

    def same_keys(self, table: Any, name: str) -> str:
        """Return the condition that a table has the same keys in the same order."""
        if not table:
            return f"not {name}"
        if all(key.__class__ in _LITERAL for key in table):
            return f"(*{name},) == {(*table,)!r}"
        for key in table:
            self.follow(key)  # held, so that its id is its own
        return f"[*map(id, {name})] == {[*map(id, table)]}"

    def numbers(self) -> list[tuple[str, float]]:
        """Return the expression and the value of each float that is handed over."""
        return [
            (expression, value)
            for one in self.handed
            for expression, value in zip(
                one.expressions, one.value if isinstance(one.value, tuple) else (one.value,)
            )
        ]

    # --- compared -------------------------------------------------------------------------------

    def facts(self) -> Iterator[str]:
        """Yield all that is compared, as texts with names for objects."""
        yield from (f"{expression} is {value!r}" for expression, value in self.pinned)
        yield from self.conditions
        yield from self.gradients

    def readable(self, text: str) -> str:
        """Return a text with the kinds of objects in place of their names."""

        def kind(name: re.Match) -> str:
            value = self.constants.get(name[0], name)
            if value is name:  # no name of an object
                return name[0]
            is_named = isinstance(value, (type, types.FunctionType))
            return f"<{value.__qualname__ if is_named else type(value).__name__}>"

        return re.sub(r"\bc\d+\b", kind, f"{text:.{_MOST_TOLD}}")

    def first_that_fails(self, args: tuple, kwargs: dict) -> str:
        """Return the first condition that does not hold, those of gradients aside; "" if all hold."""
        values = [*self.pinned, *self.numbers()]
        known = {**self.constants, "args": args, "kwargs": kwargs}
        for condition in self.conditions:
            if not _value(condition, known):
                return self.readable(condition)
        for expression, value in values:
            if repr(_value(expression, known)) != repr(value):
                return self.readable(expression)
        return ""

    def lines(self) -> Iterator[str]:
        """Yield code of a function's body that raises Changed where the guard does not hold."""
        yield from checks(self.conditions)
        if self.pinned:
            values = "".join(f"{expression}, " for expression, _ in self.pinned)
            yield f"    values = ({values})"
            yield "    if values != pinned or [*map(type, values)] != kinds: raise Changed"

    def names_of_lines(self) -> dict[str, Any]:
        """Return the objects that this code names."""
        values = tuple(value for _, value in self.pinned)
        kinds = [type(value) for value in values]
        return {**self.constants, "pinned": values, "kinds": kinds, "Changed": Changed}


def _value(expression: str, known: dict[str, Any]) -> Any:
    try:
        return eval(expression, known)
    except NOT_THERE:
        return None


def checks(conditions: Sequence[str]) -> Iterator[str]:
    for start in range(0, len(conditions), _TOGETHER):
        together = " and ".join(conditions[start : start + _TOGETHER])
        yield f"    if not ({together}): raise Changed"


def generated(name: str, lines: Iterable[str], names: dict[str, Any]) -> Any:
    """Return the function of that name in generated code."""
    names = dict(names)
    exec(compile("\n".join(lines), "<ltc replay>", "exec"), names)
    return names[name]
