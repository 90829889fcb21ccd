"""Partial sums of a weight's gradient, added in one fixed order.

Images fall into slots, whose sums are kept apart, so that neither tasks nor threads change a bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ltc.llvm.emit.builder import Builder, function_text
from ltc.llvm.emit.dtype import BYTES
from ltc.llvm.emit.index import Index, least
from ltc.llvm.emit.isa import Isa
from ltc.llvm.emit.vectors import Epilogue, GeneratedKernel, Vectors, tasks_for, transposed

FETCHED_SQUARES = 4  # ahead of the one that is stored
UNITS = 16  # that a launch falls into, where the images allow it


@dataclass(frozen=True)
class Slots:
    """partial[slot, group, panel, row, output channel of the panel].

    rows  of a panel: one for each column of the gradient [groups * outputs, rows]
    """

    count: int
    groups: int
    outputs: int
    panel: int
    rows: int

    @property
    def panels(self) -> int:
        return -(-self.outputs // self.panel)

    @property
    def of_one(self) -> int:
        """Elements of one slot."""
        return self.groups * self.panels * self.rows * self.panel

    def bytes(self, element: str) -> int:
        return max(1, self.count * self.of_one) * BYTES[element]


def slots_for(images: int, groups: int, outputs: int, panel: int, rows: int) -> Slots:
    parts = groups * -(-outputs // panel)
    count = max(1, min(images, -(-UNITS // max(1, parts))))
    return Slots(count, groups, outputs, panel, rows)


def images_of(slot: Index, images: Index, slots: int) -> tuple[Index, Index]:
    """The first image of a slot, and the first that it has no more."""
    return slot * images // slots, (slot + 1) * images // slots


def adding_kernel(
    name: str, dtype: torch.dtype, isa: Isa, slots: Slots,
    row_of: Callable[[Index], Index], epilogue: Epilogue | None, operands: int,
) -> GeneratedKernel:  # fmt: skip
    """result[group, o, column]: the sum over slots, in their order: "partial", "result".

    row_of    the row of a panel that holds a column
    epilogue  its row is the output channel
    """
    b = Builder()
    v = Vectors(b, isa, dtype)
    adder = Adder(v, slots, row_of, epilogue)
    units = slots.groups * slots.panels * adder.squares

    def unit(number: Index, _) -> None:
        part, square = divmod(number, adder.squares)
        panel = v.at("%p0", part * (slots.rows * slots.panel), v.element)
        adder.add(panel, *divmod(part, slots.panels), square)

    if units:
        b.loop(*b.share(units), 1, [], unit)
    arguments = ("partial", "result", *(f"operand{i}" for i in range(operands)))
    work = slots.count * slots.of_one
    text = function_text(name, len(arguments), b)
    return GeneratedKernel(name, text, arguments, tasks_for(8 * work, units, 1), work)


class Adder:
    """Stores the sums over slots, turned, in the result, %p1.

    squares  of columns of a panel, as many as a vector has lanes, which are turned together
    """

    def __init__(
        self, v: Vectors, slots: Slots, row_of: Callable[[Index], Index],
        epilogue: Epilogue | None,
    ):  # fmt: skip
        self.v, self.slots, self.row_of, self.epilogue = v, slots, row_of, epilogue
        self.squares = -(-slots.rows // v.width)

    def add(self, memory: str, group: Index, panel: Index, square: Index) -> None:
        """One square; `memory`: where the panel's sums of the first slot are."""
        v, slots = self.v, self.slots
        column = square * v.width
        mask = v.first(slots.rows - column) if slots.rows % v.width else None
        spots = [self._spot(column + i) for i in range(v.width)]

        def strip(j: Index, _) -> None:
            first = panel * slots.panel + j
            sums = self._summed(v.at(memory, j, v.element), spots)
            for i, line in enumerate(transposed(v.builder, sums, v.element)):
                self._store_existing(line, group, first + i, column, mask)

        v.builder.loop(0, slots.panel, v.width, [], strip)

    def _spot(self, column: Index) -> Index:
        v = self.v
        if self.slots.rows % v.width:
            column = least(column, self.slots.rows - 1)
        return self.row_of(column) * self.slots.panel

    def _summed(self, memory: str, spots: list[Index]) -> list[str]:
        v, slots = self.v, self.slots

        def slot(s: Index, sums: list[str]) -> list[str]:
            base = v.at(memory, s * slots.of_one, v.element)
            return [v.add(total, v.load_computed(base, one)) for total, one in zip(sums, spots)]

        starts = [(v.vector, v.load_computed(memory, one)) for one in spots]
        return v.builder.loop(1, slots.count, 1, starts, slot)

    def _store_existing(self, value, group, channel, column, mask) -> None:
        b, outputs = self.v.builder, self.slots.outputs
        exists = b.value(f"icmp slt i64 {channel}, {outputs}")
        flat = group * outputs + channel
        b.when(exists, [], lambda: self._store(value, flat, column, mask))

    def _store(self, value: str, flat: Index, column: Index, mask: str | None) -> None:
        v, b = self.v, self.v.builder
        v.fetch(self.epilogue, flat, column + FETCHED_SQUARES * v.width)
        if self.epilogue is not None:
            with b.lanes(v.width):
                value = self.epilogue(b, value, flat, column, mask)
        v.store(value, "%p1", flat * self.slots.rows + column, mask)
