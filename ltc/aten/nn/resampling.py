"""Resampling along one dimension: each result is a weighted sum of some elements near each other.

A table says which: interpolations, and poolings whose windows differ, are tables. The gradient is
resampling as well, by the table read the other way: nothing is added to where others add.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass

import torch

from ltc.aten.promote import compute_dtype
from ltc.ir import build, ops
from ltc.ir.node import Node, make

Span = tuple[int, int]

MOST_UNROLLED = 6  # taps: more of them are added up in a loop
FRACTION_BITS = 20  # of the slope by which windows move


@dataclass(frozen=True)
class Taps:
    """Which elements of an operand each result is made of.

    indices  [taps, results], i64
    weights  [taps, results], f64; None where each result is one element
    spans    of each result, the first and the last element that it may read
    size     elements of the operand
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
    """What is not a part of a result has the weight 0, and may be infinite."""
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
