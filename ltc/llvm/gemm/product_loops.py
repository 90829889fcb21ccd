"""The loops of a matrix product over panels and blocks, and what is done to the sums."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable

from ltc.llvm.emit.builder import Builder
from ltc.llvm.emit.index import Index, least, most
from ltc.llvm.emit.vectors import Epilogue, Vectors, reserved
from ltc.llvm.gemm.blocking import DOT_TILE, STRIP_BLOCKS, STRIP_PANELS, GemmPlan, Matrix
from ltc.llvm.gemm.microkernel import (
    STRIP_TILES,
    Dots,
    DotTiles,
    ProductBlock,
    add_to_memory,
    pieces,
)
from ltc.llvm.gemm.packing import PackedPanel, PackedRows
from ltc.support.sizes.extent import Extent

WAITING_BLOCKS = 32  # whose partial sums wait in memory where K is split


class ProductLoops:
    """The body of one kernel.

    Attributes:
        numbers: Its arguments: M, K, the outermost batch extent, blocks of a packed strip.
    """

    numbers = 4

    def __init__(self, plan: GemmPlan, epilogue: Epilogue | None):
        self.b = Builder()
        self.plan, self.epilogue = plan, epilogue
        self.v = Vectors(self.b, plan.isa, plan.dtype)
        self.m, self.k, self.outer, self.strip_blocks = map(self.b.number, range(self.numbers))
        # Sums go straight to the result where nothing is to be done to them.
        self.is_direct = epilogue is None and not plan.adds_in_memory

    def emit(self) -> None:
        if self.plan.n == 0:
            return
        if self.plan.by_dots:
            self._emit_dots()
        elif self.plan.by_dot_tiles:
            self._emit_dot_tiles()
        else:
            self._emit_panels()

    # --- the walk over panels and blocks ----------------------------------------------------------

    def _emit_panels(self) -> None:
        v, plan = self.v, self.plan
        self.panel = PackedPanel(v, plan) if plan.packs else None
        self.strip = PackedRows(v, plan, self.k) if plan.packs_left else None
        self.block = ProductBlock(v, plan, self.panel, self.strip)
        if not self.is_direct:
            self.totals = reserved(self.b, self._waiting_blocks() * self._block_size(), v.element)
        rows = self._all_rows()
        self.full, self.tail = divmod(rows, plan.height)
        self.blocks = (rows + (plan.height - 1)) // plan.height

        if plan.packs_left:
            self._each_group(self._strips(), plan.panels, self._strip_of_rows)
        else:
            self._each_group(plan.panels, self.blocks, self._panel)

    def _waiting_blocks(self) -> int:
        """Return how many blocks have sums in memory at the same time."""
        if self.plan.sums_strips:
            return STRIP_BLOCKS * STRIP_PANELS
        return WAITING_BLOCKS if self.plan.splits else 1

    def _strips(self) -> Index:
        return (self.blocks + (self.strip_blocks - 1)) // self.strip_blocks

    def _each_group(self, groups: Index, members: Index, body) -> None:
        """Call body(group, first member, last member) for this task's part of each group.

        Args:
            groups: The groups of each batch.
        """
        count: Index = self.outer * groups
        for extent in self.plan.inner:
            count = count * extent
        low, high = self.b.share(count * members)
        divisor = most(members, 1)
        first_group = low // divisor
        end_group = (high + (divisor - 1)) // divisor

        def group(number: Index, _) -> None:
            batch = number // groups
            done = number * members
            self._locate(batch)
            first, last = most(low - done, 0), least(high - done, members)
            body(number - batch * groups, first, last)

        self.b.loop(first_group, end_group, 1, [], group)

    def _strip_of_rows(self, strip: Index, first_panel: Index, last_panel: Index) -> None:
        """Some panels of a strip of blocks, whose rows are packed."""
        first = strip * self.strip_blocks
        last = least(first + self.strip_blocks, self.blocks)
        self.first_of_strip = first
        if self.plan.sums_strips:
            self.b.loop(first_panel, last_panel, STRIP_PANELS, [], lambda low, _: self._strip_in_pieces(
                first, last, low, least(low + STRIP_PANELS, last_panel)
            ))  # fmt: skip
            return
        assert self.strip is not None  # where the plan packs the left operand
        self.strip.fill(self.left_at, first, last, self._all_rows(), 0, self.k)
        self.b.loop(first_panel, last_panel, 1, [], lambda panel, _: self._panel(
            panel, first, last
        ))  # fmt: skip

    def _strip_in_pieces(
        self, first: Index, last: Index, first_panel: Index, last_panel: Index
    ) -> None:
        """Some panels of a strip, whose sums wait in memory while K is packed piece by piece."""
        strip, panel_memory = self.strip, self.panel
        assert strip is not None and panel_memory is not None  # such a plan packs both
        self._clear(self.totals, (last_panel - first_panel) * STRIP_BLOCKS)

        def each_block(panel: Index, body: Callable[[Index, Index], None]) -> None:
            """body(block, where its sums are)"""
            before = (panel - first_panel) * STRIP_BLOCKS - first
            self.b.loop(first, last, 1, [], lambda number, _: body(
                number, (before + number) * self._block_size()
            ))  # fmt: skip

        def piece(start: Index, _) -> None:
            depth = least(self.plan.depth, self.k - start)
            strip.fill(self.left_at, first, last, self._all_rows(), start, depth)
            self._each_panel(first_panel, last_panel, functools.partial(multiply, start, depth))

        def multiply(start: Index, depth: Index, panel: Index, width: Index) -> None:
            panel_memory.fill(self.right_at, self.column, width, start, depth)
            each_block(panel, lambda number, spot: self._each_height(number, 0, depth, spot))

        self.b.loop(0, self.k, self.plan.depth, [], piece)
        self._each_panel(
            first_panel, last_panel, lambda panel, _: each_block(panel, self._finish)
        )  # fmt: skip

    def _each_panel(self, first: Index, last: Index, body: Callable[[Index, Index], None]) -> None:
        """body(panel, its width) for each from `first` up to `last`."""
        self.b.loop(first, last, 1, [], lambda panel, _: self._at_width(
            panel, functools.partial(body, panel)
        ))  # fmt: skip

    def _all_rows(self) -> Index:
        return self.plan.rows or self.m

    def _holds(self, predicate: str, x: Index, y: Index) -> str:
        return self.b.value(f"icmp {predicate} i64 {x}, {y}")

    def _locate(self, batch: Index) -> None:
        """Sets the pointers to this batch's matrices."""
        plan = self.plan
        self.batch_index = batch
        pointers = ("%p1", "%p0", "%p2") if plan.is_transposed else ("%p0", "%p1", "%p2")
        matrices = zip(pointers, (plan.left, plan.right, plan.result))
        self.left_at, self.right_at, self.result_at = batch_at(self.v, matrices, plan.inner, batch)

    def _panel(self, panel: Index, first: Index, last: Index) -> None:
        """The blocks from `first` up to `last` of one panel."""
        self._at_width(panel, lambda width: self._blocks(width, first, last))

    def _at_width(self, panel: Index, body: Callable[[Index], None]) -> None:
        """body(how many columns a panel has): the last one may be narrower."""
        width = self.plan.panel_width
        if isinstance(self.plan.n, Extent):
            left = self.plan.n - panel * width
            for has, columns in (("sge", width), ("slt", left)):
                self.b.when(self._holds(has, left, width), [], functools.partial(
                    self._with_masks, panel, columns, body
                ))  # fmt: skip
            return
        full, rest = divmod(self.plan.n, width)
        if full:
            self.b.when(self._holds("slt", panel, full), [], lambda: self._with_masks(
                panel, width, body
            ))  # fmt: skip
        if rest:
            self.b.when(self._holds("eq", panel, full), [], lambda: self._with_masks(
                panel, rest, body
            ))  # fmt: skip

    def _with_masks(self, panel: Index, width: Index, body: Callable[[Index], None]) -> None:
        v = self.v
        self.column = panel * self.plan.panel_width
        widest = width if isinstance(width, int) else self.plan.panel_width
        self.masks = [v.first(width - start) for start in range(0, widest, v.width)]
        body(width)

    def _blocks(self, width: Index, first: Index, last: Index) -> None:
        """Compute the blocks from `first` up to `last` of a panel of so many columns."""
        if self.plan.splits:
            self.b.loop(first, last, WAITING_BLOCKS, [], lambda low, _: self._split(
                width, low, least(low + WAITING_BLOCKS, last)
            ))  # fmt: skip
            return
        if self.panel is not None:
            self.panel.fill(self.right_at, self.column, width, 0, self.k)

        def block(number: Index, _) -> None:
            self._fetch(number)
            if self.plan.is_long:
                self._clear(self.totals, 1)
            self._each_height(number, 0, self.k, 0)
            if not self.is_direct:
                self._finish(number, 0)

        self.b.loop(first, last, 1, [], block)

    def _split(self, width: Index, first: Index, last: Index) -> None:
        """Blocks whose sums wait in memory while K is packed piece by piece."""
        self._clear(self.totals, last - first)

        def spot(number: Index) -> Index:
            return (number - first) * self._block_size()

        def piece(start: Index, _) -> None:
            depth = least(self.plan.depth, self.k - start)
            assert self.panel is not None  # where K is split, all of it is packed
            self.panel.fill(self.right_at, self.column, width, start, depth)
            self.b.loop(first, last, 1, [], lambda number, _: self._each_height(
                number, start, depth, spot(number)
            ))  # fmt: skip

        self.b.loop(0, self.k, self.plan.depth, [], piece)
        self.b.loop(first, last, 1, [], lambda number, _: self._finish(number, spot(number)))

    # --- one block --------------------------------------------------------------------------------

    def _block_size(self) -> int:
        return self.plan.height * self.plan.panel_width

    def _line(self) -> int:
        """Elements of a row of sums in memory."""
        return len(self.masks) * self.v.width

    def _clear(self, memory: str, blocks: Index) -> None:
        v = self.v
        size = blocks * self._block_size()
        self.b.loop(0, size, v.width, [], lambda i, _: v.store_computed(v.zero, memory, i))

    def _each_height(self, number: Index, start: Index, depth: Index, spot: Index) -> None:
        """The sums of block `number`: a whole one, or what rows are left by powers of two."""
        height = self.plan.height
        if height == 1:
            self._rows(number, 0, 1, start, depth, spot)
            return
        is_whole = self._holds("slt", number, self.full)
        self.b.when(is_whole, [], lambda: self._rows(number, 0, height, start, depth, spot))
        rest = self.b.where(is_whole, 0, self.tail)
        rows = 1 << (height - 1).bit_length() - 1
        while rows:
            bit = self.b.value(f"and i64 {rest}, {rows}")
            before = self.b.index(self.b.value(f"and i64 {rest}, {-2 * rows}"))
            at = spot + before * self._line()
            self.b.when(self._holds("ne", bit, 0), [], functools.partial(
                self._rows, number, before, rows, start, depth, at
            ))  # fmt: skip
            rows //= 2

    def _rows(self, number, before, rows: int, start: Index, depth: Index, spot: Index) -> None:
        """The sums of `rows` rows of a block over `depth` steps from `start`, stored.

        Args:
            before: Rows of the block that come before them.
        """
        v, plan = self.v, self.plan
        row = number * plan.height + before
        if self.strip is not None:
            left = self.strip.at(number - self.first_of_strip, start, before)
        else:
            left = v.at(self.left_at, row * plan.left.row + start * plan.left.column)  # fmt: skip
        right = "" if plan.packs else v.at(self.right_at, self.column)

        def sums(first: Index, end: Index) -> list[str]:
            return self.block.sums(left, right, rows, self.masks, first, end)

        if self.is_direct:
            line = v.at(self.result_at, row * plan.result.row + self.column)
            for i, value in enumerate(sums(0, depth)):
                r, j = divmod(i, len(self.masks))
                v.store(value, line, r * plan.result.row + j * v.width, self.masks[j])
            return
        memory = v.at(self.totals, spot, v.element)
        if plan.adds_in_memory:
            pieces(v, 0, depth, lambda first, end: add_to_memory(v, memory, sums(first, end)))
            return
        for i, value in enumerate(sums(0, depth)):
            v.store_computed(value, memory, i * v.width)

    def _rows_of(self, number: Index) -> str:
        """Return how many rows a block has."""
        is_whole = self._holds("slt", number, self.full)
        return self.b.where(is_whole, self.plan.height, self.tail)

    def _fetch(self, number: Index) -> None:
        """Asks for what the epilogue of a block reads: it comes while the block is summed."""
        if not getattr(self.epilogue, "fetches", False):
            return
        v = self.v
        first = self.batch_index * self.m + number * self.plan.height

        def row(r: Index, _) -> None:
            for j in range(len(self.masks)):
                v.fetch(self.epilogue, first + r, self.column + j * v.width)

        self.b.loop(0, self._rows_of(number), 1, [], row)

    def _finish(self, number: Index, spot: Index) -> None:
        """Stores what becomes of the sums of a block, which lie in memory."""
        self._finish_rows(number * self.plan.height, self._rows_of(number), spot)

    def _finish_rows(self, row: Index, rows: Index, spot: Index) -> None:
        v = self.v
        line = v.at(self.result_at, row * self.plan.result.row + self.column)
        flat = self.batch_index * self._all_rows() + row

        def one(r: Index, _) -> None:
            at = v.at(line, r * self.plan.result.row)
            for j, mask in enumerate(self.masks):
                place = spot + (r * self._line() + j * v.width)
                value = v.load_computed(self.totals, place)
                if self.epilogue is not None:
                    where = (flat + r, self.column + j * v.width)
                    with self.b.lanes(v.width):
                        value = self.epilogue(self.b, value, *where, mask)
                v.store(value, at, j * v.width, mask)

        # A loop: an epilogue may be long, and its text is needed once.
        self.b.loop(0, rows, 1, [], one)

    # --- few rows ---------------------------------------------------------------------------------

    def _emit_dots(self) -> None:
        v, plan = self.v, self.plan
        self.totals = reserved(self.b, plan.rows * v.width, v.element)
        dots = Dots(v, plan, self.totals)

        def group(panel: Index, _first: Index, _last: Index) -> None:
            self.column = panel * v.width
            dots.sums(self.left_at, self.right_at, self.column, self.k)
            is_cut = plan.n % v.width != 0
            self.masks = [v.first(plan.n - self.column) if is_cut else None]
            self._finish_rows(0, plan.rows, 0)

        self._each_group(plan.panels, 1, group)

    def _emit_dot_tiles(self) -> None:
        v, plan = self.v, self.plan
        tiles = DotTiles(v, plan, self.m, self.k)
        self.totals = tiles.memory
        count = (self.m + (DOT_TILE - 1)) // DOT_TILE

        def strip(first: Index, last: Index) -> None:
            tiles.sums(self.left_at, self.right_at, self.column, first, last)
            row = first * DOT_TILE
            self._finish_rows(row, least(last * DOT_TILE, self.m) - row, 0)

        def panel(number: Index, first: Index, last: Index) -> None:
            self.column = number * v.width
            is_cut = plan.n % v.width != 0
            self.masks = [v.first(plan.n - self.column) if is_cut else None]
            self.b.loop(first, last, STRIP_TILES, [], lambda i, _: strip(
                i, least(i + STRIP_TILES, last)
            ))  # fmt: skip

        self._each_group(plan.panels, count, panel)


def batch_at(
    v: Vectors, matrices: Iterable[tuple[str, Matrix]], inner: tuple[int, ...], batch: Index
) -> list[str]:
    """Return where the matrices of number `batch` begin.

    Args:
        matrices: The first element of each operand, and its strides.
        inner: Batch extents but the outermost.
    """
    numbers: list[Index] = []
    for extent in reversed(inner):
        batch, number = divmod(batch, extent)
        numbers.append(number)
    numbers.append(batch)
    places = []
    for pointer, matrix in matrices:
        offset: Index = 0
        for number, stride in zip(numbers, reversed(matrix.batch)):
            offset = offset + number * stride
        places.append(v.at(pointer, offset))
    return places
