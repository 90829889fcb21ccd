"""Partial sums of a weight's gradient, added in one fixed order.

Images fall into chunks, whose sums are kept apart, so that neither tasks nor threads change a bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ltc.llvm.emit.builder import Builder, function_text
from ltc.llvm.emit.dtype import BYTES
from ltc.llvm.emit.index import Index, least
from ltc.llvm.emit.isa import LEVEL_2_BYTES, Isa
from ltc.llvm.emit.vectors import Epilogue, GeneratedKernel, Vectors, tasks_for, transposed

FETCHED_SQUARES = 4  # ahead of the one that is stored
NEAR_SUM_BYTES = LEVEL_2_BYTES // 4
WORK_ITEMS = 16  # that a launch falls into, where the images allow it


@dataclass(frozen=True)
class ImageSplit:
    """partial[chunk, group, panel, row, output channel of the panel].

    Attributes:
        rows: The rows of a panel: one for each column of the gradient [groups * outputs, rows].
        together: Number of panels for which one item of work reads its images.
    """

    count: int
    groups: int
    outputs: int
    panel: int
    rows: int
    together: int = 1

    @property
    def panels(self) -> int:
        return -(-self.outputs // self.panel)

    @property
    def of_one(self) -> int:
        """Elements of one chunk."""
        return self.groups * self.panels * self.rows * self.panel

    @property
    def items(self) -> int:
        """Return how many items of work there are: (chunk, group, panels that are together)."""
        return self.count * self.groups * (self.panels // self.together)

    def bytes(self, element: str) -> int:
        return max(1, self.count * self.of_one) * BYTES[element]


def image_split(images: int, groups: int, outputs: int, panel: int, rows: int) -> ImageSplit:
    parts = groups * -(-outputs // panel)
    count = max(1, min(images, -(-WORK_ITEMS // max(1, parts))))
    return ImageSplit(count, groups, outputs, panel, rows)


def near_split(split: ImageSplit, images: int, element: str) -> ImageSplit:
    """The same with as many panels of a group together as have sums that stay near the processor.

    An operand comes from afar for each item that reads it. Items are not fewer than they were, or than
    are wanted.
    """
    row = split.rows * split.panel * BYTES[element]
    for together in range(split.panels, 1, -1):
        if split.panels % together == 0 and together * row <= NEAR_SUM_BYTES:
            parts = split.groups * (split.panels // together)
            count = max(1, min(images, -(-WORK_ITEMS // max(1, parts))))
            near = replace(split, together=together, count=count)
            if near.items >= min(WORK_ITEMS, split.items):
                return near
    return split


def images_of(chunk: Index, images: Index, chunks: int) -> tuple[Index, Index]:
    """The first image of a chunk, and the first that it has no more."""
    return chunk * images // chunks, (chunk + 1) * images // chunks


def adding_kernel(
    name: str, dtype: torch.dtype, isa: Isa, split: ImageSplit,
    row_of: Callable[[Index], Index], epilogue: Epilogue | None, operands: int,
) -> GeneratedKernel:  # fmt: skip
    """result[group, o, column]: the sum over chunks, in their order: "partial", "result".

    Args:
        row_of: The row of a panel that holds a column.
        epilogue: Its row is the output channel.
    """
    b = Builder()
    v = Vectors(b, isa, dtype)
    adder = Adder(v, split, row_of, epilogue)
    items = split.groups * split.panels * adder.squares

    def item(number: Index, _) -> None:
        part, square = divmod(number, adder.squares)
        panel = v.at("%p0", part * (split.rows * split.panel), v.element)
        adder.add(panel, *divmod(part, split.panels), square)

    if items:
        b.loop(*b.share(items), 1, [], item)
    arguments = ("partial", "result", *(f"operand{i}" for i in range(operands)))
    work = split.count * split.of_one
    text = function_text(name, len(arguments), b)
    return GeneratedKernel(name, text, arguments, tasks_for(8 * work, items, 1), work)


class Adder:
    """Store the sums over chunks, transposed, in the result, %p1.

    Attributes:
        squares: Squares of a panel's columns, as many as a vector has lanes, which are transposed
            together.
    """

    def __init__(
        self, v: Vectors, split: ImageSplit, row_of: Callable[[Index], Index],
        epilogue: Epilogue | None,
    ):  # fmt: skip
        self.v, self.split, self.row_of, self.epilogue = v, split, row_of, epilogue
        self.squares = -(-split.rows // v.width)

    def add(self, memory: str, group: Index, panel: Index, square: Index) -> None:
        """One square; `memory`: where the panel's sums of the first chunk are."""
        v, split = self.v, self.split
        column = square * v.width
        mask = v.first(split.rows - column) if split.rows % v.width else None
        spots = [self._spot(column + i) for i in range(v.width)]

        def strip(j: Index, _) -> None:
            first = panel * split.panel + j
            sums = self._summed(v.at(memory, j, v.element), spots)
            for i, line in enumerate(transposed(v.builder, sums, v.element)):
                self._store_existing(line, group, first + i, column, mask)

        v.builder.loop(0, split.panel, v.width, [], strip)

    def _spot(self, column: Index) -> Index:
        v = self.v
        if self.split.rows % v.width:
            column = least(column, self.split.rows - 1)
        return self.row_of(column) * self.split.panel

    def _summed(self, memory: str, spots: list[Index]) -> list[str]:
        v, split = self.v, self.split

        def chunk(s: Index, sums: list[str]) -> list[str]:
            base = v.at(memory, s * split.of_one, v.element)
            return [v.add(total, v.load_computed(base, one)) for total, one in zip(sums, spots)]

        starts = [(v.vector, v.load_computed(memory, one)) for one in spots]
        return v.builder.loop(1, split.count, 1, starts, chunk)

    def _store_existing(self, value, group, channel, column, mask) -> None:
        b, outputs = self.v.builder, self.split.outputs
        exists = b.value(f"icmp slt i64 {channel}, {outputs}")
        flat = group * outputs + channel
        b.when(exists, [], lambda: self._store(value, flat, column, mask))

    def _store(self, value: str, flat: Index, column: Index, mask: str | None) -> None:
        v, b = self.v, self.v.builder
        v.fetch(self.epilogue, flat, column + FETCHED_SQUARES * v.width)
        if self.epilogue is not None:
            with b.lanes(v.width):
                value = self.epilogue(b, value, flat, column, mask)
        v.store(value, "%p1", flat * self.split.rows + column, mask)
