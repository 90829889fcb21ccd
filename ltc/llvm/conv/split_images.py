"""Partial sums of a weight's gradient, added in one fixed order.

Images fall into slots, whose sums are kept apart, so that neither tasks nor threads change a bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ltc.llvm.emit.builder import Builder, function_text
from ltc.llvm.emit.isa import Isa
from ltc.llvm.emit.index import Index, least
from ltc.llvm.emit.vectors import BYTES, Epilogue, GeneratedKernel, Lanes, tasks_for, transposed

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


def images_of(l: Lanes, slot: Index, images: Index, slots: int) -> tuple[Index, Index]:
    """The first image of a slot, and the first that it has no more."""
    b = l.builder
    first = b.index(b.value(f"udiv i64 {slot * images}, {slots}"))
    return first, b.index(b.value(f"udiv i64 {(slot + 1) * images}, {slots}"))


def adding_kernel(
    name: str, dtype: torch.dtype, isa: Isa, slots: Slots,
    row_of: Callable[[Lanes, Index], Index], epilogue: Epilogue | None, operands: int,
) -> GeneratedKernel:  # fmt: skip
    """result[group, o, column]: the sum over slots, in their order: "partial", "result".

    row_of    the row of a panel that holds a column
    epilogue  its row is the output channel
    """
    b = Builder()
    l = Lanes(b, isa, dtype)
    adder = Adder(l, slots, row_of, epilogue)
    units = slots.groups * slots.panels * adder.squares

    def unit(number: str, _) -> None:
        part, square = divmod(number, adder.squares)
        panel = l.at("%p0", part * (slots.rows * slots.panel), l.element)
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
        self, l: Lanes, slots: Slots, row_of: Callable[[Lanes, Index], Index],
        epilogue: Epilogue | None,
    ):  # fmt: skip
        self.l, self.slots, self.row_of, self.epilogue = l, slots, row_of, epilogue
        self.squares = -(-slots.rows // l.width)

    def add(self, memory: str, group: Index, panel: Index, square: Index) -> None:
        """One square; `memory`: where the panel's sums of the first slot are."""
        l, slots = self.l, self.slots
        column = square * l.width
        mask = l.first(slots.rows - column) if slots.rows % l.width else None
        spots = [self._spot(column + i) for i in range(l.width)]

        def strip(v: str, _) -> None:
            first = panel * slots.panel + v
            sums = self._summed(l.at(memory, v, l.element), spots)
            for i, line in enumerate(transposed(l.builder, sums, l.element)):
                self._store_existing(line, group, first + i, column, mask)

        l.builder.loop(0, slots.panel, l.width, [], strip)

    def _spot(self, column: Index) -> Index:
        l = self.l
        if self.slots.rows % l.width:
            column = least(column, self.slots.rows - 1)
        return self.row_of(l, column) * self.slots.panel

    def _summed(self, memory: str, spots: list[Index]) -> list[str]:
        l, slots = self.l, self.slots

        def slot(s: str, sums: list[str]) -> list[str]:
            base = l.at(memory, s * slots.of_one, l.element)
            return [l.add(total, l.load_computed(base, one)) for total, one in zip(sums, spots)]

        starts = [(l.vector, l.load_computed(memory, one)) for one in spots]
        return l.builder.loop(1, slots.count, 1, starts, slot)

    def _store_existing(self, value, group, channel, column, mask) -> None:
        b, outputs = self.l.builder, self.slots.outputs
        exists = b.value(f"icmp slt i64 {channel}, {outputs}")
        flat = group * outputs + channel
        b.when(exists, [], lambda: self._store(value, flat, column, mask))

    def _store(self, value: str, flat: Index, column: Index, mask: str | None) -> None:
        l, b = self.l, self.l.builder
        l.fetch(self.epilogue, flat, column + FETCHED_SQUARES * l.width)
        if self.epilogue is not None:
            with b.lanes(l.width):
                value = self.epilogue(b, value, flat, column, mask)
        l.store(value, "%p1", flat * self.slots.rows + column, mask)
