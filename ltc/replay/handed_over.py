"""The program's numbers, computed for the next call from learning rates, step counts and arguments.

Several calls along one path are compared.  A number that was always the same is a constant.  One that
has changed has to be a known number, or what was computed from known ones, in each of the calls: then it
is computed so.  Known numbers that never changed are part of the guard.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ltc.replay.counters import product
from ltc.replay.guard import Changed, checks, generated
from ltc.replay.observation import Observation
from ltc.replay.traced_float import ARITHMETIC, COMPARISONS, Computed, Known


class ChangesByItself(Exception):
    """A number changes from call to call, and nothing that is known explains it."""


class HandedOver:
    """A function that computes the numbers of a path from known ones."""

    def __init__(self, calls: Sequence[Observation]) -> None:
        """`calls`: at least two, alike."""
        self._calls, self._last = calls, calls[-1]
        self._conditions: list[str] = []
        self._lines: list[str] = []
        self._constants: dict[str, Any] = {"product": product, "Changed": Changed}
        self._texts: dict[tuple, str] = {}  # of computed numbers, by what they are computed from
        self._by_history: dict[tuple, list[str]] = {}  # of numbers that change
        self._known = self._name_known()
        self._operations: list[str | None] = []
        for place in range(len(self._last.operations)):
            self._operations.append(self._operation(place))
        self._add_decisions()
        self._slots = [self._slot(place) for place in range(len(self._last.scalars))]
        self._counts = [self._count(operand) for operand in self._last.counts]

    def function(self) -> Any:
        """Return known numbers -> (numbers of the recording, new counts), which may raise Changed."""
        return generated("numbers_of", self._text(), self._constants)

    def _text(self) -> Iterator[str]:
        yield "def numbers_of(known):"
        yield from (f"    {line}" for line in self._lines)
        yield from checks(self._conditions)
        yield f"    return [{', '.join(map(str, self._slots))}], [{', '.join(self._counts)}]"

    # --- known numbers

    def _name_known(self) -> list[str]:
        """Return the expression of each known number; a literal if it is part of the guard."""
        texts: list[str] = []
        for place, value in enumerate(self._last.numbers):
            history = tuple(call.numbers[place] for call in self._calls)
            expression = f"known[{place}]"
            if _is_constant(history):
                texts.append(self._literal(value))
                self._conditions.append(f"{expression} == {texts[-1]}")
                if value == 0:  # equal to the zero of the other sign
                    self._conditions.append(f"repr({expression}) == {repr(value)!r}")
            elif history in self._by_history:
                texts.append(self._by_history[history][0])
                self._conditions.append(f"{expression} == {texts[-1]}")
            else:
                texts.append(f"n{place}")
                self._by_history[history] = [texts[-1]]
                self._lines.append(f"n{place} = {expression}")
        return texts

    # --- numbers computed from them

    def _operation(self, place: int) -> str | None:
        """Return the expression of an operation's result; None if it cannot be computed again."""
        name, operands, result = self._last.operations[place]
        texts = [self._operand(place, position) for position in range(len(operands))]
        if None in texts:
            return None
        history = tuple(call.operations[place].result for call in self._calls)
        if _is_constant(history) and not any(_varies(text) for text in texts):
            return self._literal(result)
        key = (name, *texts)
        if key not in self._texts:
            self._texts[key] = f"t{len(self._texts)}"
            self._lines.append(f"{self._texts[key]} = {_computed(name, texts)}")
        same = self._by_history.setdefault(history, [])
        if self._texts[key] not in same:
            same.append(self._texts[key])
        return self._texts[key]

    def _operand(self, place: int, position: int) -> str | None:
        operand = self._last.operations[place].operands[position]
        if isinstance(operand, (Known, Computed)):
            return self._named(operand)
        history = tuple(call.operations[place].operands[position] for call in self._calls)
        return self._literal(operand) if _is_constant(history) else None

    def _named(self, operand: Known | Computed) -> str | None:
        texts = self._known if isinstance(operand, Known) else self._operations
        return texts[operand.place]

    def _add_decisions(self) -> None:
        """Require the same outcome of each decision that the function makes by a number."""
        for text, operation in zip(self._operations, self._last.operations):
            if operation.result.__class__ is float:
                continue
            if text is None:
                raise ChangesByItself("a number that decides between branches changes by itself")
            if _varies(text):
                self._conditions.append(f"{text} == {operation.result!r}")

    # --- the program's numbers, and the counters

    def _slot(self, place: int) -> str | None:
        """Return the expression of one of the recording's numbers; None for a seed."""
        if place in self._last.seeds:
            return None
        history = tuple(_number(call.scalars[place]) for call in self._calls)
        if _is_constant(history):
            return self._literal(self._last.scalars[place])
        texts = self._by_history.get(history)
        if not texts:
            hint = (
                "" if not self._last.reachable.host else ": numbers of CPU tensors are not followed"
            )
            raise ChangesByItself(
                f"the number at {self._last.line_of(place)} changes from call to call, and follows "
                f"from no float argument, learning rate or step count{hint}"
            )
        self._conditions += [f"{texts[0]} == {other}" for other in texts[1:]]
        return texts[0]

    def _count(self, operand: Known | Computed) -> str:
        """Return the expression of a counter's new value."""
        text = self._named(operand)
        if text is None:
            raise ChangesByItself("a step count grows by a number that changes by itself")
        return text

    def _literal(self, value: Any) -> str:
        if isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
            return repr(value) if repr(value)[0] != "-" else f"({value!r})"
        name = f"v{len(self._constants)}"
        self._constants[name] = value
        return name


def _number(value: Any) -> Any:
    return (value.dtype, value.item()) if isinstance(value, torch.Tensor) else value


def _is_constant(history: tuple) -> bool:
    return all(repr(value) == repr(history[0]) for value in history)


def _varies(text: str | None) -> bool:
    """Return True if an expression may have another value the next time."""
    return text is not None and text[0] in "nt"


def _computed(name: str, texts: list[Any]) -> str:
    if name in ARITHMETIC or name in COMPARISONS:
        sign = ARITHMETIC.get(name) or COMPARISONS[name]
        return f"{texts[0]} {sign} {texts[1]}"
    return {"neg": "-{}", "pos": "+{}", "abs": "abs({})", "truth": "bool({})",
            "value": "repr({})", "product": "product({})"}[name].format(", ".join(texts))  # fmt: skip
