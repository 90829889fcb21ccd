"""What convolutions and poolings mean: a node to the torch calls that compute it.

Of eager.py's table, the rows that look through windows, with the channels second or last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ltc.ir import ops
from ltc.ir.infer import window_extent
from ltc.ir.node import Node, is_channels_last, make

aten = torch.ops.aten
Compute = Callable[..., Any]


def _geometry(node: Node) -> tuple[Any, ...]:
    """Stride, padding, dilation, transposed, output padding, groups: as torch's overloads want."""
    padding = node.attr("padding")
    no_padding = [0] * len(padding)
    return (
        node.attr("stride"), padding, node.attr("dilation"), False, no_padding, node.attr("groups"),
    )  # fmt: skip


def in_either_layout(lower: Callable[[Node], Compute], *places: int) -> Callable[[Node], Compute]:
    """The row of an op that may have its channels last: operands in those places, and the results."""

    def row(node: Node) -> Compute:
        if not is_channels_last(node):
            return lower(node)
        attrs = dict(node.attrs)
        del attrs["channels_last"]
        if "shape" in attrs and 0 in places and node.op is not ops.CONVOLUTION_WEIGHT_GRADIENT:
            attrs["shape"] = _channels_second(attrs["shape"])
        inputs = [
            make(ops.INPUT, index=k, dtype=n.dtype, shape=_channels_second(n.shape))
            if k in places else n
            for k, n in enumerate(node.inputs)
        ]  # fmt: skip
        compute = lower(make(node.op, *inputs, **attrs))
        keeps = node.op is ops.CONVOLUTION_WEIGHT_GRADIENT

        def computed(*operands: torch.Tensor) -> Any:
            moved = [x.movedim(-1, 1) if k in places else x for k, x in enumerate(operands)]
            result = compute(*moved)
            if keeps:
                return result
            if isinstance(result, tuple):
                return tuple(x.movedim(1, -1).contiguous() for x in result)
            return result.movedim(1, -1).contiguous()

        return computed

    return row


def _channels_second(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (shape[0], shape[-1], *shape[1:-1])


def convolution(node: Node) -> Compute:
    geometry = _geometry(node)
    return lambda x, weight: torch.convolution(x, weight, None, *geometry)


def convolution_input_gradient(node: Node) -> Compute:
    gradient, shape = _convolution_gradient(node, 0), node.shape
    return lambda grad, weight: gradient(grad, _unread(grad, shape), weight)


def convolution_weight_gradient(node: Node) -> Compute:
    gradient, shape = _convolution_gradient(node, 1), node.shape
    return lambda grad, x: gradient(grad, x, _unread(grad, shape))


def _convolution_gradient(node: Node, place: int) -> Compute:
    """That of the operand (place 0) or of the weight (1)."""
    geometry, wanted = _geometry(node), [k == place for k in range(3)]
    return lambda grad, x, weight: aten.convolution_backward(
        grad, x, weight, None, *geometry, wanted
    )[place]


def _unread(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Stands for a tensor of which only the shape is read."""
    return like.new_empty(()).expand(shape)


def _rounds_up(node: Node, operand: tuple[int, ...], result: tuple[int, ...]) -> bool:
    """Whether the result has windows that lie partly outside: torch's ceil_mode."""
    kernel, stride, padding = (node.attr(name) for name in ("kernel", "stride", "padding"))
    rank = len(kernel)
    whole = tuple(
        window_extent(n, k, s, p, p, d)
        for n, k, s, p, d in zip(operand[-rank:], kernel, stride, padding, node.attr("dilation"))
    )
    return whole != result[-rank:]


def max_pool(node: Node) -> Compute:
    names = ("kernel", "stride", "padding", "dilation")
    arguments = [node.attr(name) for name in names]
    arguments.append(_rounds_up(node, node.inputs[0].shape, node.attr("shape")))
    rank = len(node.attr("kernel"))
    function = {2: aten.max_pool2d_with_indices, 3: aten.max_pool3d_with_indices}[rank]
    return lambda x: function(x, *arguments)


def max_pool_gradient(node: Node) -> Compute:
    shape, rank = node.shape, len(node.attr("shape")) - 2
    flat = (*shape[:2], int(np.prod(shape[2:])))
    assert rank >= 1

    def compute(grad: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        zeros = grad.new_zeros(flat)
        return zeros.scatter_add_(2, indices.flatten(2), grad.flatten(2)).reshape(shape)

    return compute


def _pool_arguments(node: Node, operand: tuple[int, ...], result: tuple[int, ...]) -> list[Any]:
    return [
        node.attr("kernel"), node.attr("stride"), node.attr("padding"),
        _rounds_up(node, operand, result), node.attr("count_padding"), node.attr("divisor") or None,
    ]  # fmt: skip


def average_pool(node: Node) -> Compute:
    arguments = _pool_arguments(node, node.inputs[0].shape, node.shape)
    function = {2: aten.avg_pool2d, 3: aten.avg_pool3d}[len(node.attr("kernel"))]
    return lambda x: function(x, *arguments)


def average_pool_gradient(node: Node) -> Compute:
    arguments, shape = _pool_arguments(node, node.shape, node.inputs[0].shape), node.shape
    rank = len(node.attr("kernel"))
    function = {2: aten.avg_pool2d_backward, 3: aten.avg_pool3d_backward}[rank]
    return lambda grad: function(grad.contiguous(), grad.new_empty(shape), *arguments)
