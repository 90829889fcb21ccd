"""The table of rules, by overload."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ltc.aten.schema import schema_of

RULES: dict[str, Rule] = {}
SKIPPED: list[str] = []  # overloads that have a rule here and do not exist in this torch


class Rule:
    """The rule by which one overload becomes nodes.

    Args:
        function: The formula; besides the overload's arguments it may name `results` (the recorded
            TensorTypes) and `seed` (the node of a random overload's seed).
        static: Arguments whose values change the formula: name -> those values, or None for all.
        moves: The formula only moves elements, so it holds for every dtype, complex ones included.
        alike: Operands that the formula takes to be of one shape, as torch's callers make them.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        static: dict[str, Any],
        moves: bool,
        alike: tuple[str, ...] = (),
    ) -> None:
        self.function, self.static, self.moves, self.alike = function, static, moves, alike

    @functools.cached_property
    def _names(self) -> list[str]:
        """The formula's arguments: asked of Python at the first use, as few rules are ever used."""
        return list(inspect.signature(self.function).parameters)

    @functools.cached_property
    def takes_results(self) -> bool:
        return "results" in self._names

    @functools.cached_property
    def takes_seed(self) -> bool:
        return "seed" in self._names

    @functools.cached_property
    def _alike(self) -> list[tuple[int, str]]:
        return [(self._names.index(name), name) for name in self.alike]

    def fits(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        """Return True if the operands that must be of one shape are."""
        given = [args[i] if i < len(args) else kwargs.get(name) for i, name in self._alike]
        shapes = [tuple(operand.shape) for operand in given if operand is not None]
        return all(shape == shapes[0] for shape in shapes[1:])

    @property
    def place(self) -> str:
        code = self.function.__code__
        return f"{code.co_filename}:{code.co_firstlineno}"


def traces(
    *overloads: str,
    static: Mapping[str, Iterable[Any] | None] | None = None,
    moves: bool = False,
    alike: tuple[str, ...] = (),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes the function below it the rule of these overloads ("aten::add.Tensor").

    A rule gives one node, or a tuple of nodes in the order of the call's results; a nested tuple
    is flattened. NotImplemented or None means: not for these operands, let torch's kernel do it.
    So does an operand that is not as `alike` as the rule takes it to be.
    An overload's in-place and out forms use its rule too.
    """
    values = {name: None if v is None else frozenset(v) for name, v in (static or {}).items()}

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for overload in overloads:
            _add(overload, Rule(function, values, moves, alike))
        return function

    return register


def _add(overload: str, rule: Rule) -> None:
    if overload in RULES:
        raise ValueError(
            f"{overload} has two rules: {RULES[overload].place} and {rule.place}. Remove one."
        )
    if schema_of(overload) is None and not overload.startswith("ltc::"):
        SKIPPED.append(overload)
        return
    RULES[overload] = rule


# --- in-place and out forms ----------------------------------------------------------------------


@functools.cache
def rule_of(overload: str) -> Rule | None:
    """The overload's own rule, or that of the functional overload that it is a form of."""
    if overload in RULES:
        return RULES[overload]
    functional = functional_form(overload)
    return None if functional is None else RULES.get(functional)


@functools.cache
def functional_form(overload: str) -> str | None:
    """ "aten::add.Tensor" for "aten::add_.Tensor" and "aten::add.out": the same but for writing."""
    schema = schema_of(overload)
    if schema is None or not any(a.alias_info and a.alias_info.is_write for a in schema.arguments):
        return None
    namespace, _, base = schema.name.partition("::")
    inplace = base.endswith("_") and not base.endswith("__")
    base = base[:-1] if inplace else base
    wanted = _signature(schema)
    packet = getattr(getattr(torch.ops, namespace), base, None)
    for variant in packet.overloads() if packet is not None else ():
        name = f"{namespace}::{base}" + ("" if variant == "default" else f".{variant}")
        candidate = schema_of(name)
        writes = any(a.alias_info and a.alias_info.is_write for a in candidate.arguments)
        if name in RULES and not writes and _signature(candidate) == wanted:
            return name
    return None


def _signature(schema: Any) -> tuple[tuple[str, str], ...]:
    """Names and types of the arguments that are not written to only."""
    left_out = {"dtype", "layout", "device", "pin_memory", "memory_format"}
    return tuple(
        (a.name, str(a.type)) for a in schema.arguments if not a.is_out and a.name not in left_out
    )


@functools.cache
def static_arguments(overload: str) -> dict[str, frozenset[Any] | None]:
    """Scalar arguments whose value is part of the graph: name -> those values, None for all."""
    rule = rule_of(overload)
    found = dict(rule.static) if rule is not None else {}
    found.update(SHAPE_ARGUMENTS.get(overload.partition(".")[0].removesuffix("_"), {}))
    return found


# Numbers that an overload's result shape, or its number of results, depends on: rule or no rule.
SHAPE_ARGUMENTS = {
    "aten::arange": {"start": None, "end": None, "step": None},
    "aten::range": {"start": None, "end": None, "step": None},
    "aten::linspace": {"start": None, "end": None},
    "aten::logspace": {"start": None, "end": None, "base": None},
}


__all__ = ["RULES", "SKIPPED", "rule_of", "static_arguments", "traces"]
