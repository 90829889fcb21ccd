"""Rules of convolution and its gradients.

A transposed convolution is the gradient of an ordinary one with respect to its input, so its own
gradients are an ordinary convolution and the weight gradient with the operands exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ltc.aten.nn.resampling import Taps, resampled
from ltc.aten.registry import traces
from ltc.ir import build, ops
from ltc.ir.infer import window_extent
from ltc.ir.node import Node, make


def _each(values: Any, rank: int) -> tuple[int, ...]:
    """One number for each spatial dimension."""
    values = (values,) if isinstance(values, int) else tuple(values)
    return values * rank if len(values) == 1 else values


def _geometry(
    weight: Node,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> dict[str, Any]:
    rank = len(weight.shape) - 2
    return {
        "stride": _each(stride, rank),
        "padding": _each(padding, rank),
        "dilation": _each(dilation, rank),
        "groups": groups,
    }


def _has_windows(
    wide: tuple[Any, ...], weight: Node, narrow: tuple[Any, ...], geometry: dict[str, Any]
) -> bool:
    """Return True if convolving `wide` gives as many windows as `narrow` has.

    An output padding beyond the stride makes room for more.
    """
    windows = tuple(
        window_extent(extent, kernel, s, p, p, d)
        for extent, kernel, s, p, d in zip(
            wide[2:], weight.shape[2:], geometry["stride"], geometry["padding"],
            geometry["dilation"],
        )
    )  # fmt: skip
    return windows == tuple(narrow[2:])


def _has_channels(wide: Node, weight: Node, narrow: Node, groups: int) -> bool:
    """Return True if batches and channels of a convolution's operand and result agree."""
    return (
        wide.shape[0] == narrow.shape[0]
        and wide.shape[1] == weight.shape[1] * groups
        and narrow.shape[1] == weight.shape[0]
        and weight.shape[0] % groups == 0
    )


def _transposed_shape(
    x: Node, weight: Node, geometry: dict[str, Any], output_padding: Sequence[int]
) -> tuple[Any, ...]:
    """The shape of what a convolution of that geometry would make `x` of."""
    spatial = zip(
        x.shape[2:], weight.shape[2:], geometry["stride"], geometry["padding"],
        geometry["dilation"], _each(output_padding, len(x.shape) - 2),
    )  # fmt: skip
    extents = [(n - 1) * s - 2 * p + d * (k - 1) + 1 + more for n, k, s, p, d, more in spatial]
    return (x.shape[0], weight.shape[1] * geometry["groups"], *extents)


@traces("aten::convolution", "aten::convolution_overrideable")
def convolution(
    x: Node,
    weight: Node,
    bias: Node | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Node:
    if not x.dtype.is_floating_point or not (x.size and weight.size):
        return NotImplemented
    if len(x.shape) != len(weight.shape):
        return NotImplemented
    geometry = _geometry(weight, stride, padding, dilation, groups)
    if weight.shape[0] % groups:
        return NotImplemented
    if transposed:
        shape = _transposed_shape(x, weight, geometry, output_padding)
        if not _has_windows(shape, weight, x.shape, geometry) or x.shape[1] != weight.shape[0]:
            return NotImplemented
        y = make(ops.CONVOLUTION_INPUT_GRADIENT, x, weight, shape=shape, **geometry)
    else:
        y = make(ops.CONVOLUTION, x, weight, **geometry)
    if not all(extent > 0 for extent in y.shape):
        return NotImplemented
    if bias is None:
        return y
    return y + build.reshape(bias, (-1, *(1,) * (len(y.shape) - 2)))


@traces("aten::_convolution")
def convolution_with_flags(
    x: Node,
    weight: Node,
    bias: Node | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    *flags: Any,
) -> Node:
    return convolution(
        x, weight, bias, stride, padding, dilation, transposed, output_padding, groups
    )


@traces("aten::convolution_backward", "aten::convolution_backward_overrideable")
def convolution_backward(
    grad: Node, x: Node, weight: Node, bias_sizes: Sequence[int] | None, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], transposed: bool,
    output_padding: Sequence[int], groups: int, output_mask: Sequence[bool],
) -> tuple[Node | None, ...]:  # fmt: skip
    if not grad.size or not x.size or not weight.size:
        return NotImplemented
    geometry = _geometry(weight, stride, padding, dilation, groups)
    wide, narrow = (grad, x) if transposed else (x, grad)
    if not _has_windows(wide.shape, weight, narrow.shape, geometry):
        return NotImplemented
    if not _has_channels(wide, weight, narrow, groups):
        return NotImplemented
    if transposed:
        input_gradient = make(ops.CONVOLUTION, grad, weight, **geometry)
        pair = (x, grad)
    else:
        input_gradient = make(
            ops.CONVOLUTION_INPUT_GRADIENT, grad, weight, shape=x.shape, **geometry
        )
        pair = (grad, x)
    weight_gradient = make(ops.CONVOLUTION_WEIGHT_GRADIENT, *pair, shape=weight.shape, **geometry)
    bias_gradient = build.sum_of(grad, [0, *range(2, len(grad.shape))])
    gradients = (input_gradient, weight_gradient, bias_gradient)
    return tuple(g if wanted else None for g, wanted in zip(gradients, output_mask))


# --- Rules of sliding windows as columns, and of their sums: unfold and fold of images -----------

Pair = Sequence[int]


def _windows(extent: int, kernel: int, dilation: int, padding: int, stride: int) -> int:
    """Return how many windows there are along a dimension."""
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
