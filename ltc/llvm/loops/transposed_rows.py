"""Rows that lie apart in memory and whose results are to lie in order: they are turned first.

A few neighbouring rows at a time are copied to memory of the thread, in squares of vectors that are
turned in registers; then each is reduced and stored as any other row is.
"""

from __future__ import annotations

from math import prod

from ltc.ir.loop_nest import Value
from ltc.llvm.emit import memory_ops
from ltc.llvm.emit.builder import LANES
from ltc.llvm.emit.conversions import from_memory
from ltc.llvm.emit.dtype import FORMS, Form
from ltc.llvm.emit.index import Index, least
from ltc.llvm.emit.vectors import transposed
from ltc.llvm.loops.reductions import RowReductions

TURNED_BYTES = 5 << 18  # a second-level cache, and what of the next one is near
MOST_ROWS = 4 * LANES  # of a group: whole runs of cache lines from each element of the rows
UNITS = 16  # that a launch falls into, where there are enough rows
SQUARES_AHEAD = 2  # that memory is asked for


class TurnedRows(RowReductions):
    """Groups of rows whose elements side by side in memory belong to different rows."""

    def _loads_to_turn(self) -> list[Value]:
        """The loads of neighbouring rows that lie side by side, where all else is along rows."""
        last, row = len(self.space.extents) - 1, self.depth - 1
        if not self.reductions or self.depth != last or row < 0 or self.summed:
            return []
        if self.space.extents[row] < LANES or self.space.extents[last] < LANES:
            return []
        steps = {self.space.form(store.offset).coefficient(last) for store in self.kernel.stores}
        if 1 not in steps or not steps <= {0, 1}:
            return []
        apart = [
            value
            for value in self.order
            if value.kind == "load" and self.space.form(value.data[1]).coefficient(last) > 1
        ]
        beside = all(
            self.space.form(value.data[1]).coefficient(row) == 1 and not value.guards
            for value in apart
        )
        return apart if beside and self._rows_of_a_group(apart) else []

    def _rows_of_a_group(self, loads: list[Value]) -> int:
        """How many rows of all loads are turned together; 0 where no vector of them fits."""
        bytes = sum(FORMS[load.data[0].dtype].bytes for load in loads)
        fitting = TURNED_BYTES // max(1, bytes * self._pitch())
        enough = max(LANES, prod(self.space.extents[: self.depth]) // UNITS)
        return min(MOST_ROWS, fitting // LANES * LANES, enough // LANES * LANES)

    def _pitch(self) -> int:
        """Elements from one turned row to the next: a vector more, so that they spread in caches."""
        return (-(-self.space.extents[-1] // LANES) + 1) * LANES

    def _reserve_turned(self) -> None:
        for load in self.turned:
            size, stored = self.group * self._pitch(), FORMS[load.data[0].dtype].stored
            self.turned_at[load] = self.b.effect(f"alloca [{size} x {stored}], align 64")

    def _over_turned(self, group: Index) -> None:
        """Everything that a group of rows is for."""
        row = self.depth - 1
        first = group * self.group
        left = self.space.extents[row] - first
        for load in self.turned:
            self._turn(load, first, left)
        count = least(left, self.group)

        def one(i: Index, _) -> None:
            with self._scope():
                self.variables[row], self.turned_row = first + i, i
                self._hoist([store.value for store in self.kernel.stores])
                self._row()

        self.b.loop(0, count, 1, (), one)

    def _turn(self, load: Value, first: Index, left: Index) -> None:
        """Copies a group of rows from number `first` on, of which so many are left."""

        def squares(i: Index, _) -> None:
            for start in range(0, self.group, LANES):
                self._square(load, first, left, start, i)

        self.b.loop(0, self.space.extents[-1], LANES, (), squares)

    def _square(self, load: Value, first: Index, left: Index, start: int, i: Index) -> None:
        """The elements from i on of the rows from `start` on of a group."""
        form, extents, b = FORMS[load.data[0].dtype], self.space.extents, self.b
        mask = None
        if extents[self.depth - 1] % self.group:
            mask = self._first_lanes(left - start)
        lines = []
        for k in range(LANES):
            at = i + k
            if extents[-1] % LANES:  # what is beyond the row may be anything
                at = least(at, extents[-1] - 1)
            lines.append(self._line(load, first + start, at, mask))
        target = b.address(self.turned_at[load], i, form.stored)
        with b.lanes(LANES):
            for k, line in enumerate(transposed(b, lines, form.stored)):
                address = b.address(target, (start + k) * self._pitch(), form.stored)
                memory_ops.store(b, line, address, form.stored)

    def _line(self, load: Value, row: Index, at: Index, mask: str | None) -> str:
        """One element of a vector of rows, as it is stored."""
        node, offset = load.data
        form, offset = FORMS[node.dtype], self.space.form(offset)
        with self._scope():
            self.variables[self.depth - 1], self.variables[self.vector] = row, at
            with self.b.lanes(1):
                base = self._element(load, offset)
                address = self.b.address(self.pointer[node], base, form.stored)
            ahead = SQUARES_AHEAD * LANES * offset.coefficient(self.vector)
            self.b.prefetch(self.b.address(address, ahead, form.stored))
            with self.b.lanes(LANES):
                return memory_ops.load(self.b, address, form.stored, mask)

    def _load(self, value: Value, form: Form) -> str:
        if value not in self.turned_at:
            return super()._load(value, form)
        place = self.turned_row * self._pitch() + self.variables[self.vector]
        address = self.b.address(self.turned_at[value], place, form.stored)
        return from_memory(self.b, form, memory_ops.load(self.b, address, form.stored, self.mask))
