"""The sums of a convolution whose groups have few result channels, straight from the operand."""

from __future__ import annotations

from ltc.llvm.conv.nchw_accumulate import Sums
from ltc.llvm.emit.index import Index, least
from ltc.llvm.emit.vectors import LONGEST_SUM, multiples


class DirectSums(Sums):
    """Gathers nothing: a line of the result meets a line of the operand at each tap."""

    stack_bytes = 0

    def _vectors(self) -> int:
        return max(1, min(4, -(-self.width // self.v.width)))

    def _emit(self, units: int) -> None:
        lines = self.images * self.groups * self.lines
        self.b.loop(*self.b.share(lines), 1, [], self._direct_line)

    def _direct_line(self, number: Index, _) -> None:
        """One line of the result."""
        v, b = self.v, self.b
        part, line = divmod(number, self.lines)
        self._locate(part)
        deep, high, wide = self.axes
        sums = [(v.vector, v.zero)] * (self.rows * self.vectors)
        together = max(1, LONGEST_SUM // max(1, self.taps))  # channels of one piece of a long sum

        def columns(column: Index, _) -> None:
            def channel(c: Index, values: list[str]) -> list[str]:
                source = v.at(self.operand_at, c * self.size)

                def outer(d: Index, values: list[str]) -> list[str]:
                    return b.loop(0, high.taps, 1, pairs(values), lambda h, j: middle(d, h, j))

                def middle(d: Index, h: Index, values: list[str]) -> list[str]:
                    at, limit = self._operand_line(source, line, d, h)
                    k = (c * deep.taps + d) * high.taps + h
                    weights = v.at(self.weight_at, k * wide.taps)
                    return b.loop(0, wide.taps, 1, pairs(values), lambda w, j: tap(
                        at, limit, weights, w, j
                    ))  # fmt: skip

                return b.loop(0, deep.taps, 1, pairs(values), outer)

            def tap(at, limit, weights, w, values) -> list[str]:
                ys = [
                    self._operand_vector(at, column + j * v.width, w, limit)
                    for j in range(self.vectors)
                ]
                result = []
                for r in range(self.rows):
                    x = v.splat(v.scalar(weights, w + r * self.channels * self.taps))
                    for j, y in enumerate(ys):
                        result.append(v.multiply_add(x, y, values[r * self.vectors + j]))
                return result

            def piece(start: Index, totals: list[str]) -> list[str]:
                end = least(start + together, self.channels)
                parts = b.loop(start, end, 1, sums, channel)
                return [v.add(total, part) for total, part in zip(totals, parts)]

            values = b.loop(0, self.channels, together, sums, piece)
            for i, value in enumerate(values):
                r, j = divmod(i, self.vectors)
                at = column + j * v.width
                mask = v.first(self.width - at)
                if self.spread:
                    self._store_spread_line(value, r, line, at, mask)
                else:
                    self._store_vector(value, r, line * self.width + at, mask)

        def pairs(values: list[str]) -> list[tuple[str, str]]:
            return [(v.vector, value) for value in values]

        b.loop(0, self.width, self.panel, [], columns)

    def _operand_vector(self, line: str, column: Index, w: Index, limit: Index) -> str:
        """What adjacent columns of the result meet at one tap."""
        v, axis = self.v, self.axes[2]
        first = axis.met(column, w)
        return v.strided(line, first, axis.stride, v.masks_of(first, axis.stride, limit))

    def _store_spread_line(self, value, row, line, column, mask) -> None:
        v = self.v
        o, p = divmod(line, self.axes[1].count)
        at: Index = 0
        for index, axis in zip((o, p, column), self.axes):
            element = index * axis.place[1] + axis.place[0]
            at = at * axis.result + element
        base = v.at("%p2", (self.result_row + row) * self.result_size + at)  # fmt: skip
        step = self.axes[2].place[1]
        v.scatter(value, base, multiples(v.width, step), mask)
