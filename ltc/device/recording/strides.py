"""The strides a view would have on the CPU, which decide what is a view of it and what is a copy.

A lazy tensor appears contiguous, and its values are handed on in the order of its indices.  But
`x.t().contiguous()` and `x.t().reshape(-1)` are copies to whoever writes to them or to x.  What is
no view counts as contiguous, whatever strides the CPU would have given it.
"""

from __future__ import annotations

from typing import Any

import torch

from ltc.aten.call import Call
from ltc.device.torch_device import contiguous_strides
from ltc.support.torch_private import plain_functions


def note_strides(call: Call) -> None:
    """Give the results of a view overload their strides."""
    source, overload = call.args[0], call.overload
    with plain_functions(), torch.no_grad():
        viewed = without_values(source.shape, source.strides, source.dtype)
        try:
            made: Any = overload(viewed, *call.args[1:], **call.kwargs)
        except RuntimeError:  # a `view` of what is not contiguous, which the CPU refuses
            return
    for result, view in zip(call.results, [made] if isinstance(made, torch.Tensor) else made):
        if result is not None and not view.is_contiguous():
            result.strides = tuple(view.stride())


def without_values(
    shape: tuple[int, ...], strides: tuple[int, ...] | None, dtype: torch.dtype
) -> torch.Tensor:
    """A tensor on the meta device; without strides it is contiguous."""
    whole = torch.empty(0, dtype=dtype, device="meta")
    return whole.as_strided(shape, strides or contiguous_strides(shape))
