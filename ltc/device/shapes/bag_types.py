"""What the CPU notes of an embedding bag for its backward, in shapes that depend on how it computes.

torch's Meta kernels tell them for CUDA, or, asked for the CPU, not always right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ltc.support.torch_private import schema_of_overload

Type = tuple[Any, torch.dtype]  # shape and dtype

_OVERLOADS = {"aten::_embedding_bag": True, "aten::_embedding_bag_forward_only": False}
SUM, MEAN, _MAX = 0, 1, 2
_SUMMED_BY_STRETCHES = frozenset({torch.float32, torch.float16, torch.bfloat16})


def as_on_cpu(overload: Any, args: Sequence[Any], kwargs: dict, types: tuple) -> tuple:
    """The types of a call's results, given those that Meta tells; the same where it is no bag."""
    keeps_for_backward = _OVERLOADS.get(overload.name())
    if keeps_for_backward is None:
        return types
    given = {
        a.name: a.default_value
        for a in schema_of_overload(overload).arguments
        if a.has_default_value()
    }
    given |= dict(zip([a.name for a in schema_of_overload(overload).arguments], args)) | kwargs
    index = given["indices"].shape, types[1][1]
    offsets, mode, padding_idx = given["offsets"].shape, given["mode"], given["padding_idx"]
    return of_bags(types[0], index, offsets, mode, padding_idx, keeps_for_backward)


def of_bags(
    made: Type,
    indices: Type,
    offsets: Sequence[int],
    mode: int,
    padding_idx: int,
    keeps_for_backward: bool,
) -> tuple[Type, Type, Type, Type]:
    """The bags' values, the bag of each index, how many rows each has, whose row was the largest.

    made     of the bags' values
    offsets  their shape
    """
    (count, width), dtype = made
    by_stretches = dtype in _SUMMED_BY_STRETCHES and padding_idx < 0
    noted = (0,) if mode == SUM and by_stretches else indices[0]
    sizes = (count,) if keeps_for_backward or mode != SUM else offsets
    largest = (count, width) if mode == _MAX else sizes
    index = indices[1]
    return made, (tuple(noted), index), (tuple(sizes), index), (tuple(largest), index)
