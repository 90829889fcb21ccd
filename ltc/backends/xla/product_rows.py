"""The rows of matrix products and convolutions."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import torch
from jax import lax

from ltc.backends.xla.elementwise_rows import Row
from ltc.backends.xla.numbers import Array
from ltc.ir import ops
from ltc.ir.node import Node, is_channels_last
from ltc.ir.ops import Op

# What torch.set_float32_matmul_precision says, as XLA says it: TF32 and bfloat16 are of the device.
_PRECISIONS = {
    "highest": lax.Precision.HIGHEST, "high": lax.Precision.HIGH, "medium": lax.Precision.DEFAULT,
}  # fmt: skip


def precision() -> lax.Precision:
    return _PRECISIONS[torch.get_float32_matmul_precision()]


def matmul(node: Node, x: Array, y: Array) -> Array:
    rank = len(x.shape)
    batch = tuple(range(rank - 2))
    dims = (((rank - 1,), (rank - 2,)), (batch, batch))
    if x.dtype == jnp.bool_:
        made = lax.dot_general(x.astype(jnp.int32), y.astype(jnp.int32), dims)
        return made != 0
    return lax.dot_general(x, y, dims, precision=precision())


def _convolved(node: Node) -> Callable[[Array, Array], Array]:
    """The convolution of an operand and a weight that a node or its gradients are about."""
    stride, padding = node.attr("stride"), node.attr("padding")
    spatial = "DHW"[-len(stride) :]
    images = f"N{spatial}C" if is_channels_last(node) else f"NC{spatial}"

    def function(x: Array, weight: Array) -> Array:
        return lax.conv_general_dilated(
            x, weight, stride, [(p, p) for p in padding], rhs_dilation=node.attr("dilation"),
            dimension_numbers=(images, f"OI{spatial}", images),
            feature_group_count=node.attr("groups"), precision=precision(),
        )  # fmt: skip

    return function


def convolution(node: Node, x: Array, weight: Array) -> Array:
    if node.size == 0 or x.size == 0 or weight.size == 0:
        return jnp.zeros(node.shape, x.dtype)
    return _convolved(node)(x, weight)


def convolution_input_gradient(node: Node, grad: Array, weight: Array) -> Array:
    function = _convolved(node)
    return _transposed(node, grad, weight, lambda x: function(x, weight))


def convolution_weight_gradient(node: Node, grad: Array, x: Array) -> Array:
    function = _convolved(node)
    return _transposed(node, grad, x, lambda weight: function(x, weight))


def _transposed(node: Node, grad: Array, other: Array, function: Callable[[Array], Array]) -> Array:
    """Return the gradient of the operand in which the convolution is linear.

    Args:
        other: The other operand.
        function: The convolution as a function of the operand.
    """
    if node.size == 0 or grad.size == 0 or other.size == 0:
        return jnp.zeros(node.shape, grad.dtype)
    like = jax.ShapeDtypeStruct(node.shape, grad.dtype)
    return jax.linear_transpose(function, like)(grad)[0]


ROWS: dict[Op, Row] = {
    ops.MATMUL: matmul,
    ops.CONVOLUTION: convolution,
    ops.CONVOLUTION_INPUT_GRADIENT: convolution_input_gradient,
    ops.CONVOLUTION_WEIGHT_GRADIENT: convolution_weight_gradient,
}
