"""Which formula tells the types of which overload's results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ltc.aten.call import CallResult
from ltc.device.shapes.formulas.operands import Type, type_of

Types = tuple[Type | None, ...]
Formula = Callable[..., Types | None]

MOST_DIMS = 64  # some of PyTorch's kernels refuse more, in their own words

FORMULAS: dict[str, Formula] = {}
_of_overload: dict[Any, Formula | None] = {}


def types_of(*overloads: str) -> Callable[[Formula], Formula]:
    """Makes the function below it the formula of these overloads ("aten::add.Tensor").

    A formula gets the arguments that the overload gets, with values and Scalars in place of tensors
    and numbers.  It answers only where PyTorch's kernel accepts the call, and warns of nothing; for
    all else it gives None.
    """

    def register(formula: Formula) -> Formula:
        add(formula, *overloads)
        return formula

    return register


def add(formula: Formula, *overloads: str) -> None:
    """Let it be the formula of these overloads."""
    FORMULAS.update(dict.fromkeys(overloads, formula))


def in_place(formula: Formula) -> Formula:
    """The formula of the form that writes its result, cast, over its first argument."""

    def written(x: Any, *args: Any, **kwargs: Any) -> Types | None:
        found = formula(x, *args, **kwargs)
        if found is None or found[0] is None:
            return None
        shape, dtype = found[0]
        if shape != x.shape or (dtype is not x.dtype and not torch.can_cast(dtype, x.dtype)):
            return None
        return (type_of(x),)

    return written


def types_by_formula(overload: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Types | None:
    """Types of the results, in the order of `Call.results`; None where no formula is certain."""
    try:
        formula = _of_overload[overload]
    except KeyError:
        formula = _of_overload[overload] = FORMULAS.get(overload.name())
    if formula is None or any(
        [x.__class__ is CallResult and len(x.shape) > MOST_DIMS for x in args]
    ):
        return None
    try:
        return formula(*args, **kwargs)
    except AttributeError:  # a number, or a 0-dim CPU tensor, where the formula reads a shape
        return None
