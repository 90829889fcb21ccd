"""The sums of a convolution whose groups have few result channels, straight from the operand."""

from __future__ import annotations

from ltc.llvm.conv.nchw_accumulate import Sums
from ltc.llvm.emit.builder import multiples
from ltc.llvm.emit.index import Index, least
from ltc.llvm.emit.vectors import LONGEST_SUM


class DirectSums(Sums):
    """Gathers nothing: a line of the result meets a line of the operand at each tap."""

    stack_bytes = 0

    def _vectors(self) -> int:
        return max(1, min(4, -(-self.width // self.v.width)))

    def _emit(self, items: int) -> None:
        lines = self.images * self.groups * self.lines
        self.b.loop(*self.b.share(lines), 1, [], self._direct_line)

    def _direct_line(self, number: Index, _) -> None:
        """One line of the result."""
        part, line = divmod(number, self.lines)
        self._locate(part)
        self.b.loop(
            0, self.width, self.panel, [], lambda column, _: self._direct_columns(line, column)
        )

    def _direct_columns(self, line: Index, column: Index) -> None:
        """A panel of columns of every row of the result."""
        v, b = self.v, self.b
        zeros = v.typed([v.zero] * (self.rows * self.vectors))
        together = max(1, LONGEST_SUM // max(1, self.taps))  # channels of one piece of a long sum

        def piece(start: Index, totals: list[str]) -> list[str]:
            end = least(start + together, self.channels)
            parts = b.loop(
                start, end, 1, zeros, lambda c, sums: self._direct_channel(line, column, c, sums)
            )
            return [v.add(total, part) for total, part in zip(totals, parts)]

        for i, value in enumerate(b.loop(0, self.channels, together, zeros, piece)):
            r, j = divmod(i, self.vectors)
            at = column + j * v.width
            mask = v.first(self.width - at)
            if self.spread:
                self._store_spread_line(value, r, line, at, mask)
            else:
                self._store_vector(value, r, line * self.width + at, mask)

    def _direct_channel(
        self, line: Index, column: Index, channel: Index, sums: list[str]
    ) -> list[str]:
        """The sums, and what one channel adds to them at every tap."""
        v, b, (deep, high, wide) = self.v, self.b, self.axes
        source = v.at(self.operand_at, channel * self.size)

        def taps(d: Index, h: Index, sums: list[str]) -> list[str]:
            at, limit = self._operand_line(source, line, d, h)
            k = (channel * deep.taps + d) * high.taps + h
            weights = v.at(self.weight_at, k * wide.taps)
            return b.loop(0, wide.taps, 1, v.typed(sums), lambda w, sums: self._direct_tap(
                at, limit, weights, column, w, sums
            ))  # fmt: skip

        return b.nest((deep.taps, high.taps), v.typed(sums), taps)

    def _direct_tap(self, line, limit, weights, column, w, sums: list[str]) -> list[str]:
        v = self.v
        ys = [
            self._operand_vector(line, column + j * v.width, w, limit) for j in range(self.vectors)
        ]
        result = []
        for r in range(self.rows):
            x = v.splat(v.scalar(weights, w + r * self.channels * self.taps))
            for j, y in enumerate(ys):
                result.append(v.multiply_add(x, y, sums[r * self.vectors + j]))
        return result

    def _operand_vector(self, line: str, column: Index, w: Index, limit: Index) -> str:
        """What adjacent columns of the result meet at one tap."""
        v, axis = self.v, self.axes[2]
        first = axis.input_index(column, w)
        return v.strided(line, first, axis.stride, v.masks_of(first, axis.stride, limit))

    def _store_spread_line(self, value, row, line, column, mask) -> None:
        v = self.v
        o, p = divmod(line, self.axes[1].count)
        at: Index = 0
        for index, axis in zip((o, p, column), self.axes):
            at = at * axis.result + (index * axis.place[1] + axis.place[0])
        base = v.at("%p2", (self.result_row + row) * self.result_size + at)
        step = self.axes[2].place[1]
        v.scatter(value, base, multiples(v.width, step), mask)
