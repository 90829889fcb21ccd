"""Attention in one pass over the keys: no matrix of scores, results in one fixed order.

A block of queries lies across the lanes of vectors, so that the largest score and the sum of each
row are plain vector operations.  Keys come in tiles: their scores stay in the nearest cache, where
they become weights and then add rows of the value to a block of results.  A later tile with a
larger score scales down what was added before it.  Source of that idea: T. Dao et al.,
"FlashAttention", arXiv:2205.14135; M. Milakov and N. Gimelshein, arXiv:1805.02867.
"""

from __future__ import annotations

import math as numbers
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ltc.llvm import math
from ltc.llvm.builder import Builder, function_text
from ltc.llvm.dtype import FORMS
from ltc.llvm.isa import Isa
from ltc.llvm.lanes import (
    GeneratedKernel,
    Index,
    Lanes,
    multiples,
    require_stack,
    reserved,
    share,
    tasks_for,
)  # fmt: skip
from ltc.llvm.matmul import Matrix
from ltc.llvm.rng import block_bits, random_bits
from ltc.llvm.tiles import Rows, Tiles

KEYS = 128  # of one tile
KEEP_BITS = 24  # of the uniform number that decides whether a weight is dropped


@dataclass(frozen=True)
class Attention:
    """One attention: extents, where operands lie, and what is done to scores.

    batch    extents of the dimensions that number the matrices
    queries, keys, extent, width  L, S, E, V: query [L, E], key [S, E], value [S, V]
    bias     where the bias [L, S] lies, or None; is_mask says that it is bool
    causal   whether query i reads keys 0 to i alone
    dropped  whether weights are dropped
    safe     whether a row of which no score counts gives 0, not NaN
    """

    dtype: torch.dtype
    batch: tuple[int, ...]
    queries: int
    keys: int
    extent: int
    width: int
    query: Matrix
    key: Matrix
    value: Matrix
    bias: Matrix | None
    is_mask: bool
    causal: bool
    dropped: bool
    safe: bool = True

    @property
    def batches(self) -> int:
        return numbers.prod(self.batch)


