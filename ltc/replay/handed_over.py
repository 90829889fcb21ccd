"""Which of a program's numbers follow from a learning rate, a step count or an argument, and how.

Several calls along one path are compared.  A number that was always the same is a constant.  One
that has changed has to be what one known number, or what was computed from known ones, was each
time: then it is computed so.  Known numbers that never changed are part of the guard.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ltc.replay.counters import product_of
from ltc.replay.observation import Multiplied, Observation, alike_growth
from ltc.replay.traced_float import ARITHMETIC, COMPARISONS, Computed, Known

_NEAR = (1, -1, 2)  # an optimizer's step is counted before it is used, or after


class ChangesByItself(Exception):
    """A number changes from call to call, and nothing that is known explains it."""


class HandedOver:
    """How the numbers of a path are found for the next call.

    slots       the expression of each of the recording's numbers; None where it is a seed
    conditions  expressions that are true as long as these hold
    lines       assignments that come before
    constants   what they name
    growth      what a call adds to each counter; None where it is multiplied
    products    the expression of what each of those becomes
    """

    def __init__(self, calls: Sequence[Observation]) -> None:
        """`calls`: at least two, alike."""
        self._calls, self._last = calls, calls[-1]
        self.conditions: list[str] = []
        self.lines: list[str] = []
        self.constants: dict[str, Any] = {}
        self._texts: dict[tuple, str] = {}  # of computed numbers, by what they are computed from
        self._known = self._name_known()
        self._near = self._name_near()
        self._by_history: dict[tuple, list[str]] = {}
        for text, history in self._near:
            self._by_history.setdefault(history, []).append(text)
        self._operations: list[str | None] = []
        grown = alike_growth(calls)
        self.growth = [None if isinstance(by, Multiplied) else by for by in grown]
        products: dict[int, str] = {}
        for place in range(len(self._last.operations)):
            self._operations.append(self._operation(place))
            for counter, by in enumerate(grown):
                if by == Multiplied(place):
                    products[counter] = self._product(counter, place)
        self.products = [products[counter] for counter in sorted(products)]
        self._add_decisions()
        self.slots = [self._slot(place) for place in range(len(self._last.scalars))]

    # --- known numbers

    def _name_known(self) -> list[str]:
        """The expression of each: the literal of one that is part of the guard."""
        texts: list[str] = []
        first: dict[tuple, str] = {}
        for place, value in enumerate(self._last.numbers):
            history = tuple(call.numbers[place] for call in self._calls)
            expression = self._expression(place)
            if _is_constant(history):
                texts.append(self._literal(value))
                self.conditions.append(f"{expression} == {texts[-1]}")
                if value == 0:  # equal to the zero of the other sign
                    self.conditions.append(f"repr({expression}) == {repr(value)!r}")
            elif history in first:
                texts.append(first[history])
                self.conditions.append(f"{expression} == {texts[-1]}")
            else:
                texts.append(f"n{place}")
                first[history] = texts[-1]
                self.lines.append(f"n{place} = {expression}")
        return texts

    def _expression(self, place: int) -> str:
        """What finds a known number: first those of the call, then the counters."""
        numbers = self._last.reachable.numbers
        if place < len(numbers):
            return numbers[place].expression
        return f"counts[{place - len(numbers)}]"

    def _name_near(self) -> list[tuple[str, tuple]]:
        """(expression, history) of what a changing number may be: itself, a step on, twice that."""
        found: dict[str, tuple] = {}
        for place, text in enumerate(self._known):
            history = tuple(call.numbers[place] for call in self._calls)
            if not _is_constant(history):
                found.setdefault(text, history)
        for text, history in list(found.items()):
            for step in _NEAR:
                found[f"({text} + {step})"] = tuple(value + step for value in history)
        for text, history in list(found.items()):
            found[f"(2 * {text})"] = tuple(2 * value for value in history)
        return list(found.items())

    # --- what was computed from them

    def _operation(self, place: int) -> str | None:
        """The expression of an operation's result; None where it cannot be computed again."""
        name, operands, result = self._last.operations[place]
        texts = [self._operand(place, position) for position in range(len(operands))]
        if None in texts:
            return None
        known = [text for text in texts if text is not None]
        history = tuple(call.operations[place].result for call in self._calls)
        if _is_constant(history) and not any(map(_varies, known)):
            return self._literal(result)
        key = (name, *texts)
        if key not in self._texts:
            self._texts[key] = f"t{len(self._texts)}"
            self.lines.append(f"{self._texts[key]} = {_computed(name, texts)}")
        return self._texts[key]

    def _operand(self, place: int, position: int) -> str | None:
        operand = self._last.operations[place].operands[position]
        if isinstance(operand, Known):
            return self._known[operand.place]
        if isinstance(operand, Computed):
            return self._operations[operand.place]
        history = tuple(call.operations[place].operands[position] for call in self._calls)
        if _is_constant(history):
            return self._literal(operand)
        return next((text for text, others in self._near if others == history), None)

    def _add_decisions(self) -> None:
        """What the function decided by a number has to come out as it did."""
        for text, operation in zip(self._operations, self._last.operations):
            if operation.result.__class__ is float:
                continue
            if text is None:
                raise ChangesByItself("a number that decides what is done changes by itself")
            if _varies(text):
                self.conditions.append(f"{text} == {operation.result!r}")

    def _product(self, counter: int, place: int) -> str:
        """The expression of a counter that an operation's result has multiplied."""
        factor = self._operations[place]
        if factor is None:
            raise ChangesByItself("a step count is multiplied by a number that changes by itself")
        before = self._known[len(self._last.reachable.numbers) + counter]
        dtype = self._last.reachable.counters[counter].tensor.dtype
        expression = product_of(dtype, before, factor)
        key = ("product", expression)
        if key not in self._texts:
            text = self._texts[key] = f"t{len(self._texts)}"
            self.lines.append(f"{text} = {expression}")
            history = tuple(call.counts[counter] for call in self._calls)
            self._near += [(text, history), (f"(1 - {text})", tuple(1 - x for x in history))]
        return self._texts[key]

    # --- the program's numbers

    def _slot(self, place: int) -> str | None:
        if place in self._last.seeds:
            return None
        value = self._last.scalars[place]
        history = tuple(_number(call.scalars[place]) for call in self._calls)
        if _is_constant(history):
            return self._literal(value)
        texts = list(self._by_history.get(history, ()))
        for operation, text in enumerate(self._operations):
            if text is not None and text not in texts:
                if history == tuple(c.operations[operation].result for c in self._calls):
                    texts.append(text)
        if not texts:
            hint = (
                "" if not self._last.reachable.host else ": numbers of CPU tensors are not followed"
            )
            raise ChangesByItself(
                f"the number at {self._last.line_of(place)} changes from call to call, and follows "
                f"from no float argument, learning rate or step count{hint}"
            )
        self.conditions += [f"{texts[0]} == {other}" for other in texts[1:]]
        return texts[0]

    def _literal(self, value: Any) -> str:
        if isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
            return repr(value) if repr(value)[0] != "-" else f"({value!r})"
        name = f"v{len(self.constants)}"
        self.constants[name] = value
        return name


def _number(value: Any) -> Any:
    return (value.dtype, value.item()) if isinstance(value, torch.Tensor) else value


def _is_constant(history: tuple) -> bool:
    return all(repr(value) == repr(history[0]) for value in history)


def _varies(text: str) -> bool:
    """Whether an expression is of something that may be another number the next time."""
    return text[0] in "nt" or text.startswith(("(n", "(2 * ", "(1 - "))


def _computed(name: str, texts: list[Any]) -> str:
    if name in ARITHMETIC or name in COMPARISONS:
        sign = ARITHMETIC.get(name) or COMPARISONS[name]
        return f"{texts[0]} {sign} {texts[1]}"
    return {"neg": "-{}", "pos": "+{}", "abs": "abs({})", "truth": "bool({})", "value": "repr({})"}[
        name
    ].format(f"({texts[0]})")
