"""One `Call` run when it is made, though no kernel of ltc's could pass it on: mostly by its rule."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ltc.aten.call import Call, CallResult, Scalar
from ltc.aten.expansion import values_read_by
from ltc.backends.interpreter.by_rule import ByRule
from ltc.backends.interpreter.recorded_call import is_by_rule, run_by_kernel
from ltc.backends.plain_dispatch import PlainDispatch
from ltc.runtime.graph_compiler import compiled_call
from ltc.support.bounded_table import BoundedTable

_rules: BoundedTable[tuple, ByRule] = BoundedTable("CallsByRule", 4096)


class CallRun:
    """A call that has run, with the interface of a path's entry.

    Attributes:
        call: With the computed results.
        value: The first of them.
        link: The link that a view adds to its chain.
    """

    __slots__ = ("call", "value", "link")

    def __init__(self, call: Call) -> None:
        self.call, self.link = call, None
        self.value: Any = call.results[0] if call.results else None


def run(
    call: Call, numbers: Sequence[Any], device: int
) -> tuple[list[torch.Tensor | None], ByRule | None]:
    """Return the call's results, and the rule by which they were made, if they were.

    Its operands are computed, and are left as they are.

    Args:
        numbers: The values of its scalars, by their slots.
    """
    values = {one: one.tensor for one in values_read_by(call)}
    key = _key(call, {one: place for place, one in enumerate(values)})
    rule = _rules.get(key)
    with PlainDispatch():
        if rule is None:
            made = None if is_by_rule(call) else run_by_kernel(call, values, numbers)
            if made is not None:
                return made, None
            rule = ByRule(call, functools.partial(compiled_call, device=device))
            _rules.keep(key, rule)
        return rule.run(call, values, numbers), rule


def _key(call: Call, places: dict[CallResult, int]) -> tuple:
    """Return the key of a rule; `places` are those of the values that the call reads."""
    results = tuple([None if one is None else (one.shape, one.dtype) for one in call.results])
    arguments = _typed([*call.args, *call.kwargs.items()], places)
    return call.overload, arguments, results, call.default


def _typed(argument: Any, places: dict[CallResult, int]) -> Any:
    kind = argument.__class__
    if kind is list or kind is tuple:
        return kind, tuple([_typed(part, places) for part in argument])
    if kind is CallResult:
        return CallResult, places[argument], argument.shape, argument.dtype
    if kind is float:
        return kind, repr(argument)  # 0.0 and -0.0 are equal
    if kind is Scalar:
        return Scalar, argument.slot, argument.dtype, argument.wrapped, argument.origin
    return kind, argument
