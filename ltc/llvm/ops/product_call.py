"""A matrix product by PyTorch's own CPU kernel, called in pieces, and what is fused behind it.

A piece is some rows and columns of the result. It is computed in one thread, and its epilogue follows
while it lies in the caches. There are as many as the machine has processors, or more, and each is one
task's: results do not depend on how many threads there are, and no threads but ltc's own compute.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from ltc import config
from ltc.llvm.compiler import symbols
from ltc.llvm.emit.builder import Builder, function_text
from ltc.llvm.emit.index import Index, least
from ltc.llvm.emit.isa import Isa
from ltc.llvm.emit.vectors import Epilogue, GeneratedKernel, Vectors, reserved, tasks_for
from ltc.llvm.gemm.blocking import Matrix, Shape
from ltc.llvm.gemm.product_loops import batch_at
from ltc.llvm.ops.torch_c_abi import SCALAR_TYPES
from ltc.support.process import processors
from ltc.support.sizes.choices import least as least_size
from ltc.support.sizes.choices import most as most_size
from ltc.support.sizes.extent import Extent, number_now

PIECE_ELEMENTS = 1 << 18  # of a result, at most: the epilogue finds them in some cache
CALL_WORK = 1 << 20  # multiply-adds beside which the about 1 us of a call are a few hundredths
COLUMNS = 64  # a piece begins at a multiple of a cache line
_NEEDED = ("aoti_torch_cpu_mm_out", "omp_get_max_threads", "omp_set_num_threads")
_MKL_LIMIT = "MKL_Set_Num_Threads_Local"  # returns the limit that it replaces


def can_call(dtype: torch.dtype, shape: Shape) -> bool:
    """Return True if PyTorch's kernel can be called for a product in place of a generated one."""
    names = (*_NEEDED, *symbols.SHIM_NAMES)
    is_cut = isinstance(shape.n, Extent)  # pieces have to be of known columns
    is_free = config.value("LTC_ISA") == "native"  # PyTorch takes what the processor has
    return is_free and not is_cut and dtype in SCALAR_TYPES and all(map(symbols.has_symbol, names))


def called_product(
    dtype: torch.dtype, shape: Shape, isa: Isa, epilogue: Epilogue | None = None, operands: int = 0,
    right_is_last: bool = False,
) -> GeneratedKernel:  # fmt: skip
    """left [*batch, M, K] times right [*batch, K, N], as `gemm.kernel.matmul` takes it.

    Args:
        right_is_last: The pointers are the left operand, the result, those of the epilogue and the
            right operand.
    """
    shape = shape.folded()
    pieces = _pieces_of(shape)
    names = ("left", "right", "result", *(f"operand{i}" for i in range(operands)))
    if right_is_last:
        names = ("left", "result", *names[3:], "right")
    pointers = tuple(f"%p{names.index(name)}" for name in ("left", "right", "result"))
    outer = shape.batch[0] if shape.batch else 1
    numbers: tuple[int, ...] = (shape.m, shape.k, outer, pieces.rows)
    calls = _Calls(dtype, shape, isa, pieces, epilogue, pointers)
    if epilogue is None:
        numbers = (*numbers, *calls.leave_open())
    calls.emit()
    text = function_text("kernel", 3 + operands, calls.b, len(numbers))
    work = 2 * shape.batches * shape.m * shape.n * shape.k
    tasks = tasks_for(work, shape.batches * pieces.rows * pieces.columns, 1)
    return GeneratedKernel("kernel", text, names, tasks, work, numbers, is_call=True)


@dataclass(frozen=True)
class _CutResult:
    """The pieces of a result.

    Attributes:
        width: Columns of a piece; the last one may have fewer.
        columns: Number of pieces side by side.
        rows: Number of pieces one below the other.
        most_elements: Elements of a piece, at most, at any size.
    """

    width: int
    columns: int
    rows: int
    most_elements: int


