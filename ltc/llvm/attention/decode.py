"""Attention of very few queries, as when text is made word by word: lanes are keys, not queries.

All scores of one query stay in memory of the thread; keys and values are read once, in order.
"""

from __future__ import annotations

import math as numbers

from ltc.llvm.attention.scores import KEEP_BITS, Attention, Scores, operand_names
from ltc.llvm.attention.tiles import Rows
from ltc.llvm.emit import math_float
from ltc.llvm.emit.builder import function_text
from ltc.llvm.emit.index import Index, least
from ltc.llvm.emit.isa import Isa
from ltc.llvm.emit.philox import random_bits
from ltc.llvm.emit.vectors import GeneratedKernel, add_in_pieces, tasks_for
from ltc.llvm.gemm.blocking import Matrix
from ltc.support.sizes.extent import Extent, number_now

MOST_QUERIES = 4  # of more, lanes of queries waste less than sums over lanes cost
MOST_KEYS = 1 << 16  # their scores take half a megabyte of a thread's stack
TOGETHER = 4  # keys whose products with the query are under way at once
MOST_VECTORS = 8  # of a query, which stays in registers


def has_few(a: Attention, result: Matrix, isa: Isa) -> bool:
    """Whether this kernel is the one to take."""
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
    """As attention_kernel, of a few queries; each task computes whole rows of the result."""
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
