"""The gradient [N, *spatial, C] of a convolution's operand of so few channels C that they would
leave most of a vector empty.

A vector is adjacent channels of what is summed.  Each result keeps a vector of sums in registers
over all taps; at the end the lanes of each are added up, those of many results at once.
"""

from __future__ import annotations

from ltc.llvm.conv.axes import Axes
from ltc.llvm.conv.geometry import Geometry
from ltc.llvm.conv.nhwc_accumulate import StripSums
from ltc.llvm.emit.dtype import BYTES, FORMS
from ltc.llvm.emit.index import Index
from ltc.llvm.emit.isa import Isa
from ltc.llvm.emit.vectors import Epilogue, Vectors, shuffled

FULL_SHARE = 4  # of a vector's lanes, one in so many; more results are better off side by side


def sums_across_lanes(v: Vectors, geometry: Geometry, axes: Axes) -> bool:
    """Whether these kernels compute a phase of a gradient, and are worth it."""
    outputs, channels = geometry.weight[:2]
    few = 1 <= channels <= v.width // FULL_SHARE and geometry.groups == 1 and outputs >= v.width
    weights = axes[2].taps * channels
    return few and weights + v.width + 2 <= v.isa.registers


class ChannelTotals(StripSums):
    """result[n, o, m] = sum over t, c of operand[n, o meets t, c] * weight[c, m, t]."""

    def __init__(self, dtype, geometry: Geometry, axes: Axes, isa: Isa, epilogue: Epilogue | None):
        positions = isa.lanes(BYTES[FORMS[dtype].computed]) // geometry.weight[1]
        super().__init__(dtype, geometry, axes, isa, epilogue, positions)

    def _line(self, image: Index, line: Index, position: Index) -> None:
        self._tiles(image, line, 0, lambda place, width, column: self._store(
            total_of_each(self.v, self._summed(place, width)), width, position, column
        ))  # fmt: skip

    def _summed(self, place: str, width: int) -> list[str]:
        """A vector of sums for each result: those of a position are neighbours."""
        v, b, (deep, high, _) = self.v, self.b, self.axes

        def line(d: Index, h: Index, values: list[str]) -> list[str]:
            row = (d * high.taps + h) * (self.axes[2].taps * self.right)
            weights = v.at(self.packed, row * self.packed_row, v.element)
            here = v.at(place, self.input_tile.tap(d, h, 0), v.element)
            return b.loop(0, self.channels, v.width, v.typed(values), lambda c, values: (
                self._vector(v.at(here, c, v.element), v.at(weights, c, v.element), c, values)
            ))  # fmt: skip

        zeros = v.typed([v.zero] * (width * self.right))
        return b.nest((deep.taps, high.taps), zeros, line)

    def _vector(self, here: str, weights: str, channel: Index, values: list[str]) -> list[str]:
        """One vector of channels of a line of taps: each element is loaded once."""
        v, values, mask = self.v, list(values), self.mask(channel)
        rows = range(self.axes[2].taps * self.right)
        ys = [v.load_computed(weights, row * self.packed_row) for row in rows]
        for element, meetings in self._meetings(len(values) // self.right).items():
            x = v.load_computed(here, element, mask)
            for r, t in meetings:
                for m in range(self.right):
                    at = r * self.right + m
                    values[at] = v.multiply_add(x, ys[t * self.right + m], values[at])
        return values

    def _meetings(self, width: int) -> dict[Index, list[tuple[int, int]]]:
        """The (position, tap) that meet each element of a line."""
        found: dict[Index, list[tuple[int, int]]] = {}
        for r in range(width):
            for t in range(self.axes[2].taps):
                element = self.input_tile.place(0, 0, r) + self.input_tile.tap(0, 0, t)
                found.setdefault(element, []).append((r, t))
        return dict(sorted(found.items()))

    def _store(self, totals: str, width: int, position: Index, column: Index) -> None:
        v, right = self.v, self.right
        if self.epilogue is None and self.axes[2].place[1] == 1:
            first = self._row(position, column, 0) * right
            v.store(totals, "%p2", first, v.first(width * right))
            return
        for r in range(width):
            lanes = [min(r * right + k, v.width - 1) for k in range(v.width)]
            self._store_one(
                shuffled(self.b, v.vector, totals, totals, lanes), self._row(position, column, r)
            )

    def _store_one(self, value: str, row: Index) -> None:
        v, mask = self.v, self.v.first(self.right)
        if self.epilogue is not None:
            with self.b.lanes(v.width):
                value = self.epilogue(self.b, value, row, 0, mask)
        v.store(value, "%p2", row * self.right, mask)


def total_of_each(v: Vectors, vectors: list[str]) -> str:
    """A vector of the sums of the lanes of each vector, of as many as it has lanes at most."""
    width, step = v.width, 1
    vectors = vectors + [v.zero] * (width - len(vectors))
    while step < width:
        keep = [lane if not lane & step else width + lane - step for lane in range(width)]
        move = [lane + step if not lane & step else width + lane for lane in range(width)]
        vectors = [
            v.add(*(shuffled(v.builder, v.vector, x, y, lanes) for lanes in (keep, move)))
            for x, y in zip(vectors[::2], vectors[1::2])
        ]
        step *= 2
    return vectors[0]
