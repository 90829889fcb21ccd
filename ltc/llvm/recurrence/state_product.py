"""Rows of numbers in memory times a panel: sums of some rows stay in registers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ltc.llvm.emit.index import Index, least
from ltc.llvm.emit.vectors import Vectors, add_in_pieces, reserved
from ltc.llvm.recurrence.weight_panels import Panels

MOST_ROWS = 8  # summed at once
OTHER_REGISTERS = 2  # a number of the left operand, and what the compiler needs

# (first row, how many of them, their sums, row after row)
Finish = Callable[[Index, int, list[str]], None]


class StateProduct:
    """Adds up rows times panels.

    pitch  numbers from one row of the left operand to the next, as they are computed
    """

    def __init__(self, v: Vectors, panels: Panels, pitch: int):
        self.v, self.b, self.panels, self.pitch = v, v.builder, panels, pitch
        self.vectors = panels.gates * panels.vectors
        free = v.isa.registers - self.vectors - OTHER_REGISTERS
        self.height = max(1, min(MOST_ROWS, free // self.vectors))
        self.memory = reserved(v.builder, self.height * panels.row, v.element)

    def block(self, left: str, row: Index, count: Index, panel: str, finish: Finish) -> None:
        """finish(...) for up to `height` rows from `row` on: all, or by powers of two."""
        b = self.b
        is_whole = b.value(f"icmp eq i64 {count}, {self.height}")
        b.when(is_whole, [], partial(self._rows, left, row, self.height, panel, finish))
        rest = b.where(is_whole, 0, count)
        rows = 1 << (self.height - 1).bit_length() - 1 if self.height > 1 else 0
        while rows:
            wanted = b.value(f"icmp ne i64 {b.value(f'and i64 {rest}, {rows}')}, 0")
            before = b.index(b.value(f"and i64 {rest}, {-2 * rows}"))
            b.when(wanted, [], partial(self._rows, left, row + before, rows, panel, finish))
            rows //= 2

    def blocks(self, low: Index, high: Index, body: Callable[[Index, Index], None]) -> None:
        """body(first row, count) for blocks of the rows from `low` up to `high`."""
        self.b.loop(low, high, self.height, [], lambda row, _: body(
            row, least(self.height, high - row)
        ))  # fmt: skip

    def _rows(self, left: str, row: Index, rows: int, panel: str, finish: Finish) -> None:
        v, width = self.v, self.v.width
        line = v.at(left, row * self.pitch, v.element)

        def step(k: Index, sums: list[str]) -> list[str]:
            here = v.at(panel, k * self.panels.row, v.element)
            right = [v.load_computed(here, j * width) for j in range(self.vectors)]
            number, made = v.at(line, k, v.element), []
            for r in range(rows):
                x = v.splat(v.computed_scalar(number, r * self.pitch))
                for y, total in zip(right, sums[r * self.vectors :]):
                    made.append(v.multiply_add(x, y, total))
            return made

        zeros = [v.zero] * (rows * self.vectors)
        finish(row, rows, add_in_pieces(v, self.panels.depth, zeros, step, self.memory))
