"""as_strided: a slice where it selects elements in order, else a lookup of each element."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence

import torch

from ltc.aten.registry import traces
from ltc.aten.rules.movement import INVERSES, View, _put_back_by_position
from ltc.ir import build
from ltc.ir.node import Node


@traces("aten::as_strided", "aten::as_strided_copy", moves=True)
def as_strided(
    x: Node, size: Sequence[int], stride: Sequence[int], storage_offset: int | None = None
) -> Node:
    """Elements of the contiguous `x`, from storage_offset on; some may be there several times."""
    flat, start = build.reshape(x, (-1,)), storage_offset or 0
    if not math.prod(size):
        return build.full(tuple(size), 0, x.dtype)
    step = _step_of(size, stride)
    if step is not None:
        last = start + (math.prod(size) - 1) * step
        return build.reshape(build.slice_dim(flat, 0, start, last + 1, step), tuple(size))
    return build.take(flat, _positions(size, stride, start), 0)


def _positions(size: Sequence[int], stride: Sequence[int], start: int) -> Node:
    """Where each element is in the flat tensor."""
    along = [build.iota_along(size, d) * step for d, step in enumerate(stride)]
    return functools.reduce(operator.add, along) + start


def _back_from_as_strided(
    base: Node,
    new: Node,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Node:
    step = _step_of(size, stride)
    if step is None:
        view: View = (torch.ops.aten.as_strided.default, (size, stride, storage_offset), {}, None)
        return _put_back_by_position(base, new, [view])
    run = build.reshape(build.cast(new, base.dtype), (-1,))
    flat = build.insert(build.reshape(base, (-1,)), run, 0, storage_offset or 0, step)
    return build.reshape(flat, base.shape)


def _step_of(size: Sequence[int], stride: Sequence[int]) -> int | None:
    """How far each element is from the one before it, where that is one number above 0.

    Of an extent of 1 any stride will do.
    """
    expected = None
    for extent, step in zip(reversed(size), reversed(stride)):
        if extent != 1:
            if step != (step if expected is None else expected) or not step:
                return None
            expected = step * extent
    last = [step for extent, step in zip(size, stride) if extent != 1]
    return last[-1] if last else 1


@traces("aten::as_strided_scatter", moves=True)
def as_strided_scatter(
    x: Node,
    src: Node,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Node:
    return _back_from_as_strided(x, src, size, stride, storage_offset)


INVERSES["aten::as_strided"] = _back_from_as_strided
