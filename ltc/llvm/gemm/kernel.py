"""Matrix products: every transposition and batch, each result computed in one fixed order.

Which product is computed in place of the wanted one, and in how many tasks; product_loops has the
loops, blocking the words.
"""

from __future__ import annotations

import functools

import torch

from ltc.llvm.emit.builder import function_text
from ltc.llvm.emit.isa import Isa
from ltc.llvm.emit.vectors import Epilogue, GeneratedKernel, tasks_for
from ltc.llvm.gemm.blocking import (
    DOT_TILE,
    PANELS_OF_A_STRIP,
    GemmPlan,
    Matrix,
    Shape,
    has_pairs,
    plan_of,
)  # fmt: skip
from ltc.llvm.gemm.product_loops import ProductLoops
from ltc.support.sizes.choices import most
from ltc.support.sizes.extent import Extent, known


def matmul(
    name: str,
    dtype: torch.dtype,
    batch: tuple[int, ...],
    extents: tuple[int, int, int],
    left: Matrix,
    right: Matrix,
    result: Matrix,
    isa: Isa,
    epilogue: Epilogue | None = None,
    operands: int = 0,
) -> GeneratedKernel:
    """left [*batch, M, K] times right [*batch, K, N].

    Args:
        dtype: The dtype of all three: float32, float64, or float16 and bfloat16, which sum in float32.
        extents: M, N, K; any may be 0, and K = 0 gives zeros.
        result: Its columns are adjacent: `result.column` is 1.
        epilogue: Maps a vector of sums to the vector stored; its row is counted over the whole
            batch.
        operands: Pointers that the epilogue reads, %p3 and on.
        tasks: Each computes whole panels or blocks of rows; no result depends on their number.
    """
    m, n, k = extents
    if has_pairs(dtype, isa):
        n = known(n)  # how wide a panel is follows from it
    wanted = Shape(batch, m, n, k, left, right, result).folded()
    shape, is_transposed = _as_computed(wanted, may_transpose=epilogue is None)
    plan = plan_of(dtype, isa, shape, is_transposed)
    if epilogue is None:
        text = _plain_text(name, plan)
    else:
        text = _text(name, plan, epilogue, operands)
    return _kernel(name, text, plan, shape, operands)


def _as_computed(shape: Shape, may_transpose: bool) -> tuple[Shape, bool]:
    """The product that is computed in place of the wanted one, and whether it is transposed."""
    is_transposed = may_transpose and shape.n == 1 and _is_column(shape)
    if is_transposed:
        shape = shape.transposed()  # one row: its columns fill vectors
    if shape.n == 1:  # one column: its stride says nothing, and 1 is the best to have
        shape = _with_adjacent_columns(shape)
    assert shape.result.column == 1 or shape.n <= 1, "the columns of a result are adjacent"
    return shape, is_transposed


def _is_column(shape: Shape) -> bool:
    """Return True if a result of one column is one of several adjacent numbers, as many at any
    sizes.

    The text of a row is for so many columns alone.
    """
    is_known = not isinstance(shape.m, Extent)
    return is_known and shape.m > 1 and shape.result.row == 1


def _kernel(name: str, text: str, plan: GemmPlan, shape: Shape, operands: int) -> GeneratedKernel:
    work = 2 * shape.batches * shape.m * shape.n * shape.k
    blocks, groups = most(1, -(-shape.m // plan.height)), shape.batches * plan.panels
    strip = plan.strip_blocks(shape.k)
    if plan.by_dots:
        blocks = 1
    elif plan.by_dot_tiles:
        blocks = most(1, -(-shape.m // DOT_TILE))
    elif plan.packs_left:
        groups = shape.batches * -(-blocks // strip)
        blocks = max(1, plan.panels // PANELS_OF_A_STRIP)
    arguments = ("left", "right", "result", *(f"operand{i}" for i in range(operands)))
    outer = shape.batch[0] if shape.batch else 1
    return GeneratedKernel(
        name, text, arguments, tasks_for(work, groups, blocks), work,
        (shape.m, shape.k, outer, strip),
    )  # fmt: skip


def _with_adjacent_columns(shape: Shape) -> Shape:
    right = Matrix(shape.right.row, 1, shape.right.batch)
    result = Matrix(shape.result.row, 1, shape.result.batch)
    return Shape(shape.batch, shape.m, 1, shape.k, shape.left, right, result)


def _text(name: str, plan: GemmPlan, epilogue: Epilogue | None, operands: int) -> str:
    product = ProductLoops(plan, epilogue)
    product.emit()
    return function_text(name, 3 + operands, product.b, product.numbers)


@functools.lru_cache(maxsize=512)
def _plain_text(name: str, plan: GemmPlan) -> str:
    return _text(name, plan, None, 0)
