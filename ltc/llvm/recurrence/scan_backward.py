"""All steps of one direction of a layer backwards: gradients of what its gates got from the input.

What reaches the states of a step lies in memory as it is computed.  A step makes the gradients of its
gates from it, and these times the weight are what reaches the states before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ltc.llvm.emit.builder import function_text
from ltc.llvm.emit.index import Index
from ltc.llvm.emit.isa import Isa
from ltc.llvm.emit.vectors import GeneratedKernel
from ltc.llvm.recurrence import cell_math
from ltc.llvm.recurrence.recurrent_shape import Recurrence
from ltc.llvm.recurrence.state_product import StateProduct
from ltc.llvm.recurrence.time_walk import TimeStep, TimeWalk
from ltc.llvm.recurrence.weight_panels import backward_panels


def scan_backward(name: str, r: Recurrence, isa: Isa, names: tuple[str, ...]) -> GeneratedKernel:
    """The kernel; results that are not among the `names` of its pointers are not stored."""
    scan = _BackwardScan(r, isa, names)
    scan.emit()
    text = function_text(name, len(names), scan.b, scan.numbers)
    return GeneratedKernel(name, text, names, 1, 0)


class _BackwardScan(TimeWalk):
    def __init__(self, r: Recurrence, isa: Isa, names: tuple[str, ...]):
        super().__init__(r, isa, names)
        self.panels = backward_panels(r, self.v)
        self.pitch = self.panels.pitch
        self.product = StateProduct(self.v, self.panels, r.columns)

    def emit(self) -> None:
        self._load_gradients()
        self.walk(True, self._step)
        self._store_gradients()

    def _states(self) -> list[tuple[str, str, str]]:
        """(gradient of the last state, the memory of the present one, that of the first state)"""
        hidden = ("last", "carried", "of_hidden")
        cell = ("last_cell", "cell_carried", "of_cell")
        return [hidden, cell] if self.r.cell == "lstm" else [hidden]

    def _load_gradients(self) -> None:
        def vector(last: str, memory: str, row: Index, column: Index, mask: str | None) -> None:
            x = self.v.load(self.pointer(last), row * self.r.width + column, mask)
            self.v.store_computed(x, self.pointer(memory), row * self.pitch + column)

        for last, memory, _ in self._states():
            self.each_vector(self.low, self.high, partial(vector, last, memory))

    def _store_gradients(self) -> None:
        def vector(memory: str, first: str, row: Index, column: Index, mask: str | None) -> None:
            x = self.v.load_computed(self.pointer(memory), row * self.pitch + column)
            self.v.store(x, self.pointer(first), row * self.r.width + column, mask)

        for _, memory, first in self._states():
            if self.has(first):
                self.each_vector(self.low, self.high, partial(vector, memory, first))

    # --- one step

    def _step(self, step: TimeStep) -> None:
        self.each_vector(self.low, step.end, partial(_CELLS[self.r.cell], self, step))
        self.b.loop(0, self.panels.groups, 1, [], lambda group, _: self._group(step, group))

    def _group(self, step: TimeStep, group: Index) -> None:
        v = self.v
        panel = v.at(self.pointer("panels"), group * self.panels.size, v.element)
        target = v.at(self.pointer("carried"), group * self.panels.columns, v.element)

        def finish(row: Index, rows: int, sums: list[str]) -> None:
            for k, value in enumerate(sums):
                r, j = divmod(k, self.panels.vectors)
                at = (row + r) * self.pitch + j * v.width
                if self.r.cell == "gru":  # some of it reaches the state before by itself
                    value = v.add(value, v.load_computed(target, at))
                v.store_computed(value, target, at)

        self.product.blocks(self.low, step.end, lambda row, count: self.product.block(
            self.pointer("through"), row, count, panel, finish
        ))  # fmt: skip

    # --- what a cell reads and leaves

    def _before(
        self, step: TimeStep, row: Index, column: Index, mask: str | None, names: tuple[str, str]
    ) -> str:
        """A row of a state as the step began with it; `names` of all later ones, and of the first."""
        b, v, width = self.b, self.v, self.r.width
        later = v.at(self.pointer(names[0]), (step.previous + row) * width)
        first = v.at(self.pointer(names[1]), row * width)
        is_later = b.value(f"icmp slt i64 {row}, {step.continued}")
        chosen = b.value(f"select i1 {is_later}, ptr {later}, ptr {first}")
        return v.load(chosen, column, mask)

    def _hidden_before(self, step: TimeStep, row: Index, column: Index, mask: str | None) -> str:
        before = self._before(step, row, column, mask, ("outputs", "hidden"))
        if self.has("before"):
            place = (step.start + row) * self.r.width + column
            self.v.store(before, self.pointer("before"), place, mask)
        return before

    def _of_hidden(self, step: TimeStep, row: Index, column: Index, mask: str | None) -> str:
        """What reaches the state that the step has made."""
        v = self.v
        given = v.load(self.pointer("gradient"), (step.start + row) * self.r.width + column, mask)
        return v.add(given, v.load_computed(self.pointer("carried"), row * self.pitch + column))

    def _gates(self, place: Index, column: Index, mask: str | None) -> list[str]:
        v, width = self.v, self.r.width
        at = place * (4 * width) + column
        return [v.load(self.pointer("gates"), at + k * width, mask) for k in range(4)]

    def _leave(
        self, name: str, values: list[str], place: Index, column: Index, mask: str | None
    ) -> None:
        """Store gradients of all gates as a result."""
        if self.has(name):
            for k, value in enumerate(values):
                at = place * self.r.columns + (column + k * self.r.width)
                self.v.store(value, self.pointer(name), at, mask)

    def _pass_through(self, values: list[str], row: Index, column: Index, mask: str | None) -> None:
        """What is to be multiplied by the weight; the columns of gates follow each other."""
        for k, value in enumerate(values):
            at = row * self.r.columns + (column + k * self.r.width)
            self.store_memory(value, self.pointer("through"), at, mask)

    # --- cells

    def lstm(self, step: TimeStep, row: Index, column: Index, mask: str | None) -> None:
        v, place, at = self.v, step.start + row, row * self.pitch + column
        cell = v.load(self.pointer("cells"), place * self.r.width + column, mask)
        made, of_cell = cell_math.lstm_gradient(
            v, self._gates(place, column, mask),
            self._before(step, row, column, mask, ("cells", "cell")), cell,
            self._of_hidden(step, row, column, mask),
            v.load_computed(self.pointer("cell_carried"), at),
        )  # fmt: skip
        v.store_computed(of_cell, self.pointer("cell_carried"), at)
        self._hidden_before(step, row, column, mask)
        self._leave("of_pre", made, place, column, mask)
        self._pass_through(made, row, column, mask)

    def gru(self, step: TimeStep, row: Index, column: Index, mask: str | None) -> None:
        place = step.start + row
        before = self._hidden_before(step, row, column, mask)
        of_pre, of_products, by_itself = cell_math.gru_gradient(
            self.v, self._gates(place, column, mask), before,
            self._of_hidden(step, row, column, mask),
        )  # fmt: skip
        self._leave("of_pre", of_pre, place, column, mask)
        self._leave("of_products", of_products, place, column, mask)
        self._pass_through(of_products, row, column, mask)
        self.v.store_computed(by_itself, self.pointer("carried"), row * self.pitch + column)

    def elman(self, step: TimeStep, row: Index, column: Index, mask: str | None) -> None:
        v, place = self.v, step.start + row
        output = v.load(self.pointer("outputs"), place * self.r.width + column, mask)
        slope = cell_math.elman_slope(v, self.r.cell, output)
        made = [v.mul(self._of_hidden(step, row, column, mask), slope)]
        self._hidden_before(step, row, column, mask)
        self._leave("of_pre", made, place, column, mask)
        self._pass_through(made, row, column, mask)


_CELLS: dict[str, Callable[..., None]] = {
    "lstm": _BackwardScan.lstm, "gru": _BackwardScan.gru, "tanh": _BackwardScan.elman,
    "relu": _BackwardScan.elman,
}  # fmt: skip
