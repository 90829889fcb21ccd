"""Attention in one pass over the keys: no matrix of scores, results in one fixed order.

A block of queries lies across the lanes of vectors, so that the largest score and the sum of each
row are plain vector operations.  Keys come in tiles: their scores stay in the nearest cache, where
they become weights and then add rows of the value to a block of results.  A later tile with a
larger score scales down what was added before it.  Source of that idea: T. Dao et al.,
"FlashAttention", arXiv:2205.14135; M. Milakov and N. Gimelshein, arXiv:1805.02867.
"""

from __future__ import annotations

import math as numbers

from ltc.llvm.attention.scores import (
    DRAWN_TOGETHER,
    KEEP_BITS,
    Attention,
    Scores,
    operand_names,
    require_room,
)
from ltc.llvm.attention.tiles import Rows
from ltc.llvm.emit import math_float
from ltc.llvm.emit.builder import function_text
from ltc.llvm.emit.index import Index, least
from ltc.llvm.emit.isa import Isa
from ltc.llvm.emit.philox import random_bits
from ltc.llvm.emit.vectors import GeneratedKernel, add_in_pieces, tasks_for
from ltc.llvm.gemm.blocking import Matrix
from ltc.support.sizes.extent import Extent, number_now


def attention_kernel(name: str, attention: Attention, result: Matrix, isa: Isa) -> GeneratedKernel:
    """The result [L, V] of each batch, and the logarithms of the sums, contiguous.

    Raises Unsupported where a thread's stack cannot hold what a block needs.

    Args:
        tasks: Each computes whole blocks of queries; no result depends on their number.
    """
    if has_few(attention, result, isa):
        return few_queries(name, attention, result, isa)
    return _Forward(attention, result, isa).kernel(name)


