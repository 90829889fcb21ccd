"""Rules of matrix and vector products.  Letters: M rows, N columns, K the summed extent."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from ltc.aten.extern import made_by_kernel
from ltc.aten.promote import compute_dtype, to_dtype
from ltc.aten.registry import traces
from ltc.ir import build
from ltc.ir.node import Node, Operand
from ltc.ir.tensor_type import LOW_PRECISION


@traces("aten::mm", "aten::bmm")
def mm(x: Node, y: Node) -> Node:
    return build.matmul(x, y)


@traces("aten::mv")
def mv(x: Node, vector: Node) -> Node:
    return build.reshape(build.matmul(x, build.unsqueeze(vector, 1)), x.shape[:1])


@traces("aten::addmv", static={"beta": (0, 1), "alpha": (1,)})
def addmv(x: Node, matrix: Node, vector: Node, beta: Operand = 1, alpha: Operand = 1) -> Node:
    product = mv(matrix, vector)
    return _blend(x, product, beta, alpha) if product.size else NotImplemented


@traces("aten::dot", "aten::vdot")
def dot(x: Node, y: Node) -> Node:
    (k,) = x.shape
    return build.reshape(build.matmul(build.reshape(x, (1, k)), build.reshape(y, (k, 1))), ())


@traces("aten::addmm", static={"beta": (0, 1), "alpha": (1,)})
def addmm(x: Node, a: Node, b: Node, beta: Operand = 1, alpha: Operand = 1) -> Node:
    """beta * x + alpha * a @ b"""
    return _blend(x, build.matmul(a, b), beta, alpha)


@traces("aten::baddbmm", static={"beta": (0, 1), "alpha": (1,)})
def baddbmm(x: Node, a: Node, b: Node, beta: Operand = 1, alpha: Operand = 1) -> Node:
    return _blend(x, build.matmul(a, b), beta, alpha)


@traces("aten::addbmm", static={"beta": (0, 1), "alpha": (1,)})
def addbmm(x: Node, a: Node, b: Node, beta: Operand = 1, alpha: Operand = 1) -> Node:
    batch, rows, inner = a.shape
    side_by_side = build.reshape(build.permute(a, (1, 0, 2)), (rows, batch * inner))
    stacked = build.reshape(b, (batch * inner, b.shape[-1]))
    return _blend(x, build.matmul(side_by_side, stacked), beta, alpha)


@traces("aten::addr", static={"beta": (0, 1), "alpha": (1,)})
def addr(x: Node, a: Node, b: Node, beta: Operand = 1, alpha: Operand = 1) -> Node:
    """beta * x + alpha * the outer product of a and b"""
    if not x.dtype.is_floating_point or x.dtype in LOW_PRECISION:
        return NotImplemented
    return _blend(x, build.unsqueeze(a, 1) * build.unsqueeze(b, 0), beta, alpha)


def _blend(x: Node, product: Node, beta: Any, alpha: Any) -> Node:
    """beta * x + alpha * product; x is not read for beta = 0, so its NaN does not spread."""
    dtype = compute_dtype(product.dtype)
    product = build.cast(product, dtype)
    if _is_not(alpha, 1):
        product = product * alpha
    if not _is_not(beta, 0):
        return product
    x = to_dtype(x, dtype)
    return (x * beta if _is_not(beta, 1) else x) + product


def _is_not(number: Any, value: int) -> bool:
    """Return True if `number` may be something other than `value`: a lifted one always may."""
    return isinstance(number, Node) or number != value


@traces("aten::linear")
def linear(x: Node, weight: Node, bias: Node | None = None) -> Node:
    """x @ weight.T + bias over the last dimension."""
    if not x.shape or len(weight.shape) != 2:
        return NotImplemented
    product, shape = build.matmul(_rows(x), build.transpose(weight, 0, 1)), x.shape[:-1]
    if bias is not None and len(x.shape) in _ADDED_BEFORE_ROUNDING:
        product, bias = _blend(bias, product, 1, 1), None
    product = build.reshape(product, (*shape, weight.shape[0]))
    return product if bias is None else product + bias


_ADDED_BEFORE_ROUNDING = 2, 3  # dimensions of x with which torch's kernel makes one product of all


def _rows(x: Node) -> Node:
    return build.reshape(x, (prod(x.shape[:-1]), x.shape[-1]))


def _conjugate(x: Node) -> Node:
    return made_by_kernel("aten::_conj_physical", x, x) if x.dtype.is_complex else x


@traces("aten::linear_backward")
def linear_backward(
    x: Node, grad: Node, weight: Node, output_mask: Sequence[bool]
) -> tuple[Node | None, ...]:
    rows = _rows(grad)
    of_x = of_weight = of_bias = None
    if output_mask[0]:
        of_x = build.reshape(build.matmul(rows, _conjugate(weight)), x.shape)
    if output_mask[1]:
        of_weight = build.matmul(build.transpose(rows, 0, 1), _conjugate(_rows(x)))
    if output_mask[2]:
        of_bias = build.sum_of(rows, 0)
    return of_x, of_weight, of_bias
