"""The innermost part of a matrix product: a block of rows times a panel, summed in registers."""

from __future__ import annotations

import functools
from collections.abc import Callable

from ltc.llvm.emit.dtype import BYTES
from ltc.llvm.emit.index import Index, least
from ltc.llvm.emit.vectors import LONGEST_SUM, Vectors, reserved, shuffled, transposed
from ltc.llvm.gemm.blocking import DOT_TILE, GemmPlan
from ltc.llvm.gemm.packing import PackedPanel, PackedRows

PREFETCHED_ROWS = 16
FAR_BYTES = 2048  # between elements that no processor foresees
LINE_BYTES = 64


class ProductBlock:
    """Adds up blocks of one product.

    Args:
        panel: The packed panel, or None where the right operand is read in place.
        strip: The packed rows, or None where the left operand is read in place.
    """

    def __init__(
        self, v: Vectors, plan: GemmPlan, panel: PackedPanel | None, strip: PackedRows | None
    ):
        self.v, self.b, self.plan = v, v.builder, plan
        self.panel, self.strip = panel, strip
        # A column of the left operand is in another page at each step.
        self.prefetches_left = plan.left.column * plan.dtype.itemsize >= FAR_BYTES

    def sums(self, left: str, right: str, rows: int, masks, first: Index, end: Index) -> list[str]:
        """Return rows x vectors sums of the packed steps from `first` up to `end`.

        Args:
            left: The place of the block's first row, at step 0.
            right: The place of the panel, or of its first column if it is read in place.
            masks: The masks of the panel's vectors.
        """
        v = self.v
        if self.plan.pairs:
            first, end = first // 2, end // 2
        zeros = [(v.vector, v.zero)] * (rows * len(masks))

        def step(k: Index, sums: list[str]) -> list[str]:
            vectors = self._right(right, k, masks)
            if self.plan.pairs:
                return self._pair_step(left, k, rows, vectors, sums)
            return self._step(left, k, rows, vectors, sums)

        return self.b.loop(first, end, 1, zeros, step)

    def _right(self, right: str, k: Index, masks) -> list[str]:
        v = self.v
        if self.panel is not None:
            return self.panel.row(k, len(masks))
        line = v.at(right, k * self.plan.right.row)
        vectors = [v.load(line, j * v.width, mask) for j, mask in enumerate(masks)]
        for j in range(len(masks) if self.plan.prefetches else 0):
            self.b.prefetch(v.at(line, PREFETCHED_ROWS * self.plan.right.row + j * v.width))
        return vectors

    def _step(self, left, k, rows, vectors, sums) -> list[str]:
        v, result = self.v, []
        value_of = self._in_place(left, k, rows) if self.strip is None else self._packed(left, k)
        for r in range(rows):
            x = v.splat(value_of(r))
            for j, y in enumerate(vectors):
                result.append(v.multiply_add(x, y, sums[r * len(vectors) + j]))
        return result

    def _packed(self, left: str, k: Index) -> Callable[[int], str]:
        assert self.strip is not None
        return functools.partial(self.strip.value, left, k)

    def _in_place(self, left: str, k: Index, rows: int) -> Callable[[int], str]:
        """Return the maker of step k of a row of a block that is read in place."""
        v, plan = self.v, self.plan
        here = v.at(left, k * plan.left.column)
        if plan.foresees and rows == plan.height:
            # The next block's rows follow: a line of them at each step, before they are wanted.
            line = LINE_BYTES // plan.dtype.itemsize
            self.b.prefetch(v.at(v.at(left, rows * plan.left.row), k * line))
        if self.prefetches_left:
            ahead = v.at(here, PREFETCHED_ROWS * plan.left.column)
            self.b.prefetch(ahead)
            if rows > 1:  # a block's rows may lie in two lines
                self.b.prefetch(v.at(ahead, (rows - 1) * plan.left.row))
        return lambda r: v.scalar(here, r * plan.left.row)

    def _pair_step(self, left, k, rows, vectors, sums) -> list[str]:
        """Step as `_step` does, for two elements of K; their products are added before the sum."""
        v, b = self.v, self.b
        pair, words = f"<{2 * v.width} x bfloat>", f"<{v.width} x i32>"
        function = "llvm.x86.avx512bf16.dpbf16ps.512"
        here, result = "", []
        if self.strip is None:
            here = v.at(left, k * 2 * self.plan.left.column)
        ys = [b.value(f"bitcast {words} {y} to {pair}") for y in vectors]
        for r in range(rows):
            if self.strip is not None:
                word = self.strip.value(left, k, r)
            else:
                word = self._left_pair(v.at(here, r * self.plan.left.row))
            x = b.value(f"bitcast {words} {v.splat(word, 'i32')} to {pair}")
            for j, y in enumerate(ys):
                total = (v.vector, sums[r * len(vectors) + j])
                result.append(b.pure_call(function, v.vector, total, (pair, x), (pair, y)))
        return result

    def _left_pair(self, pointer: str) -> str:
        v, b = self.v, self.b
        if self.plan.left.column == 1:
            return b.effect(f"load i32, ptr {pointer}, align 2")
        second = v.at(pointer, self.plan.left.column)
        low, high = (b.effect(f"load i16, ptr {p}, align 2") for p in (pointer, second))
        low, high = (b.value(f"zext i16 {x} to i32") for x in (low, high))
        return b.value(f"or i32 {low}, {b.value(f'shl i32 {high}, 16')}")


