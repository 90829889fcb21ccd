"""The gradient of attention: scores are made again, tile by tile, from what the forward pass kept.

One task goes through blocks of queries in order and adds to the gradients of all keys and values of
its matrix, so that no two tasks write to one place and every sum has one order.  Where there are
few matrices, the blocks of each are dealt to several tasks, and a second kernel adds their sums.
"""

from __future__ import annotations

import math

import torch

from ltc.errors import Unsupported
from ltc.llvm.attention.scores import DRAWN_TOGETHER, Attention, Scores, operand_names, require_room
from ltc.llvm.attention.tiles import Rows, Tiles
from ltc.llvm.conv.geometry import KernelSequence
from ltc.llvm.emit.builder import Builder, function_text
from ltc.llvm.emit.index import Index, least
from ltc.llvm.emit.isa import Isa
from ltc.llvm.emit.vectors import GeneratedKernel, Vectors, tasks_for
from ltc.llvm.gemm.blocking import Matrix
from ltc.support.sizes.extent import Extent

KEYS = 64  # of one tile
FEWEST_WORK_ITEMS = 16  # from here on whole matrices keep the threads busy

SIDES = ("key", "value")


def attention_gradient(
    name: str,
    attention: Attention,
    result: Matrix,
    gradient: Matrix,
    logarithms: Matrix,
    gradients: tuple[Matrix, Matrix, Matrix],
    wants_bias: bool,
    isa: Isa,
) -> KernelSequence:
    """Return the kernels of the gradients of query, key and value, and of the bias if wanted.

    Raises Unsupported if a thread's stack cannot hold the values of a block, and for the gradient of
    a causal attention's bias.

    Args:
        result, gradient: The places of the forward result and its gradient.
        logarithms: The places of the logarithms, as matrices of one column.
        gradients: The places of query's, key's and value's gradients; the bias's is contiguous.
    """
    if wants_bias and attention.causal:
        raise Unsupported("No kernel makes the gradient of the bias of a causal attention.")
    made = _Gradient(attention, result, gradient, logarithms, gradients, wants_bias, isa)
    first = made.kernel(name)
    if made.is_direct:
        return KernelSequence((first,), {})
    extents = {"key": attention.extent, "value": attention.width}
    kernels, scratch = [first], {}
    for side, target in zip(SIDES, gradients[1:]):
        kernels.append(
            sum_of_shares(name, attention, side, extents[side], made.shares, target, isa)
        )
        numbers = attention.batches * made.shares * attention.keys * extents[side]
        scratch[f"{side}_sums"] = numbers * (8 if attention.dtype == torch.float64 else 4)
    return KernelSequence(tuple(kernels), scratch)


