"""Matrix products: every transposition and batch, each result computed in one fixed order.

Letters: M rows of the result, N its columns, K the summed dimension.  A *panel* is a strip of
columns a few vectors wide; a *block* is the few rows whose sums over K stay in registers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ltc.llvm.builder import Builder, function_text
from ltc.llvm.isa import Isa
from ltc.llvm.lanes import (
    LONGEST_SUM,
    Epilogue,
    GeneratedKernel,
    Index,
    Lanes,
    add_in_pieces,
    reserved,
    share,
    tasks_for,
    transposed,
)  # fmt: skip

PACKED_BYTES = 256 * 1024  # of one packed panel: half of a level-2 cache
STRIP_BLOCKS = 32  # blocks whose partial sums wait in memory where K is split
PREFETCHED_ROWS, PREFETCHED_FROM_BYTES = 16, 4096
DOT_ROWS = 4  # up to so many rows, a transposed right operand is read once instead of packed


@dataclass(frozen=True)
class Matrix:
    """Where the elements of a batch of matrices lie, as strides in elements.

    batch  one stride for each batch dimension; 0 repeats the matrix
    """

    row: int
    column: int
    batch: tuple[int, ...] = ()


def stored_plain(rows: int, columns: int, batch: tuple[int, ...] = ()) -> Matrix:
    """[*batch, rows, columns], contiguous."""
    return Matrix(columns, 1, _batch_strides(rows * columns, batch))


def stored_transposed(rows: int, columns: int, batch: tuple[int, ...] = ()) -> Matrix:
    """The matrix [rows, columns] of a contiguous [*batch, columns, rows]."""
    return Matrix(1, rows, _batch_strides(rows * columns, batch))


def _batch_strides(size: int, batch: tuple[int, ...]) -> tuple[int, ...]:
    strides = []
    for extent in reversed(batch):
        strides.append(size)
        size *= extent
    return tuple(reversed(strides))


def matmul(
    name: str,
    dtype: torch.dtype,
    batch: tuple[int, ...],
    extents: tuple[int, int, int],
    left: Matrix,
    right: Matrix,
    result: Matrix,
    isa: Isa,
    epilogue: Epilogue | None = None,
    operands: int = 0,
) -> GeneratedKernel:
    """left [*batch, M, K] times right [*batch, K, N].

    dtype     of all three: float32, float64, or float16 and bfloat16, which sum in float32
    extents   M, N, K; any may be 0, and K = 0 gives zeros
    result    its columns are adjacent: `result.column` is 1
    epilogue  maps a vector of sums to the vector stored; its row is counted over the whole batch
    operands  pointers that the epilogue reads, %p3 and on
    tasks     each computes whole panels or blocks of rows; no result depends on their number
    """
    batch, extents, (left, right, result) = _folded(batch, extents, (left, right, result))
    product = _Product(dtype, batch, extents, left, right, result, isa, epilogue)
    product.emit()
    m, n, k = extents
    work = 2 * product.batches * m * n * k
    arguments = ("left", "right", "result", *(f"operand{i}" for i in range(operands)))
    return GeneratedKernel(
        name, function_text(name, len(arguments), product.b), arguments,
        tasks_for(work, product.groups, product.blocks), work,
    )  # fmt: skip


def _folded(batch, extents, matrices):
    """Batch dimensions that only repeat the right operand become rows of the left one."""
    m, n, k = extents
    left, right, result = matrices
    while batch and right.batch[-1] == 0:
        if left.batch[-1] != m * left.row or result.batch[-1] != m * result.row:
            break
        m, batch = m * batch[-1], batch[:-1]
        left, right, result = (Matrix(x.row, x.column, x.batch[:-1]) for x in (left, right, result))
    return batch, (m, n, k), (left, right, result)


class _Product:
    """The body of one kernel; every number a kernel maker must choose is chosen in __init__."""

    def __init__(self, dtype, batch, extents, left, right, result, isa, epilogue):
        self.b = b = Builder()
        self.m, self.n, self.k = extents
        self.batch, self.left, self.right, self.result = batch, left, right, result
        self.epilogue = epilogue
        self.l = lanes = Lanes(b, isa, dtype)
        self.batches = 1
        for extent in batch:
            self.batches *= extent
        if self.n == 1:  # one column: its stride says nothing, and 1 is the best to have
            self.right = right = Matrix(right.row, 1, right.batch)
        assert result.column == 1 or self.n <= 1, "the columns of a result are adjacent"

        self.by_dots = (
            self.m <= DOT_ROWS and self.k >= 2 * lanes.width and self.n > 1
            and right.row == 1 and right.column != 1 and left.column == 1
        )  # fmt: skip
        # Pairs of bfloat16 along K share a lane; an odd K would pair its last with a stranger.
        self.pairs = (
            isa.bfloat16_dot and dtype is torch.bfloat16 and self.k % 2 == 0 and self.m >= 8
        )
        self.vectors = self._vectors(isa)
        self.panel_width = self.vectors * lanes.width
        self.panels = max(1, -(-self.n // self.panel_width))
        height = (isa.registers - self.vectors - (1 if isa.fused else 2)) // self.vectors
        self.blocks = max(1, -(-self.m // height))
        self.height, self.taller = divmod(self.m, self.blocks)  # the first ones are a row taller
        self.packs = (
            self.pairs or right.column != 1 or self.blocks >= 4
            or (not isa.fused and self.n % lanes.width != 0)
        )  # fmt: skip
        # Rows far apart: no processor foresees them, and few blocks share what was waited for.
        self.prefetches = not self.packs and right.row * dtype.itemsize >= PREFETCHED_FROM_BYTES
        self.depth = self._depth()
        if self.by_dots:
            self.panels, self.blocks = -(-self.n // lanes.width), 1
        self.groups = self.batches * self.panels

    def _vectors(self, isa: Isa) -> int:
        """How many vectors wide a panel is: more where few rows leave registers free."""
        if self.m < 7:
            wanted = 4 if self.m >= 3 else 8
        else:
            wanted = 2 if self.m > 18 else 3
        if isa.registers < 32:
            wanted = min(wanted, 4 if self.m < 7 else 2)
        return max(1, min(wanted, -(-self.n // self.l.width)))

    def _depth(self) -> int:
        """How much of K is summed at once: all of it unless its packed panel would be too large."""
        element = 4 if self.l.element == "float" else 8
        rows = PACKED_BYTES // (self.panel_width * element) * (2 if self.pairs else 1)
        if not self.packs or self.k <= rows:
            return self.k
        pieces = -(-self.k // rows)
        step = 2 * self.l.width
        return -(-self.k // (pieces * step)) * step

    # --- the walk over panels and blocks ----------------------------------------------------------

    def emit(self) -> None:
        l, b = self.l, self.b
        if 0 in (self.m, self.n, self.batches):
            return
        if self.by_dots:
            self._emit_dots()
            return
        self._reserve()
        low, high = share(l, self.groups * self.blocks)
        first_group, _ = l.divided(low, self.blocks)
        end_group, _ = l.divided(l.plus(high, self.blocks - 1), self.blocks)

        def group(number: str, _: list[str]) -> None:
            batch, panel = l.divided(number, self.panels)
            done = l.times(number, self.blocks)
            first = l.most(l.minus(low, done), 0)
            last = l.least(l.minus(high, done), self.blocks)
            self._locate(batch)
            self._panel_of_any_width(panel, first, last)

        b.loop(first_group, end_group, 1, [], group)

    def _reserve(self) -> None:
        """Memory of this thread for a packed panel and for sums that wait."""
        l = self.l
        self.totals = ""
        if self.depth > LONGEST_SUM or self.epilogue is not None:
            self.totals = reserved(self.b, (self.height + 1) * self.panel_width, l.element)
        if self.packs:
            element = "i32" if self.pairs else l.element
            rows = -(-self.depth // l.width) * l.width
            if self.pairs:
                rows = -(-self.depth // (2 * l.width)) * l.width
            self.packed = reserved(self.b, max(1, rows * self.panel_width), element)
        if self.depth < self.k:
            rows = STRIP_BLOCKS * (self.height + 1)
            self.waiting = reserved(self.b, rows * self.panel_width, l.element)

    def _locate(self, batch: Index) -> None:
        """Sets the pointers to this batch's matrices."""
        l, remaining = self.l, batch
        self.batch_index = batch
        offsets: list[Index] = [0, 0, 0]
        for dim in reversed(range(len(self.batch))):
            remaining, index = l.divided(remaining, self.batch[dim]) if dim else (0, remaining)
            for i, matrix in enumerate((self.left, self.right, self.result)):
                offsets[i] = l.plus(offsets[i], l.times(index, matrix.batch[dim]))
        self.left_at, self.right_at, self.result_at = (
            l.at(f"%p{i}", offset) for i, offset in enumerate(offsets)
        )

    def _panel_of_any_width(self, panel: Index, first: Index, last: Index) -> None:
        full, rest = divmod(self.n, self.panel_width)
        if full:
            is_full = self.b.value(f"icmp slt i64 {panel}, {full}")
            self.b.when(is_full, [], lambda: self._panel(panel, self.panel_width, first, last))
        if rest:
            is_last = self.b.value(f"icmp eq i64 {panel}, {full}")
            self.b.when(is_last, [], lambda: self._panel(panel, rest, first, last))

    def _panel(self, panel: Index, width: int, first: Index, last: Index) -> None:
        """The blocks from `first` up to `last` of one panel, which is `width` columns wide."""
        l = self.l
        column = l.times(panel, self.panel_width)
        count = -(-width // l.width)
        masks = [l.first(width - v * l.width) for v in range(count)]
        if self.depth < self.k:
            self.b.loop(first, last, STRIP_BLOCKS, [], lambda low, _: self._strip(
                column, width, masks, low, l.least(l.plus(low, STRIP_BLOCKS), last)
            ))  # fmt: skip
            return
        if self.packs:
            self._pack(column, width, 0, self.k)

        def block(row: Index, rows: int, _: Index) -> None:
            zeros = [l.zero] * (rows * count)
            sums = self._accumulate(row, rows, column, masks, 0, self.k, zeros)
            self._finish(row, rows, column, masks, sums)

        self._each_block(first, last, block)

    def _strip(self, column, width, masks, first, last) -> None:
        """As `_panel`, K in pieces: the sums wait in memory while the next piece is packed."""
        l, b, count = self.l, self.b, len(masks)

        def spot(number: Index, r: int, v: int) -> Index:
            row = l.plus(l.times(l.minus(number, first), self.height + 1), r)
            return l.plus(l.times(row, self.panel_width), v * l.width)

        def waiting(number: Index, rows: int) -> list[str]:
            return [
                l.load_computed(self.waiting, spot(number, r, v))
                for r in range(rows)
                for v in range(count)
            ]

        def clear(_row, rows, number):
            for r in range(rows):
                for v in range(count):
                    l.store_computed(l.zero, self.waiting, spot(number, r, v))

        def piece(start: str, _) -> None:
            depth = l.least(self.depth, l.minus(self.k, start))
            self._pack(column, width, start, depth)

            def add(row, rows, number):
                sums = self._accumulate(
                    row, rows, column, masks, start, depth, waiting(number, rows)
                )
                for i, value in enumerate(sums):
                    l.store_computed(value, self.waiting, spot(number, *divmod(i, count)))

            self._each_block(first, last, add)

        self._each_block(first, last, clear)
        b.loop(0, self.k, self.depth, [], piece)
        self._each_block(first, last, lambda row, rows, number: self._finish(
            row, rows, column, masks, waiting(number, rows)
        ))  # fmt: skip

    def _each_block(self, first: Index, last: Index, body) -> None:
        """body(first row, rows, block's number) for the blocks of each of the two heights."""
        self._blocks_of(self.height + 1, 0, self.taller, first, last, body)
        self._blocks_of(self.height, self.taller, self.blocks, first, last, body)

    def _blocks_of(self, rows: int, start: int, stop: int, first: Index, last: Index, body) -> None:
        """The blocks between `first` and `last` that are also between `start` and `stop`."""
        l = self.l
        if start == stop or rows == 0:
            return
        low, high = l.most(first, start), l.least(last, stop)
        self.b.loop(low, high, 1, [], lambda number, _: body(
            l.plus(l.times(number, rows), start), rows, number
        ))  # fmt: skip

    # --- one block --------------------------------------------------------------------------------

    def _accumulate(self, row, rows, column, masks, start, depth, sums) -> list[str]:
        """`sums` plus the products of `depth` steps from `start`: rows x vectors values."""
        l = self.l
        left = l.at(
            self.left_at,
            l.plus(l.times(row, self.left.row), l.times(start, self.left.column)),
        )
        if not self.packs:
            right = l.at(self.right_at, column)
        step = self._pair_step if self.pairs else self._step

        def body(k: str, values: list[str]) -> list[str]:
            if self.packs:
                vectors = self._packed_row(k, len(masks))
            else:
                line = l.at(right, l.times(k, self.right.row))
                vectors = [l.load(line, v * l.width, mask) for v, mask in enumerate(masks)]
                for v in range(len(masks) if self.prefetches else 0):
                    self.b.prefetch(l.at(line, PREFETCHED_ROWS * self.right.row + v * l.width))
            return step(left, k, rows, vectors, values)

        if self.pairs:
            depth, _ = l.divided(depth, 2)
        return add_in_pieces(l, depth, sums, body, self.totals)

    def _packed_row(self, k: Index, count: int) -> list[str]:
        l = self.l
        element = "i32" if self.pairs else l.element
        line = l.at(self.packed, l.times(k, self.panel_width), element)
        return [
            l.raw_load(l.at(line, v * l.width, element), None, element, l.width)
            for v in range(count)
        ]

    def _step(self, left, k, rows, vectors, sums) -> list[str]:
        l = self.l
        here, result = l.at(left, l.times(k, self.left.column)), []
        for r in range(rows):
            x = l.splat(l.scalar(here, r * self.left.row))
            for v, y in enumerate(vectors):
                result.append(l.multiply_add(x, y, sums[r * len(vectors) + v]))
        return result

    def _pair_step(self, left, k, rows, vectors, sums) -> list[str]:
        """As `_step` for two elements of K; their products are added before the sum."""
        l, b = self.l, self.b
        pair, words = f"<{2 * l.width} x bfloat>", f"<{l.width} x i32>"
        function = "llvm.x86.avx512bf16.dpbf16ps.512"
        here, result = l.at(left, l.times(l.times(k, 2), self.left.column)), []
        ys = [b.value(f"bitcast {words} {y} to {pair}") for y in vectors]
        for r in range(rows):
            word = l.splat(self._left_pair(l.at(here, r * self.left.row)), "i32")
            x = b.value(f"bitcast {words} {word} to {pair}")
            for v, y in enumerate(ys):
                total = (l.vector, sums[r * len(vectors) + v])
                result.append(b.pure_call(function, l.vector, total, (pair, x), (pair, y)))
        return result

    def _left_pair(self, pointer: str) -> str:
        l, b = self.l, self.b
        if self.left.column == 1:
            return b.effect(f"load i32, ptr {pointer}, align 2")
        second = l.at(pointer, self.left.column)
        low, high = (b.effect(f"load i16, ptr {p}, align 2") for p in (pointer, second))
        low, high = (b.value(f"zext i16 {x} to i32") for x in (low, high))
        return b.value(f"or i32 {low}, {b.value(f'shl i32 {high}, 16')}")

    def _finish(self, row, rows, column, masks, sums) -> None:
        l, count = self.l, len(masks)
        line = l.at(self.result_at, l.plus(l.times(row, self.result.row), column))
        if self.epilogue is None:
            for i, value in enumerate(sums):
                r, v = divmod(i, count)
                l.store(value, line, r * self.result.row + v * l.width, masks[v])
            return
        for i, value in enumerate(sums):
            l.store_computed(value, self.totals, i * l.width)
        flat = l.plus(l.times(self.batch_index, self.m), row)

        def one_row(r: str, _) -> None:
            at = l.at(line, l.times(r, self.result.row))
            for v, mask in enumerate(masks):
                spot = l.plus(l.times(r, count * l.width), v * l.width)
                value = l.load_computed(self.totals, spot)
                place = (l.plus(flat, r), l.plus(column, v * l.width))
                with self.b.lanes(l.width):
                    value = self.epilogue(self.b, value, *place, mask)
                l.store(value, at, v * l.width, mask)

        # A loop: an epilogue may be long, and its text is needed once.
        self.b.loop(0, rows, 1, [], one_row)

    # --- packing ----------------------------------------------------------------------------------

    def _pack(self, column: Index, width: int, start: Index, depth: Index) -> None:
        """Copy rows `start` to `start + depth` of a panel, [depth, panel width], as computed.

        What lies beyond the panel's own columns is never stored in the result, and may be anything.
        """
        if self.right.column == 1:
            self._pack_rows(column, width, start, depth)
        elif self.right.row == 1:
            self._pack_transposed(column, width, start, depth)
        else:
            self._pack_elements(column, width, start, depth)

    def _pack_rows(self, column, width, start, depth) -> None:
        l = self.l
        source = l.at(self.right_at, l.plus(l.times(start, self.right.row), column))
        masks = [l.first(width - v * l.width) for v in range(-(-width // l.width))]

        def row(k: str, _) -> None:
            line = l.at(source, l.times(k, self.right.row))
            target = l.at(self.packed, l.times(k, self.panel_width), l.element)
            for v, mask in enumerate(masks):
                l.store_computed(l.load(line, v * l.width, mask), target, v * l.width)

        def pair(k: str, _) -> None:
            line = l.at(source, l.times(l.times(k, 2), self.right.row))
            target = l.at(self.packed, l.times(k, self.panel_width), "i32")
            for v, mask in enumerate(masks):
                rows = [
                    l.raw_load(l.at(line, i * self.right.row + v * l.width), mask, "i16", l.width)
                    for i in range(2)
                ]
                l.raw_store(
                    self._interleaved(*rows), l.at(target, v * l.width, "i32"), None, "i32", l.width
                )

        if self.pairs:
            self.b.loop(0, l.divided(depth, 2)[0], 1, [], pair)
        else:
            self.b.loop(0, depth, 1, [], row)

    def _interleaved(self, x: str, y: str) -> str:
        n = self.l.width
        order = ", ".join(f"i32 {i}, i32 {n + i}" for i in range(n))
        mixed = self.b.value(
            f"shufflevector <{n} x i16> {x}, <{n} x i16> {y}, <{2 * n} x i32> <{order}>"
        )
        return self.b.value(f"bitcast <{2 * n} x i16> {mixed} to <{n} x i32>")

    def _pack_transposed(self, column, width, start, depth) -> None:
        """For a right operand whose columns are adjacent in memory: squares of vectors."""
        l, b, n = self.l, self.b, self.l.width
        per_lane = 2 if self.pairs else 1
        element = "i32" if self.pairs else l.element
        source = l.at(self.right_at, start)

        def square(k: str, v: str) -> None:
            mask = l.first(l.minus(depth, k), per_lane * n)
            lines = []
            for i in range(n):
                at = l.plus(l.plus(column, v), i)
                if width % n:
                    at = l.least(at, self.n - 1)
                line = l.at(l.at(source, k), l.times(at, self.right.column))
                if self.pairs:
                    raw = l.raw_load(line, mask, "i16", 2 * n)
                    lines.append(b.value(f"bitcast <{2 * n} x i16> {raw} to <{n} x i32>"))
                else:
                    lines.append(l.load(line, 0, mask))
            row, _ = l.divided(k, per_lane)
            target = l.at(self.packed, l.plus(l.times(row, self.panel_width), v), element)
            for i, line in enumerate(transposed(b, lines, element)):
                l.raw_store(line, l.at(target, i * self.panel_width, element), None, element, n)

        b.loop(0, depth, per_lane * n, [], lambda k, _: b.loop(
            0, width, n, [], lambda v, _: square(k, v)
        ) and None)  # fmt: skip

    def _pack_elements(self, column, width, start, depth) -> None:
        l, b = self.l, self.b
        element, kept = (l.stored, "i16") if self.pairs else (l.element, l.element)

        def one(k: str, j: str) -> None:
            offset = l.plus(
                l.times(l.plus(start, k), self.right.row),
                l.times(l.plus(column, j), self.right.column),
            )
            if self.pairs:
                x = b.effect(f"load i16, ptr {l.at(self.right_at, offset)}, align 2")
                row, parity = l.divided(k, 2)
                spot = l.plus(l.times(l.plus(l.times(row, self.panel_width), j), 2), parity)
            else:
                x = l.scalar(self.right_at, offset)
                spot = l.plus(l.times(k, self.panel_width), j)
            b.emit(f"store {kept} {x}, ptr {l.at(self.packed, spot, element)}")

        b.loop(0, depth, 1, [], lambda k, _: b.loop(
            0, width, 1, [], lambda j, _: one(k, j)
        ) and None)  # fmt: skip

    # --- few rows ---------------------------------------------------------------------------------

    def _emit_dots(self) -> None:
        """Few rows by a transposed right operand: its rows are read once, as dot products."""
        l, b = self.l, self.b
        together = 1
        while self.m * together * 2 <= l.isa.registers // 2:
            together *= 2
        together = min(together, l.width)
        dots = reserved(b, self.m * l.width, l.element)
        self.totals = reserved(b, self.m * l.width, l.element)

        def group(number: str, _) -> None:
            batch, panel = l.divided(number, self.panels)
            self._locate(batch)
            column = l.times(panel, l.width)
            b.loop(0, l.width, together, [], lambda j, _: self._dots(column, j, together, dots))
            masks = [l.first(l.minus(self.n, column)) if self.n % l.width else None]
            sums = [l.load_computed(dots, r * l.width) for r in range(self.m)]
            self._finish(0, self.m, column, masks, sums)

        b.loop(*share(l, self.groups), 1, [], group)

    def _dots(self, column: Index, j: Index, together: int, dots: str) -> None:
        l, b, m = self.l, self.b, self.m
        lines = [
            l.at(self.right_at, l.times(
                l.least(l.plus(l.plus(column, j), i), self.n - 1), self.right.column
            ))
            for i in range(together)
        ]  # fmt: skip

        def step(k: Index, mask: str | None, sums: list[str]) -> list[str]:
            ys = [l.load(line, k, mask) for line in lines]
            result = []
            for r in range(m):
                x = l.load(self.left_at, l.plus(k, r * self.left.row), mask)
                result += [l.multiply_add(x, y, sums[r * together + i]) for i, y in enumerate(ys)]
            return result

        whole = self.k // l.width * l.width
        zeros = [(l.vector, l.zero)] * (m * together)
        sums = b.loop(0, whole, l.width, zeros, lambda k, values: step(k, None, values))
        if whole < self.k:
            sums = step(whole, l.first(self.k - whole), sums)
        for r in range(m):
            for i in range(together):
                spot = l.at(dots, l.plus(j, r * l.width + i), l.element)
                b.emit(f"store {l.element} {l.total(sums[r * together + i])}, ptr {spot}")
