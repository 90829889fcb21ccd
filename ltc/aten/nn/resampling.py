"""Resampling along one dimension: each result is a weighted sum of some elements near each other.

A table says which: interpolations, and poolings whose windows differ, are tables. The gradient is
resampling as well, by the table read the other way: nothing is added to where others add.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ltc.aten.promote import compute_dtype
from ltc.aten.registry import traces
from ltc.ir import build, ops
from ltc.ir.node import Node, make
from ltc.ir.tensor_type import TensorType

Span = tuple[int, int]

MOST_UNROLLED = 6  # taps: more of them are added up in a loop
FRACTION_BITS = 20  # of the slope by which windows move


@dataclass(frozen=True)
class Taps:
    """The elements of an operand that make up each result.

    Attributes:
        indices: [taps, results], i64.
        weights: [taps, results], f64; None where each result is one element.
        spans: The first and the last element that each result may read.
        size: Elements of the operand.
    """

    indices: Node
    weights: Node | None
    spans: tuple[Span, ...]
    size: int


def resampled(x: Node, dim: int, taps: Taps) -> Node:
    """The results in place of dimension `dim`, in the dtype that computes."""
    count, size = taps.indices.shape
    column = (size, *(1,) * (len(x.shape) - dim - 1))
    dtype = compute_dtype(x.dtype)
    if taps.weights is None:
        return build.take(x, build.reshape(taps.indices, (size,)), dim)
    weights = build.cast(taps.weights, dtype)
    if count > MOST_UNROLLED:
        taken = build.cast(build.take(x, taps.indices, dim), dtype)
        return build.sum_of(_weighted(taken, build.reshape(weights, (count, *column))), dim)
    return functools.reduce(operator.add, [
        _weighted(
            build.cast(build.take(x, build.select(taps.indices, 0, t), dim), dtype),
            build.reshape(build.select(weights, 0, t), column),
        )
        for t in range(count)
    ])  # fmt: skip


def _weighted(x: Node, weight: Node) -> Node:
    """Multiply by the weight; an element of weight 0 is no part of a result, and may be infinite."""
    return build.where(build.ne(weight, 0.0), x * weight, 0.0)


def transposed(taps: Taps) -> Taps:
    """The table of the gradient: for each element, the results that read it."""
    slope, shift, count = _windows(taps.spans, taps.size)
    size, results = taps.size, taps.indices.shape[1]
    first = make(ops.SHIFT_RIGHT, *_i64(build.iota(size) * slope, FRACTION_BITS)) - shift
    position = build.reshape(build.iota(count), (count, 1)) + build.reshape(first, (1, size))
    inside = make(ops.AND, position >= 0, position < results)
    position = build.minimum(build.maximum(position, 0), results - 1)
    element = build.reshape(build.iota(size), (1, 1, size))
    is_read = build.eq(build.take(taps.indices, position, 1), element)
    if taps.weights is None:
        shares = build.cast(is_read, torch.float64)
    else:
        shares = build.where(is_read, build.take(taps.weights, position, 1), 0.0)
    weights = build.where(inside, build.sum_of(shares, 0), 0.0)
    return Taps(position, weights, (), results)


def _i64(x: Node, number: int) -> tuple[Node, Node]:
    return x, build.full((), number, torch.int64)


@functools.lru_cache(maxsize=256)
def _windows(spans: tuple[Span, ...], size: int) -> tuple[int, int, int]:
    """(slope, shift, count): element i is read by results among `count` of them from
    (i * slope >> FRACTION_BITS) - shift on."""
    first, last = [len(spans)] * size, [-1] * size
    for result, (low, high) in enumerate(spans):
        for i in range(low, high + 1):
            first[i], last[i] = min(first[i], result), max(last[i], result)
    read = [i for i in range(size) if last[i] >= 0]
    run = max(read[-1] - read[0], 1)
    slope = max(((first[read[-1]] - first[read[0]]) << FRACTION_BITS) // run, 0)
    begins = [i * slope >> FRACTION_BITS for i in range(size)]
    shift = max(begins[i] - first[i] for i in read)
    count = max(last[i] - (begins[i] - shift) for i in read) + 1
    return slope, shift, count


# --- The gradient of sampling images at points of a grid -----------------------------------------

# Points lie between four pixels. What they give back goes to whole pixels at once, all channels
# of one side by side, so that an image is turned and its gradients are added row by row.

BILINEAR, NEAREST = 0, 1
ZEROS, BORDER, REFLECTION = 0, 1, 2


class Coordinate(NamedTuple):
    """The positions of points along one dimension, in pixels, and their slope along the grid."""

    position: Node
    slope: Node


class Corner(NamedTuple):
    """A pixel beside each point: its index in the image, its share, whether it is in the image."""

    pixel: Node
    weight: Node
    inside: Node


def _coordinate(grid: Node, size: int, padding: int, aligned: bool) -> Coordinate:
    position = (grid + 1) / 2 * float(size - 1) if aligned else ((grid + 1) * float(size) - 1) / 2
    slope = build.full_like(grid, (size - 1) / 2 if aligned else size / 2)
    if padding == REFLECTION:
        low, high = (0.0, size - 1.0) if aligned else (-0.5, size - 0.5)
        position, slope = _reflected(position, slope, low, high)
    if padding in (BORDER, REFLECTION):
        last = float(size - 1)
        within = make(ops.AND, position > 0.0, position < last)
        slope = build.where(within, slope, 0.0)
        position = build.minimum(build.maximum(position, 0.0), last)
    return Coordinate(position, slope)


def _reflected(position: Node, slope: Node, low: float, high: float) -> Coordinate:
    """Mirrored at both ends until it is between them."""
    if high == low:
        return Coordinate(build.full_like(position, 0.0), build.full_like(slope, 0.0))
    distance, span = build.absolute(position - low), high - low
    rest = build.fmod(distance, build.full_like(distance, span))
    flips = build.floor(distance / span)
    is_even = build.eq(build.fmod(flips, build.full_like(flips, 2.0)), 0.0)
    forward = build.ne(is_even, position < low)
    mirrored = build.where(is_even, rest + low, span - rest + low)
    return Coordinate(mirrored, build.where(forward, slope, -slope))


def _corner(x: Node, y: Node, weight: Node, height: int, width: int) -> Corner:
    """Return the corner at the pixel of whole numbers x and y."""
    inside = [x >= 0.0, x <= float(width - 1), y >= 0.0, y <= float(height - 1)]
    row, column = (
        build.cast(build.minimum(build.maximum(at, 0.0), float(size - 1)), torch.int64)
        for at, size in ((y, height), (x, width))
    )
    holds = functools.reduce(lambda a, b: make(ops.AND, a, b), inside)
    return Corner(row * width + column, weight, holds)


def _scattered(grad: Node, corners: Sequence[Corner], shape: tuple[int, ...]) -> Node:
    """The gradient of the images: [N, C, points] added to the pixels at the corners."""
    count, channels, height, width = shape
    rows = build.transpose(grad, 1, 2)
    image = build.reshape(build.iota(count), (count, 1)) * (height * width)
    parts, indices = [], []
    for pixel, weight, inside in corners:
        share = build.where(build.unsqueeze(inside, -1), rows * build.unsqueeze(weight, -1), 0.0)
        parts.append(share)
        indices.append(pixel + image)
    index = build.reshape(build.concat(indices, 0), (-1,))
    zeros = build.full((count * height * width, channels), 0.0, grad.dtype)
    new = build.reshape(build.concat(parts, 0), (-1, channels))
    added = make(ops.PUT, zeros, index, new, dim=0, mode="add")
    images = build.reshape(added, (count, height * width, channels))
    return build.reshape(build.transpose(images, 1, 2), shape)


def _read(x: Node, corner: Corner) -> Node:
    """[N, C, points]: the pixels at a corner, 0 outside the image."""
    count, channels, *_ = x.shape
    pixel = build.unsqueeze(corner.pixel, 1)
    index = build.expand(pixel, (count, channels, pixel.shape[-1]))
    read = build.gather(build.reshape(x, (count, channels, -1)), index, 2)
    return build.where(build.unsqueeze(corner.inside, 1), read, 0.0)


@traces("aten::grid_sampler_2d_backward")
def grid_sampler_2d_backward(
    grad: Node,
    x: Node,
    grid: Node,
    interpolation_mode: int,
    padding_mode: int,
    align_corners: bool,
    output_mask: Sequence[bool],
    *,
    results: Sequence[TensorType | None],
) -> tuple[Node | None, Node | None]:
    if interpolation_mode != BILINEAR or not grad.size or not x.size:
        return NotImplemented
    dtype = compute_dtype(x.dtype)
    count, channels, height, width = x.shape
    grad = build.reshape(build.cast(grad, dtype), (count, channels, -1))
    across, down = (
        _coordinate(
            build.reshape(build.cast(build.select(grid, -1, k), dtype), (count, -1)), size,
            padding_mode, align_corners,
        )
        for k, size in enumerate((width, height))
    )  # fmt: skip
    left, above = build.floor(across.position), build.floor(down.position)
    tx, ty = across.position - left, down.position - above
    corners = [
        _corner(left + dx, above + dy, wx * wy, height, width)
        for dy, wy in ((0.0, 1.0 - ty), (1.0, ty))
        for dx, wx in ((0.0, 1.0 - tx), (1.0, tx))
    ]
    of_images = None if results[0] is None else _scattered(grad, corners, x.shape)
    if results[1] is None:
        return of_images, None
    first, second, third, fourth = (build.cast(_read(x, corner), dtype) for corner in corners)
    tx, ty = build.unsqueeze(tx, 1), build.unsqueeze(ty, 1)
    by_x = (second - first) * (1.0 - ty) + (fourth - third) * ty
    by_y = (third - first) * (1.0 - tx) + (fourth - second) * tx
    slopes = [
        build.sum_of(grad * rate, 1) * coordinate.slope
        for rate, coordinate in ((by_x, across), (by_y, down))
    ]
    stacked = build.concat([build.unsqueeze(slope, -1) for slope in slopes], -1)
    return of_images, build.reshape(stacked, grid.shape)
