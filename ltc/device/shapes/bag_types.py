"""What the CPU notes of an embedding bag for its backward, in shapes that depend on how it computes.

torch's Meta kernels tell them for CUDA, or, asked for the CPU, not always right.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ltc.support.torch_private import schema_of_overload

_OVERLOADS = {"aten::_embedding_bag": True, "aten::_embedding_bag_forward_only": False}
_SUM, _MAX = 0, 2
_SUMMED_BY_STRETCHES = frozenset({torch.float32, torch.float16, torch.bfloat16})


def as_on_cpu(overload: Any, args: Sequence[Any], kwargs: dict, types: tuple) -> tuple:
    """The types of a call's results, given those that Meta tells; the same where it is no bag.

    In order: the bags' values, the bag of each index, how many rows each bag has, and whose row
    was the largest.
    """
    keeps_for_backward = _OVERLOADS.get(overload.name())
    if keeps_for_backward is None:
        return types
    given = {
        a.name: a.default_value
        for a in schema_of_overload(overload).arguments
        if a.has_default_value()
    }
    given |= dict(zip([a.name for a in schema_of_overload(overload).arguments], args)) | kwargs
    (count, width), index = types[0][0], types[1][1]
    mode, offsets = given["mode"], given["offsets"]
    by_stretches = types[0][1] in _SUMMED_BY_STRETCHES and given["padding_idx"] < 0
    noted = (0,) if mode == _SUM and by_stretches else given["indices"].shape
    sizes = (count,) if keeps_for_backward or mode != _SUM else offsets.shape
    largest = (count, width) if mode == _MAX else sizes
    return types[0], (tuple(noted), index), (tuple(sizes), index), (tuple(largest), index)
