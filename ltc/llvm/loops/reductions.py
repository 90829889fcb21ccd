"""Reductions inside a kernel: several accumulators, and no chain of additions that is long.

The order of additions follows from the extents alone.
"""

from __future__ import annotations

from math import prod

from ltc.ir.loop_nest import Value
from ltc.llvm.emit.dtype import FORMS, Form
from ltc.llvm.emit.index import Index, least
from ltc.llvm.emit.memory_ops import CACHE_LINE
from ltc.llvm.loops import reduction_ops
from ltc.llvm.loops.one_hot_sums import SingleTerms
from ltc.llvm.loops.values import ACCUMULATORS

CHAIN = 32  # additions to one accumulator before it is added to another: sums stay accurate
FAR_APART_BYTES = 2048  # from row to row: two are in a page, and no processor foresees the next
LARGE_BYTES = 8 << 20  # of what no cache that is near holds
ROWS_AHEAD, MANY_ROWS = 12, 64  # how far ahead rows are asked for, and of how many
MOST_COLUMN_SUMS = 3  # in one pass: their accumulators fill the registers
BLOCKS = (512, 64, 8)  # likewise where rows are added: blocks of blocks of rows


class RowReductions(SingleTerms):
    """Reductions of the row, or of the vector of rows, that the variables stand at."""

    def _columns_together(self) -> list[Value]:
        """The first reductions, where they add up rows and none of them needs another."""
        if not self.reduces_columns or len(self.reductions) < 2:
            return []
        found: list[Value] = []
        for value in self.reductions[:MOST_COLUMN_SUMS]:
            if any(x.kind == "reduced" for x in value.made_from()):
                break
            found.append(value)
        return found if len(found) > 1 else []

    def _reduce_columns(self, values: list[Value], inner: list[int]) -> None:
        """Several sums of rows in one pass over them."""
        self._hoist(values)
        mask, forms = self.mask, [FORMS[value.dtype] for value in values]
        with self.b.lanes(self.lanes):
            starts = [
                (
                    self.b.of(form.computed),
                    self.b.constant(form.computed, reduction_ops.start(value.op, form)),
                )
                for value, form in zip(values, forms)
            ]

            def body(carried: list[str]) -> list[str]:
                self._ask_for_rows([value.operands[0] for value in values])
                with self.b.lanes(self.lanes):
                    ones = [self.lanes_of(value.operands[0], self.lanes) for value in values]
                    return [
                        reduction_ops.combine(self.b, value.op, form, x, one)
                        for value, form, x, one in zip(values, forms, carried, ones)
                    ]

            totals = self._in_blocks(values, inner, starts, body)
            self.mask = mask
            for value, form, total in zip(values, forms, totals):
                self.known[-1][value] = reduction_ops.finished(self.b, form, total)

    def _reduce(self, value: Value, inner: list[int]) -> None:
        (operand,) = value.operands
        form = FORMS[value.dtype]
        across = self.vector in inner
        width = (
            self.lanes if across or (self.vector is not None and self.vector < self.depth) else 1
        )
        with self.b.lanes(width):
            type = self.b.of(form.computed)
            first = self.b.constant(form.computed, reduction_ops.start(value.op, form))

            def body(carried: list[str]) -> list[str]:
                for load, step in self.following:
                    self.prefetch(load, step)
                self._ask_for_rows([operand])
                with self.b.lanes(width):
                    one = self.lanes_of(operand, width)
                    if across and self.mask is not None:
                        one = self.b.select(self.mask, form.computed, one, first)
                    return [reduction_ops.combine(self.b, value.op, form, carried[0], one)]

            if across and self._unrolls(inner):
                total = self._unrolled(value, form, type, first, body)
            elif across and len(inner) > 1 and self._unrolls(inner[-1:]):

                def row(carried: list[str]) -> list[str]:
                    with self.b.lanes(width):
                        part = self._unrolled(value, form, type, first, body)
                        return [reduction_ops.combine(self.b, value.op, form, carried[0], part)]

                (total,) = self._in_blocks([value], inner[:-1], [(type, first)], row)
            else:
                mask = self.mask
                (total,) = self._in_blocks([value], inner, [(type, first)], body)
                self.mask = mask
            if across:
                total = reduction_ops.across_lanes(self.b, value.op, form, total)
        with self.b.lanes(1 if across else width):
            self.known[-1][value] = reduction_ops.finished(self.b, form, total)

    def _ask_for_rows(self, roots: list[Value]) -> None:
        """Asks memory for what the roots load of rows to come."""
        read = self._read_by(tuple(roots))
        for value in self.order:
            if value in read and self._is_worth_asking(value):
                row = self.space.form(value.data[1]).coefficient(self.depth)
                for line in range(0, self.lanes, CACHE_LINE // FORMS[value.data[0].dtype].bytes):
                    self.prefetch(value, ROWS_AHEAD * row + line)

    def _is_worth_asking(self, value: Value) -> bool:
        """Whether a load of a vector of rows, walked down, waits for memory at each step."""
        extents, depth = self.space.extents, self.depth
        if not self.reduces_columns or depth != len(extents) - 1:
            return False
        if value.kind != "load" or value.guards or extents[depth] < MANY_ROWS:
            return False
        form, bytes = self.space.form(value.data[1]), FORMS[value.data[0].dtype].bytes
        is_far = form.coefficient(depth) * bytes >= FAR_APART_BYTES
        is_large = prod(extents) * bytes >= LARGE_BYTES
        return is_far and is_large and form.coefficient(self.vector) == 1

    def _in_blocks(
        self, values: list[Value], inner: list[int], starts, body, sizes=BLOCKS
    ) -> list[str]:
        """The total over loops, the outermost one in blocks of blocks: no chain is long."""
        variable = inner[0] if inner else self.vector
        if variable == self.vector:
            return self._nest(inner, values, starts, body)
        is_open, limit = variable in self.open, self.extent(variable)
        sizes = [size for size in sizes if is_open or size < self.space.extents[variable]]

        def sum_from(low: Index, limit: Index, sizes: list[int]) -> list[str]:
            if not sizes:
                step = self._step_of(inner, values, starts, body)
                return self.b.loop(low, limit, 1, starts, step)

            def block(low: Index, carried: list[str]) -> list[str]:
                end = least(low + sizes[0], limit)
                parts = sum_from(low, end, sizes[1:])
                return [
                    reduction_ops.combine(self.b, value.op, FORMS[value.dtype], x, y)
                    for value, x, y in zip(values, carried, parts)
                ]

            return self.b.loop(low, limit, sizes[0], starts, block)

        return sum_from(0, limit, sizes)

    def _unrolls(self, inner: list[int]) -> bool:
        if len(inner) > 1:
            return False
        return self.vector in self.open or self.space.extents[self.vector] >= 2 * self._step

    def _unrolled(self, value: Value, form: Form, type: str, first: str, body) -> str:
        """The total over the one inner variable, in several accumulators."""
        step = self._step
        starts = [(type, first)] * ACCUMULATORS

        def several(i: Index, carried: list[str]) -> list[str]:
            return [
                self._at(i + k * self.lanes, None, [one], body)[0] for k, one in enumerate(carried)
            ]

        def block(i: Index, carried: list[str]) -> list[str]:
            parts = self.b.loop(i, i + step * CHAIN, step, starts, several)
            return [
                reduction_ops.combine(self.b, value.op, form, x, y) for x, y in zip(carried, parts)
            ]

        totals = [first] * ACCUMULATORS
        if self.vector in self.open:
            totals = self._of_any_extent(starts, block, several, body)
        else:
            totals = self._of_known_extent(starts, block, several, body)
        while len(totals) > 1:
            totals = [
                reduction_ops.combine(self.b, value.op, form, x, y)
                for x, y in zip(totals[::2], totals[1::2])
            ]
        return totals[0]

    def _of_known_extent(self, starts, block, several, body) -> list[str]:
        extent, step = self.space.extents[self.vector], self._step
        whole = extent // step * step
        blocks = whole // (step * CHAIN) * step * CHAIN
        totals = [value for _, value in starts]
        if blocks:
            totals = self.b.loop(0, blocks, step * CHAIN, starts, block)
        if blocks < whole:
            again = [(type, one) for (type, _), one in zip(starts, totals)]
            totals = self.b.loop(blocks, whole, step, again, several)
        for position in range(whole, extent, self.lanes):
            mask = self._first_lanes(extent - position)
            k = (position - whole) // self.lanes
            (totals[k],) = self._at(position, mask, [totals[k]], body)
        return totals

    def _of_any_extent(self, starts, block, several, body) -> list[str]:
        extent, step = self.extent(self.vector), self._step
        assert step & (step - 1) == 0, step
        blocks = self._whole_multiples(extent, step * CHAIN)
        whole = self._whole_multiples(extent, step)
        totals = self.b.loop(0, blocks, step * CHAIN, starts, block)
        again = [(type, one) for (type, _), one in zip(starts, totals)]
        totals = self.b.loop(blocks, whole, step, again, several)
        rest = self._over_any_vectors(whole, extent, [(starts[0][0], totals[0])], body)
        return [*rest, *totals[1:]]
