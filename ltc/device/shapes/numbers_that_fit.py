"""Numbers that torch's kernels convert to a dtype, and refuse where that cannot hold them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ltc.aten.call import CallResult
from ltc.device.shapes.meta import NoTypes

_FLOATS = torch.float16, torch.bfloat16, torch.float32
_INTEGERS = torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64
# To an unsigned one, -1 may be converted.
_LARGEST: dict[torch.dtype, float] = {
    **{dtype: torch.finfo(dtype).max for dtype in _FLOATS},
    **{dtype: torch.iinfo(dtype).max for dtype in _INTEGERS},
}

# They compare with their numbers, and make no element of them.
_BOUNDING = frozenset({"clamp", "clamp_min", "clamp_max", "hardtanh"})


def fits(number: Any, dtype: torch.dtype) -> bool:
    """Return True if torch certainly converts the number to the dtype."""
    largest = _LARGEST.get(dtype)
    if largest is None or number is None or number.__class__ is complex:
        return True
    # of floats, infinities and NaN are as good in any dtype: only of those x - x is not 0
    return -largest <= number <= largest or (dtype.is_floating_point and number - number != 0)


def refuse_what_does_not_fit(
    op: str, positions: Sequence[int], values: Sequence[Any], results: Sequence[CallResult | None]
) -> None:
    """Raise torch's error for a number that a kernel of `op` would convert to the result's dtype.

    Raises NoTypes where this torch takes such a number all the same: then its own kernel is to run.

    Args:
        positions: The positions of such numbers among a call's values.
    """
    for position in positions:
        result: Any = results[0]
        if not fits(values[position], result.dtype):
            name = op.removeprefix("aten::").removesuffix("_")
            if name in _BOUNDING:
                # from torch 2.15 on, integers may have a bound that none of them reaches
                element = torch.zeros(1, dtype=result.dtype, device="cpu")
                getattr(torch.ops.aten, name)(element, *[values[i] for i in positions])
                raise NoTypes
            # a single element is filled by another way of torch's, which lets halves overflow
            alone = int(all(extent == 1 for extent in result.shape))
            torch.empty(alone, dtype=result.dtype, device="cpu").fill_(values[position])
