"""Copies of parts of matrices in the order in which a product reads them, in a thread's own memory.

What lies beyond a panel's own columns is never stored in a result, and may be anything.
"""

from __future__ import annotations

from ltc.llvm.emit.dtype import BYTES
from ltc.llvm.emit.index import Index, least, most
from ltc.llvm.emit.vectors import Vectors, reserved, transposed
from ltc.llvm.gemm.blocking import PAIRED_STRIP_STEPS, STRIP_BLOCKS, GemmPlan

PREFETCHED_STEPS = 4  # squares ahead along rows that are far apart
# Ahead along what is copied line by line: rows may be so far apart that no processor foresees them.
PREFETCHED_RIGHT_ROWS, PREFETCHED_LEFT_STEPS = 8, 4


class PackedPanel:
    """A panel of the right operand, [depth, panel width], as computed; pairs of K share an i32."""

    def __init__(self, v: Vectors, plan: GemmPlan):
        self.v, self.b, self.plan = v, v.builder, plan
        self.element = "i32" if plan.pairs else v.element
        rows = plan.depth // (2 if plan.pairs else 1) + v.width  # a square may end beyond
        self.memory = reserved(self.b, rows * plan.panel_width, self.element)

    def row(self, k: Index, count: int) -> list[str]:
        """The vectors of row k, or of the pair of rows number k."""
        v = self.v
        line = v.at(self.memory, k * self.plan.panel_width, self.element)
        return [
            v.raw_load(v.at(line, j * v.width, self.element), None, self.element, v.width)
            for j in range(count)
        ]

    def fill(self, right: str, column: Index, width: Index, start: Index, depth: Index) -> None:
        """Copy rows `start` to `start + depth` of the panel of `width` columns from `column` on."""
        if self.plan.right.column == 1:
            self._rows(right, column, width, start, depth)
        elif self.plan.right.row == 1:
            self._transposed(right, column, width, start, depth)
        else:
            self._elements(right, column, width, start, depth)

    def _rows(self, right, column, width, start, depth) -> None:
        v, stride = self.v, self.plan.right.row
        source = v.at(right, start * stride + column)
        widest = width if isinstance(width, int) else self.plan.panel_width
        masks = [v.first(width - j) for j in range(0, widest, v.width)]

        def row(k: Index, _) -> None:
            line = v.at(source, k * stride)
            if self.plan.sums_strips:  # few blocks follow: what is fetched late stands out
                self.b.prefetch(v.at(line, PREFETCHED_RIGHT_ROWS * stride))
            target = v.at(self.memory, k * self.plan.panel_width, v.element)
            for j, mask in enumerate(masks):
                v.store_computed(v.load(line, j * v.width, mask), target, j * v.width)

        def pair(k: Index, _) -> None:
            line = v.at(source, k * 2 * stride)
            target = v.at(self.memory, k * self.plan.panel_width, "i32")
            for j, mask in enumerate(masks):
                paired = pairs_of_rows(v, v.at(line, j * v.width), stride, mask)
                v.raw_store(paired, v.at(target, j * v.width, "i32"), None, "i32", v.width)

        if self.plan.pairs:
            self.b.loop(0, depth // 2, 1, [], pair)
        else:
            self.b.loop(0, depth, 1, [], row)

    def _transposed(self, right, column, width, start, depth) -> None:
        """For a right operand whose columns are adjacent in memory: squares of vectors."""
        v, b, n = self.v, self.b, self.v.width
        per_lane = 2 if self.plan.pairs else 1
        source = v.at(right, start)

        def square(k: Index, j: Index, _) -> None:
            mask = v.first(depth - k, per_lane * n)
            lines = []
            for i in range(n):
                at = column + j + i
                if not isinstance(width, int) or width % n:
                    at = least(at, self.plan.n - 1)
                line = v.at(v.at(source, k), at * self.plan.right.column)
                b.prefetch(v.at(line, PREFETCHED_STEPS * per_lane * n))
                if self.plan.pairs:
                    raw = v.raw_load(line, mask, "i16", 2 * n)
                    lines.append(b.value(f"bitcast <{2 * n} x i16> {raw} to <{n} x i32>"))
                else:
                    lines.append(v.load(line, 0, mask))
            spot = k // per_lane * self.plan.panel_width + j
            target = v.at(self.memory, spot, self.element)
            for i, line in enumerate(transposed(b, lines, self.element)):
                at = v.at(target, i * self.plan.panel_width, self.element)
                v.raw_store(line, at, None, self.element, n)

        b.nest([(0, depth, per_lane * n), (0, width, n)], [], square)

    def _elements(self, right, column, width, start, depth) -> None:
        v, b, pairs = self.v, self.b, self.plan.pairs
        element, kept = (v.stored, "i16") if pairs else (v.element, v.element)

        def one(k: Index, j: Index, _) -> None:
            offset = (start + k) * self.plan.right.row + (column + j) * self.plan.right.column
            if pairs:
                x: str = b.effect(f"load i16, ptr {v.at(right, offset)}, align 2")
                row, parity = divmod(k, 2)
                spot = (row * self.plan.panel_width + j) * 2 + parity
            else:
                x = v.scalar(right, offset)
                spot = k * self.plan.panel_width + j
            b.emit(f"store {kept} {x}, ptr {v.at(self.memory, spot, element)}")

        b.nest((depth, width), [], one)


class PackedRows:
    """A strip of rows that lie side by side: [blocks, steps, rows of a block], as computed.

    Pairs of steps share an i32, as in a packed panel; of these, all of K is packed at once.
    """

    def __init__(self, v: Vectors, plan: GemmPlan, steps: Index):
        """`steps`: all of K."""
        self.v, self.b, self.plan = v, v.builder, plan
        self.element, self.together = ("i32", 2) if plan.pairs else (v.element, 1)
        self.line = plan.strip_line
        self.steps = steps // 2 if plan.pairs else plan.depth
        most_steps = PAIRED_STRIP_STEPS // 2 if plan.pairs else STRIP_BLOCKS * self.steps
        self.memory = reserved(self.b, most_steps * self.line, self.element)

    def fill(
        self, left: str, first: Index, last: Index, rows: Index, start: Index, depth: Index
    ) -> None:
        """Copy steps `start` to `start + depth` of blocks number `first` up to `last`.

        Blocks that whole vectors can be read from are copied together, so that each line of the
        matrix is fetched once.

        Args:
            rows: The rows of the whole matrix.
        """
        height = self.plan.height
        beyond = self.line - height  # elements that a block's vectors take from the next one
        safe = least(last, most(rows - beyond, 0) // height)
        source, steps = self.v.at(left, start * self.plan.left.column), depth // self.together
        self.b.nest([steps, (first, safe, 1)], [], lambda k, number, _: self._copy(
            source, number, first, k, None
        ))  # fmt: skip

        def rest(number: Index, _) -> None:
            count = rows - number * height
            self.b.loop(0, steps, 1, [], lambda k, _: self._copy(
                source, number, first, k, least(count, height)
            ))  # fmt: skip

        self.b.loop(most(first, safe), last, 1, [], rest)

    def _copy(self, left: str, number: Index, first: Index, k: Index, count: Index | None) -> None:
        """Step k, or that pair, of one block, of which `count` rows are to be read."""
        v, plan = self.v, self.plan
        line = v.at(left, k * self.together * plan.left.column)
        source = v.at(line, number * plan.height)
        if not plan.pairs:
            self.b.prefetch(v.at(source, PREFETCHED_LEFT_STEPS * plan.left.column))
        target = self.at(number - first, k * self.together, 0)
        for start in range(0, self.line, v.width):
            mask = None if count is None else v.first(count - start)
            at = v.at(source, start)
            values = (
                pairs_of_rows(v, at, plan.left.column, mask) if plan.pairs else v.load(at, 0, mask)
            )
            v.raw_store(values, v.at(target, start, self.element), None, self.element, v.width)

    def at(self, block: Index, step: Index, row: Index) -> str:
        """Return where a block of the strip begins, at a step of K, an even one of pairs, and its
        row.
        """
        v = self.v
        step = block * self.steps + step // self.together
        return v.at(self.memory, step * self.line + row, self.element)

    def value(self, block: str, k: Index, r: int) -> str:
        """Step number k, or that pair, of row r of a block."""
        at = self.v.at(block, k * self.line + r, self.element)
        return self.b.effect(f"load {self.element}, ptr {at}, align {BYTES[self.element]}")


def pairs_of_rows(v: Vectors, pointer: str, stride: Index, mask: str | None) -> str:
    """A vector of i32, each an element of a row of bfloat16 and the one `stride` after it."""
    n = v.width
    low, high = (v.raw_load(v.at(pointer, i * stride), mask, "i16", n) for i in range(2))
    order = ", ".join(f"i32 {i}, i32 {n + i}" for i in range(n))
    mixed = v.builder.value(
        f"shufflevector <{n} x i16> {low}, <{n} x i16> {high}, <{2 * n} x i32> <{order}>"
    )
    return v.builder.value(f"bitcast <{2 * n} x i16> {mixed} to <{n} x i32>")
