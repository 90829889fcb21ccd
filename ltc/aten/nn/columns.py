"""Rules of sliding windows as columns, and of their sums: unfold and fold of images."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ltc.aten.nn.resampling import Taps, resampled
from ltc.aten.registry import traces
from ltc.ir import build, ops
from ltc.ir.node import Node, make

Pair = Sequence[int]


def _windows(extent: int, kernel: int, dilation: int, padding: int, stride: int) -> int:
    """How many windows there are along a dimension."""
    return (extent + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def _inside(index: Node, size: int, more: Node | None = None) -> tuple[Node, Node]:
    """The index where it is one, and 1.0 there; else some index and 0.0."""
    holds = make(ops.AND, index >= 0, index < size)
    holds = holds if more is None else make(ops.AND, holds, more)
    return build.minimum(build.maximum(index, 0), size - 1), build.cast(holds, torch.float64)


def _read_by_windows(extent: int, kernel: int, dilation: int, padding: int, stride: int) -> Taps:
    """Element k of window o, for k * windows + o: padding is zeros."""
    count = _windows(extent, kernel, dilation, padding, stride)
    shape = (kernel, count)
    place = build.iota_along(shape, 0) * dilation + build.iota_along(shape, 1) * stride
    index, weight = _inside(build.reshape(place - padding, (1, kernel * count)), extent)
    return Taps(index, weight, (), extent)


def _added_from_windows(extent: int, kernel: int, dilation: int, padding: int, stride: int) -> Taps:
    """For each element of an image, where in the windows it is: at most once as element k."""
    count = _windows(extent, kernel, dilation, padding, stride)
    shape = (kernel, extent)
    k = build.iota_along(shape, 0)
    distance = build.iota_along(shape, 1) + padding - k * dilation
    window = build.floor_divide(distance, stride)
    is_whole = build.eq(window * stride, distance)
    window, weight = _inside(window, count, is_whole)
    return Taps(k * count + window, weight, (), kernel * count)


@traces("aten::im2col")
def im2col(x: Node, kernel_size: Pair, dilation: Pair, padding: Pair, stride: Pair) -> Node:
    """[N, C, H, W] gives [N, C * kh * kw, windows]; N may be missing."""
    if not x.size:
        return NotImplemented
    *lead, channels, height, width = x.shape
    options = list(zip(kernel_size, dilation, padding, stride))
    rows, columns = (_windows(n, *each) for n, each in zip((height, width), options))
    for dim, each in zip((-2, -1), options):
        x = resampled(x, build.dim_of(x, dim), _read_by_windows(x.shape[dim], *each))
    kh, kw = kernel_size
    x = build.reshape(x, (*lead, channels, kh, rows, kw, columns))
    x = build.transpose(x, -3, -2)
    return build.reshape(x, (*lead, channels * kh * kw, rows * columns))


@traces("aten::col2im")
def col2im(
    x: Node, output_size: Pair, kernel_size: Pair, dilation: Pair, padding: Pair, stride: Pair
) -> Node:
    """The sum of what im2col would read from each element."""
    if not x.size:
        return NotImplemented
    *lead, _, _ = x.shape
    options = list(zip(kernel_size, dilation, padding, stride))
    rows, columns = (_windows(n, *each) for n, each in zip(output_size, options))
    kh, kw = kernel_size
    channels = x.shape[-2] // (kh * kw)
    x = build.transpose(build.reshape(x, (*lead, channels, kh, kw, rows, columns)), -3, -2)
    x = build.reshape(x, (*lead, channels, kh * rows, kw * columns))
    for dim, extent, each in zip((-2, -1), output_size, options):
        x = resampled(x, build.dim_of(x, dim), _added_from_windows(extent, *each))
    return x
