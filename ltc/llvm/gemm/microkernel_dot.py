"""Rows times rows: a transposed right operand is read where it is, not packed.

Both operands have K adjacent in memory.  The products of four rows with four columns are summed
side by side, each in the lanes of a vector along K; transposed, the sixteen vectors add up to the
sixteen results.
"""

from __future__ import annotations

from ltc.llvm.emit.dtype import BYTES
from ltc.llvm.emit.index import Index, least
from ltc.llvm.emit.vectors import Vectors, reserved, shuffled, transposed
from ltc.llvm.gemm.blocking import DOT_TILE, GemmPlan

STRIP_TILES = 16  # tiles of rows whose sums wait in memory, one vector of columns wide
PIECE_VECTORS = 64  # of K at a time: four rows of it are half of a first-level cache


class DotTiles:
    """Sums of some rows times one vector of columns."""

    def __init__(self, v: Vectors, plan: GemmPlan, rows: Index, depth: Index):
        """`rows`, `depth`: all of M and K."""
        self.v, self.b, self.plan = v, v.builder, plan
        self.rows, self.depth = rows, depth
        self.memory = reserved(self.b, STRIP_TILES * DOT_TILE * v.width, v.element)

    def sums(self, left: str, right: str, column: Index, first: Index, last: Index) -> None:
        """The tiles of rows from number `first` up to `last`, with the columns from `column` on.

        The sum of row r and column c is at place (r - DOT_TILE * first) * width + c - column.
        """
        v, b = self.v, self.b
        tiles = last - first
        size = tiles * (DOT_TILE * v.width)
        b.loop(0, size, v.width, [], lambda i, _: v.store_computed(v.zero, self.memory, i))

        def tile(start: Index, j: Index, i: Index, _) -> None:
            row = (first + i) * DOT_TILE
            place = i * (DOT_TILE * v.width) + j
            self._tile(left, right, row, column + j, start, place)

        pieces, columns = (0, self.depth, PIECE_VECTORS * v.width), (0, v.width, DOT_TILE)
        b.nest((pieces, columns, tiles), [], tile)

    def _tile(self, left, right, row: Index, column: Index, start: Index, place: Index) -> None:
        """Adds to memory what the steps from `start` on give."""
        v, b = self.v, self.b
        xs = self._lines(left, row, self.rows, self.plan.left.row, start)
        ys = self._lines(right, column, self.plan.n, self.plan.right.column, start)

        def step(k: Index, mask: str | None, sums: list[str]) -> list[str]:
            rows, columns = ([v.load(line, k, mask) for line in lines] for lines in (xs, ys))
            pairs = ((x, y) for x in rows for y in columns)
            return [v.multiply_add(x, y, total) for (x, y), total in zip(pairs, sums)]

        depth = least(PIECE_VECTORS * v.width, self.depth - start)
        whole = depth - depth % v.width
        zeros = [(v.vector, v.zero)] * DOT_TILE**2
        sums = b.loop(0, whole, v.width, zeros, lambda k, values: step(k, None, values))
        rest = depth - whole
        carried = v.typed(sums)
        sums = b.when(
            b.value(f"icmp sgt i64 {rest}, 0"), carried, lambda: step(whole, v.first(rest), sums)
        )
        self._add(sums, place)

    def _lines(self, pointer, first: Index, limit: Index, stride: int, start: Index) -> list[str]:
        """Where each of four rows begins; beyond the last, the last again."""
        v = self.v
        base = v.at(pointer, start)
        rows = (least(first + i, limit - 1) for i in range(DOT_TILE))
        return [v.at(base, row * stride) for row in rows]

    def _add(self, sums: list[str], place: Index) -> None:
        """Sum number r * DOT_TILE + c goes to row r, column c of a tile in memory."""
        v, b, n = self.v, self.b, self.v.width
        part, size = f"<{DOT_TILE} x {v.element}>", BYTES[v.element]
        for start in range(0, DOT_TILE**2, n):
            totals = transposed(b, sums[start : start + n], v.element)
            while len(totals) > 1:
                half = len(totals) // 2
                totals = [v.add(x, y) for x, y in zip(totals[:half], totals[half:])]
            for i in range(0, n, DOT_TILE):
                row = (start + i) // DOT_TILE
                at = v.at(self.memory, place + row * n, v.element)
                four = shuffled(b, v.vector, totals[0], totals[0], list(range(i, i + DOT_TILE)))
                old = b.effect(f"load {part}, ptr {at}, align {size}")
                total = b.value(f"fadd {part} {old}, {four}")
                b.emit(f"store {part} {total}, ptr {at}, align {size}")
