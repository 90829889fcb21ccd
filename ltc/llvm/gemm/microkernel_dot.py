"""Rows times rows: a transposed right operand is read where it is, not packed.

Both operands have K adjacent in memory.  The products of four rows with four columns are summed
side by side, each in the lanes of a vector along K; turned, the sixteen vectors add up to the
sixteen results.
"""

from __future__ import annotations

from ltc.llvm.emit.index import Index, least
from ltc.llvm.emit.vectors import BYTES, Lanes, reserved, shuffled, transposed
from ltc.llvm.gemm.blocking import SQUARE, Plan

STRIP_SQUARES = 16  # squares of rows whose sums wait in memory, one vector of columns wide
PIECE_VECTORS = 64  # of K at a time: four rows of it are half of a first-level cache


class Squares:
    """Sums of some rows times one vector of columns."""

    def __init__(self, lanes: Lanes, plan: Plan, rows: Index, depth: Index):
        """`rows`, `depth`: all of M and K."""
        self.l, self.b, self.plan = lanes, lanes.builder, plan
        self.rows, self.depth = rows, depth
        self.memory = reserved(self.b, STRIP_SQUARES * SQUARE * lanes.width, lanes.element)

    def sums(self, left: str, right: str, column: Index, first: Index, last: Index) -> None:
        """The squares of rows from number `first` up to `last`, with the columns from `column` on.

        The sum of row r and column c is at place (r - SQUARE * first) * width + c - column.
        """
        l, b = self.l, self.b
        squares = last - first
        size = squares * (SQUARE * l.width)
        b.loop(0, size, l.width, [], lambda i, _: l.store_computed(l.zero, self.memory, i) and None)

        def square(start: Index, j: Index, i: Index) -> None:
            row = (first + i) * SQUARE
            place = i * (SQUARE * l.width) + j
            self._square(left, right, row, column + j, start, place)

        b.loop(0, self.depth, PIECE_VECTORS * l.width, [], lambda start, _: b.loop(
            0, l.width, SQUARE, [], lambda j, _: b.loop(
                0, squares, 1, [], lambda i, _: square(start, j, i)
            ) and None) and None)  # fmt: skip

    def _square(self, left, right, row: Index, column: Index, start: Index, place: Index) -> None:
        """Adds to memory what the steps from `start` on give."""
        l, b = self.l, self.b
        xs = self._lines(left, row, self.rows, self.plan.left.row, start)
        ys = self._lines(right, column, self.plan.n, self.plan.right.column, start)

        def step(k: Index, mask: str | None, sums: list[str]) -> list[str]:
            rows, columns = ([l.load(line, k, mask) for line in lines] for lines in (xs, ys))
            pairs = ((x, y) for x in rows for y in columns)
            return [l.multiply_add(x, y, total) for (x, y), total in zip(pairs, sums)]

        depth = least(PIECE_VECTORS * l.width, self.depth - start)
        whole = depth - depth % l.width
        zeros = [(l.vector, l.zero)] * SQUARE**2
        sums = b.loop(0, whole, l.width, zeros, lambda k, values: step(k, None, values))
        rest = depth - whole
        carried = [(l.vector, value) for value in sums]
        sums = b.when(
            b.value(f"icmp sgt i64 {rest}, 0"), carried, lambda: step(whole, l.first(rest), sums)
        )
        self._add(sums, place)

    def _lines(self, pointer, first: Index, limit: Index, stride: int, start: Index) -> list[str]:
        """Where each of four rows begins; beyond the last, the last again."""
        l = self.l
        base = l.at(pointer, start)
        rows = (least(first + i, limit - 1) for i in range(SQUARE))
        return [l.at(base, row * stride) for row in rows]

    def _add(self, sums: list[str], place: Index) -> None:
        """Sum number r * SQUARE + c goes to row r, column c of a square in memory."""
        l, b, n = self.l, self.b, self.l.width
        part, size = f"<{SQUARE} x {l.element}>", BYTES[l.element]
        for start in range(0, SQUARE**2, n):
            totals = transposed(b, sums[start : start + n], l.element)
            while len(totals) > 1:
                half = len(totals) // 2
                totals = [l.add(x, y) for x, y in zip(totals[:half], totals[half:])]
            for i in range(0, n, SQUARE):
                row = (start + i) // SQUARE
                at = l.at(self.memory, place + row * n, l.element)
                four = shuffled(b, l.vector, totals[0], totals[0], list(range(i, i + SQUARE)))
                old = b.effect(f"load {part}, ptr {at}, align {size}")
                total = b.value(f"fadd {part} {old}, {four}")
                b.emit(f"store {part} {total}, ptr {at}, align {size}")
