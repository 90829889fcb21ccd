"""Partial sums of a weight's gradient, added in one fixed order.

Images fall into slots, whose sums are kept apart, so that neither tasks nor threads change a bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ltc.llvm.builder import Builder, function_text
from ltc.llvm.isa import Isa
from ltc.llvm.lanes import (
    BYTES,
    Epilogue,
    GeneratedKernel,
    Index,
    Lanes,
    share,
    tasks_for,
    transposed,
)  # fmt: skip

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
    first = b.value(f"udiv i64 {l.times(slot, images)}, {slots}")
    return first, b.value(f"udiv i64 {l.times(l.plus(slot, 1), images)}, {slots}")


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
    outputs, rows, panel_size = slots.outputs, slots.rows, slots.panel
    squares = -(-rows // l.width)
    units = slots.groups * slots.panels * squares

    def unit(number: str, _) -> None:
        part, square = l.divided(number, squares)
        group, panel = l.divided(part, slots.panels)
        column = l.times(square, l.width)
        mask = l.first(l.minus(rows, column)) if rows % l.width else None
        spots = [spot(part, l.plus(column, i)) for i in range(l.width)]
        b.loop(0, panel_size, l.width, [], lambda v, _: strip(group, panel, column, v, mask, spots))

    def spot(part: Index, column: Index) -> Index:
        if rows % l.width:
            column = l.least(column, rows - 1)
        return l.times(l.plus(l.times(part, rows), row_of(l, column)), panel_size)

    def strip(group, panel, column, v, mask, spots) -> None:
        starts = [(l.vector, l.load_computed("%p0", l.plus(one, v))) for one in spots]

        def slot(s: str, sums: list[str]) -> list[str]:
            base = l.at("%p0", l.plus(l.times(s, slots.of_one), v), l.element)
            return [
                l.add(total, l.load_computed(base, one)) for total, one in zip(sums, spots)
            ]

        lines = b.loop(1, slots.count, 1, starts, slot)
        first = l.plus(l.times(panel, panel_size), v)
        for i, line in enumerate(transposed(b, list(lines), l.element)):
            channel = l.plus(first, i)
            exists = b.value(f"icmp slt i64 {channel}, {outputs}")
            flat = l.plus(l.times(group, outputs), channel)
            b.when(exists, [], lambda line=line, flat=flat: store(line, flat, column, mask))

    def store(value: str, flat: Index, column: Index, mask: str | None) -> None:
        if epilogue is not None:
            with b.lanes(l.width):
                value = epilogue(b, value, flat, column, mask)
        l.store(value, "%p1", l.plus(l.times(flat, rows), column), mask)

    if units:
        b.loop(*share(l, units), 1, [], unit)
    arguments = ("partial", "result", *(f"operand{i}" for i in range(operands)))
    work = slots.count * slots.of_one
    text = function_text(name, len(arguments), b)
    return GeneratedKernel(name, text, arguments, tasks_for(8 * work, units, 1), work)
