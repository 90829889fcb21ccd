"""From an attention in a program to the text of its kernels, operands read where they lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ltc.errors import Unsupported
from ltc.ir import ops
from ltc.ir.loop_nest import Access, Product, strides_of
from ltc.ir.node import Node
from ltc.ir.tensor_type import TensorType
from ltc.llvm.attention.backward import attention_gradient
from ltc.llvm.attention.forward import attention_kernel
from ltc.llvm.attention.scores import Attention, require_room
from ltc.llvm.conv.geometry import KernelSequence
from ltc.llvm.emit.isa import Isa
from ltc.llvm.emit.kernel_code import KernelCode
from ltc.llvm.gemm.blocking import Matrix

NAME = "kernel"
OPERANDS = {
    ops.ATTENTION: ("query", "key", "value", "scale"),
    ops.ATTENTION_GRADIENT: (
        "gradient", "query", "key", "value", "result", "logarithms", "scale", "factor",
    ),
}  # fmt: skip


def can_attend(node: Node, isa: Isa, dtypes: frozenset[torch.dtype]) -> bool:
    """Return True if kernels are generated for the node."""
    if any(n.size == 0 or 0 in n.shape for n in node.inputs):
        return False
    if node.inputs[0].dtype not in dtypes:
        return False
    if node.op is ops.ATTENTION_GRADIENT and node.attr("wants_bias") and node.attr("causal"):
        return False
    try:
        require_room(_attention(node, {}), isa)
    except Unsupported:
        return False
    return True


def attention_codes(
    product: Product, isa: Isa, scratch: Callable[[str, int], Any]
) -> list[KernelCode]:
    """The kernels that compute an attention or its gradient, in order.

    Args:
        scratch: (name, bytes) -> the buffer of that memory.
    """
    node = product.node
    operands = dict(zip(_names(node), product.operands, strict=True))
    attention = _attention(node, operands)
    results = _result_names(node)
    made = _MAKERS[node.op](node, attention, operands, isa)
    where: dict[str, Any] = {name: access.node for name, access in operands.items()}
    shifts = {
        name: access.offset.constant * operand.dtype.itemsize
        for (name, access), operand in zip(operands.items(), node.inputs)
    }
    assert not isinstance(node.type, TensorType)  # it has several results
    for name, result, type in zip(results, product.results, node.type):
        unread = scratch(name, type.size * type.dtype.itemsize)
        where[name] = unread if result is None else result
    where |= {name: scratch(name, nbytes) for name, nbytes in made.scratch.items()}
    return [
        KernelCode(
            kernel.text, tuple(where[name] for name in kernel.arguments), kernel.tasks,
            tuple(shifts.get(name, 0) for name in kernel.arguments), kernel.numbers,
        )
        for kernel in made.kernels
    ]  # fmt: skip


def _names(node: Node) -> tuple[str, ...]:
    bias = ("bias",) if node.attr("biased") else ()
    drop = ("seed", "probability") if node.attr("dropped") else ()
    return (*OPERANDS[node.op], *bias, *drop)


def _result_names(node: Node) -> tuple[str, ...]:
    if node.op is ops.ATTENTION:
        return ("result", "logarithms")
    bias = ("bias_gradient",) if node.attr("wants_bias") else ()
    return ("query_gradient", "key_gradient", "value_gradient", *bias)


def _attention(node: Node, operands: dict[str, Access]) -> Attention:
    named = dict(zip(_names(node), node.inputs))
    query, key, value = (named[name] for name in ("query", "key", "value"))
    *batch, length, extent = query.shape

    def lies(name: str) -> Matrix | None:
        if name not in named:
            return None
        return _matrix(operands.get(name), named[name])

    return Attention(
        query.dtype, tuple(batch), length, key.shape[-2], extent, value.shape[-1],
        lies("query"), lies("key"), lies("value"), lies("bias"),
        "bias" in named and named["bias"].dtype == torch.bool,
        node.attr("causal"), node.attr("dropped"), node.attr("safe"),
    )  # fmt: skip


def _matrix(access: Access | None, node: Node) -> Matrix:
    """Return where an operand's matrices lie; contiguous ones without an access."""
    if access is None:
        *batch, row, column = strides_of(node.shape)
    else:
        *batch, row, column = (access.offset.coefficient(v) for v in range(len(node.shape)))
    return Matrix(row, column, tuple(batch))


def _ordered(type: TensorType, order: tuple[int, ...]) -> Matrix:
    """Return where a result lies whose dimensions stand in memory in `order`."""
    strides = dict(zip(order, strides_of(type.shape), strict=True))
    *batch, row, column = (strides[d] for d in range(len(order)))
    return Matrix(row, column, tuple(batch))


def _forward(node: Node, attention: Attention, operands, isa: Isa) -> KernelSequence:
    result = _ordered(node.type[0], node.attr("order"))
    return KernelSequence((attention_kernel(NAME, attention, result, isa),), {})


def _gradient(node: Node, attention: Attention, operands, isa: Isa) -> KernelSequence:
    named = dict(zip(_names(node), node.inputs))
    logarithms = operands["logarithms"].offset
    *batch, row = (logarithms.coefficient(v) for v in range(len(named["logarithms"].shape)))
    return attention_gradient(
        NAME, attention, _matrix(operands["result"], named["result"]),
        _matrix(operands["gradient"], named["gradient"]), Matrix(row, 1, tuple(batch)),
        tuple(_ordered(t, o) for t, o in zip(node.type, node.attr("orders"))),
        node.attr("wants_bias"), isa,
    )  # fmt: skip


_MAKERS = {ops.ATTENTION: _forward, ops.ATTENTION_GRADIENT: _gradient}