def _pieces_of(shape: Shape) -> _CutResult:
    """Pieces for all processors, and no more: a call packs its operands anew for each."""
    m, n, k = map(number_now, (shape.m, shape.n, shape.k))
    wanted = max(processors.count() // number_now(shape.batches), -(-m * n // PIECE_ELEMENTS))
    wanted = max(1, min(wanted, m * n * k // CALL_WORK))

    def packed(columns: int) -> int:
        return -(-wanted // columns) * n + columns * m

    across = min(range(1, min(wanted, -(-n // COLUMNS)) + 1), key=packed)
    width = min(n, -(-n // (across * COLUMNS)) * COLUMNS)
    columns = -(-n // width)
    tallest = max(1, PIECE_ELEMENTS // width)
    rows = most_size(-(-shape.m // tallest), least_size(shape.m, -(-wanted // columns)))
    return _CutResult(width, columns, rows, tallest * width)


class _Calls:
    """The body of the kernel, whose numbers are M, K, the outermost batch extent, and pieces one below
    the other.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        shape: Shape,
        isa: Isa,
        pieces: _CutResult,
        epilogue: Epilogue | None,
        pointers: tuple[str, ...],
    ):
        self.b = Builder()
        self.v = Vectors(self.b, isa, dtype)
        self.shape, self.pieces, self.epilogue = shape, pieces, epilogue
        self.pointers = pointers
        self.m, self.k, self.outer, self.row_pieces = map(self.b.number, range(4))

    def leave_open(self) -> tuple[int, ...]:
        """Make N, pieces and strides numbers, too: products with no epilogue have one text.

        Returns:
            These numbers, behind the first four.
        """
        shape, pieces = self.shape, self.pieces
        matrices = shape.left, shape.right, shape.result
        strides = [stride for matrix in matrices for stride in (matrix.row, matrix.column)]
        found = (shape.n, pieces.width, pieces.columns, *strides)
        n, width, columns, *open_strides = (self.b.number(4 + k) for k in range(len(found)))
        rows_and_columns: Any = zip(open_strides[::2], open_strides[1::2])
        left, right, result = (
            Matrix(row, column, matrix.batch)
            for matrix, (row, column) in zip(matrices, rows_and_columns)
        )
        told: Any = {"n": n, "left": left, "right": right, "result": result}
        self.shape = replace(shape, **told)
        told = {"width": width, "columns": columns}
        self.pieces = replace(pieces, **told)
        return found

    def emit(self) -> None:
        b, pieces = self.b, self.pieces
        self.handles, self.sizes = reserved(b, 3, "i64"), reserved(b, 3 * 4, "i64")
        if self.epilogue is not None:
            self.sums = reserved(b, pieces.most_elements, self.v.stored)
        count: Index = self.outer * self.row_pieces * pieces.columns
        for extent in self.shape.batch[1:]:
            count = count * extent
        low, high = b.share(count)
        limits = self._limit_threads()
        b.loop(low, high, 1, [], lambda number, _: self._piece(number))
        self._set_threads(limits)

    # --- one thread: that of the task ------------------------------------------------------------

    def _limit_threads(self) -> dict[str, str]:
        """Let this thread's calls use no other; return the limits there were."""
        b = self.b
        b.declare("omp_get_max_threads", "i32")
        before: dict[str, str] = {
            "omp_set_num_threads": b.effect("call i32 @omp_get_max_threads()")
        }
        b.declare("omp_set_num_threads", "void", "i32")
        b.emit("call void @omp_set_num_threads(i32 1)")
        if symbols.has_symbol(_MKL_LIMIT):
            b.declare(_MKL_LIMIT, "i32", "i32")
            before[_MKL_LIMIT] = b.effect(f"call i32 @{_MKL_LIMIT}(i32 1)")
        return before

    def _set_threads(self, limits: dict[str, str]) -> None:
        for name, limit in limits.items():
            if name == _MKL_LIMIT:
                self.b.effect(f"call i32 @{name}(i32 {limit})")
            else:
                self.b.emit(f"call void @{name}(i32 {limit})")

    # --- one piece -------------------------------------------------------------------------------

    def _piece(self, number: Index) -> None:
        v, shape, pieces = self.v, self.shape, self.pieces
        rest, across = divmod(number, pieces.columns)
        batch, down = divmod(rest, self.row_pieces)
        row, column = down * self.m // self.row_pieces, across * pieces.width
        rows = (down + 1) * self.m // self.row_pieces - row
        columns: Index = pieces.width
        if self.epilogue is None or shape.n % pieces.width:
            columns = least(pieces.width, shape.n - column)
        matrices = zip(self.pointers, (shape.left, shape.right, shape.result))
        left, right, result = batch_at(v, matrices, shape.batch[1:], batch)
        left = v.at(left, row * shape.left.row)
        right = v.at(right, column * shape.right.column)
        place = v.at(result, row * shape.result.row + column)
        if self.epilogue is None:
            self._multiply(left, right, place, Matrix(shape.result.row, 1), rows, columns)
            return
        self._multiply(left, right, self.sums, Matrix(pieces.width, 1), rows, columns)
        self._finish(self.epilogue, place, batch * self.m + row, column, rows, columns)

    def _multiply(
        self, left: str, right: str, result: str, strides: Matrix, rows: Index, columns: Index
    ) -> None:
        """The product of some rows and some columns; by plain loops where the call fails."""
        b, shape = self.b, self.shape
        tensors = (
            self._tensor(0, result, strides, rows, columns),
            self._tensor(1, left, shape.left, rows, self.k),
            self._tensor(2, right, shape.right, self.k, columns),
        )
        failed: str = "0"
        for code, _ in tensors:
            failed = b.value(f"or i32 {failed}, {code}")
        handles = ", ".join(f"ptr {handle}" for _, handle in tensors)
        b.declare("aoti_torch_cpu_mm_out", "i32", "ptr", "ptr", "ptr")
        (failed,) = b.when(
            b.value(f"icmp eq i32 {failed}, 0"), [("i32", failed)],
            lambda: [b.effect(f"call i32 @aoti_torch_cpu_mm_out({handles})")],
        )  # fmt: skip
        b.declare("aoti_torch_delete_tensor_object", "i32", "ptr")
        for _, handle in tensors:
            b.effect(f"call i32 @aoti_torch_delete_tensor_object(ptr {handle})")

        def instead() -> None:
            count = f"@{symbols.FAILED_CALLS}"
            b.declarations.add(f"{count} = external global i64")
            b.effect(f"atomicrmw add ptr {count}, i64 1 monotonic")
            self._by_loops(left, right, result, strides, rows, columns)

        b.when(b.value(f"icmp ne i32 {failed}, 0"), [], instead)

    def _tensor(
        self, number: int, pointer: str, strides: Matrix, rows: Index, columns: Index
    ) -> tuple[str, str]:
        """A tensor around a matrix: 0 if that went well, and its handle."""
        b, name = self.b, "aoti_torch_create_tensor_from_blob"
        sizes = b.address(self.sizes, 4 * number, "i64")
        for i, word in enumerate((rows, columns, strides.row, strides.column)):
            b.emit(f"store i64 {word}, ptr {b.address(sizes, i, 'i64')}")
        handle = b.address(self.handles, number, "i64")
        b.emit(f"store i64 0, ptr {handle}")
        b.declare(name, "i32", *"ptr i64 ptr ptr i64 i32 i32 i32 ptr".split())
        code = b.effect(
            f"call i32 @{name}(ptr {pointer}, i64 2, ptr {sizes}, ptr {b.address(sizes, 2, 'i64')}, "
            f"i64 0, i32 {SCALAR_TYPES[self.v.dtype]}, i32 0, i32 0, ptr {handle})"
        )
        return code, b.value(f"inttoptr i64 {b.effect(f'load i64, ptr {handle}')} to ptr")

    def _by_loops(
        self, left: str, right: str, result: str, strides: Matrix, rows: Index, columns: Index
    ) -> None:
        """The same as slowly as it may be: PyTorch had no memory for what it packs."""
        v, shape = self.v, self.shape

        def one(row: Index, column: Index, _) -> None:
            x = v.at(left, row * shape.left.row)
            y = v.at(right, column * shape.right.column)

            def step(k: Index, sums: list[str]) -> list[str]:
                left_one = v.splat(v.scalar(x, k * shape.left.column))
                right_one = v.splat(v.scalar(y, k * shape.right.row))
                return [v.multiply_add(left_one, right_one, sums[0])]

            (total,) = self.b.loop(0, self.k, 1, [(v.vector, v.zero)], step)
            v.store(total, result, row * strides.row + column, v.first(1))

        self.b.nest((rows, columns), [], one)

    def _finish(
        self,
        epilogue: Epilogue,
        place: str,
        flat: Index,
        column: Index,
        rows: Index,
        columns: Index,
    ) -> None:
        """Store what becomes of a piece's sums.

        Args:
            place: The address of the first result of the piece.
            flat: The number of its first row over the whole batch.
        """
        b, v = self.b, self.v
        whole = columns - columns % v.width

        def vector(row: Index, at: Index, mask: str | None) -> None:
            value = v.load(self.sums, row * self.pieces.width + at, mask)
            with b.lanes(v.width):
                value = epilogue(b, value, flat + row, column + at, mask)
            v.store(value, place, row * self.shape.result.row + at, mask)

        def line(row: Index, _) -> None:
            b.loop(0, whole, v.width, [], lambda at, _: vector(row, at, None))
            if not isinstance(columns, int) or columns % v.width:
                rest = b.value(f"icmp slt i64 {whole}, {columns}")
                b.when(rest, [], lambda: vector(row, whole, v.first(columns - whole)))

        b.loop(0, rows, 1, [], line)
