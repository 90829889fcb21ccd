"""as_strided where it selects a run of elements in order, as buckets of gradients do: a slice."""

from __future__ import annotations

import math
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
    """size elements from storage_offset on, in the order of the contiguous `x`."""
    if not _is_in_order(size, stride):
        return NotImplemented
    start = storage_offset or 0
    run = build.slice_dim(build.reshape(x, (-1,)), 0, start, start + math.prod(size))
    return build.reshape(run, tuple(size))


def _back_from_as_strided(
    base: Node,
    new: Node,
    size: Sequence[int],
    stride: Sequence[int],
    storage_offset: int | None = None,
) -> Node:
    if not _is_in_order(size, stride):
        step: View = (torch.ops.aten.as_strided.default, (size, stride, storage_offset), {}, None)
        return _put_back_by_position(base, new, step)
    run = build.reshape(build.cast(new, base.dtype), (-1,))
    flat = build.insert(build.reshape(base, (-1,)), run, 0, storage_offset or 0)
    return build.reshape(flat, base.shape)


def _is_in_order(size: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the strides are those of a contiguous tensor; of an extent of 1 any will do."""
    expected = 1
    for extent, step in zip(reversed(size), reversed(stride)):
        if extent != 1 and step != expected:
            return False
        expected *= extent
    return True


INVERSES["aten::as_strided"] = _back_from_as_strided
