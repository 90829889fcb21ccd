"""The panels and blocks of a matrix product: decided here, from its shape, and nowhere else.

`plan_of` gives every number that the text of a product depends on; docs/codegen.md shows some.

Letters: M rows of the result, N its columns, K the summed dimension. A *panel* is a strip of
columns a few vectors wide; a *block* is the few rows whose sums over K stay in registers. M, K and
the outermost batch extent are numbers of the kernel: what is decided here looks at their classes
alone, so that nearly all batch sizes have one text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ltc.llvm.emit.dtype import BYTES, FORMS
from ltc.llvm.emit.isa import ALIASING_BYTES, LEVEL_2_BYTES, LINES_OF_A_SET, Isa
from ltc.llvm.emit.vectors import LONGEST_SUM
from ltc.support.sizes.choices import by_sample, least, most
from ltc.support.sizes.extent import Extent, number_now

PACKED_BYTES = LEVEL_2_BYTES // 2  # of one packed panel
PREFETCHED_FROM_BYTES = 4096  # rows so far apart that no processor foresees the next one
# Of a left operand whose rows are adjacent each step along K may be in another page. Of so many
# steps, all blocks of a panel take a few before the next ones come.
FAR_STEPS, NEAR_STEPS = 2048, 256
PAIRED_STRIP_STEPS = 8192  # of all blocks of a packed strip of pairs together: another half
MOST_PAIRED_BLOCKS = 8
# Of a packed strip of single rows: with a panel and the sums of so many, it fills such a cache.
STRIP_STEPS, STRIP_BLOCKS, STRIP_PANELS = 384, 16, 32
PANELS_OF_A_STRIP = 4  # that a task multiplies packed rows by, at least: each task packs its own
DOT_ROWS = 4  # up to so many rows, a transposed right operand is read once instead of packed
MOST_STREAMS = 16  # of memory that are read side by side
DOT_TILE = 4  # rows and columns whose products are summed side by side along K
# Up to so many rows, and from so many steps for each, packing a right operand costs more than
# adding up the lanes of each sum.
MOST_TILED_ROWS, STEPS_FOR_A_TILED_ROW = 64, 16
FEW_ROWS, SOME_ROWS = 6, 12  # up to so many, wider panels leave no register idle
# Up to so many rows of a product that reads its panels in place, blocks are what few rows are
# usually made of: 9, 4, 2 and 1 of 16 rows would read a panel four times.
MOST_EVEN_ROWS, EVEN_HEIGHT = 32, 8
MANY_STEPS = 64  # of K, from which on pairs of rows that lie side by side are packed
# From so many on, packing pays even where columns are adjacent: with rows that are far apart in
# memory, or with near ones.
MANY_BLOCKS, MANY_NEAR_BLOCKS = 4, 8


@dataclass(frozen=True)
class Matrix:
    """The places of the elements of a batch of matrices, as strides in elements.

    Attributes:
        batch: One stride for each batch dimension; 0 repeats the matrix.
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


@dataclass(frozen=True)
class Shape:
    """A batch of products: left [*batch, M, K] times right [*batch, K, N]."""

    batch: tuple[int, ...]
    m: int
    n: int
    k: int
    left: Matrix
    right: Matrix
    result: Matrix

    @property
    def batches(self) -> int:
        total = 1
        for extent in self.batch:
            total *= extent
        return total

    def folded(self) -> Shape:
        """Batch dimensions that only repeat the right operand become rows of the left one."""
        one = self
        while one.batch and one.right.batch[-1] == 0:
            left, result = one.left, one.result
            if left.batch[-1] != one.m * left.row or result.batch[-1] != one.m * result.row:
                break
            matrices = (Matrix(x.row, x.column, x.batch[:-1]) for x in (left, one.right, result))
            one = Shape(one.batch[:-1], one.m * one.batch[-1], one.n, one.k, *matrices)
        return one

    def transposed(self) -> Shape:
        """The product of the transposed operands, which is the transposed result."""
        left, right, result = (
            Matrix(x.column, x.row, x.batch) for x in (self.right, self.left, self.result)
        )
        return Shape(self.batch, self.n, self.m, self.k, left, right, result)


@dataclass(frozen=True)
class Blocking:
    """The part of a plan that any value suits: each has the same bits, only its speed differs.

    Attributes:
        vectors: The width of a panel in vectors.
        packs: A panel is copied to memory of this thread before it is used.
    """

    vectors: int
    packs: bool


