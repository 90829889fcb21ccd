"""Copies of parts of matrices in the order in which a product reads them, in a thread's own memory.

What lies beyond a panel's own columns is never stored in a result, and may be anything.
"""

from __future__ import annotations

from ltc.llvm.emit.index import Index, least, most
from ltc.llvm.emit.vectors import Lanes, reserved, transposed
from ltc.llvm.gemm.blocking import STRIP_STEPS, Plan

PREFETCHED_STEPS = 4  # squares ahead along rows that are far apart


class PackedPanel:
    """A panel of the right operand, [depth, panel width], as computed; pairs of K share an i32."""

    def __init__(self, lanes: Lanes, plan: Plan):
        self.l, self.b, self.plan = lanes, lanes.builder, plan
        self.element = "i32" if plan.pairs else lanes.element
        rows = plan.depth // (2 if plan.pairs else 1) + lanes.width  # a square may end beyond
        self.memory = reserved(self.b, rows * plan.panel_width, self.element)

    def row(self, k: Index, count: int) -> list[str]:
        """The vectors of row k, or of the pair of rows number k."""
        l = self.l
        line = l.at(self.memory, k * self.plan.panel_width, self.element)
        return [
            l.raw_load(l.at(line, v * l.width, self.element), None, self.element, l.width)
            for v in range(count)
        ]

    def fill(self, right: str, column: Index, width: int, start: Index, depth: Index) -> None:
        """Copy rows `start` to `start + depth` of the panel that begins at `column`."""
        if self.plan.right.column == 1:
            self._rows(right, column, width, start, depth)
        elif self.plan.right.row == 1:
            self._transposed(right, column, width, start, depth)
        else:
            self._elements(right, column, width, start, depth)

    def _rows(self, right, column, width, start, depth) -> None:
        l, stride = self.l, self.plan.right.row
        source = l.at(right, start * stride + column)
        masks = [l.first(width - v * l.width) for v in range(-(-width // l.width))]

        def row(k: str, _) -> None:
            line = l.at(source, k * stride)
            target = l.at(self.memory, k * self.plan.panel_width, l.element)
            for v, mask in enumerate(masks):
                l.store_computed(l.load(line, v * l.width, mask), target, v * l.width)

        def pair(k: str, _) -> None:
            line = l.at(source, k * 2 * stride)
            target = l.at(self.memory, k * self.plan.panel_width, "i32")
            for v, mask in enumerate(masks):
                paired = pairs_of_rows(l, l.at(line, v * l.width), stride, mask)
                l.raw_store(paired, l.at(target, v * l.width, "i32"), None, "i32", l.width)

        if self.plan.pairs:
            self.b.loop(0, depth // 2, 1, [], pair)
        else:
            self.b.loop(0, depth, 1, [], row)

    def _transposed(self, right, column, width, start, depth) -> None:
        """For a right operand whose columns are adjacent in memory: squares of vectors."""
        l, b, n = self.l, self.b, self.l.width
        per_lane = 2 if self.plan.pairs else 1
        source = l.at(right, start)

        def square(k: str, v: str) -> None:
            mask = l.first(depth - k, per_lane * n)
            lines = []
            for i in range(n):
                at = column + v + i
                if width % n:
                    at = least(at, self.plan.n - 1)
                line = l.at(l.at(source, k), at * self.plan.right.column)
                b.prefetch(l.at(line, PREFETCHED_STEPS * per_lane * n))
                if self.plan.pairs:
                    raw = l.raw_load(line, mask, "i16", 2 * n)
                    lines.append(b.value(f"bitcast <{2 * n} x i16> {raw} to <{n} x i32>"))
                else:
                    lines.append(l.load(line, 0, mask))
            row = k // per_lane
            spot = row * self.plan.panel_width + v
            target = l.at(self.memory, spot, self.element)
            for i, line in enumerate(transposed(b, lines, self.element)):
                at = l.at(target, i * self.plan.panel_width, self.element)
                l.raw_store(line, at, None, self.element, n)

        b.loop(0, depth, per_lane * n, [], lambda k, _: b.loop(
            0, width, n, [], lambda v, _: square(k, v)
        ) and None)  # fmt: skip

    def _elements(self, right, column, width, start, depth) -> None:
        l, b, pairs = self.l, self.b, self.plan.pairs
        element, kept = (l.stored, "i16") if pairs else (l.element, l.element)

        def one(k: str, j: str) -> None:
            offset = (start + k) * self.plan.right.row + (column + j) * self.plan.right.column
            if pairs:
                x = b.effect(f"load i16, ptr {l.at(right, offset)}, align 2")
                row, parity = divmod(k, 2)
                column_of_pair = row * self.plan.panel_width + j
                spot = column_of_pair * 2 + parity
            else:
                x = l.scalar(right, offset)
                spot = k * self.plan.panel_width + j
            b.emit(f"store {kept} {x}, ptr {l.at(self.memory, spot, element)}")

        b.loop(0, depth, 1, [], lambda k, _: b.loop(
            0, width, 1, [], lambda j, _: one(k, j)
        ) and None)  # fmt: skip


class PackedRows:
    """Pairs along K of rows that lie side by side: [blocks, pairs, rows of a block] of a strip."""

    def __init__(self, lanes: Lanes, plan: Plan, steps: Index):
        """`steps`: all of K."""
        self.l, self.b, self.plan = lanes, lanes.builder, plan
        self.line = -(-plan.height // lanes.width) * lanes.width
        self.pairs = steps // 2
        self.memory = reserved(self.b, STRIP_STEPS // 2 * self.line, "i32")

    def fill(self, left: str, first: Index, last: Index, rows: Index) -> None:
        """Copy blocks number `first` up to `last` of a matrix of `rows` rows.

        Blocks that whole vectors can be read from are copied together, so that each line of the
        matrix is fetched once.
        """
        height = self.plan.height
        beyond = self.line - height  # elements that a block's vectors take from the next one
        safe = least(last, most(rows - beyond, 0) // height)
        self.b.loop(0, self.pairs, 1, [], lambda k, _: self.b.loop(
            first, safe, 1, [], lambda number, _: self._copy(left, number, first, k, None)
        ) and None)  # fmt: skip

        def rest(number: str, _) -> None:
            count = rows - number * height
            self.b.loop(0, self.pairs, 1, [], lambda k, _: self._copy(
                left, number, first, k, least(count, height)
            ))  # fmt: skip

        self.b.loop(most(first, safe), last, 1, [], rest)

    def _copy(self, left: str, number: Index, first: Index, k: Index, count: Index | None) -> None:
        """Pair k of one block, of which `count` rows are to be read."""
        l, plan = self.l, self.plan
        line = l.at(left, k * 2 * plan.left.column)
        source = l.at(line, number * plan.height)
        target = self.at(number - first, k * 2, 0)
        for start in range(0, self.line, l.width):
            mask = None if count is None else l.first(count - start)
            pairs = pairs_of_rows(l, l.at(source, start), plan.left.column, mask)
            l.raw_store(pairs, l.at(target, start, "i32"), None, "i32", l.width)

    def at(self, block: Index, step: Index, row: Index) -> str:
        """Where a block of the strip begins, at an even step of K and a row of the block."""
        l = self.l
        pair = block * self.pairs + step // 2
        return l.at(self.memory, pair * self.line + row, "i32")

    def pair(self, block: str, k: Index, r: int) -> str:
        """Pair number k of row r of a block."""
        at = self.l.at(block, k * self.line + r, "i32")
        return self.b.effect(f"load i32, ptr {at}, align 4")


def pairs_of_rows(l: Lanes, pointer: str, stride: Index, mask: str | None) -> str:
    """A vector of i32, each an element of a row of bfloat16 and the one `stride` after it."""
    n = l.width
    low, high = (l.raw_load(l.at(pointer, i * stride), mask, "i16", n) for i in range(2))
    order = ", ".join(f"i32 {i}, i32 {n + i}" for i in range(n))
    mixed = l.builder.value(
        f"shufflevector <{n} x i16> {low}, <{n} x i16> {high}, <{2 * n} x i32> <{order}>"
    )
    return l.builder.value(f"bitcast <{2 * n} x i16> {mixed} to <{n} x i32>")
