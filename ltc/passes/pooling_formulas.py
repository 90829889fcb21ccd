"""Poolings written in smaller primitives: one spatial dimension after the other.

A window's elements along one dimension are as many slices of the operand, each with the window's
stride. backends/reference/row_formulas.py says what the results are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from ltc.ir import build, ops
from ltc.ir.node import Node, is_channels_last, make

MAX_SLICES = 64  # of one pooling: a longer formula is no smaller than the primitive


class _Windows(NamedTuple):
    """The windows along one dimension.

    Attributes:
        extent: The operand's.
        windows: Their number.
    """

    dim: int
    extent: int
    windows: int
    kernel: int
    stride: int
    padding: int
    dilation: int

    @property
    def padded(self) -> int:
        """The operand's extent with its padding, and with what the last window has behind that."""
        last = (self.windows - 1) * self.stride + self.dilation * (self.kernel - 1) + 1
        return max(self.padding + self.extent, last)

    def slices(self, x: Node, fill: float) -> Iterator[Node]:
        """Yield for each place in a window the elements that all windows have there."""
        x = _padded(x, self.dim, self.padding, self.padded - self.padding - self.extent, fill)
        for place in range(self.kernel):
            start = place * self.dilation
            limit = start + (self.windows - 1) * self.stride + 1
            yield build.slice_dim(x, self.dim, start, limit, self.stride)

    def spread(self, x: Node) -> Node:
        """Return the sums that undo `slices` with a fill of 0."""
        apart = build.unsqueeze(x, self.dim + 1)
        apart = _padded(apart, self.dim + 1, 0, self.stride - 1, 0)
        shape = (*x.shape[: self.dim], self.windows * self.stride, *x.shape[self.dim + 1 :])
        length = (self.windows - 1) * self.stride + 1
        apart = build.slice_dim(build.reshape(apart, shape), self.dim, 0, length)
        total = None
        for place in range(self.kernel):
            start = place * self.dilation
            moved = _padded(apart, self.dim, start, self.padded - start - length, 0)
            total = moved if total is None else total + moved
        assert total is not None  # a kernel has an element
        return build.slice_dim(total, self.dim, self.padding, self.padding + self.extent)

    def members(self, count_padding: bool) -> Node:
        """Return the number of elements of each window, as i64[windows]."""
        start = build.iota(self.windows) * self.stride - self.padding
        limit = build.minimum(start + self.kernel, self.extent + self.padding)
        if not count_padding:
            start, limit = build.maximum(start, 0), build.minimum(limit, self.extent)
        return build.maximum(limit - start, 1)


def _padded(x: Node, dim: int, low: int, high: int, fill: float) -> Node:
    def along(amount: int) -> tuple[int, ...]:
        return tuple(amount if k == dim else 0 for k in range(len(x.shape)))

    return build.pad(x, along(low), along(high), fill)


def _windows(node: Node, operand: tuple[int, ...], result: tuple[int, ...]) -> list[_Windows]:
    """Return the windows along each spatial dimension of operands with the channels second."""
    names = ("kernel", "stride", "padding", "dilation")
    columns = zip(operand[2:], result[2:], *[node.attr(name) for name in names])
    return [_Windows(dim, *one) for dim, one in enumerate(columns, start=2)]


def _is_long(node: Node) -> bool:
    return bool(sum(node.attr("kernel")) > MAX_SLICES)


def _order(rank: int, is_to_second: bool) -> tuple[int, ...]:
    last = rank - 1
    return (0, last, *range(1, last)) if is_to_second else (0, *range(2, rank), 1)


def _second(node: Node, x: Node) -> Node:
    """Return an operand with its channels second."""
    return build.permute(x, _order(len(x.shape), True)) if is_channels_last(node) else x


def _own(node: Node, x: Node) -> Node:
    """Return a result with its channels where the node has them."""
    return build.permute(x, _order(len(x.shape), False)) if is_channels_last(node) else x


def _shape(node: Node, shape: tuple[int, ...]) -> tuple[int, ...]:
    if not is_channels_last(node):
        return shape
    return tuple(shape[k] for k in _order(len(shape), True))


# --- maxima --------------------------------------------------------------------------------------


def max_pool(node: Node) -> tuple[Node, ...] | None:
    """The first of the largest elements, or the last NaN, and its place in the image."""
    x, shape = _second(node, node.inputs[0]), _shape(node, node.attr("shape"))
    if _is_long(node) or 0 in shape:
        return None
    extents = x.shape[2:]
    places = build.reshape(build.iota(math.prod(extents)), (1, 1, *extents))
    values, places = x, build.expand(places, x.shape)
    lowest = -math.inf if x.dtype.is_floating_point else torch.iinfo(x.dtype).min
    for windows in reversed(_windows(node, x.shape, shape)):  # so that first is first in the image
        best, at = None, None
        for value, place in zip(windows.slices(values, lowest), windows.slices(places, -1)):
            if best is None or at is None:
                best, at = value, place
                continue
            is_more = build.gt(value, best) | build.is_nan(value) | build.lt(at, 0)
            is_more = build.ge(place, 0) & is_more
            best, at = build.where(is_more, value, best), build.where(is_more, place, at)
        assert best is not None and at is not None
        values, places = best, at
    return _own(node, values), _own(node, places)


def max_pool_gradient(node: Node) -> tuple[Node, ...] | None:
    grad, indices = (_second(node, x) for x in node.inputs)
    shape = _shape(node, node.shape)
    if 0 in shape or not grad.size:
        return None
    images = shape[0] * shape[1]
    flat = [build.reshape(x, (images, x.size // images)) for x in (grad, indices)]
    zeros = build.full((images, math.prod(shape[2:])), 0, grad.dtype)
    made = make(ops.SCATTER, zeros, flat[1], flat[0], dim=1, mode="add")
    return (_own(node, build.reshape(made, shape)),)


# --- averages ------------------------------------------------------------------------------------


def _wide(x: Node) -> Node:
    return build.cast(x, torch.float32) if x.dtype.itemsize < 4 else x


def _mean(node: Node, x: Node, windows: list[_Windows]) -> Node:
    """Return sums by what each is divided by."""
    divisor = node.attr("divisor")
    if divisor:
        return x / build.full_like(x, float(divisor))
    members = build.full((1, 1), 1, torch.int64)
    for one in windows:
        members = build.unsqueeze(members, -1) * one.members(node.attr("count_padding"))
    return x / build.expand(build.cast(members, x.dtype), x.shape)


def average_pool(node: Node) -> tuple[Node, ...] | None:
    x, shape = _second(node, node.inputs[0]), _shape(node, node.shape)
    if _is_long(node) or 0 in shape or not x.dtype.is_floating_point:
        return None
    windows, total = _windows(node, x.shape, shape), _wide(x)
    for one in windows:
        first, *rest = one.slices(total, 0)
        total = first
        for part in rest:
            total = total + part
    return (_own(node, build.cast(_mean(node, total, windows), x.dtype)),)


def average_pool_gradient(node: Node) -> tuple[Node, ...] | None:
    grad, shape = _second(node, node.inputs[0]), _shape(node, node.shape)
    if _is_long(node) or 0 in shape or not grad.size or not grad.dtype.is_floating_point:
        return None
    windows = _windows(node, shape, grad.shape)
    spread = _mean(node, _wide(grad), windows)
    for one in windows:
        spread = one.spread(spread)
    return (_own(node, build.cast(spread, grad.dtype)),)
