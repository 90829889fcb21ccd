"""The faster of the two ways to compute a matrix product: the generated kernel, or PyTorch's own.

Both run once for each class of shapes and machine, in the process that compiles, by the time of its own
thread: what other processes do meanwhile hardly shows. The ratio is kept in the disk cache. A program
whose bits may depend on no measurement has the generated kernel: `Graph.reproducible`.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ltc.llvm.compiler import llvm_binding
from ltc.llvm.emit.isa import ALIASING_BYTES, Isa
from ltc.llvm.emit.vectors import GeneratedKernel
from ltc.llvm.gemm.blocking import Matrix, Shape, stored_plain
from ltc.llvm.gemm.kernel import matmul
from ltc.llvm.native.kernel_cache import kernel_name, load
from ltc.llvm.ops.product_call import CALL_WORK, called_product, can_call
from ltc.support.bounded_table import BoundedTable
from ltc.support.disk_cache import disk_cache
from ltc.support.process import processors
from ltc.support.sizes.extent import number_now
from ltc.support.version import source_digest

GAIN = 1.03  # less is no reason to call: bits would depend on a measurement for nothing
MOST_WORK = 1 << 28  # multiply-adds of a trial: about 10 ms of one AVX2 thread
FEWEST_ROWS = 256  # that are left of many: they share what is packed of the right operand
SAMPLES, SAMPLE_SECONDS = 6, 0.001  # of each way, of which the fastest counts
_ratios: BoundedTable[str, float] = BoundedTable("ProductRatios", 4096)


def is_call_faster(dtype: torch.dtype, shape: Shape, isa: Isa) -> bool:
    """Return True if a program should call PyTorch's kernel for a product; measure if need be."""
    shape = _at_present(shape.folded())
    if shape.m * shape.n * shape.k < CALL_WORK or not can_call(dtype, shape):
        return False
    name = _class_name(dtype, shape)
    ratio = _ratios.get(name)
    if ratio is None:
        ratio = _ratios.keep(name, _kept(name) or _measured(name, dtype, shape, isa))
    return ratio > GAIN


def _at_present(shape: Shape) -> Shape:
    """The shape with numbers where it has expressions of sizes."""

    def now(matrix: Matrix) -> Matrix:
        row, column = map(number_now, (matrix.row, matrix.column))
        return Matrix(row, column, tuple(map(number_now, matrix.batch)))

    m, n, k = map(number_now, (shape.m, shape.n, shape.k))
    matrices = map(now, (shape.left, shape.right, shape.result))
    return Shape(tuple(map(number_now, shape.batch)), m, n, k, *matrices)


# --- classes of shapes -------------------------------------------------------------------------------


def _class_name(dtype: torch.dtype, shape: Shape) -> str:
    """Names what the ratio depends on: M and K by their magnitude, strides by what they do to caches.

    N and the kernels' way through the operands are part of a product's text.
    """
    sides = tuple(_side(matrix, dtype) for matrix in (shape.left, shape.right))
    extents = shape.m.bit_length(), shape.n, shape.k.bit_length(), shape.batches > 1
    parts = (
        "ratio of products", dtype, extents, sides, source_digest(), torch.__version__,
        llvm_binding.name_of(""), platform.node(), processors.count(),
    )  # fmt: skip
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _side(matrix: Matrix, dtype: torch.dtype) -> tuple[bool, bool, bool]:
    """(rows are adjacent, so are columns, many steps share few sets of a cache)"""
    far = max(matrix.row, matrix.column) * dtype.itemsize
    return matrix.row == 1, matrix.column == 1, far % (ALIASING_BYTES // 4) == 0


def _kept(name: str) -> float | None:
    disk = disk_cache()
    return None if disk is None else disk.read_as(name, lambda data: float(json.loads(data)))


# --- measuring ---------------------------------------------------------------------------------------


def _measured(name: str, dtype: torch.dtype, shape: Shape, isa: Isa) -> float:
    """Time both ways; return the time of the generated kernel as a multiple of the calls'."""
    # The first call of a thread sets its number of threads; a copy of a process may not make a team.
    torch.get_num_threads()
    shape = _for_trial(shape)
    matrices = shape.left, shape.right, shape.result
    generated = matmul("kernel", dtype, (), (shape.m, shape.n, shape.k), *matrices, isa)
    kernels = generated, called_product(dtype, shape, isa)
    loaded = load({kernel_name(kernel.text): kernel.text for kernel in kernels})
    operands = [
        _operand(dtype, shape.m, shape.k, shape.left), _operand(dtype, shape.k, shape.n, shape.right),
        _operand(dtype, shape.m, shape.n, shape.result),
    ]  # fmt: skip
    ways = [_runner(loaded[kernel_name(k.text)].entry, k, operands) for k in kernels]
    generated_seconds, called_seconds = _fastest(ways)
    ratio = generated_seconds / called_seconds
    disk = disk_cache()
    if disk is not None:
        disk.write(name, json.dumps(ratio).encode())
    return ratio


def _for_trial(shape: Shape) -> Shape:
    """One matrix product like it, with work for some milliseconds at most.

    Rows are left out first: the others decide on what the caches hold.
    """
    extents = {"m": shape.m, "n": shape.n, "k": shape.k}
    while extents["m"] * extents["n"] * extents["k"] > MOST_WORK:
        longest = max(extents, key=extents.__getitem__)
        extents["m" if extents["m"] > FEWEST_ROWS else longest] //= 2
    one = replace(shape, batch=(), **extents)
    left, right = (Matrix(matrix.row, matrix.column) for matrix in (shape.left, shape.right))
    return replace(one, left=left, right=right, result=stored_plain(one.m, one.n))


def _operand(dtype: torch.dtype, rows: int, columns: int, matrix: Matrix) -> torch.Tensor:
    """Ones where the matrix lies; what is drawn at random would change what the program draws."""
    size = (rows - 1) * matrix.row + (columns - 1) * matrix.column + 1
    memory = torch.empty(size, dtype=dtype, device="cpu")
    memory.as_strided((rows, columns), (matrix.row, matrix.column)).fill_(1)
    return memory


def _runner(
    entry: int, kernel: GeneratedKernel, operands: list[torch.Tensor]
) -> Callable[[], object]:
    words = [*[operand.data_ptr() for operand in operands], *kernel.numbers]
    arguments = (ctypes.c_int64 * len(words))(*words)
    call: Any = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)(entry)
    return lambda: call(arguments, 0, 1)  # all tasks as one


def _fastest(ways: list[Callable[[], object]]) -> list[float]:
    """Seconds of this thread for a run of each way, which take turns."""
    repeats = [max(1, int(SAMPLE_SECONDS / (_seconds(way, 1) + 1e-9))) for way in ways]
    samples = [[_seconds(way, n) for way, n in zip(ways, repeats)] for _ in range(SAMPLES)]
    return [max(min(column), 1e-9) for column in zip(*samples)]


def _seconds(way: Callable[[], object], repeats: int) -> float:
    began = time.thread_time()
    for _ in range(repeats):
        way()
    return (time.thread_time() - began) / repeats
