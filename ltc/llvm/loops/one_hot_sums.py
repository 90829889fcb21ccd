"""Elements of a row that are chosen by their place: where(position == index, term, 0).

A cross entropy picks one of each row, and so does its gradient. The sum of such a row is the one
term, and whether a vector holds the place is asked of small numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ltc.ir import ops
from ltc.ir.loop_nest import Affine, Value
from ltc.llvm.emit.builder import multiples
from ltc.llvm.emit.dtype import FORMS
from ltc.llvm.emit.index import Index
from ltc.llvm.loops import reduction_ops
from ltc.llvm.loops.nests import Nests

ZEROS = ("0", "0.0")
MOST_PLACES = 1 << 30  # of a row: their differences are 32-bit numbers


class SingleTerms(Nests):
    """Sums of where(position == index, term, 0), an index for each row."""

    def _single_terms(self) -> dict[Value, tuple[Value, Value]]:
        """For each such sum over the vector variable: its index and its term."""
        inner = list(range(self.depth, len(self.space.extents)))
        if inner != [self.vector] or self.turned:
            return {}
        found = {value: self._single_term(value) for value in self.reductions}
        return {value: pair for value, pair in found.items() if pair is not None}

    def _single_term(self, value: Value) -> tuple[Value, Value] | None:
        (chosen,) = value.operands
        if value.op is not ops.SUM or chosen.kind != "cell" or chosen.op is not ops.WHERE:
            return None
        condition, term, other = chosen.operands
        is_zero = other.kind == "constant" and other.data in ZEROS
        index = self._place_asked_for(condition) if is_zero else None
        return None if index is None else (index, term)

    def _place_asked_for(self, value: Value) -> Value | None:
        """The number of a row that a comparison finds equal to the position in it."""
        if value.kind != "cell" or value.op is not ops.EQ:
            return None
        for position, index in (value.operands, value.operands[::-1]):
            is_of_row = self.vector not in self.needs[index] and index.dtype == torch.int64
            if is_of_row and self._is_place_in_row(position):
                return index
        return None

    def _is_place_in_row(self, value: Value) -> bool:
        is_position = value.kind == "position"
        return is_position and self.space.form(value.data) == Affine(0, ((self.vector, 1),))

    def _made(self, value: Value, width: int) -> str:
        asked = self._place_asked_for(value) if width > 1 and self._has_few_places() else None
        if asked is None:
            return super()._made(value, width)
        with self.b.lanes(1):
            place, extent = self.lanes_of(asked, 1), self.extent(self.vector)
            inside = self.b.value(f"icmp ult i64 {place}, {extent}")
            lane = self.b.where(inside, place, -1) - self.variables[self.vector]
            lane = self.b.value(f"trunc i64 {lane} to i32")
        return self.b.compare("eq", "i32", multiples(width), self.b.splat("i32", lane))

    def _has_few_places(self) -> bool:
        is_open = self.vector in self.open  # the text is for rows of any length then
        return not is_open and self.space.extents[self.vector] <= MOST_PLACES

    def _take_term(self, value: Value) -> None:
        """The term at the index, and zero where no element of the row has it."""
        index, term = self.single[value]
        form, b = FORMS[value.dtype], self.b
        with b.lanes(1):
            at = b.index(self.lanes_of(index, 1))
            inside = b.value(f"icmp ult i64 {at}, {self.extent(self.vector)}")
            zero = b.constant(form.computed, 0)

            def taken() -> list[str]:
                with self._at_one_point(at):  # adding a zero, as the sum does: -0.0 is 0.0 then
                    one = self.lanes_of(term, 1)
                    return [reduction_ops.combine(b, value.op, form, one, zero)]

            (total,) = b.when(inside, [(b.of(form.computed), zero)], taken)
            self.known[-1][value] = reduction_ops.finished(b, form, total)

    @contextmanager
    def _at_one_point(self, place: Index) -> Iterator[None]:
        """Values made inside are those of one element of the row, scalars all."""
        before = self.is_vector, self.row_of
        with self._scope():
            self.variables[self.vector] = place
            self.is_vector = dict.fromkeys(self.is_vector, False)
            self.row_of = {v: row for v, row in self.row_of.items() if v in self.row_is_there}
            yield
        self.is_vector, self.row_of = before
