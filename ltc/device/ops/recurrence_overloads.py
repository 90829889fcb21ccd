"""The overloads of namespace ltc that record a recurrence: schemas, result types, CPU formulas.

The rules of aten/nn/recurrent.py say what they compute.  `sizes` has for each step how many
sequences it has, and is empty where each step has all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ltc.backends.reference import recurrence as formulas
from ltc.device.recording.fast_path import lazily_built
from ltc.native.core import CORE, KERNEL_KEY

CALLS_OF_A_STEP = 5  # that the shortest formula makes for it: they take time, which a program saves
_GIVEN = "Tensor pre, Tensor weight, Tensor hidden"
_OF_RESULTS = "Tensor gradient, Tensor last, Tensor weight, Tensor hidden, Tensor outputs"
_ORDER = "int[] sizes, bool reverse"
SCHEMAS = (
    f"recurrence.lstm({_GIVEN}, Tensor cell, {_ORDER}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    f"recurrence.gru({_GIVEN}, Tensor bias, {_ORDER}) -> (Tensor, Tensor, Tensor)",
    f"recurrence.elman({_GIVEN}, str function, {_ORDER}) -> (Tensor, Tensor)",
    f"recurrence_gradient.lstm({_OF_RESULTS}, Tensor last_cell, Tensor cell, Tensor gates,"
    f" Tensor cells, {_ORDER}) -> (Tensor, Tensor, Tensor, Tensor)",
    f"recurrence_gradient.gru({_OF_RESULTS}, Tensor gates, {_ORDER})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    f"recurrence_gradient.elman({_OF_RESULTS}, str function, {_ORDER}) -> (Tensor, Tensor, Tensor)",
)


def all_sizes(rows: int, batch: int, sizes: Sequence[int]) -> Sequence[int]:
    """Return how many sequences each step has."""
    return sizes or [batch] * (rows // batch)


def _formula(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function as an overload: the hidden state is the last of three, or the fourth of
    five.
    """

    def computed(*operands: Any) -> Any:
        *others, sizes, reverse = operands
        state = others[3] if function in _GRADIENTS else others[2]
        whole = all_sizes(others[0].shape[0], state.shape[0], sizes)
        if CORE is not None:
            CORE.lengthen(CALLS_OF_A_STEP * len(whole))
        return tuple(x.clone() if x is state else x for x in function(*others, whole, reverse))

    return computed


_GRADIENTS = frozenset({formulas.lstm_gradient, formulas.gru_gradient, formulas.elman_gradient})


def _like(x: torch.Tensor, state: torch.Tensor, gates: int) -> torch.Tensor:
    return state.new_empty((x.shape[0], gates * state.shape[1]))


def _types_of_lstm(pre: torch.Tensor, weight: torch.Tensor, hidden: torch.Tensor, *rest: Any):
    rows, gates, cells = (_like(pre, hidden, n) for n in (1, 4, 1))
    return rows, torch.empty_like(hidden), torch.empty_like(hidden), gates, cells


def _types_of_gru(pre: torch.Tensor, weight: torch.Tensor, hidden: torch.Tensor, *rest: Any):
    return _like(pre, hidden, 1), torch.empty_like(hidden), _like(pre, hidden, 4)


def _types_of_elman(pre: torch.Tensor, weight: torch.Tensor, hidden: torch.Tensor, *rest: Any):
    return _like(pre, hidden, 1), torch.empty_like(hidden)


def _types_of_gradient(gates: int, *further: int):
    """Return the types of a gradient's results: of `pre`, of the state, the states before, and
    more.

    For each 0 in `further` a gradient of the state, else one of so many gates.
    """

    def types(gradient: Any, last: Any, weight: Any, hidden: torch.Tensor, *rest: Any):
        more = [_like(gradient, hidden, n) if n else torch.empty_like(hidden) for n in further]
        rows = _like(gradient, hidden, gates), _like(gradient, hidden, 1)
        return rows[0], torch.empty_like(hidden), rows[1], *more

    return types


# name -> (result types, formula)
OVERLOADS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "recurrence.lstm": (_types_of_lstm, formulas.lstm),
    "recurrence.gru": (_types_of_gru, formulas.gru),
    "recurrence.elman": (_types_of_elman, formulas.elman),
    "recurrence_gradient.lstm": (_types_of_gradient(4, 0), formulas.lstm_gradient),
    "recurrence_gradient.gru": (_types_of_gradient(3, 3), formulas.gru_gradient),
    "recurrence_gradient.elman": (_types_of_gradient(1), formulas.elman_gradient),
}


# overload -> the kernel that records it
RECORDED = {name: lazily_built(f"ltc::{name}") for name in OVERLOADS}


def define(library: torch.library.Library) -> None:
    """Define the overloads, each with a kernel that records it."""
    for schema in SCHEMAS:
        library.define(schema)
    for name, (types, formula) in OVERLOADS.items():
        library.impl(name, types, "Meta")
        library.impl(name, _formula(formula), "CPU")
        library.impl(name, RECORDED[name], KERNEL_KEY)
