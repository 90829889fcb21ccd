"""The common parts of attention kernels: extents and places of operands, scores, masks, dropout."""

from __future__ import annotations

import math as numbers
from dataclasses import dataclass

import torch

from ltc.llvm.attention.tiles import Rows, Tiles
from ltc.llvm.emit import math_float
from ltc.llvm.emit.builder import Builder
from ltc.llvm.emit.index import Index, least
from ltc.llvm.emit.isa import Isa
from ltc.llvm.emit.philox import block_bits, following_bits, random_bits
from ltc.llvm.emit.vectors import Vectors, require_stack, reserved
from ltc.llvm.gemm.blocking import Matrix
from ltc.support.sizes.extent import Extent

KEYS = 128  # of one tile
DRAWN_TOGETHER = 4  # keys for which random bits are drawn at once: words of a block
KEEP_BITS = 24  # of the uniform number that decides whether a weight is dropped


@dataclass(frozen=True)
class Attention:
    """One attention: extents, where operands lie, and what is done to scores.

    Attributes:
        batch: Extents of the dimensions that number the matrices.
        queries, keys, extent, width: L, S, E, V: query [L, E], key [S, E], value [S, V].
        bias: The place of the bias [L, S], or None; is_mask is True if it is bool.
        causal: True if query i reads keys 0 to i alone.
        dropped: True if weights are dropped.
        safe: True if a row of which no score counts gives 0, not NaN.
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
        self.v: Vectors = self.t.v
        w = self.v.width
        self.vectors = 2
        if not isinstance(attention.queries, Extent):
            self.vectors = min(2, max(1, -(-attention.queries // w)))
        self.block = self.vectors * w
        self.blocks = -(-attention.queries // self.block)
        self.rows = self.t.rows_for(self.vectors)
        self.tile = KEYS
        if not isinstance(attention.keys, Extent):
            self.tile = min(KEYS, -(-attention.keys // self.rows) * self.rows)
        self.rest = attention.keys % self.rows
        self.masks = [None] * self.vectors
        self.is_wide = self.v.stored == self.v.element

    def pointer(self, name: str) -> str:
        return f"%p{self.names.index(name)}"

    def padded(self, extent: int) -> int:
        return -(-extent // self.v.width) * self.v.width

    # --- memory and numbers of one call

    def prepare(self) -> None:
        """Prepare scratch memory, and the numbers, for every item."""
        a = self.a
        self.query_tile = self.reserved(self.padded(a.extent) * self.block)
        self.score_tile = self.reserved(self.tile * self.block)
        self.row_buffer = self.reserved(self.block * self.padded(max(a.extent, a.width)))
        self.packed = {}
        for name, columns in (("key", a.extent), ("value", a.width)):
            if self._packs(getattr(a, name)):
                self.packed[name] = self.reserved(self.tile * self.padded(columns))
        if a.bias is not None:
            self.bias_tile = self.reserved(self.padded(self.tile) * self.block)
        self.prepare_numbers()

    def prepare_numbers(self) -> None:
        """The scale, and what dropout needs."""
        a, b, v = self.a, self.b, self.v
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
            self.kept_factor = v.splat(self._from_double(factor))

    def reserved(self, count: int) -> str:
        return reserved(self.b, count, self.v.element)

    def stack_bytes(self) -> int:
        a, pads = self.a, self.padded
        numbers_kept = (pads(a.extent) + 2 * self.tile) * self.block
        numbers_kept += (self.tile + self.block) * (pads(a.extent) + pads(a.width))
        return numbers_kept * 8

    def double(self, name: str) -> str:
        """The number that an operand holds, as scores are computed."""
        return self._from_double(self.b.effect(f"load double, ptr {self.pointer(name)}"))

    def _from_double(self, x: str) -> str:
        if self.v.element == "double":
            return x
        return self.b.value(f"fptrunc double {x} to float")

    def _packs(self, matrix: Matrix) -> bool:
        return not self.is_wide or matrix.column != 1

    # --- one block of queries

    def begin(self, item: Index, batch: Index, block: Index, matrices: dict[str, Matrix]) -> None:
        """Everything about the block: where its operands are, how many keys it reads."""
        a, v = self.a, self.v
        self.batch = batch
        self.first_query = block * self.block
        whole = not isinstance(a.queries, Extent) and a.queries % self.block == 0
        left = a.queries - self.first_query
        self.count = self.block if whole else least(left, self.block)
        self.limit: Index = a.keys
        if a.causal:
            seen = self.first_query + self.block
            if self.block % self.rows:  # of vectors of two lanes: the rest of keys stays the rest
                seen = (seen + (self.rows - 1)) // self.rows * self.rows
            self.limit = least(a.keys, seen)
        offsets = self.t.locate(batch, a.batch, matrices)
        self.operands = {name: self._at(name, offsets[name], m) for name, m in matrices.items()}
        if a.bias is not None:
            (offset,) = self.t.locate(batch, a.batch, {"bias": a.bias}).values()
            element = "i8" if a.is_mask else v.stored
            self.bias_at = v.at(self.pointer("bias"), offset, element)
        if a.causal:
            self.lane_numbers = [
                v.numbers(self.first_query + j * v.width) for j in range(self.vectors)
            ]
        if a.dropped:
            first = batch * a.queries + self.first_query
            self.lane_positions = [self._positions(first, j) for j in range(self.vectors)]

    def _at(self, name: str, offset: Index, matrix: Matrix) -> Rows:
        stored = name != "logarithms"
        element = self.v.stored if stored else self.v.element
        at = self.v.at(self.pointer(name), offset, element)
        return Rows(at, matrix.row, matrix.column, stored)

    def _positions(self, first: Index, j: int) -> str:
        """The position of each lane's first score among all scores."""
        v = self.v
        return v.numbers((first + j * v.width) * self.a.keys, self.a.keys, "i64")

    def pack_queries(self, name: str, target: str, columns: int, factor: str = "") -> None:
        """The block's rows of an operand, transposed: lanes are queries."""
        v, t = self.v, self.t
        rows = t.moved(self.operands[name], self.first_query)
        if rows.column != 1:
            pitch = self.padded(columns)
            t.pack(rows, self.count, columns, self.row_buffer, pitch)
            rows = Rows(self.row_buffer, pitch, 1, stored=False)
        scale = v.splat(factor) if factor else ""

        def scaled(value: str) -> str:
            return v.mul(value, scale) if scale else value

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
        a, v, b = self.a, self.v, self.b
        bias = a.bias
        if bias is None:
            return
        element = "i8" if a.is_mask else v.stored
        first = self.first_query * bias.row + start * bias.column
        here = Rows(v.at(self.bias_at, first, element), bias.row, bias.column)
        if bias.row != 0 and bias.column == 1:
            self.t.pack_transposed(
                here, self.count, self.vectors, count, self.bias_tile, load=self.bias_vector
            )
            return

        def key(k: Index, _) -> None:
            offset, place = k * bias.column, k * self.block
            if bias.row == 0:
                number = v.splat(self.bias_number(here.pointer, offset))
                for j in range(self.vectors):
                    v.store_computed(number, self.bias_tile, place + j * v.width)
                return

            def query(q: Index, _) -> None:
                number = self.bias_number(here.pointer, offset + q * bias.row)
                at = v.at(self.bias_tile, place + q, v.element)
                b.emit(f"store {v.element} {number}, ptr {at}")

            b.loop(0, self.count, 1, [], query)

        b.loop(0, count, 1, [], key)

    def bias_vector(self, x: Rows, offset: Index, mask: str | None) -> str:
        v = self.v
        if not self.a.is_mask:
            return v.load(x.pointer, offset, mask)
        w = v.width
        raw = v.raw_load(v.at(x.pointer, offset, "i8"), mask, "i8", w)
        seen = self.b.value(f"icmp ne <{w} x i8> {raw}, zeroinitializer")
        return v.select(seen, v.zero, -numbers.inf)

    def bias_number(self, pointer: str, offset: Index) -> str:
        v, b = self.v, self.b
        if not self.a.is_mask:
            return v.scalar(pointer, offset)
        raw = b.effect(f"load i8, ptr {v.at(pointer, offset, 'i8')}")
        seen = b.value(f"icmp ne i8 {raw}, 0")
        with b.lanes(1):
            zero, minus = (b.constant(v.element, x) for x in (0.0, -numbers.inf))
        return b.value(f"select i1 {seen}, {v.element} {zero}, {v.element} {minus}")

    def scores(self, keys: Rows, start: Index, k: Index, rows: int) -> list[str]:
        """Scores of `rows` keys from `start + k` on, with the bias, -inf where not seen."""
        a, v = self.a, self.v
        queries = Rows(self.query_tile, self.block, 1, stored=False)
        zeros = [v.zero] * (rows * self.vectors)
        sums = self.t.product(self.t.moved(keys, k), rows, queries, self.masks, a.extent, zeros)
        result = []
        for i, value in enumerate(sums):
            r, j = divmod(i, self.vectors)
            if a.bias is not None:
                value = v.add(value, v.load_computed(self.bias_tile, self.spot(k + r, j)))
            if a.causal:
                value = self._causal(value, start + (k + r), j)
            result.append(value)
        return result

    def _causal(self, value: str, key: Index, j: int) -> str:
        v, words = self.v, f"<{self.v.width} x i32>"
        number = v.splat(v.narrow(key), "i32")
        seen = self.b.value(f"icmp sge {words} {self.lane_numbers[j]}, {number}")
        return v.select(seen, value, -numbers.inf)

    def spot(self, row: Index, j: int) -> Index:
        """Return where a vector of a tile of keys by queries lies."""
        return row * self.block + j * self.v.width

    def exp(self, x: str) -> str:
        with self.b.lanes(self.v.width):
            return math_float.call(self.b, "exp", self.v.element, x)

    def finite(self, top: str) -> str:
        """The largest score, or 0 where no score counts yet."""
        v = self.v
        none = v.test("oeq", top, -numbers.inf)
        return v.select(none, v.zero, top)

    def zero_where(self, masks: list[str], values: list[str]) -> list[str]:
        v = self.v
        return [v.select(m, v.zero, x) for m, x in zip(masks, values)]

    # --- dropout

    @property
    def _begins_blocks(self) -> bool:
        """Return True if each fourth key is the first of a block of random bits, in every row."""
        return not isinstance(self.a.keys, Extent) and self.a.keys % DRAWN_TOGETHER == 0

    def kept(self, key: Index, count: int) -> list[list[str]]:
        """Return the factors of the weights of keys from `key` on, for each of them by vectors.

        Args:
            key: The first key; if count > 1, a multiple of DRAWN_TOGETHER.
            count: Number of keys, at most DRAWN_TOGETHER.
        """
        v, b, words = self.v, self.b, f"<{self.v.width} x i64>"
        by_vector = []
        for j in range(self.vectors):
            at = b.value(f"add {words} {self.lane_positions[j]}, {v.splat(key, 'i64')}")
            with b.lanes(v.width):
                if count == 1:
                    bits = [random_bits(b, self.seed, at, KEEP_BITS, 0)]
                elif self._begins_blocks:
                    bits = block_bits(b, self.seed, at, KEEP_BITS, 0)
                else:
                    bits = following_bits(b, self.seed, at, KEEP_BITS, 0)
            by_vector.append([self.factor_of(x) for x in bits[:count]])
        return [list(of_key) for of_key in zip(*by_vector)]

    def factor_of(self, bits: str) -> str:
        v = self.v
        limit = v.splat(self.threshold, "i64")
        stays = self.b.value(f"icmp uge <{v.width} x i64> {bits}, {limit}")
        return v.select(stays, self.kept_factor, v.zero)


def operand_names(attention: Attention) -> tuple[str, ...]:
    """The operands after query, key and value, by name."""
    bias = ("bias",) if attention.bias is not None else ()
    return ("scale", *bias, *(("seed", "probability") if attention.dropped else ()))


def require_room(attention: Attention, isa: Isa) -> None:
    """Raises Unsupported where a thread's stack cannot hold what a block needs, gradients too."""
    require_stack(2 * Scores(attention, isa, ()).stack_bytes(), "attention")