class _Forward(Scores):
    def __init__(self, attention: Attention, result: Matrix, isa: Isa):
        rest = operand_names(attention)
        names = ("query", "key", "value", *rest, "result", "logarithms")
        super().__init__(attention, isa, names)
        self.result = result
        keys = attention.keys
        self.is_single = not isinstance(keys, Extent) and keys <= self.tile

    def kernel(self, name: str) -> GeneratedKernel:
        a, b, v = self.a, self.b, self.v
        require_room(a, v.isa)
        items = a.batches * self.blocks
        work = 2 * a.batches * a.queries * a.keys * (a.extent + a.width)
        self.prepare()
        self.result_tile = self.reserved(self.padded(a.width) * self.block)
        b.loop(*b.share(b.number(0)), 1, [], self._work_item)
        return GeneratedKernel(
            name, function_text(name, len(self.names), b, numbers=1), self.names,
            tasks_for(work, items, 1), work, (items,),
        )  # fmt: skip

    def _work_item(self, item: Index, _) -> None:
        a, b, v = self.a, self.b, self.v
        batch, block = divmod(item, self.blocks)
        if a.causal:
            block = self._balanced(block)
        matrices = {"query": a.query, "key": a.key, "value": a.value, "result": self.result}
        self.begin(item, batch, block, matrices)
        self.pack_queries("query", self.query_tile, a.extent, self.scale)
        if not self.is_single:
            self._clear_results()
        lowest = v.constant(-numbers.inf)
        start = [(v.vector, lowest)] * self.vectors + [(v.vector, v.zero)] * self.vectors
        values = b.loop(0, self.limit, self.tile, start, self._tile)
        if self.is_single and a.keys == 0:
            self._clear_results()
        self._finish(values[: self.vectors], values[self.vectors :])

    def _balanced(self, block: Index) -> Index:
        """Blocks from both ends in turn: a task's share of long and of short ones is the same."""
        if isinstance(block, int):
            return block
        half, odd = divmod(block, 2)
        from_end = self.blocks - 1 - half
        is_odd = self.b.value(f"icmp eq i64 {odd}, 1")
        return self.b.where(is_odd, from_end, half)

    def _clear_results(self) -> None:
        v = self.v
        self.b.loop(0, self.padded(self.a.width) * self.block, v.width, [], lambda i, _: (
            v.store_computed(v.zero, self.result_tile, i)
        ))  # fmt: skip

    def _tile(self, start: Index, carried: list[str]) -> list[str]:
        a, v, n = self.a, self.v, self.vectors
        tops, totals = carried[:n], carried[n:]
        count = least(self.tile, self.limit - start)
        keys = self.tile_rows("key", a.extent, start, count)
        values = self.tile_rows("value", a.width, start, count)
        self.pack_bias(start, count)

        def scores(k: Index, rows: int, best: list[str]) -> list[str]:
            best = list(best)
            for i, value in enumerate(self.scores(keys, start, k, rows)):
                r, j = divmod(i, n)
                v.store_computed(value, self.score_tile, self.spot(k + r, j))
                larger = v.test("ogt", value, best[j])
                best[j] = v.select(larger, value, best[j])
            return best

        best = self.t.each_rows(count, self.rows, self.rest, v.typed(tops), scores)
        safe = [self.finite(x) for x in best]
        old = [self.exp(v.sub(x, y)) for x, y in zip(tops, safe)]
        sums = self._weights(start, count, safe)
        totals = [v.multiply_add(x, y, z) for x, y, z in zip(totals, old, sums)]
        self._add_values(values, count, old)
        return [*best, *totals]

    def _weights(self, start: Index, count: Index, safe: list[str]) -> list[str]:
        """Scores become weights; their sums, of which dropout takes nothing."""
        a, v, n = self.a, self.v, self.vectors
        together = DRAWN_TOGETHER if a.dropped else 1

        def step(k: Index, keys: int, sums: list[str]) -> list[str]:
            sums = list(sums)
            kept = self.kept(start + k, keys) if a.dropped else None
            for r in range(keys):
                for j in range(n):
                    spot = self.spot(k + r, j)
                    x = v.load_computed(self.score_tile, spot)
                    weight = self.exp(v.sub(x, safe[j]))
                    sums[j] = v.add(sums[j], weight)
                    if kept:
                        weight = v.mul(weight, kept[r][j])
                    v.store_computed(weight, self.score_tile, spot)
            return sums

        none = [(v.vector, v.zero)] * n
        return self.t.each_rows(count, together, a.keys % together, none, step)

    def _add_values(self, values: Rows, count: Index, old: list[str]) -> None:
        """result = old * result + weights @ value; lanes are queries, rows columns of the value."""
        a, v, n = self.a, self.v, self.vectors
        weights = Rows(self.score_tile, self.block, 1, stored=False)

        def columns(c: Index, rows: int, _) -> list[str]:
            spots = [self.spot(c + r, j) for r in range(rows) for j in range(n)]
            sums = [v.zero] * len(spots)
            if not self.is_single:
                sums = [
                    v.mul(v.load_computed(self.result_tile, s), old[i % n])
                    for i, s in enumerate(spots)
                ]
            here = self.t.moved(values, 0, c)
            across = Rows(here.pointer, here.column, here.row, here.stored)
            for s, total in zip(
                spots, self.t.product(across, rows, weights, self.masks, count, sums)
            ):
                v.store_computed(total, self.result_tile, s)
            return []

        self.t.each_rows(a.width, self.rows, a.width % self.rows, [], columns)

    def _finish(self, tops: list[str], totals: list[str]) -> None:
        a, v, b = self.a, self.v, self.b
        none = [v.test("oeq", x, v.zero) for x in totals]
        inverse = [v.div(1.0, x) for x in totals]
        if a.safe:
            inverse = self.zero_where(none, inverse)
        self.t.unpack_transposed(
            self.result_tile, self.vectors, a.width, self.row_buffer,
            lambda value, j: v.mul(value, inverse[j]),
        )  # fmt: skip
        target = self.t.moved(self.operands["result"], self.first_query)
        self.t.store_rows(self.row_buffer, self.count, a.width, target)
        first = self.batch * a.queries + self.first_query
        for j, (top, total) in enumerate(zip(tops, totals)):
            with b.lanes(v.width):
                logarithm = math_float.call(b, "log", v.element, total)
            logarithm = v.add(logarithm, self.finite(top))
            mask = v.first(self.count - j * v.width)
            at = v.at(self.pointer("logarithms"), first + j * v.width, v.element)
            v.raw_store(logarithm, at, mask, v.element, v.width)


