"""Types of the results of a recurrence and of its gradient."""

from __future__ import annotations

from typing import Any

from ltc.device.shapes.formulas.operands import FLOATS, of_one_dtype, type_of
from ltc.device.shapes.formulas.table import Types, types_of


def _rows(x: Any, hidden: Any, gates: int) -> tuple[tuple[int, ...], Any]:
    """The type of what has `gates` numbers for each of the state, in each row of `x`."""
    return (x.shape[0], gates * hidden.shape[1]), hidden.dtype


@types_of("ltc::recurrence.lstm")
def _lstm(pre: Any, weight: Any, hidden: Any, cell: Any, *rest: Any) -> Types | None:
    if not of_one_dtype(FLOATS, pre, weight, hidden, cell):
        return None
    state, rows = type_of(hidden), _rows(pre, hidden, 1)
    return rows, state, state, _rows(pre, hidden, 4), rows


@types_of("ltc::recurrence.gru")
def _gru(pre: Any, weight: Any, hidden: Any, bias: Any, *rest: Any) -> Types | None:
    if not of_one_dtype(FLOATS, pre, weight, hidden, bias):
        return None
    return _rows(pre, hidden, 1), type_of(hidden), _rows(pre, hidden, 4)


@types_of("ltc::recurrence.elman")
def _elman(pre: Any, weight: Any, hidden: Any, *rest: Any) -> Types | None:
    if not of_one_dtype(FLOATS, pre, weight, hidden):
        return None
    return _rows(pre, hidden, 1), type_of(hidden)


@types_of("ltc::recurrence_gradient.lstm")
def _lstm_gradient(gradient: Any, last: Any, weight: Any, hidden: Any, *rest: Any) -> Types | None:
    state = type_of(hidden)
    return _rows(gradient, hidden, 4), state, _rows(gradient, hidden, 1), state


@types_of("ltc::recurrence_gradient.gru")
def _gru_gradient(gradient: Any, last: Any, weight: Any, hidden: Any, *rest: Any) -> Types | None:
    gates = _rows(gradient, hidden, 3)
    return gates, type_of(hidden), _rows(gradient, hidden, 1), gates


@types_of("ltc::recurrence_gradient.elman")
def _elman_gradient(gradient: Any, last: Any, weight: Any, hidden: Any, *rest: Any) -> Types | None:
    rows = _rows(gradient, hidden, 1)
    return rows, type_of(hidden), rows
