"""Copies of windows that do not overlap, in the order in which a weight's gradient reads them.

Where no element of the operand belongs to two windows, a copy is no larger than the windows, so the
rows of a block can lie side by side, position after position, as in a packed matrix. In the operand the
rows are a few elements of every pixel, and pixels lie so far apart that they share few sets of a cache.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ltc.llvm.conv.axes import Axes
from ltc.llvm.conv.nhwc_input_tile import InputTile
from ltc.llvm.emit.dtype import BYTES
from ltc.llvm.emit.index import Index
from ltc.llvm.emit.vectors import Vectors, reserved

FETCHED_PIXELS = 8  # the distance of prefetches ahead of the pixel that is copied
UNROLLED = 8  # blocks that one turn of a loop copies


@dataclass(frozen=True)
class RowBlocks:
    """The rows of sums of a run of elements, in blocks whose sums stay in registers.

    Attributes:
        height: Rows of a block; `taller` blocks, the first ones, have one more.
    """

    run: int
    blocks: int
    height: int
    taller: int

    @classmethod
    def of(cls, run: int, most: int) -> RowBlocks:
        """Return blocks of at most so many rows."""
        blocks = max(1, -(-run // most))
        return cls(run, blocks, *divmod(run, blocks))

    @property
    def kinds(self) -> list[tuple[int, int, int]]:
        """Return (rows, first, end) of the blocks of each height."""
        split = (self.height + 1) * self.taller
        both = (self.height + 1, 0, split), (self.height, split, self.run)
        return [kind for kind in both if kind[1] < kind[2]]


def are_apart(axes: Axes, is_dense: bool) -> bool:
    """Return True if windows neither overlap nor meet padding, and their lines are runs of elements.

    Args:
        axes: Ascending ones.
        is_dense: False where a pixel has channels of other groups.
    """
    apart = all((axis.taps - 1) * axis.step < axis.stride for axis in axes)
    wide = axes[2]
    is_run = wide.taps <= 1 or (wide.step == 1 and is_dense)
    return apart and is_run and all(axis.is_always_inside for axis in axes)


def closed_up(axes: Axes) -> Axes:
    """Return the axes of the windows' elements alone, with nothing between them."""
    deep, high, wide = (replace(axis, stride=max(1, axis.taps), step=1, first=0) for axis in axes)
    return deep, high, wide