@dataclass(frozen=True)
class GemmPlan:
    """Every number that the text of a product depends on.

    Attributes:
        is_transposed: The kernel's first operand is the right one.
        inner: Batch extents but the outermost.
        rows: Number of rows of the left operand, if the text fits only that; else 0.
        vectors: The width of a panel in vectors.
        height: Rows of a whole block; the rest are done in blocks of 8, 4, 2 and 1.
        by_dots: Few rows by a transposed right operand: its rows are read once, as dot products.
        streams: So many of its rows at most are read side by side.
        by_dot_tiles: Some rows by a transposed right operand: read in place, summed along K.
        pairs: Pairs of bfloat16 along K share a lane.
        packs: A panel is copied to memory of this thread before it is used.
        packs_left: So are strips of rows that lie side by side, each made of a few blocks.
        foresees: The rows of the next block follow in memory those of a block.
        depth: The part of K that is packed at once.
        splits: True if K may be longer than `depth`.
        is_long: True if K may be longer than one chain of additions.
        prefetches: Rows to prefetch ahead, if the right operand is read in place; else 0.
    """

    dtype: torch.dtype
    isa: Isa
    left: Matrix
    right: Matrix
    result: Matrix
    is_transposed: bool
    inner: tuple[int, ...]
    n: int
    rows: int
    vectors: int
    height: int
    by_dots: bool
    streams: int
    by_dot_tiles: bool
    pairs: bool
    packs: bool
    packs_left: bool
    foresees: bool
    depth: int
    splits: bool
    is_long: bool
    prefetches: bool

    @property
    def width(self) -> int:
        """Elements of one vector."""
        return self.isa.lanes(BYTES[FORMS[self.dtype].computed])

    @property
    def panel_width(self) -> int:
        return self.vectors * self.width

    @property
    def strip_line(self) -> int:
        """Elements of memory that a block of packed rows takes for each step, or pair of steps."""
        return -(-self.height // self.width) * self.width

    @property
    def sums_strips(self) -> bool:
        """Return True if K is taken in pieces for a whole strip, so that none is too long to be
        packed.
        """
        return self.packs_left and not self.pairs

    @property
    def adds_in_memory(self) -> bool:
        """Return True if a sum may be of several chains, which are added to values in memory."""
        return self.is_long or self.splits or self.sums_strips

    def strip_blocks(self, k: int) -> int:
        """Blocks of a packed strip of rows."""
        if self.sums_strips:
            return STRIP_BLOCKS
        return least(MOST_PAIRED_BLOCKS, most(1, PAIRED_STRIP_STEPS // most(1, k)))

    @property
    def panels(self) -> int:
        narrow = self.by_dots or self.by_dot_tiles
        return most(1, -(-self.n // (self.width if narrow else self.panel_width)))


def plan_of(dtype: torch.dtype, isa: Isa, shape: Shape, is_transposed: bool) -> GemmPlan:
    """The plan of a product; products with equal plans have one text."""
    left, right, m, n, k = shape.left, shape.right, shape.m, shape.n, shape.k
    computed_bytes = BYTES[FORMS[dtype].computed]
    width = isa.lanes(computed_bytes)
    by_dots = _is_by_dots(dtype, isa, shape)
    pairs = _pairs(dtype, isa, shape)
    blocking = blocking_of(dtype, isa, shape)
    vectors, packs = blocking.vectors, blocking.packs
    with by_sample(m, n, k):  # blocks of any height are right
        height = EVEN_HEIGHT if _is_even(isa, shape, blocking) else _height(isa, m, vectors)
        is_far = right.row * dtype.itemsize >= PREFETCHED_FROM_BYTES
    packs_left = _packs_left(dtype, isa, shape, vectors)
    depth = PACKED_BYTES // (vectors * width * computed_bytes) * (2 if pairs else 1)
    sums_strips = packs_left and not pairs
    if sums_strips:
        packs, depth = True, STRIP_STEPS
    elif left.row == 1 and left.column != 1 and k >= FAR_STEPS and not pairs:
        depth = min(depth, NEAR_STEPS)
    depth = depth // LONGEST_SUM * LONGEST_SUM  # chains end where they would in one piece
    return GemmPlan(
        dtype, isa, left, right, shape.result, is_transposed, shape.batch[1:], n,
        rows=m if by_dots or m <= 1 else 0,
        vectors=vectors,
        height=height,
        by_dots=by_dots,
        streams=_streams(dtype, shape) if by_dots else 0,
        by_dot_tiles=_is_by_dot_tiles(dtype, isa, shape),
        pairs=pairs,
        packs=packs,
        packs_left=packs_left,
        foresees=left.column == 1 and left.row == k and computed_bytes == dtype.itemsize,
        depth=depth,
        splits=packs and not sums_strips and k > depth,
        is_long=isinstance(k, Extent) or k > LONGEST_SUM,
        prefetches=not packs and bool(is_far),
    )  # fmt: skip


def blocking_of(dtype: torch.dtype, isa: Isa, shape: Shape) -> Blocking:
    """A good choice for nearly all products of that class."""
    must_pack = _must_pack(dtype, isa, shape)  # no choice: where it has to be is guarded
    # Any width is right, and to pack more than has to be.
    with by_sample(shape.m, shape.n, shape.k):
        vectors = max(1, min(_wanted_vectors(dtype, isa, shape), _most_vectors(dtype, isa, shape)))
        is_far = shape.right.row * dtype.itemsize >= PREFETCHED_FROM_BYTES
        blocks = MANY_BLOCKS if is_far else MANY_NEAR_BLOCKS
        many = shape.m >= blocks * _height(isa, shape.m, vectors)
    return Blocking(vectors, must_pack or many)


def _is_by_dots(dtype: torch.dtype, isa: Isa, shape: Shape) -> bool:
    if isinstance(shape.m, Extent) or isinstance(shape.n, Extent):
        return False  # its text is for so many rows and columns alone
    return 1 <= shape.m <= DOT_ROWS and _is_rows_by_rows(dtype, isa, shape)


def _streams(dtype: torch.dtype, shape: Shape) -> int:
    """Return how many rows of the right operand are read side by side: of a set of the first-level
    cache they take half of the lines, so that those that come early are not evicted before they are read.
    """
    apart = number_now(shape.right.column) * dtype.itemsize
    sets = ALIASING_BYTES // math.gcd(apart, ALIASING_BYTES)
    return min(MOST_STREAMS, sets * (LINES_OF_A_SET // 2))


def _is_by_dot_tiles(dtype: torch.dtype, isa: Isa, shape: Shape) -> bool:
    if any(isinstance(extent, Extent) for extent in (shape.m, shape.n, shape.k)):
        return False
    fits = isa.registers >= 2 * DOT_TILE**2 and _width(dtype, isa) >= DOT_TILE
    few = DOT_ROWS < shape.m <= min(MOST_TILED_ROWS, shape.k // STEPS_FOR_A_TILED_ROW)
    are_rows = _is_rows_by_rows(dtype, isa, shape)
    return fits and few and are_rows and not _pairs(dtype, isa, shape)


def _is_rows_by_rows(dtype: torch.dtype, isa: Isa, shape: Shape) -> bool:
    """Return True if K, of some vectors, is adjacent in both operands, and in one of many columns."""
    return (
        shape.k >= 2 * _width(dtype, isa) and shape.n > 1
        and shape.right.row == 1 and shape.right.column != 1 and shape.left.column == 1
    )  # fmt: skip


def _pairs(dtype: torch.dtype, isa: Isa, shape: Shape) -> bool:
    # An odd K would pair its last element with a stranger.
    return has_pairs(dtype, isa) and shape.k % 2 == 0 and shape.m > FEW_ROWS


def has_pairs(dtype: torch.dtype, isa: Isa) -> bool:
    """Return True if two numbers may share a lane."""
    return isa.bfloat16_dot and dtype is torch.bfloat16


def _packs_left(dtype: torch.dtype, isa: Isa, shape: Shape, vectors: int) -> bool:
    """Return True if rows that lie side by side are packed: read in place, each step is in another
    line and, with many rows, in another page.

    Rows of tall blocks use most of such a line; their pairs have to be made.
    """
    left, m, n, k = shape.left, shape.m, shape.n, shape.k
    if left.row != 1 or left.column == 1:
        return False
    if _pairs(dtype, isa, shape):
        return MANY_STEPS <= k <= PAIRED_STRIP_STEPS
    if isa.registers >= 32:
        return False
    with by_sample(m, n, k):  # either way is right
        panels = n // (vectors * _width(dtype, isa))
        return bool(m > FEW_ROWS and k > LONGEST_SUM and panels >= PANELS_OF_A_STRIP)


def _must_pack(dtype: torch.dtype, isa: Isa, shape: Shape) -> bool:
    may_be_cut = isinstance(shape.n, Extent) or shape.n % _width(dtype, isa) != 0
    is_cut = not isa.fused and may_be_cut
    return _pairs(dtype, isa, shape) or shape.right.column != 1 or is_cut


def _width(dtype: torch.dtype, isa: Isa) -> int:
    return isa.lanes(BYTES[FORMS[dtype].computed])


def _most_vectors(dtype: torch.dtype, isa: Isa, shape: Shape) -> int:
    return -(-number_now(shape.n) // _width(dtype, isa))


def _height(isa: Isa, m: int, vectors: int) -> int:
    """Rows of a block whose sums, with a row of the panel and one number, fill the registers."""
    return 1 if m == 1 else (isa.registers - vectors - (1 if isa.fused else 2)) // vectors


def _is_even(isa: Isa, shape: Shape, blocking: Blocking) -> bool:
    """Return True if blocks are as high as the powers of two that few rows are made of."""
    some = FEW_ROWS < shape.m <= MOST_EVEN_ROWS
    return (
        some and not blocking.packs and _height(isa, shape.m, blocking.vectors) == EVEN_HEIGHT + 1
    )


def _wanted_vectors(dtype: torch.dtype, isa: Isa, shape: Shape) -> int:
    """Return how many vectors wide a panel is: more where few rows leave registers free, or are
    better.
    """
    m = shape.m
    if m == 1:
        return 16 if isa.registers >= 32 else 8
    if isa.registers < 32:
        return 4 if m <= FEW_ROWS else 2
    if m <= FEW_ROWS:
        return 4
    some = SOME_ROWS if _must_pack(dtype, isa, shape) else MOST_EVEN_ROWS
    return 3 if m <= some or _rows_collide(dtype, shape) else 2


def _rows_collide(dtype: torch.dtype, shape: Shape) -> bool:
    """Return True if a tall block's rows, read side by side along K, evict each other from cache."""
    left = shape.left
    return left.column == 1 and left.row * dtype.itemsize % ALIASING_BYTES == 0
