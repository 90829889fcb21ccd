"""Automatic mixed precision on a lazy device: torch's, with the device filled in."""

from __future__ import annotations

import functools

import torch

from ltc.support.torch_private import DEVICE_TYPE


class autocast(torch.amp.autocast):
    """Run the block, or the decorated function, with CPU's lists of ops in lower precision.

    Args:
        device: A lazy device, or its type.
        dtype: torch.bfloat16 or torch.float16; any other warns and disables.
    """

    def __init__(
        self,
        device: torch.device | str = DEVICE_TYPE,
        enabled: bool = True,
        dtype: torch.dtype = torch.bfloat16,
        cache_enabled: bool = True,
    ):
        if torch.device(device).type != DEVICE_TYPE:
            raise ValueError(
                f"ltc.amp.autocast takes a lazy device, not {device!r}. "
                f"Use torch.autocast for other devices."
            )
        super().__init__(DEVICE_TYPE, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


custom_fwd = functools.partial(torch.amp.custom_fwd, device_type=DEVICE_TYPE)
custom_bwd = functools.partial(torch.amp.custom_bwd, device_type=DEVICE_TYPE)
