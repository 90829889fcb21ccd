"""Rows of the reference of more than one call: views, joins, lookups by index, and windows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from ltc.ir import ops
from ltc.ir.infer import window_extent
from ltc.ir.node import Node, is_channels_last, make

aten = torch.ops.aten
Compute = Callable[..., Any]


def permute(node: Node) -> Compute:
    dims = node.attr("dims")
    return lambda x: x.permute(dims)


def _slices(node: Node) -> tuple[slice, ...]:
    return tuple(map(slice, node.attr("starts"), node.attr("limits"), node.attr("steps")))


def slice_of(node: Node) -> Compute:
    slices = _slices(node)
    return lambda x: x[slices]


def expand(node: Node) -> Compute:
    shape = node.shape
    return lambda x: x.expand(shape)


def reshape(node: Node) -> Compute:
    shape = node.shape
    return lambda x: x.reshape(shape)


def flip(node: Node) -> Compute:
    dims = node.attr("dims")
    return lambda x: torch.flip(x, dims)


def pad(node: Node) -> Compute:
    inner = tuple(slice(a, a + n) for a, n in zip(node.attr("low"), node.inputs[0].shape))
    shape = node.shape

    def compute(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        result = torch.empty(shape, dtype=x.dtype)
        result.copy_(value)
        result[inner] = x
        return result

    return compute


def concat(node: Node) -> Compute:
    dim = node.attr("dim")
    return lambda *parts: torch.cat(parts, dim)


def insert(node: Node) -> Compute:
    starts, steps, extents = node.attr("starts"), node.attr("steps"), node.inputs[1].shape
    region = tuple(
        slice(start, start + max((n - 1) * step + 1, 0) if n else start, step)
        for start, step, n in zip(starts, steps, extents)
    )

    def compute(base: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        result = base.clone(memory_format=torch.contiguous_format)
        result[region] = new
        return result

    return compute


def take(node: Node) -> Compute:
    dim, shape = node.attr("dim"), node.shape
    return lambda x, index: torch.index_select(x, dim, index.reshape(-1)).reshape(shape)


_REDUCTIONS = {"multiply": "prod", "maximum": "amax", "minimum": "amin"}


def put(node: Node) -> Compute:
    dim, base_shape, mode = node.attr("dim"), node.shape, node.attr("mode")
    lead, trail = base_shape[:dim], base_shape[dim + 1 :]
    count = node.inputs[1].size
    if mode in _REDUCTIONS:
        function, of_rows = _scattered(mode), (count, *(1,) * len(trail))
    else:
        function, of_rows = {"set": torch.index_copy, "add": torch.index_add}[mode], (count,)

    def compute(base: torch.Tensor, index: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
        rows, index = new.reshape(*lead, count, *trail), index.reshape(of_rows)
        index = index.expand_as(rows) if mode in _REDUCTIONS else index
        made: torch.Tensor = function(base, dim, index, rows)
        return made

    return compute


def _scattered(mode: str) -> Compute:
    """(base, dim, index, new) by elements."""
    if mode in _REDUCTIONS:
        return functools.partial(torch.scatter_reduce, reduce=_REDUCTIONS[mode])
    return {"set": torch.scatter, "add": torch.scatter_add}[mode]


def gather(node: Node) -> Compute:
    dim = node.attr("dim")
    return lambda x, index: torch.gather(x, dim, index)


def scatter(node: Node) -> Compute:
    dim, function = node.attr("dim"), _scattered(node.attr("mode"))
    return lambda base, index, new: function(base, dim, index, new)


# --- Convolutions and poolings: windows, with the channels second or last ---------------------


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
    """Return the gradient of the operand (place 0) or of the weight (1)."""
    geometry, wanted = _geometry(node), [k == place for k in range(3)]
    return lambda grad, x, weight: aten.convolution_backward(
        grad, x, weight, None, *geometry, wanted
    )[place]


def _unread(like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Stands for a tensor of which only the shape is read."""
    return like.new_empty(()).expand(shape)


def _rounds_up(node: Node, operand: tuple[int, ...], result: tuple[int, ...]) -> bool:
    """Return True if the result has windows that lie partly outside: torch's ceil_mode."""
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
