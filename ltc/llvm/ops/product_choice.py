"""Classes and trials of products, and of convolutions of single positions, for kernel_choice."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace

import torch

from ltc.ir import ops
from ltc.llvm.conv.geometry import Geometry, KernelSequence
from ltc.llvm.conv.nhwc_pointwise import (
    forward_shape,
    input_gradient_shape,
    weight_gradient_shape,
)  # fmt: skip
from ltc.llvm.conv.nhwc_weight_grad import channels_last_weight_gradient
from ltc.llvm.emit.isa import ALIASING_BYTES, Isa
from ltc.llvm.emit.vectors import Epilogue, GeneratedKernel
from ltc.llvm.gemm.blocking import Matrix, Shape, stored_plain
from ltc.llvm.gemm.kernel import matmul
from ltc.llvm.ops import kernel_choice
from ltc.llvm.ops.kernel_choice import MOST_WORK, Way, way_of
from ltc.llvm.ops.product_call import CALL_WORK, called_product, can_call
from ltc.support.sizes.extent import number_now

FEWEST_ROWS = 256  # that are left of many: they share what is packed of the right operand
NAMES = ("left", "right", "result")


def is_call_faster(dtype: torch.dtype, shape: Shape, isa: Isa) -> bool:
    """Return True if a program should call PyTorch's kernel for a product; measure if need be."""
    shape = _at_present(shape.folded())
    if not _may_call(dtype, shape):
        return False
    return kernel_choice.is_call_faster(_class(dtype, shape), lambda: _ways(dtype, shape, isa))


def _may_call(dtype: torch.dtype, shape: Shape) -> bool:
    return shape.m * shape.n * shape.k >= CALL_WORK and can_call(dtype, shape)


def _at_present(shape: Shape) -> Shape:
    """The shape with numbers where it has expressions of sizes."""

    def now(matrix: Matrix) -> Matrix:
        row, column = map(number_now, (matrix.row, matrix.column))
        return Matrix(row, column, tuple(map(number_now, matrix.batch)))

    m, n, k = map(number_now, (shape.m, shape.n, shape.k))
    matrices = map(now, (shape.left, shape.right, shape.result))
    return Shape(tuple(map(number_now, shape.batch)), m, n, k, *matrices)


# --- classes of shapes -------------------------------------------------------------------------------


def _class(dtype: torch.dtype, shape: Shape) -> Hashable:
    """Name the facts that the ratio depends on: magnitudes of M and K, effects of strides on caches.

    N and the kernels' way through the operands are part of a product's text.
    """
    sides = tuple(_side(matrix, dtype) for matrix in (shape.left, shape.right))
    return dtype, shape.m.bit_length(), shape.n, shape.k.bit_length(), shape.batches > 1, sides


def _side(matrix: Matrix, dtype: torch.dtype) -> tuple[bool, bool, bool]:
    """(rows are adjacent, so are columns, many steps share few sets of a cache)"""
    far = max(matrix.row, matrix.column) * dtype.itemsize
    return matrix.row == 1, matrix.column == 1, far % (ALIASING_BYTES // 4) == 0


# --- measuring ---------------------------------------------------------------------------------------


def _ways(dtype: torch.dtype, shape: Shape, isa: Isa) -> tuple[Way, Way]:
    shape = _for_trial(shape)
    matrices = shape.left, shape.right, shape.result
    generated = matmul("kernel", dtype, (), (shape.m, shape.n, shape.k), *matrices, isa)
    operands = (
        _operand(dtype, shape.m, shape.k, shape.left), _operand(dtype, shape.k, shape.n, shape.right),
        _operand(dtype, shape.m, shape.n, shape.result),
    )  # fmt: skip
    buffers = dict(zip(NAMES, operands))
    return way_of([generated], buffers), way_of([called_product(dtype, shape, isa)], buffers)


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


# --- convolutions of single positions ----------------------------------------------------------------

# The operation -> its product, and what its kernels call the operands.
_PRODUCTS: dict[ops.Op, tuple[Callable[[Geometry], Shape], tuple[str, str]]] = {
    ops.CONVOLUTION: (forward_shape, ("operand", "weight")),
    ops.CONVOLUTION_INPUT_GRADIENT: (input_gradient_shape, ("gradient", "weight")),
    ops.CONVOLUTION_WEIGHT_GRADIENT: (weight_gradient_shape, ("gradient", "operand")),
}


def called_pointwise(
    op: ops.Op, dtype: torch.dtype, geometry: Geometry, isa: Isa, epilogue: Epilogue | None, operands: int
) -> GeneratedKernel | None:  # fmt: skip
    """Return a call for a convolution on channels last, or a gradient of it; None if it is no product,
    or the generated kernels are about as fast.
    """
    if not geometry.is_pointwise:
        return None
    shape_of, names = _PRODUCTS[op]
    shape = shape_of(geometry)
    is_of_weight = op is ops.CONVOLUTION_WEIGHT_GRADIENT
    faster = _is_gradient_call_faster if is_of_weight else is_call_faster
    if not faster(dtype, shape, isa):
        return None
    # Kernels of a weight's gradient have one operand behind those of the epilogue.
    kernel = called_product(dtype, shape, isa, epilogue, operands, right_is_last=is_of_weight)
    renamed = dict(zip(NAMES, (*names, "result")))
    return replace(kernel, arguments=tuple(renamed.get(n, n) for n in kernel.arguments))


def _is_gradient_call_faster(dtype: torch.dtype, shape: Shape, isa: Isa) -> bool:
    """`is_call_faster` of a weight's gradient, for which no product is generated."""
    shape = _at_present(shape)
    if not _may_call(dtype, shape):
        return False
    return kernel_choice.is_call_faster(
        ("gradient of a weight", _class(dtype, shape)),
        lambda: _ways_of_gradient(dtype, shape, isa),
    )


def _ways_of_gradient(dtype: torch.dtype, shape: Shape, isa: Isa) -> tuple[Way, Way]:
    outputs, channels = shape.m, shape.n
    rows = max(1, min(shape.k, MOST_WORK // (outputs * channels)))
    images = max(1, min(rows, kernel_choice.TRIAL_IMAGES))
    geometry = Geometry(
        (images, channels, rows // images), (outputs, channels, 1), (images, outputs, rows // images),
        (1,), (0,), (1,), 1,
    )  # fmt: skip
    generated: KernelSequence = channels_last_weight_gradient("kernel", dtype, geometry, isa)
    gradient, operand, result = (
        torch.ones(extents, dtype=dtype, device="cpu")
        for extents in ((rows, outputs), (rows, channels), (outputs, channels))
    )
    buffers = {"gradient": gradient, "operand": operand, "result": result}
    buffers.update(zip(NAMES, (gradient, operand, result)))
    for name, size in generated.scratch.items():
        buffers[name] = torch.zeros(size, dtype=torch.uint8, device="cpu")
    called = called_product(dtype, weight_gradient_shape(geometry), isa)
    return way_of(generated.kernels, buffers), way_of([called], buffers)
