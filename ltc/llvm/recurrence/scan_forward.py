"""All steps of one direction of a layer: each task has sequences of its own, and waits for nobody.

The hidden states that a step begins with lie in memory as they are computed.  A panel of the weight
has the columns of all gates that make the same numbers of the new states, so that a cell's formula
follows its sums at once; the new states go to the outputs, and over the old ones after the step.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ltc.llvm.emit.builder import function_text
from ltc.llvm.emit.index import Index
from ltc.llvm.emit.isa import Isa
from ltc.llvm.emit.vectors import GeneratedKernel, reserved
from ltc.llvm.recurrence import cell_math
from ltc.llvm.recurrence.recurrent_shape import Recurrence
from ltc.llvm.recurrence.state_product import StateProduct
from ltc.llvm.recurrence.time_walk import TimeStep, TimeWalk
from ltc.llvm.recurrence.weight_panels import forward_panels, mask_of


def scan_forward(name: str, r: Recurrence, isa: Isa, names: tuple[str, ...]) -> GeneratedKernel:
    """The kernel; results that are not among the `names` of its pointers are not stored."""
    scan = _ForwardScan(r, isa, names)
    scan.emit()
    text = function_text(name, len(names), scan.b, scan.numbers)
    return GeneratedKernel(name, text, names, 1, 0)


class _ForwardScan(TimeWalk):
    def __init__(self, r: Recurrence, isa: Isa, names: tuple[str, ...]):
        super().__init__(r, isa, names)
        self.panels = forward_panels(r, self.v)
        self.pitch = self.panels.pitch
        self.product = StateProduct(self.v, self.panels, self.pitch)
        size = self.product.height * self.panels.row
        self.sums = reserved(self.b, size, self.v.element)

    def emit(self) -> None:
        self._load_states()
        self.walk(False, self._step)
        self._store_states()

    def _states(self) -> list[tuple[str, str, str]]:
        """(first state, the memory of the present one, last state)"""
        hidden = ("hidden", "state", "last")
        cell = ("cell", "cell_state", "last_cell")
        return [hidden, cell] if self.r.cell == "lstm" else [hidden]

    def _load_states(self) -> None:
        def vector(first: str, memory: str, row: Index, column: Index, mask: str | None) -> None:
            x = self.v.load(self.pointer(first), row * self.r.width + column, mask)
            self.v.store_computed(x, self.pointer(memory), row * self.pitch + column)

        for first, memory, _ in self._states():
            self.each_vector(self.low, self.high, partial(vector, first, memory))

    def _store_states(self) -> None:
        def vector(memory: str, last: str, row: Index, column: Index, mask: str | None) -> None:
            x = self.v.load_computed(self.pointer(memory), row * self.pitch + column)
            self.v.store(x, self.pointer(last), row * self.r.width + column, mask)

        for _, memory, last in self._states():
            if self.has(last):
                self.each_vector(self.low, self.high, partial(vector, memory, last))

    # --- one step

    def _step(self, step: TimeStep) -> None:
        self.b.loop(0, self.panels.groups, 1, [], lambda group, _: self._group(step, group))

        def new_state(row: Index, column: Index, mask: str | None) -> None:
            at = (step.start + row) * self.r.width + column
            x = self.v.load(self.pointer("outputs"), at, mask)
            self.v.store_computed(x, self.pointer("state"), row * self.pitch + column)

        self.each_vector(self.low, step.end, new_state)

    def _group(self, step: TimeStep, group: Index) -> None:
        v = self.v
        panel = v.at(self.pointer("panels"), group * self.panels.size, v.element)
        columns = [group * self.panels.columns + j * v.width for j in range(self.panels.vectors)]

        def block(row: Index, count: Index) -> None:
            self.product.block(self.pointer("state"), row, count, panel, partial(self._keep, row))
            # A loop: a cell's formula is long, and its text is needed once.
            self.b.loop(0, count, 1, [], lambda number, _: self._row(step, row, number, columns))

        self.product.blocks(self.low, step.end, block)

    def _keep(self, first: Index, row: Index, rows: int, sums: list[str]) -> None:
        place = (row - first) * self.panels.row
        for k, value in enumerate(sums):
            self.v.store_computed(value, self.sums, place + k * self.v.width)

    def _row(self, step: TimeStep, first: Index, number: Index, columns: list[Index]) -> None:
        """What the cells of one row do at the columns of a group."""
        v, panels = self.v, self.panels
        for j, column in enumerate(columns):
            mask = mask_of(v, panels, column)
            products = [
                v.load_computed(self.sums, number * panels.row + (g * panels.vectors + j) * v.width)
                for g in range(self.r.gates)
            ]
            _CELLS[self.r.cell](self, step, first + number, column, mask, products)

    # --- cells

    def given(self, place: Index, column: Index, mask: str | None) -> list[str]:
        """What the gates of a row get from the input."""
        at = place * self.r.columns + column
        starts = [at + g * self.r.width for g in range(self.r.gates)]
        return [self.v.load(self.pointer("pre"), start, mask) for start in starts]

    def store_gates(self, gates: list[str], place: Index, column: Index, mask: str | None) -> None:
        if self.has("gates"):
            for k, gate in enumerate(gates):
                at = place * (len(gates) * self.r.width) + (column + k * self.r.width)
                self.v.store(gate, self.pointer("gates"), at, mask)

    def store_row(self, x: str, name: str, place: Index, column: Index, mask: str | None) -> None:
        if self.has(name):
            self.v.store(x, self.pointer(name), place * self.r.width + column, mask)

    def lstm(
        self, step: TimeStep, row: Index, column: Index, mask: str | None, products: list[str]
    ) -> None:
        v, place, at = self.v, step.start + row, row * self.pitch + column
        sums = [v.add(x, y) for x, y in zip(self.given(place, column, mask), products)]
        before = v.load_computed(self.pointer("cell_state"), at)
        hidden, cell, gates = cell_math.lstm(v, sums, before)
        v.store_computed(cell, self.pointer("cell_state"), at)
        self.store_row(hidden, "outputs", place, column, mask)
        self.store_row(cell, "cells", place, column, mask)
        self.store_gates(gates, place, column, mask)

    def gru(
        self, step: TimeStep, row: Index, column: Index, mask: str | None, products: list[str]
    ) -> None:
        v, place = self.v, step.start + row
        before = v.load_computed(self.pointer("state"), row * self.pitch + column)
        bias = v.load(self.pointer("bias"), column, mask)
        given = self.given(place, column, mask)
        hidden, gates = cell_math.gru(v, given, products, bias, before)
        self.store_row(hidden, "outputs", place, column, mask)
        self.store_gates(gates, place, column, mask)

    def elman(
        self, step: TimeStep, row: Index, column: Index, mask: str | None, products: list[str]
    ) -> None:
        v, place = self.v, step.start + row
        function = cell_math.tanh if self.r.cell == "tanh" else cell_math.relu
        hidden = function(v, v.add(self.given(place, column, mask)[0], products[0]))
        self.store_row(hidden, "outputs", place, column, mask)


_CELLS: dict[str, Callable[..., None]] = {
    "lstm": _ForwardScan.lstm, "gru": _ForwardScan.gru, "tanh": _ForwardScan.elman, "relu": _ForwardScan.elman,
}  # fmt: skip