# Attention of very few queries, as when text is made word by word: lanes are keys, not queries.
# All scores of one query stay in memory of the thread; keys and values are read once, in order.

MOST_QUERIES = 4  # of more, lanes of queries waste less than sums over lanes cost
MOST_KEYS = 1 << 16  # their scores take half a megabyte of a thread's stack
TOGETHER = 4  # keys whose products with the query are under way at once
MOST_VECTORS = 8  # of a query, which stays in registers


def has_few(a: Attention, result: Matrix, isa: Isa) -> bool:
    """Return True if this kernel is the one to take."""
    vectors = -(-a.extent // isa.lanes(8 if a.dtype.itemsize == 8 else 4))
    rows = (a.query, a.key, a.value, result)
    readable = all(m.column == 1 for m in rows) and (a.bias is None or a.bias.column == 1)
    few = (
        not isinstance(a.queries, Extent)
        and a.queries <= MOST_QUERIES
        and 0 < a.keys <= MOST_KEYS
        and vectors <= MOST_VECTORS
    )
    return readable and few


def _room(keys: int) -> int:
    """Scores that a line has room for; of sizes that are expressions, a power of two."""
    if not isinstance(keys, Extent):
        return keys
    room = 1 << (number_now(keys) - 1).bit_length()
    return room if keys <= room else MOST_KEYS


def few_queries(name: str, attention: Attention, result: Matrix, isa: Isa) -> GeneratedKernel:
    """Generate as attention_kernel does, for a few queries; each task computes whole rows of the
    result.
    """
    return _Decode(attention, result, isa).kernel(name)


class _Decode(Scores):
    def __init__(self, attention: Attention, result: Matrix, isa: Isa):
        rest = operand_names(attention)
        names = ("query", "key", "value", *rest, "result", "logarithms")
        super().__init__(attention, isa, names)
        a = attention
        self.matrices = {"query": a.query, "key": a.key, "value": a.value, "result": result}

    def kernel(self, name: str) -> GeneratedKernel:
        a, b = self.a, self.b
        items = a.batches * a.queries
        work = 2 * items * a.keys * (a.extent + a.width)
        self.prepare_numbers()
        self.line = self.reserved(self.padded(_room(a.keys)))
        self.totals = self.reserved(self.t.widest * self.v.width)
        b.loop(*b.share(b.number(0)), 1, [], self._work_item)
        return GeneratedKernel(
            name, function_text(name, len(self.names), b, numbers=1), self.names,
            tasks_for(work, items, 1), work, (items,),
        )  # fmt: skip

    def _work_item(self, item: Index, _) -> None:
        a, v = self.a, self.v
        self.item = item
        batch, self.row = divmod(item, a.queries)
        offsets = self.t.locate(batch, a.batch, self.matrices)
        self.operands = {
            name: Rows(v.at(self.pointer(name), offsets[name]), m.row, 1)
            for name, m in self.matrices.items()
        }
        if a.bias is not None:
            (offset,) = self.t.locate(batch, a.batch, {"bias": a.bias}).values()
            here = offset + self.row * a.bias.row
            element = "i8" if a.is_mask else v.stored
            self.bias_row = Rows(v.at(self.pointer("bias"), here, element), 0, 1)
        self.seen: Index = a.keys
        if a.causal:
            self.seen = least(a.keys, self.row + 1)
        self._find_scores()
        top = self.finite(self._largest())
        total = self._find_weights(top)
        self._finish(top, total)

    def _find_scores(self) -> None:
        a, b, v = self.a, self.b, self.v
        query = self.t.moved(self.operands["query"], self.row)
        scale = v.splat(self.scale)
        starts = range(0, a.extent, v.width)
        masks = [v.first(a.extent - c) for c in starts]
        parts = [v.mul(v.load(query.pointer, c, mask), scale) for c, mask in zip(starts, masks)]

        def keys(k: Index, count: int) -> None:
            for r in range(count):
                key, total = self.t.moved(self.operands["key"], k + r), v.zero
                for c, part, mask in zip(starts, parts, masks):
                    total = v.multiply_add(part, v.load(key.pointer, c, mask), total)
                at = v.at(self.line, k + r, v.element)
                b.emit(f"store {v.element} {v.total(total)}, ptr {at}")

        whole = self.seen // TOGETHER * TOGETHER
        b.loop(0, whole, TOGETHER, [], lambda k, _: keys(k, TOGETHER))
        b.loop(whole, self.seen, 1, [], lambda k, _: keys(k, 1))

    def _largest(self) -> str:
        """The largest score, in every lane; scores get their bias, and -inf beyond the last."""
        b, v = self.b, self.v
        minus = v.constant(-numbers.inf)

        def step(k: Index, best: list[str]) -> list[str]:
            mask = v.first(self.seen - k)
            score = v.load_computed(self.line, k)
            if self.a.bias is not None:
                score = v.add(score, self.bias_vector(self.bias_row, k, mask))
            score = v.select(mask, score, minus)
            v.store_computed(score, self.line, k)
            larger = v.test("ogt", score, best[0])
            return [v.select(larger, score, best[0])]

        (best,) = b.loop(0, self.seen, v.width, [(v.vector, minus)], step)
        name = f"llvm.vector.reduce.fmax.{v.suffix}"
        return v.splat(b.pure_call(name, v.element, (v.vector, best)))

    def _find_weights(self, top: str) -> str:
        """Scores become weights; the sum of them, of which dropout takes nothing."""
        a, b, v = self.a, self.b, self.v
        first = self.item * a.keys

        def step(k: Index, sums: list[str]) -> list[str]:
            x = v.load_computed(self.line, k)
            weight = self.exp(v.sub(x, top))
            total = v.add(sums[0], weight)
            if a.dropped:
                at = v.numbers(first + k, 1, "i64")
                with b.lanes(v.width):
                    bits = random_bits(b, self.seed, at, KEEP_BITS, 0)
                weight = v.mul(weight, self.factor_of(bits))
            v.store_computed(weight, self.line, k)
            return [total]

        (total,) = b.loop(0, self.seen, v.width, [(v.vector, v.zero)], step)
        return v.splat(v.total(total))

    def _finish(self, top: str, total: str) -> None:
        a, b, v = self.a, self.b, self.v
        inverse = v.div(1.0, total)
        if a.safe:
            none = v.test("oeq", total, v.zero)
            (inverse,) = self.zero_where([none], [inverse])
        target = self.t.moved(self.operands["result"], self.row)
        for first in range(0, a.width, self.t.widest * v.width):
            count = min(self.t.widest, -(-(a.width - first) // v.width))
            masks = [v.first(a.width - first - j * v.width) for j in range(count)]
            for j, value in enumerate(self._columns(first, masks)):
                value = v.mul(value, inverse)
                v.store(value, target.pointer, first + j * v.width, masks[j])
        with b.lanes(v.width):
            logarithm = v.add(math_float.call(b, "log", v.element, total), top)
        v.raw_store(
            logarithm, v.at(self.pointer("logarithms"), self.item, v.element), v.first(1),
            v.element, v.width,
        )  # fmt: skip

    def _columns(self, first: int, masks: list[str | None]) -> list[str]:
        """weights @ value of a few vectors of columns."""
        v = self.v
        values = self.operands["value"]

        def step(k: Index, sums: list[str]) -> list[str]:
            weight = v.splat(v.computed_scalar(self.line, k))
            row = self.t.moved(values, k, first)
            return [
                v.multiply_add(weight, v.load(row.pointer, j * v.width, mask), sums[j])
                for j, mask in enumerate(masks)
            ]

        zeros = [v.zero] * len(masks)
        return add_in_pieces(v, self.seen, zeros, step, self.totals)
