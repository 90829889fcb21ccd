"""Pieces of attention kernels: small products in registers, and operands packed for them.

A tile is a short matrix of which a few rows at a time, each a few vectors wide, stay in registers
while a sum runs: sums[r][v] += left[r, d] * right[d][v].  The left operand is read number by
number, so it may lie anywhere; the right one in whole vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from ltc.llvm.emit.builder import Builder
from ltc.llvm.emit.index import Index, least
from ltc.llvm.emit.isa import Isa
from ltc.llvm.emit.vectors import Vectors, transposed
from ltc.llvm.gemm.blocking import Matrix
from ltc.support.sizes.extent import Extent


@dataclass(frozen=True)
class Rows:
    """Rows of numbers in memory.

    Attributes:
        pointer: To the first.
        row: Elements from one row to the next.
        column: Elements from one column to the next.
        stored: True if the elements are as the tensor holds them, not as they are computed.
    """

    pointer: str
    row: int
    column: int
    stored: bool = True


class Tiles:
    """Emits tiles of one kernel."""

    def __init__(self, b: Builder, isa: Isa, dtype: torch.dtype):
        self.b, self.dtype = b, dtype
        self.v = Vectors(b, isa, dtype)
        self.many = isa.registers >= 32

    def rows_for(self, vectors: int) -> int:
        """Return how many rows of so many vectors are summed at once."""
        if self.many:
            return 8 if vectors <= 3 else 4
        return 4 if vectors <= 2 else 2

    @property
    def widest(self) -> int:
        """Vectors of one row, at most."""
        return 4 if self.many else 2

    # --- where things are

    def locate(self, flat: Index, extents: tuple[int, ...], matrices: dict[str, Matrix]):
        """The first element of each matrix, by its pointer, of one batch counted flat."""
        remaining = flat
        offsets: dict[str, Index] = dict.fromkeys(matrices, 0)
        for dim in reversed(range(len(extents))):
            remaining, index = divmod(remaining, extents[dim]) if dim else (0, remaining)
            for pointer, matrix in matrices.items():
                offsets[pointer] = offsets[pointer] + index * matrix.batch[dim]
        return offsets

    def moved(self, x: Rows, row: Index, column: Index = 0) -> Rows:
        """The rows that begin elsewhere in the same matrix."""
        offset = row * x.row + column * x.column
        element = self.v.stored if x.stored else self.v.element
        return Rows(self.v.at(x.pointer, offset, element), x.row, x.column, x.stored)

    def number(self, x: Rows, offset: Index) -> str:
        return (
            self.v.scalar(x.pointer, offset)
            if x.stored
            else self.v.computed_scalar(x.pointer, offset)
        )

    def vector(self, x: Rows, offset: Index, mask: str | None = None) -> str:
        load = self.v.load if x.stored else self.v.load_computed
        return load(x.pointer, offset, mask)

    # --- products

    def product(
        self,
        left: Rows,
        rows: int,
        right: Rows,
        masks: list[str | None],
        depth: Index,
        sums: list[str],
    ) -> list[str]:
        """`sums`, rows x vectors, plus left[r, d] * right[d] for d up to `depth`.

        Args:
            masks: The masks of the vectors of the right operand's rows.
        """
        v, b = self.v, self.b

        def step(d: Index, values: list[str]) -> list[str]:
            line, here = d * right.row, d * left.column
            ys = [self.vector(right, line + j * v.width, m) for j, m in enumerate(masks)]
            element = v.stored if left.stored else v.element
            start = Rows(v.at(left.pointer, here, element), left.row, left.column, left.stored)
            result = []
            for r in range(rows):
                x = v.splat(self.number(start, r * left.row))
                for j, y in enumerate(ys):
                    result.append(v.multiply_add(x, y, values[r * len(ys) + j]))
            return result

        return b.loop(0, depth, 1, v.typed(sums), step)

    def each_rows(
        self,
        count: Index,
        rows: int,
        rest: int,
        carried: list[tuple[str, str]],
        body: Callable[[Index, int, list[str]], list[str]],
    ) -> list[str]:
        """Write body(first row, rows, carried) for `count` rows, `rows` at a time.

        Args:
            rest: Number of rows left at the end; 0: `count` is a multiple of `rows`. If it may be any
            number, they are done one by one.
        """
        b = self.b
        types = [type for type, _ in carried]
        is_open = isinstance(rest, Extent)
        whole = count if not is_open and rest == 0 else count // rows * rows
        values = b.loop(0, whole, rows, carried, lambda k, now: body(k, rows, now))
        if is_open:
            again = list(zip(types, values))
            return b.loop(whole, count, 1, again, lambda k, now: body(k, 1, now))
        if rest == 0:
            return values
        if isinstance(count, int):
            return body(whole, rest, values)
        more = b.value(f"icmp slt i64 {whole}, {count}")
        return b.when(more, list(zip(types, values)), lambda: body(whole, rest, values))

    # --- packing

    def pack(self, x: Rows, count: Index, columns: int, target: str, pitch: int) -> None:
        """`count` rows of `columns` numbers as they are computed, `pitch` apart."""
        v, b = self.v, self.b

        def row(i: Index, _) -> None:
            line, place = self.moved(x, i), i * pitch
            if x.column == 1:
                for c in range(0, columns, v.width):
                    value = self.vector(line, c, v.first(columns - c))
                    v.store_computed(value, target, place + c)
                return
            b.loop(0, columns, 1, [], lambda c, _: self._copy(
                line, c * x.column, target, place + c
            ))  # fmt: skip

        b.loop(0, count, 1, [], row)

    def _copy(self, x: Rows, offset: Index, target: str, place: Index, factor: str = "") -> None:
        value = self.number(x, offset)
        if factor:
            value = self.b.value(f"fmul {self.v.element} {value}, {factor}")
        at = self.v.at(target, place, self.v.element)
        self.b.emit(f"store {self.v.element} {value}, ptr {at}")

    def pack_transposed(
        self,
        x: Rows,
        count: Index,
        vectors: int,
        columns: Index,
        target: str,
        finish: Callable[[str], str] = lambda value: value,
        load: Callable[[Rows, Index, str | None], str] | None = None,
    ) -> None:
        """Row c of `target`, `vectors` vectors wide, becomes column c of the first `count` rows.

        What lies beyond them repeats the last one.  `load` reads a vector of the source, and
        `finish` is what becomes of each; columns beyond `columns` up to a whole vector are written.
        """
        v, b, w = self.v, self.b, self.v.width
        load = load or self.vector
        pitch = vectors * w

        def square(j: int, c: Index, _) -> None:
            is_whole = isinstance(columns, int) and columns % w == 0
            mask = None if is_whole else v.first(columns - c)
            lines = []
            for i in range(w):
                row: Index = j * w + i
                if not (isinstance(count, int) and row < count):
                    row = least(row, count - 1)
                lines.append(load(x, row * x.row + c, mask))
            for i, line in enumerate(transposed(b, lines, v.element)):
                place = (c + i) * pitch + j * w
                v.store_computed(finish(line), target, place)

        for j in range(vectors):
            b.loop(0, columns, w, [], partial(square, j))

    def unpack_transposed(
        self,
        source: str,
        vectors: int,
        columns: int,
        target: str,
        finish: Callable[[str, int], str],
    ) -> None:
        """The other way, between buffers: row q of `target` becomes column q of `source`.

        Args:
            target: [vectors of lanes, columns up to a whole vector].
            finish: (vector, which of a row's vectors) -> what is stored.
        """
        v, b, w = self.v, self.b, self.v.width
        pitch, padded = vectors * w, -(-columns // w) * w

        def square(j: int, c: Index, _) -> None:
            lines = [finish(v.load_computed(source, (c + i) * pitch + j * w), j) for i in range(w)]
            for i, line in enumerate(transposed(b, lines, v.element)):
                v.store_computed(line, target, c + (j * w + i) * padded)

        for j in range(vectors):
            b.loop(0, columns, w, [], partial(square, j))

    def store_rows(self, source: str, count: Index, columns: int, target: Rows) -> None:
        """`count` rows from a buffer to the tensor's memory, rounded to its dtype."""
        v, b = self.v, self.b
        padded = -(-columns // v.width) * v.width

        def row(q: Index, _) -> None:
            line = self.moved(target, q)
            for c in range(0, columns, v.width):
                value = v.load_computed(source, q * padded + c)
                v.store(value, line.pointer, c, v.first(columns - c))

        b.loop(0, count, 1, [], row)
