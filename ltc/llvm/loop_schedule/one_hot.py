"""Elements of a row that are chosen by their place: where(position == index, term, 0).

A cross entropy picks one of each row, and so does its gradient.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ltc.ir import ops
from ltc.ir.loop_nest import Affine, Value
from ltc.llvm.loop_schedule.iteration_space import Nest

ZEROS = ("0", "0.0")
Needs = Mapping[Value, frozenset[int]]


def one_hot_sums(nest: Nest, vector: int, needs: Needs) -> dict[Value, tuple[Value, Value]]:
    """For each sum over the vector variable that has one term: its index and its term."""
    if nest.inner != [vector]:
        return {}
    found = {value: _single_term(nest, vector, needs, value) for value in nest.reductions}
    return {value: pair for value, pair in found.items() if pair is not None}


def _single_term(nest: Nest, vector: int, needs: Needs, value: Value) -> tuple[Value, Value] | None:
    (chosen,) = value.operands
    if value.op is not ops.SUM or chosen.kind != "cell" or chosen.op is not ops.WHERE:
        return None
    condition, term, other = chosen.operands
    is_zero = other.kind == "constant" and other.data in ZEROS
    index = index_compared(nest, vector, needs, condition) if is_zero else None
    return None if index is None else (index, term)


def index_compared(nest: Nest, vector: int, needs: Needs, value: Value) -> Value | None:
    """The index of a row that a comparison finds equal to the position in it."""
    if value.kind != "cell" or value.op is not ops.EQ:
        return None
    for position, index in (value.operands, value.operands[::-1]):
        is_of_row = vector not in needs[index] and index.dtype == torch.int64
        if is_of_row and _is_place_in_row(nest, vector, position):
            return index
    return None


def _is_place_in_row(nest: Nest, vector: int, value: Value) -> bool:
    is_position = value.kind == "position"
    return is_position and nest.space.form(value.data) == Affine(0, ((vector, 1),))
