"""Loss scaling on a lazy device."""

from __future__ import annotations

import torch

from ltc.support.torch_private import DEVICE_TYPE


class GradScaler(torch.amp.GradScaler):
    """torch's GradScaler for lazy devices; skips a step whose gradients hold inf or NaN.

    An ordinary optimizer waits for the device each step, to know whether to skip. The optimizers of
    `ltc.amp.syncfree` read the flag on the device instead, and wait for nothing.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ):
        super().__init__(
            DEVICE_TYPE, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