class Scores:
    """Emits what forward and gradient share: operands, scores, dropout.

    A block of queries is `vectors` vectors of lanes; `block` is their number.
    """

    def __init__(self, attention: Attention, isa: Isa, names: tuple[str, ...]):
        self.a, self.b = attention, Builder()
        self.names = names
        self.t = Tiles(self.b, isa, attention.dtype)
        self.l: Lanes = self.t.l
        w = self.l.width
        self.vectors = min(2, max(1, -(-attention.queries // w)))
        self.block = self.vectors * w
        self.blocks = -(-attention.queries // self.block)
        self.rows = self.t.rows_for(self.vectors)
        self.tile = min(KEYS, -(-attention.keys // self.rows) * self.rows)
        self.rest = attention.keys % self.rows
        self.masks = [None] * self.vectors
        self.is_wide = self.l.stored == self.l.element

    def pointer(self, name: str) -> str:
        return f"%p{self.names.index(name)}"

    def padded(self, extent: int) -> int:
        return -(-extent // self.l.width) * self.l.width

    # --- memory and numbers of one call

    def prepare(self) -> None:
        """What every unit uses: scratch memory, the scale, what dropout needs."""
        a, b, l = self.a, self.b, self.l
        self.query_tile = self._reserved(self.padded(a.extent) * self.block)
        self.score_tile = self._reserved(self.tile * self.block)
        self.row_buffer = self._reserved(self.block * self.padded(max(a.extent, a.width)))
        self.packed = {}
        for name, columns in (("key", a.extent), ("value", a.width)):
            if self._packs(getattr(a, name)):
                self.packed[name] = self._reserved(self.tile * self.padded(columns))
        if a.bias is not None:
            self.bias_tile = self._reserved(self.padded(self.tile) * self.block)
        self.scale = self.double("scale")
        if a.dropped:
            self.seed = b.effect(f"load i64, ptr {self.pointer('seed')}")
            p = b.effect(f"load double, ptr {self.pointer('probability')}")
            with b.lanes(1):
                at = b.convert("fptrunc", "double", p, "float")
                at = b.binary("fmul", "float", at, b.constant("float", 2.0**KEEP_BITS))
                at = b.intrinsic("ceil", "float", at)
                self.threshold = b.convert("fptoui", "float", at, "i64")
                rest = b.binary("fsub", "double", b.constant("double", 1.0), p)
                factor = b.binary("fdiv", "double", b.constant("double", 1.0), rest)
            self.kept_factor = l.splat(self._from_double(factor))

    def _reserved(self, count: int) -> str:
        return reserved(self.b, count, self.l.element)

    def stack_bytes(self) -> int:
        a, pads = self.a, self.padded
        numbers_kept = (pads(a.extent) + 2 * self.tile) * self.block
        numbers_kept += (self.tile + self.block) * (pads(a.extent) + pads(a.width))
        return numbers_kept * 8

    def double(self, name: str) -> str:
        """The number that an operand holds, as scores are computed."""
        return self._from_double(self.b.effect(f"load double, ptr {self.pointer(name)}"))

    def _from_double(self, x: str) -> str:
        if self.l.element == "double":
            return x
        return self.b.value(f"fptrunc double {x} to float")

    def _packs(self, matrix: Matrix) -> bool:
        return not self.is_wide or matrix.column != 1

    # --- one block of queries

    def begin(self, unit: Index, batch: Index, block: Index, matrices: dict[str, Matrix]) -> None:
        """Everything about the block: where its operands are, how many keys it reads."""
        a, l, b = self.a, self.l, self.b
        self.batch = batch
        self.first_query = l.times(block, self.block)
        whole = a.queries % self.block == 0
        left = l.minus(a.queries, self.first_query)
        self.count = self.block if whole else l.least(left, self.block)
        self.limit: Index = a.keys
        if a.causal:
            self.limit = l.least(a.keys, l.plus(self.first_query, self.block))
        offsets = self.t.locate(batch, a.batch, matrices)
        self.operands = {name: self._at(name, offsets[name], m) for name, m in matrices.items()}
        if a.bias is not None:
            (offset,) = self.t.locate(batch, a.batch, {"bias": a.bias}).values()
            element = "i8" if a.is_mask else l.stored
            self.bias_at = l.at(self.pointer("bias"), offset, element)
        if a.causal:
            self.lane_numbers = [self._lane_numbers("i32", v) for v in range(self.vectors)]
        if a.dropped:
            first = l.plus(l.times(batch, a.queries), self.first_query)
            self.lane_positions = [self._positions(first, v) for v in range(self.vectors)]

    def _at(self, name: str, offset: Index, matrix: Matrix) -> Rows:
        stored = name != "logarithms"
        element = self.l.stored if stored else self.l.element
        at = self.l.at(self.pointer(name), offset, element)
        return Rows(at, matrix.row, matrix.column, stored)

    def _lane_numbers(self, element: str, v: int) -> str:
        l = self.l
        first = l.narrow(l.plus(self.first_query, v * l.width))
        lanes = multiples(l.width, 1, element)
        return self.b.value(f"add <{l.width} x i32> {l.splat(first, 'i32')}, {lanes}")

    def _positions(self, first: Index, v: int) -> str:
        """The position of each lane's first score among all scores."""
        l = self.l
        at = l.splat(l.times(l.plus(first, v * l.width), self.a.keys), "i64")
        return self.b.value(f"add <{l.width} x i64> {at}, {multiples(l.width, self.a.keys, 'i64')}")

    def pack_queries(self, name: str, target: str, columns: int, factor: str = "") -> None:
        """The block's rows of an operand, transposed: lanes are queries."""
        l, t = self.l, self.t
        rows = t.moved(self.operands[name], self.first_query)
        if rows.column != 1:
            pitch = self.padded(columns)
            t.pack(rows, self.count, columns, self.row_buffer, pitch)
            rows = Rows(self.row_buffer, pitch, 1, stored=False)
        scale = l.splat(factor) if factor else ""

        def scaled(value: str) -> str:
            return self.b.value(f"fmul {l.vector} {value}, {scale}") if scale else value

        t.pack_transposed(rows, self.count, self.vectors, columns, target, scaled)

    # --- one tile of keys

    def tile_rows(self, name: str, columns: int, start: Index, count: Index) -> Rows:
        """A tile of the key or the value, packed where it has to be."""
        rows = self.t.moved(self.operands[name], start)
        if name not in self.packed:
            return rows
        pitch = self.padded(columns)
        self.t.pack(rows, count, columns, self.packed[name], pitch)
        return Rows(self.packed[name], pitch, 1, stored=False)

    def pack_bias(self, start: Index, count: Index) -> None:
        """The bias of a tile, its rows being keys; -inf where a mask says no."""
        a, l, b = self.a, self.l, self.b
        if a.bias is None:
            return
        element = "i8" if a.is_mask else l.stored
        first = l.plus(l.times(self.first_query, a.bias.row), l.times(start, a.bias.column))
        here = Rows(l.at(self.bias_at, first, element), a.bias.row, a.bias.column)
        if a.bias.row != 0 and a.bias.column == 1:
            self.t.pack_transposed(
                here, self.count, self.vectors, count, self.bias_tile, load=self._bias_vector
            )
            return

        def key(k: str, _) -> None:
            offset, place = l.times(k, a.bias.column), l.times(k, self.block)
            if a.bias.row == 0:
                number = l.splat(self._bias_number(here.pointer, offset))
                for v in range(self.vectors):
                    l.store_computed(number, self.bias_tile, l.plus(place, v * l.width))
                return

            def query(q: str, _) -> None:
                number = self._bias_number(here.pointer, l.plus(offset, l.times(q, a.bias.row)))
                at = l.at(self.bias_tile, l.plus(place, q), l.element)
                b.emit(f"store {l.element} {number}, ptr {at}")

            b.loop(0, self.count, 1, [], query)

        b.loop(0, count, 1, [], key)

    def _bias_vector(self, x: Rows, offset: Index, mask: str | None) -> str:
        l = self.l
        if not self.a.is_mask:
            return l.load(x.pointer, offset, mask)
        w = l.width
        raw = l.raw_load(l.at(x.pointer, offset, "i8"), mask, "i8", w)
        seen = self.b.value(f"icmp ne <{w} x i8> {raw}, zeroinitializer")
        minus = l.constant(-numbers.inf)
        return self.b.value(
            f"select {l.mask_type} {seen}, {l.vector} zeroinitializer, {l.vector} {minus}"
        )

    def _bias_number(self, pointer: str, offset: Index) -> str:
        l, b = self.l, self.b
        if not self.a.is_mask:
            return l.scalar(pointer, offset)
        raw = b.effect(f"load i8, ptr {l.at(pointer, offset, 'i8')}")
        seen = b.value(f"icmp ne i8 {raw}, 0")
        with b.lanes(1):
            zero, minus = (b.constant(l.element, x) for x in (0.0, -numbers.inf))
        return b.value(f"select i1 {seen}, {l.element} {zero}, {l.element} {minus}")

    def scores(self, keys: Rows, start: Index, k: Index, rows: int) -> list[str]:
        """Scores of `rows` keys from `start + k` on, with the bias, -inf where not seen."""
        a, l = self.a, self.l
        queries = Rows(self.query_tile, self.block, 1, stored=False)
        zeros = [l.zero] * (rows * self.vectors)
        sums = self.t.product(self.t.moved(keys, k), rows, queries, self.masks, a.extent, zeros)
        result = []
        for i, value in enumerate(sums):
            r, v = divmod(i, self.vectors)
            if a.bias is not None:
                value = l.add(value, l.load_computed(self.bias_tile, self.spot(l.plus(k, r), v)))
            if a.causal:
                value = self._causal(value, l.plus(start, l.plus(k, r)), v)
            result.append(value)
        return result

    def _causal(self, value: str, key: Index, v: int) -> str:
        l, words = self.l, f"<{self.l.width} x i32>"
        number = l.splat(l.narrow(key), "i32")
        seen = self.b.value(f"icmp sge {words} {self.lane_numbers[v]}, {number}")
        minus = l.constant(-numbers.inf)
        return self.b.value(f"select {l.mask_type} {seen}, {l.vector} {value}, {l.vector} {minus}")

    def spot(self, row: Index, v: int) -> Index:
        """Where a vector of a tile of keys by queries lies."""
        return self.l.plus(self.l.times(row, self.block), v * self.l.width)

    def exp(self, x: str) -> str:
        with self.b.lanes(self.l.width):
            return math.call(self.b, "exp", self.l.element, x)

    # --- dropout

    @property
    def kept_together(self) -> int:
        """Of how many keys one block of random bits decides."""
        return 4 if self.a.keys % 4 == 0 else 1

    def kept(self, key: Index) -> list[list[str]]:
        """What the weights of `kept_together` keys from `key` on are multiplied by, each vector."""
        l, b, words = self.l, self.b, f"<{self.l.width} x i64>"
        by_vector = []
        for v in range(self.vectors):
            at = b.value(f"add {words} {self.lane_positions[v]}, {l.splat(key, 'i64')}")
            with b.lanes(l.width):
                if self.kept_together == 1:
                    bits = [random_bits(b, self.seed, at, KEEP_BITS, 0)]
                else:
                    bits = block_bits(b, self.seed, at, KEEP_BITS, 0)
            by_vector.append([self._factor(x) for x in bits])
        return [list(of_key) for of_key in zip(*by_vector)]

    def _factor(self, bits: str) -> str:
        l = self.l
        limit = l.splat(self.threshold, "i64")
        stays = self.b.value(f"icmp uge <{l.width} x i64> {bits}, {limit}")
        return self.b.value(
            f"select {l.mask_type} {stays}, {l.vector} {self.kept_factor}, "
            f"{l.vector} zeroinitializer"
        )


def attention_kernel(
    name: str, attention: Attention, result: Matrix, isa: Isa
) -> GeneratedKernel:
    """The result [L, V] of each batch, and the logarithms of the sums, contiguous.

    tasks  each computes whole blocks of queries; no result depends on their number

    Raises Unsupported where a thread's stack cannot hold what a block needs.
    """
    return _Forward(attention, result, isa).kernel(name)


def operand_names(attention: Attention) -> tuple[str, ...]:
    """The operands after query, key and value, by name."""
    bias = ("bias",) if attention.bias is not None else ()
    return ("scale", *bias, *(("seed", "probability") if attention.dropped else ()))


def require_room(attention: Attention, isa: Isa) -> None:
    """Raises Unsupported where a thread's stack cannot hold what a block needs, gradients too."""
    require_stack(2 * Scores(attention, isa, ()).stack_bytes(), "attention")


class _Forward(Scores):
    def __init__(self, attention: Attention, result: Matrix, isa: Isa):
        rest = operand_names(attention)
        names = ("query", "key", "value", *rest, "result", "logarithms")
        super().__init__(attention, isa, names)
        self.result = result
        self.is_single = attention.keys <= self.tile

    def kernel(self, name: str) -> GeneratedKernel:
        a, b, l = self.a, self.b, self.l
        require_room(a, l.isa)
        units = a.batches * self.blocks
        work = 2 * a.batches * a.queries * a.keys * (a.extent + a.width)
        if a.queries and a.batches:
            self.prepare()
            self.result_tile = self._reserved(self.padded(a.width) * self.block)
            b.loop(*share(l, units), 1, [], self._unit)
        return GeneratedKernel(
            name, function_text(name, len(self.names), b), self.names,
            tasks_for(work, units, 1), work,
        )  # fmt: skip

    def _unit(self, unit: str, _) -> None:
        a, b, l = self.a, self.b, self.l
        batch, block = l.divided(unit, self.blocks)
        matrices = {"query": a.query, "key": a.key, "value": a.value, "result": self.result}
        self.begin(unit, batch, block, matrices)
        self.pack_queries("query", self.query_tile, a.extent, self.scale)
        if not self.is_single:
            self._clear_results()
        lowest = l.constant(-numbers.inf)
        start = [(l.vector, lowest)] * self.vectors + [(l.vector, l.zero)] * self.vectors
        values = b.loop(0, self.limit, self.tile, start, self._tile)
        if self.is_single and a.keys == 0:
            self._clear_results()
        self._finish(values[: self.vectors], values[self.vectors :])

    def _clear_results(self) -> None:
        l = self.l
        self.b.loop(0, self.padded(self.a.width) * self.block, l.width, [], lambda i, _: (
            l.store_computed(l.zero, self.result_tile, i)
        ))  # fmt: skip

    def _tile(self, start: str, carried: list[str]) -> list[str]:
        a, l, b, n = self.a, self.l, self.b, self.vectors
        tops, totals = carried[:n], carried[n:]
        count = l.least(self.tile, l.minus(self.limit, start))
        keys = self.tile_rows("key", a.extent, start, count)
        values = self.tile_rows("value", a.width, start, count)
        self.pack_bias(start, count)

        def scores(k: Index, rows: int, best: list[str]) -> list[str]:
            best = list(best)
            for i, value in enumerate(self.scores(keys, start, k, rows)):
                r, v = divmod(i, n)
                l.store_computed(value, self.score_tile, self.spot(l.plus(k, r), v))
                larger = b.value(f"fcmp ogt {l.vector} {value}, {best[v]}")
                best[v] = b.value(
                    f"select {l.mask_type} {larger}, {l.vector} {value}, {l.vector} {best[v]}"
                )
            return best

        best = self.t.each_rows(
            count, self.rows, self.rest, [(l.vector, top) for top in tops], scores
        )
        safe = [self._finite(x) for x in best]
        old = [self.exp(b.value(f"fsub {l.vector} {x}, {y}")) for x, y in zip(tops, safe)]
        sums = self._weights(start, count, safe)
        totals = [l.multiply_add(x, y, z) for x, y, z in zip(totals, old, sums)]
        self._add_values(values, count, old)
        return [*best, *totals]

    def _finite(self, top: str) -> str:
        """The largest score, or 0 where no score counts yet."""
        l, b = self.l, self.b
        none = b.value(f"fcmp oeq {l.vector} {top}, {l.constant(-numbers.inf)}")
        return b.value(f"select {l.mask_type} {none}, {l.vector} {l.zero}, {l.vector} {top}")

    def _weights(self, start: Index, count: Index, safe: list[str]) -> list[str]:
        """Scores become weights; their sums, of which dropout takes nothing."""
        a, l, b, n = self.a, self.l, self.b, self.vectors
        together = self.kept_together if a.dropped else 1

        def step(k: str, sums: list[str]) -> list[str]:
            sums = list(sums)
            kept = self.kept(l.plus(start, k)) if a.dropped else None
            for r in range(together):
                for v in range(n):
                    spot = self.spot(l.plus(k, r), v)
                    x = l.load_computed(self.score_tile, spot)
                    weight = self.exp(b.value(f"fsub {l.vector} {x}, {safe[v]}"))
                    sums[v] = l.add(sums[v], weight)
                    if kept:
                        weight = b.value(f"fmul {l.vector} {weight}, {kept[r][v]}")
                    l.store_computed(weight, self.score_tile, spot)
            return sums

        return b.loop(0, count, together, [(l.vector, l.zero)] * n, step)

    def _add_values(self, values: Rows, count: Index, old: list[str]) -> None:
        """result = old * result + weights @ value; lanes are queries, rows columns of the value."""
        a, l, b, n = self.a, self.l, self.b, self.vectors
        weights = Rows(self.score_tile, self.block, 1, stored=False)

        def columns(c: Index, rows: int, _) -> list[str]:
            spots = [self.spot(l.plus(c, r), v) for r in range(rows) for v in range(n)]
            sums = [l.zero] * len(spots)
            if not self.is_single:
                sums = [
                    b.value(f"fmul {l.vector} {l.load_computed(self.result_tile, s)}, {old[i % n]}")
                    for i, s in enumerate(spots)
                ]
            here = self.t.moved(values, 0, c)
            across = Rows(here.pointer, here.column, here.row, here.stored)
            for s, total in zip(
                spots, self.t.product(across, rows, weights, self.masks, count, sums)
            ):
                l.store_computed(total, self.result_tile, s)
            return []

        self.t.each_rows(a.width, self.rows, a.width % self.rows, [], columns)

    def _finish(self, tops: list[str], totals: list[str]) -> None:
        a, l, b = self.a, self.l, self.b
        none = [b.value(f"fcmp oeq {l.vector} {x}, {l.zero}") for x in totals]
        ones = l.constant(1.0)
        inverse = [b.value(f"fdiv {l.vector} {ones}, {x}") for x in totals]
        if a.safe:
            inverse = self._zero_where(none, inverse)
        self.t.unpack_transposed(
            self.result_tile, self.vectors, a.width, self.row_buffer,
            lambda value, v: b.value(f"fmul {l.vector} {value}, {inverse[v]}"),
        )  # fmt: skip
        target = self.t.moved(self.operands["result"], self.first_query)
        self.t.store_rows(self.row_buffer, self.count, a.width, target)
        first = l.plus(l.times(self.batch, a.queries), self.first_query)
        for v, (top, total) in enumerate(zip(tops, totals)):
            with b.lanes(l.width):
                logarithm = math.call(b, "log", l.element, total)
            logarithm = l.add(logarithm, self._finite(top))
            mask = l.first(l.minus(self.count, v * l.width))
            at = l.at(self.pointer("logarithms"), l.plus(first, v * l.width), l.element)
            l.raw_store(logarithm, at, mask, l.element, l.width)

    def _zero_where(self, masks: list[str], values: list[str]) -> list[str]:
        l = self.l
        return [
            self.b.value(f"select {l.mask_type} {m}, {l.vector} {l.zero}, {l.vector} {x}")
            for m, x in zip(masks, values)
        ]