class Dots:
    """Few rows by a transposed right operand: its rows are read once, as dot products."""

    def __init__(self, v: Vectors, plan: GemmPlan, memory: str):
        """`memory`: of plan.rows vectors, where the sums of one group of columns go."""
        self.v, self.b, self.plan, self.memory = v, v.builder, plan, memory
        self.together = 1
        while plan.rows * self.together * 2 <= v.isa.registers // 2:
            self.together *= 2
        self.together = min(self.together, v.width, plan.streams)

    def sums(self, left: str, right: str, column: Index, depth: Index) -> None:
        """The sums of the columns from `column` on, one vector of them for each row."""
        self.b.loop(0, self.v.width, self.together, [], lambda j, _: self._some(
            left, right, column, j, depth
        ))  # fmt: skip

    def _some(self, left: str, right: str, column: Index, j: Index, depth: Index) -> None:
        v, b, m = self.v, self.b, self.plan.rows
        lines = [
            v.at(right, least(column + j + i, self.plan.n - 1) * self.plan.right.column)
            for i in range(self.together)
        ]  # fmt: skip

        def step(k: Index, mask: str | None, sums: list[str]) -> list[str]:
            ys = [v.load(line, k, mask) for line in lines]
            result = []
            for r in range(m):
                x = v.load(left, k + r * self.plan.left.row, mask)
                for i, y in enumerate(ys):
                    result.append(v.multiply_add(x, y, sums[r * self.together + i]))
            return result

        whole = depth - depth % v.width
        zeros = [(v.vector, v.zero)] * (m * self.together)
        sums = b.loop(0, whole, v.width, zeros, lambda k, values: step(k, None, values))
        rest = depth - whole
        carried = v.typed(sums)
        sums = b.when(
            b.value(f"icmp sgt i64 {rest}, 0"), carried, lambda: step(whole, v.first(rest), sums)
        )
        for r in range(m):
            for i in range(self.together):
                spot = v.at(self.memory, j + (r * v.width + i), v.element)
                b.emit(f"store {v.element} {v.total(sums[r * self.together + i])}, ptr {spot}")


def add_to_memory(v: Vectors, memory: str, values: list[str]) -> None:
    """Adds vectors to those that lie one after another in memory."""
    for i, value in enumerate(values):
        total = v.add(v.load_computed(memory, i * v.width), value)
        v.store_computed(total, memory, i * v.width)


def pieces(v: Vectors, first: Index, end: Index, body) -> None:
    """body(start, stop) for each LONGEST_SUM steps: a sum of such sums errs less than one chain."""
    v.builder.loop(first, end, LONGEST_SUM, [], lambda start, _: body(
        start, least(start + LONGEST_SUM, end)
    ))  # fmt: skip


# --- rows times rows --------------------------------------------------------------------------
# A transposed right operand is read where it is, not packed.  Both operands have K adjacent in memory.
# The products of four rows with four columns are summed side by side, each in the lanes of a vector
# along K; transposed, the sixteen vectors add up to the sixteen results.

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
        """Return where each of four rows begins; beyond the last, the last again."""
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
