"""Sums of a convolution over its taps, strip by strip, on [N, *spatial, C].

The operand's lines are copied with their padding; a few positions of a line keep their sums in
registers over all taps.
"""

from __future__ import annotations

import itertools

from ltc.llvm.conv.axes import Axes, padded
from ltc.llvm.conv.geometry import Geometry
from ltc.llvm.conv.nhwc_input_tile import InputTile, ascending, strip_extents
from ltc.llvm.emit.builder import Builder, function_text, multiples
from ltc.llvm.emit.dtype import BYTES
from ltc.llvm.emit.index import Index, least
from ltc.llvm.emit.isa import LEVEL_2_BYTES, Isa
from ltc.llvm.emit.vectors import (
    Epilogue,
    GeneratedKernel,
    Vectors,
    require_stack,
    reserved,
    tasks_for,
)

STRIP_BYTES = LEVEL_2_BYTES // 2
STRIP_PIXELS = 256


class Strips:
    """The common base of the kernels: the strips of an operand, and the walk over them."""

    def __init__(self, dtype, geometry: Geometry, axes: Axes, isa: Isa):
        self.b = Builder()
        self.v = v = Vectors(self.b, isa, dtype)
        self.geometry, self.axes = geometry, ascending(axes)
        self.channels = geometry.weight[0]
        self.taps = axes[0].taps * axes[1].taps * axes[2].taps
        self.images, self.lines = strip_extents(
            self.axes, self.channels, BYTES[v.element], (1, 1), STRIP_PIXELS, STRIP_BYTES
        )
        self.strips = -(-axes[1].count // max(1, self.lines))
        self.input_tile = InputTile(
            v, self.axes, self.channels, self.channels, self.images, self.lines
        )
        self.vectors = -(-self.channels // v.width)
        self.work = 2 * geometry.operand[0] * self.channels * geometry.weight[1] * self.taps
        for axis in axes:
            self.work *= axis.count

    def lines_from(self, line: Index) -> Index:
        high = self.axes[1]
        if high.count % max(1, self.lines) == 0:
            return self.lines
        return least(self.lines, high.count - line)

    def mask(self, channel: Index) -> str | None:
        v = self.v
        return v.first(self.channels - channel) if self.channels % v.width else None


class StripSums(Strips):
    """Sums over taps of an operand of [N, *spatial, C], with the weights [C, M, *kernel].

    The pointers are the weight, the operand and the result; the number is the images.

    Args:
        most: Positions of a tile, which are sums in registers.
    """

    def __init__(
        self, dtype, geometry: Geometry, axes: Axes, isa: Isa, epilogue: Epilogue | None, most: int
    ):  # fmt: skip
        super().__init__(dtype, geometry, axes, isa)
        self.epilogue, self.right = epilogue, geometry.weight[1]
        count = axes[2].count
        tiles = max(1, -(-count // most))
        width, wider = divmod(count, tiles)
        self.widths = [(w, n) for w, n in ((width + 1, wider), (width, tiles - wider)) if w and n]
        self.packed_row = self.vectors * self.v.width

    def kernel(self, name: str, operand: str, operands: int) -> GeneratedKernel:
        v, b, deep = self.v, self.b, self.axes[0]
        packed_size = max(1, self.taps * self.right) * self.packed_row
        require_stack(self.input_tile.bytes + packed_size * BYTES[v.element], "convolution")
        images = self.geometry.operand[0]
        each = deep.count * self.strips
        items = -(-images // self.images) * each
        if self.work or not self.taps:
            self.input_tile.reserve()
            self.packed = reserved(b, packed_size, v.element)
            self._pack()
            blocks = (b.number(0) + (self.images - 1)) // self.images
            b.loop(*b.share(blocks * each), 1, [], lambda item, _: self._work_item(item))
        arguments = ("weight", operand, "result", *(f"operand{i}" for i in range(operands)))
        text = function_text(name, len(arguments), b, 1)
        tasks = tasks_for(4 * self.work, items, 1)
        return GeneratedKernel(name, text, arguments, tasks, self.work, (images,))

    def _pack(self) -> None:
        """packed[tap, m, c]"""
        v, extents = self.v, padded(self.geometry.weight[2:], 1)
        size = extents[0] * extents[1] * extents[2]
        elements = [0]
        for axis, extent in zip(self.axes, extents):
            first, step = axis.kernel
            elements = [e * extent + first + t * step for e in elements for t in range(axis.taps)]
        rows = [m * size + element for element in elements for m in range(self.right)]
        lanes = multiples(v.width, self.right * size)

        def vector(c: Index, _) -> None:
            here, mask = v.at("%p0", c * (self.right * size)), self.mask(c)
            for k, row in enumerate(rows):
                value = v.gather(v.at(here, row), lanes, mask)
                v.store_computed(value, self.packed, c + k * self.packed_row)

        self.b.loop(0, self.channels, v.width, [], vector)

    def _work_item(self, item: Index) -> None:
        b = self.b
        block, rest = divmod(item, self.axes[0].count * self.strips)
        deep, number = divmod(rest, self.strips)
        first, line = block * self.images, number * self.lines
        images, lines = least(self.images, self.b.number(0) - first), self.lines_from(line)
        self.input_tile.copy("%p1", 0, first, images, deep, line)
        b.nest((images, lines), [], lambda n, i, _: self._line(
            n, i, self._position(first + n, deep, line + i)
        ))  # fmt: skip

    def _line(self, image: Index, line: Index, position: Index) -> None:
        """Computes a line of the strip; `position`: where its first result is, counted flat."""
        raise NotImplementedError

    def _tiles(self, image: Index, line: Index, channel: Index, body) -> None:
        """body(where its first tap is, how many positions, the first) for each tile of a line."""
        v, b, start = self.v, self.b, 0
        for width, count in self.widths:

            def tile(j: Index, _=None, width=width) -> None:
                place = self.input_tile.place(image, line, j) + channel
                body(v.at(self.input_tile.memory, place, v.element), width, j)

            if count == 1:
                tile(start)
            else:
                b.loop(start, start + width * count, width, [], tile)
            start += width * count

    def _meetings(self, width: int, taps: int) -> dict[Index, list[tuple[int, int]]]:
        """The (position, tap) of a line that meet each of its elements: each is loaded once."""
        found: dict[Index, list[tuple[int, int]]] = {}
        for r, t in itertools.product(range(width), range(taps)):
            element = self.input_tile.place(0, 0, r) + self.input_tile.tap(0, 0, t)
            found.setdefault(element, []).append((r, t))
        return dict(sorted(found.items()))

    def _position(self, image: Index, deep: Index, line: Index) -> Index:
        """The flat position in the result of a line's first element."""
        total = image
        for index, axis in zip((deep, line, 0), self.axes):
            at = index * axis.place[1] + axis.place[0]
            total = total * axis.result + at
        return total

    def _row(self, position: Index, column: Index, r: int) -> Index:
        """The flat position of the r-th result of a tile that begins at a column."""
        return position + (column + r) * self.axes[2].place[1]
