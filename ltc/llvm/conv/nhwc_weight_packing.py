"""Weights in the order in which a channels-last convolution meets them."""

from __future__ import annotations

from ltc.llvm.conv.axes import Axes
from ltc.llvm.emit.builder import multiples
from ltc.llvm.emit.dtype import BYTES
from ltc.llvm.emit.index import Index, least
from ltc.llvm.emit.vectors import Vectors, reserved, shuffled, transposed

FETCHED_VECTORS = 4
FETCHED_ROWS = 2
MOST_SHUFFLED_TAPS = 9  # each tap is picked out of that many vectors; more are turned or gathered
FEWEST_TURNED_TAPS = 2  # of a square of taps and channels; fewer are gathered


class WeightPacker:
    """packed[tap, left channel, right channel] of one panel of right channels.

    weight  [group, right, left, *kernel] where `forward`, else [group, left, right, *kernel]
    kernel  its extents, all three; the axes say which of its elements are met
    depth   left channels that are packed at once
    """

    def __init__(self, v: Vectors, axes: Axes, kernel, left: int, right: int, panel: int,
                 depth: int, forward: bool):  # fmt: skip
        self.v, self.left, self.right, self.panel = v, left, right, panel
        self.depth, self.forward = depth, forward
        deep, high, wide = axes
        self.size = kernel[0] * kernel[1] * kernel[2]
        self.elements = [
            (a * kernel[1] + b) * kernel[2] + c
            for a in _elements(deep)
            for b in _elements(high)
            for c in _elements(wide)
        ]
        self.rows = len(self.elements) * depth
        self.bytes = (self.rows + 1) * panel * BYTES[v.element]

    def reserve(self) -> None:
        # One row more: what has no place is put there.
        self.memory = reserved(self.v.builder, (self.rows + 1) * self.panel, self.v.element)

    def pack(self, group: Index, column: Index, start: Index, depth: Index) -> None:
        """Packs the weights of left channels from `start` on, for right ones from `column` on."""
        if self.forward:
            self._pack_forward(group, column, start, depth)
        else:
            self._pack_gradient(group, column, start, depth)

    def _pack_forward(self, group, column, start, depth) -> None:
        """Squares of (right, left and tap), transposed; each row goes where its tap and channel are."""
        v, n, size = self.v, self.v.width, self.size
        run, limit = self.left * size, depth * size
        base = v.at("%p0", group * (self.right * run) + start * size)

        def square(q: Index, j: Index, _) -> None:
            mask = v.first(limit - q)
            lines = []
            for i in range(n):
                channel = column + j + i
                if self.right % self.panel:
                    channel = least(channel, self.right - 1)
                line = channel * run + q
                v.builder.prefetch(v.at(base, line + FETCHED_VECTORS * n))
                lines.append(v.load(base, line, mask))
            for i, line in enumerate(transposed(v.builder, lines, v.element)):
                at = q + i
                channel, tap = divmod(at, size)
                row = tap * self.depth + channel
                if not isinstance(limit, int) or limit % n:
                    exists = v.builder.value(f"icmp slt i64 {at}, {limit}")
                    row = v.builder.where(exists, row, self.rows)
                v.store_computed(line, self.memory, row * self.panel + j)

        v.builder.nest([(0, limit, n), (0, self.panel, n)], [], square)

    def _pack_gradient(self, group, column, start, depth) -> None:
        v, size = self.v, self.size
        first = group * self.left + start
        base = v.at("%p0", (first * self.right + column) * size)

        def channel(k: Index, j: Index, _) -> None:
            here = v.at(base, (k * self.right + j) * size)
            left = self.right - (column + j) if self.right % self.panel else None
            vectors = self._picked(here, left)
            for tap, value in enumerate(vectors):
                row = k + tap * self.depth
                v.store_computed(value, self.memory, row * self.panel + j)

        v.builder.nest([depth, (0, self.panel, v.width)], [], channel)

    def _picked(self, here: str, left: Index | None) -> list[str]:
        """For each tap, a vector of adjacent right channels, of which `left` exist."""
        v, n, size = self.v, self.v.width, self.size
        squares = {element // n for element in self.elements}
        if size > MOST_SHUFFLED_TAPS and len(self.elements) >= FEWEST_TURNED_TAPS * len(squares):
            return self._turned(here, left, sorted(squares))
        if size > MOST_SHUFFLED_TAPS:
            mask = None if left is None else v.first(left)
            lanes = multiples(n, size)
            return [v.gather(v.at(here, element), lanes, mask) for element in self.elements]
        limit = None if left is None else left * size
        for k in range(size):
            v.builder.prefetch(v.at(here, FETCHED_ROWS * self.right * size + k * n))
        parts = [
            v.load(here, k * n, None if limit is None else v.first(limit - k * n))
            for k in range(size)
        ]
        return [self._every(parts, element) for element in self.elements]

    def _turned(self, here: str, left: Index | None, squares: list[int]) -> list[str]:
        """Adjacent taps of each channel, transposed to adjacent channels of each tap."""
        v, n, size = self.v, self.v.width, self.size
        found: dict[int, str] = {}
        for first in (square * n for square in squares):
            mask = v.first(size - first) if size - first < n else None
            channels = [i if left is None else least(i, left - 1) for i in range(n)]
            lines = [v.load(here, channel * size + first, mask) for channel in channels]
            found.update(enumerate(transposed(v.builder, lines, v.element), first))
        return [found[element] for element in self.elements]

    def _every(self, parts: list[str], element: int) -> str:
        """Lanes element, element + size, ... of the parts, which lie side by side."""
        v, n, size = self.v, self.v.width, self.size
        result = parts[0]
        for k in range(size):
            wanted = [element + lane * size - k * n for lane in range(n)]
            inside = [0 <= at < n for at in wanted]
            if not any(inside):
                continue
            lanes = [n + at if ok else lane for lane, (at, ok) in enumerate(zip(wanted, inside))]
            if k == 0:
                lanes = [at if ok else 0 for at, ok in zip(wanted, inside)]
            result = shuffled(v.builder, v.vector, result, parts[k], lanes)
        return result


def _elements(axis) -> list[int]:
    first, step = axis.kernel
    return [first + tap * step for tap in range(axis.taps)]