class _Gradient(Scores):
    """Emits the first kernel; `shares` is over how many tasks the blocks of a matrix are dealt."""

    def __init__(self, attention, result, gradient, logarithms, gradients, wants_bias, isa):
        bias = ("bias_gradient",) if wants_bias else ()
        self.shares = 1
        batches = max(1, attention.batches)
        names = ["gradient", "query", "key", "value", "result", "logarithms", "factor"]
        names += operand_names(attention)
        super().__init__(attention, isa, ())
        if batches < FEWEST_WORK_ITEMS:
            self.shares = -(-FEWEST_WORK_ITEMS // batches)
            if not isinstance(self.blocks, Extent):  # else a share may have no block at all
                self.shares = max(1, min(self.blocks, self.shares))
        self.is_direct = (
            self.shares == 1 and self.is_wide and all(m.column == 1 for m in gradients[1:])
        )
        ends = "gradient" if self.is_direct else "sums"
        self.names = (*names, "query_gradient", *(f"{s}_{ends}" for s in SIDES), *bias)
        self.tile = min(KEYS, self.tile)
        self.logarithms, self.wants_bias = logarithms, wants_bias
        a = attention
        self.matrices = {
            "query": a.query, "key": a.key, "value": a.value, "result": result,
            "gradient": gradient, "logarithms": logarithms, "query_gradient": gradients[0],
        }  # fmt: skip
        if self.is_direct:
            self.matrices |= {f"{s}_gradient": m for s, m in zip(SIDES, gradients[1:])}
        self.extents = {"key": a.extent, "value": a.width}

    def kernel(self, name: str) -> GeneratedKernel:
        a, b, v = self.a, self.b, self.v
        require_room(a, v.isa)
        items = a.batches * self.shares
        work = 2 * a.batches * a.queries * a.keys * (3 * a.extent + 2 * a.width)
        self.prepare()
        self._reserve()
        b.loop(*b.share(b.number(0)), 1, [], self._work_item)
        return GeneratedKernel(
            name, function_text(name, len(self.names), b, numbers=1), self.names,
            tasks_for(work, items, 1), work, (items,),
        )  # fmt: skip

    def _reserve(self) -> None:
        a, block = self.a, self.block
        self.factor = self.double("factor")
        self.gradient_tile = self.reserved(self.padded(a.width) * block)
        self.query_sums = self.reserved(self.padded(a.extent) * block)
        self.weight_tile = self.reserved(self.tile * block)
        self.along = self.reserved(block)
        self.row_copies = {
            name: self.reserved(block * self.padded(columns))
            for name, columns in (("query", a.extent), ("gradient", a.width))
            if self._packs(self.matrices[name])
        }
        if self.wants_bias:
            self.bias_rows = self.reserved(block * self.padded(self.tile))

    # --- one share of the blocks of one matrix

    def _work_item(self, item: Index, _) -> None:
        batch, number = divmod(item, self.shares)
        offsets = self.t.locate(batch, self.a.batch, self.matrices)
        self.sums = {}
        for side in SIDES:
            if self.is_direct:
                name = f"{side}_gradient"
                pointer = self.v.at(self.pointer(name), offsets[name])
                self.sums[side] = Rows(pointer, self.matrices[name].row, 1)
            else:
                size = self.a.keys * self.extents[side]
                pointer = self.v.at(self.pointer(f"{side}_sums"), item * size, self.v.element)
                self.sums[side] = Rows(pointer, self.extents[side], 1, stored=False)
            self._clear(self.sums[side], self.extents[side])
        self.b.loop(number, self.blocks, self.shares, [], lambda block, _: self._block(
            item, batch, block
        ))  # fmt: skip

    def _clear(self, rows: Rows, columns: int) -> None:
        v = self.v

        def row(k: Index, _) -> None:
            line = self.t.moved(rows, k)
            for c in range(0, columns, v.width):
                at = v.at(line.pointer, c, v.element)
                v.raw_store(v.zero, at, v.first(columns - c), v.element, v.width)

        self.b.loop(0, self.a.keys, 1, [], row)

    def _block(self, item: Index, batch: Index, block: Index) -> None:
        a, b, v = self.a, self.b, self.v
        self.begin(item, batch, block, self.matrices)
        self.pack_queries("query", self.query_tile, a.extent, self.scale)
        self.pack_queries("gradient", self.gradient_tile, a.width)
        self.query_rows = self._rows("query", a.extent)
        self.gradient_rows = self._rows("gradient", a.width)
        self._find_along()
        b.loop(0, self.padded(a.extent) * self.block, v.width, [], lambda i, _: (
            v.store_computed(v.zero, self.query_sums, i)
        ))  # fmt: skip
        self._load_lanes()
        b.loop(0, self.limit, self.tile, [], self._tile)
        factor = v.splat(self.factor)
        self.t.unpack_transposed(
            self.query_sums, self.vectors, a.extent, self.row_buffer,
            lambda value, j: v.mul(value, factor),
        )  # fmt: skip
        target = self.t.moved(self.operands["query_gradient"], self.first_query)
        self.t.store_rows(self.row_buffer, self.count, a.extent, target)

    def _rows(self, name: str, columns: int) -> Rows:
        """The block's rows of an operand, each a line of vectors."""
        rows = self.t.moved(self.operands[name], self.first_query)
        if name not in self.row_copies:
            return rows
        pitch = self.padded(columns)
        self.t.pack(rows, self.count, columns, self.row_copies[name], pitch)
        return Rows(self.row_copies[name], pitch, 1, stored=False)

    def _find_along(self) -> None:
        """For each query, its result times the gradient of that."""
        a, v, b = self.a, self.v, self.b
        results = self.t.moved(self.operands["result"], self.first_query)

        def query(q: Index, _) -> None:
            x, y = self.t.moved(results, q), self.t.moved(self.gradient_rows, q)
            total = self._dot(x, y, a.width)
            b.emit(f"store {v.element} {total}, ptr {v.at(self.along, q, v.element)}")

        b.loop(0, self.count, 1, [], query)

    def _dot(self, x: Rows, y: Rows, columns: int) -> str:
        v, b = self.v, self.b
        if x.column == 1:
            total = v.zero
            for c in range(0, columns, v.width):
                mask = v.first(columns - c)
                total = v.multiply_add(self.t.vector(x, c, mask), self.t.vector(y, c, mask), total)
            return v.total(total)

        def step(c: Index, sums: list[str]) -> list[str]:
            left = self.t.number(x, c * x.column)
            product = b.value(f"fmul {v.element} {left}, {self.t.number(y, c)}")
            return [b.value(f"fadd {v.element} {sums[0]}, {product}")]

        with b.lanes(1):
            zero = b.constant(v.element, 0.0)
        return b.loop(0, columns, 1, [(v.element, zero)], step)[0]

    def _load_lanes(self) -> None:
        """The logarithm and `along` of each lane's query; +inf makes weights of 0."""
        v, b = self.v, self.b
        logs = self.t.moved(self.operands["logarithms"], self.first_query)
        at, kept = logs.pointer, self.logarithms.row
        if kept != 1:
            at = self.row_buffer

            def query(q: Index, _) -> None:
                x = v.computed_scalar(logs.pointer, q * kept)
                b.emit(f"store {v.element} {x}, ptr {v.at(at, q, v.element)}")

            b.loop(0, self.count, 1, [], query)
        masks = [v.first(self.count - j * v.width) for j in range(self.vectors)]
        self.alongs = [
            v.load_computed(self.along, j * v.width, mask) for j, mask in enumerate(masks)
        ]
        self.tops = []
        for j, mask in enumerate(masks):
            top = v.load_computed(at, j * v.width, mask)
            none = v.test("oeq", top, -math.inf)
            if not self.a.safe:
                self.tops.append(top)
                continue
            self.tops.append(v.select(none, math.inf, top))

    # --- one tile of keys

    def _tile(self, start: Index, _) -> None:
        a = self.a
        count = least(self.tile, self.limit - start)
        keys = self.tile_rows("key", a.extent, start, count)
        values = self.tile_rows("value", a.width, start, count)
        self.pack_bias(start, count)
        self.t.each_rows(count, self.rows, self.rest, [], lambda k, rows, _: self._scores(
            keys, values, start, k, rows
        ))  # fmt: skip
        if self.wants_bias:
            self._store_bias(start, count)
        self._add_rows("value", self.weight_tile, self.gradient_rows, start, count)
        self._add_rows("key", self.score_tile, self.query_rows, start, count, self.factor)
        self._add_queries(keys, count)

    def _scores(self, keys, values, start: Index, k: Index, rows: int) -> list[str]:
        """Weights of `rows` keys, and the gradients of their scores, into the two tiles."""
        a, v, n = self.a, self.v, self.vectors
        spots = [self.spot(k + r, j) for r in range(rows) for j in range(n)]
        weights = [
            self.exp(v.sub(score, self.tops[i % n]))
            for i, score in enumerate(self.scores(keys, start, k, rows))
        ]
        used = self._dropped(weights, start, k, rows) if a.dropped else weights
        for spot, weight, kept in zip(spots, weights, used):
            v.store_computed(kept, self.weight_tile, spot)
            if a.dropped:
                v.store_computed(weight, self.score_tile, spot)
        gradients = Rows(self.gradient_tile, self.block, 1, stored=False)
        zeros = [v.zero] * len(spots)
        sums = self.t.product(self.t.moved(values, k), rows, gradients, self.masks, a.width, zeros)
        for i, (spot, total) in enumerate(zip(spots, sums)):
            v.store_computed(self._of_score(spot, total, i % n), self.score_tile, spot)
        return []

    def _of_score(self, spot: Index, total: str, j: int) -> str:
        """weight * (its gradient - along); the gradient of a dropped weight is scaled as it is."""
        v = self.v
        used = v.load_computed(self.weight_tile, spot)
        if not self.a.dropped:
            away = v.sub(total, self.alongs[j])
            return v.mul(used, away)
        weight = v.load_computed(self.score_tile, spot)
        first = v.mul(used, total)
        second = v.mul(weight, self.alongs[j])
        return v.sub(first, second)

    def _dropped(self, weights: list[str], start: Index, k: Index, rows: int) -> list[str]:
        v, n = self.v, self.vectors
        result = []
        for r in range(0, rows, DRAWN_TOGETHER):
            factors = self.kept(start + (k + r), min(DRAWN_TOGETHER, rows - r))
            for i, row in enumerate(factors):
                for j, factor in enumerate(row):
                    weight = weights[(r + i) * n + j]
                    result.append(v.mul(weight, factor))
        return result

    def _add_rows(
        self, side: str, tile: str, right: Rows, start: Index, count: Index, factor: str = ""
    ) -> None:
        """sums of the side's rows += factor * tile @ right; lanes are columns."""
        v, columns = self.v, self.extents[side]
        target = self.t.moved(self.sums[side], start)
        scale = v.splat(factor) if factor else ""
        for first in range(0, columns, self.t.widest * v.width):
            n = min(self.t.widest, -(-(columns - first) // v.width))
            masks = [v.first(columns - first - j * v.width) for j in range(n)]
            height = self.t.rows_for(n)

            def body(k: Index, rows: int, _, first=first, n=n, masks=masks) -> list[str]:
                left = Rows(v.at(tile, k * self.block, v.element), self.block, 1, stored=False)
                zeros = [v.zero] * (rows * n)
                sums = self.t.product(
                    left, rows, self.t.moved(right, 0, first), masks, self.count, zeros
                )
                here = self.t.moved(target, k, first)
                for i, total in enumerate(sums):
                    r, j = divmod(i, n)
                    offset = r * here.row + j * v.width
                    at = v.at(here.pointer, offset, v.element)
                    old = v.raw_load(at, masks[j], v.element, v.width)
                    new = v.multiply_add(total, scale, old) if scale else v.add(old, total)
                    v.raw_store(new, at, masks[j], v.element, v.width)
                return []

            self.t.each_rows(count, height, self.a.keys % height, [], body)

    def _add_queries(self, keys: Rows, count: Index) -> None:
        """query sums += key.T @ score gradients; lanes are queries, rows columns of the key."""
        a, v, n = self.a, self.v, self.vectors
        tile = Rows(self.score_tile, self.block, 1, stored=False)

        def columns(c: Index, rows: int, _) -> list[str]:
            spots = [self.spot(c + r, j) for r in range(rows) for j in range(n)]
            sums = [v.load_computed(self.query_sums, spot) for spot in spots]
            here = self.t.moved(keys, 0, c)
            across = Rows(here.pointer, here.column, here.row, here.stored)
            made = self.t.product(across, rows, tile, self.masks, count, sums)
            for spot, total in zip(spots, made):
                v.store_computed(total, self.query_sums, spot)
            return []

        self.t.each_rows(a.extent, self.rows, a.extent % self.rows, [], columns)

    def _store_bias(self, start: Index, count: Index) -> None:
        """Gradients of a tile's scores are those of its bias."""
        a, v, b = self.a, self.v, self.b
        pitch = self.padded(self.tile)
        self.t.unpack_transposed(
            self.score_tile, self.vectors, self.tile, self.bias_rows, lambda value, j: value
        )
        rows = self.batch * a.queries + self.first_query

        def query(q: Index, _) -> None:
            line = (rows + q) * a.keys + start

            def chunk(c: Index, _) -> None:
                value = v.load_computed(self.bias_rows, q * pitch + c)
                mask = v.first(count - c)
                v.store(value, self.pointer("bias_gradient"), line + c, mask)

            b.loop(0, count, v.width, [], chunk)

        b.loop(0, self.count, 1, [], query)


# --- the second kernel of a gradient whose matrices are shared out ----------------------------
# It adds what the tasks have made.


def sum_of_shares(
    name: str, a: Attention, side: str, columns: int, shares: int, target: Matrix, isa: Isa
) -> GeneratedKernel:
    """The sums of the shares of each matrix, one after the other, in the result's dtype."""
    b = Builder()
    t = Tiles(b, isa, a.dtype)
    v: Vectors = t.v
    size = a.keys * columns

    def row(number: Index, _) -> None:
        batch, k = divmod(number, a.keys)
        (offset,) = t.locate(batch, a.batch, {"target": target}).values()
        line = offset + k * target.row
        first = batch * shares * size + k * columns
        for c in range(0, columns, v.width):
            mask = v.first(columns - c)
            total = v.load_computed("%p0", first + c, mask)
            for i in range(1, shares):
                total = v.add(total, v.load_computed("%p0", first + (i * size + c), mask))
            if target.column == 1:
                v.store(total, "%p1", line + c, mask)
            else:
                _scatter(v, total, "%p1", line, c, target.column, min(v.width, columns - c))

    rows = a.batches * a.keys
    b.loop(*b.share(b.number(0)), 1, [], row)
    arguments = (f"{side}_sums", f"{side}_gradient")
    return GeneratedKernel(
        name, function_text(name, 2, b, numbers=1), arguments,
        tasks_for(rows * columns * shares * 8, rows, 1), rows * columns * shares, (rows,),
    )  # fmt: skip


def _scatter(v: Vectors, total: str, pointer: str, line: Index, first: int, step: int, count: int):
    """Numbers `step` apart, one by one."""
    for i in range(count):
        lanes = ", ".join(f"i32 {i if lane == 0 else -1}" for lane in range(v.width))
        lanes = lanes.replace("i32 -1", "i32 poison")
        one = v.builder.value(
            f"shufflevector {v.vector} {total}, {v.vector} poison, <{v.width} x i32> <{lanes}>"
        )
        v.store(one, pointer, line + (first + i) * step, v.first(1))