class WindowTile:
    """copied[depth tap, line tap, block of rows, position, row]: the windows of some lines of the result.

    Attributes:
        rows: Blocks of the channels of all taps of a line.
        down, across: Lines and columns of taps that are walked one by one.

    Args:
        apart: Elements of the operand from one pixel to the next.
        images: Number of images copied together.
        lines: Number of lines of the result in each image.
        most: Rows of a block, at most.
    """

    joins_lines, joins_taps, across = False, True, 1

    def __init__(
        self, v: Vectors, axes: Axes, channels: int, apart: int, images: int, lines: int, most: int
    ):
        self.v, self.axes, self.apart, self.lines = v, axes, apart, lines
        self.rows = rows = RowBlocks.of(channels * axes[2].taps, most)
        self.down = axes[1].taps
        positions = images * lines * axes[2].count
        # A vector of a block's last position may end behind the block.
        self.line = positions + -(-v.width // max(1, rows.height))
        self.size = axes[0].taps * axes[1].taps * rows.run * self.line
        self.bytes = self.size * BYTES[v.element]

    def reserve(self) -> None:
        """Memory of this call; vectors may reach beyond the last element."""
        self.memory = reserved(self.v.builder, self.size + self.v.width, self.v.element)

    def copy(
        self, operand: str, channel: Index, first: Index, images: Index, deep: Index, line: Index,
        lines: Index,
    ) -> None:  # fmt: skip
        """Copy the windows of so many lines of the result, at one depth of each image.

        Args:
            channel: The first that is copied, of those of all groups.
        """
        v, (axis, high, wide) = self.v, self.axes
        stride = wide.stride * self.apart

        def one_line(n: Index, i: Index, d: Index, h: Index, _) -> None:
            down, across = axis.input_index(deep, d), high.input_index(line + i, h)
            at = ((first + n) * axis.extent + down) * high.extent + across
            source = v.at(operand, (at * wide.extent + wide.first) * self.apart + channel)
            target = self.block(d, h, 0, 0)
            position = self._position(n, i, 0)

            def pixel(j: Index, _) -> None:
                here = v.at(source, j * stride)
                v.builder.prefetch(v.at(here, FETCHED_PIXELS * stride))
                self._copy(here, target, position + j)

            v.builder.loop(0, wide.count, 1, [], pixel)

        v.builder.nest((images, lines, axis.taps, high.taps), [], one_line)

    def _copy(self, source: str, target: str, position: Index) -> None:
        """Copy the elements of one line of a window to all blocks."""
        v, run = self.v, self.rows.run

        def block(rows: int, k: Index, left: int | None) -> None:
            to = v.at(target, k * self.line + position * rows, v.element)
            for start in range(0, rows, v.width):
                mask = None if left is None else v.first(left - start)
                value = v.load(v.at(source, k), start, mask)
                v.store_computed(value, to, start)

        for rows, low, end in self.rows.kinds:
            reach = -(-rows // v.width) * v.width
            safe = min(end, low + max(0, (run - reach - low) // rows + 1) * rows)
            together = low + (safe - low) // (UNROLLED * rows) * (UNROLLED * rows)

            def several(k: Index, _, rows: int = rows) -> None:
                for i in range(UNROLLED):
                    block(rows, k + i * rows, None)

            v.builder.loop(low, together, UNROLLED * rows, [], several)
            for k in range(together, safe, rows):
                block(rows, k, None)
            for k in range(safe, end, rows):  # a vector would end behind the run
                block(rows, k, run - k)

    def block(self, d: Index, h: Index, w: Index, k: Index) -> str:
        """Return where the block is that begins at row k of a line of taps; `w` is 0."""
        tap = d * self.axes[1].taps + h
        return self.v.at(self.memory, (tap * self.rows.run + k) * self.line, self.v.element)

    def _position(self, image: Index, line: Index, column: Index) -> Index:
        return (image * self.lines + line) * self.axes[2].count + column

    def place(self, image: Index, line: Index, column: Index, rows: int) -> Index:
        """Return how far a position lies from the first one of a block of so many rows."""
        return self._position(image, line, column) * rows

    @staticmethod
    def row(r: int) -> int:
        """Return how far row r of a block lies from its first one, at any position."""
        return r


class SharedTile:
    """Windows that overlap or meet padding: rows in one padded copy of the operand's lines.

    Attributes:
        joins_taps, joins_lines: Blocks cross from tap to tap of a line, and from line to line.
    """

    def __init__(
        self, v: Vectors, axes: Axes, channels: int, apart: int, images: int, lines: int, most: int
    ):
        self.v, self.axes, self.channels = v, axes, channels
        self.tile = InputTile(v, axes, channels, apart, images, lines)
        self.bytes = self.tile.bytes
        _, high, wide = axes
        self.joins_taps = self.tile.taps_touch and self._joining_pays(most)
        self.line_run = channels * (wide.taps if self.joins_taps else 1)
        self.across = 1 if self.joins_taps else wide.taps
        self.joins_lines = self.joins_taps and self.line_run * high.taps <= most
        self.down = 1 if self.joins_lines else high.taps
        self.rows = RowBlocks.of(self.line_run * (high.taps if self.joins_lines else 1), most)

    def _joining_pays(self, most: int) -> bool:
        """Return True if blocks of rows fill the registers better if they cross from tap to tap.

        Otherwise, the columns at which a tap lies in the padding are left out.
        """
        wide, channels = self.axes[2], self.channels
        if wide.is_always_inside:
            return True
        return -(-channels * wide.taps // most) * wide.count <= -(-channels // most) * wide.meetings

    def reserve(self) -> None:
        """Memory of this call; vectors may reach beyond the last element."""
        self.tile.reserve()

    def copy(
        self, operand: str, channel: Index, first: Index, images: Index, deep: Index, line: Index,
        lines: Index,
    ) -> None:  # fmt: skip
        """Copy the operand's lines that a whole strip meets at one depth, also where fewer are left."""
        self.tile.copy(operand, channel, first, images, deep, line)

    def block(self, d: Index, h: Index, w: Index, k: Index) -> str:
        """Return where the block is that begins at row k of a tap, at the first position."""
        return self.v.at(self.tile.memory, self.tile.tap(d, h, w) + k, self.v.element)

    def place(self, image: Index, line: Index, column: Index, rows: int) -> Index:
        """Return how far a position lies from the first one."""
        return self.tile.place(image, line, column)

    def row(self, r: int) -> Index:
        """Return how far row r of a block lies from its first one, at any position."""
        h, k = divmod(r, self.line_run)
        return self.tile.tap(0, h, 0) + k
