"""The variable by which accelerate, and transformers with it, is told which device to take."""

from __future__ import annotations

import os

from ltc.support.torch_private import DEVICE_TYPE

VARIABLE = "ACCELERATE_TORCH_DEVICE"


def asked_for() -> bool:
    """Return True if they were told to take this device."""
    return os.environ.get(VARIABLE, "").partition(":")[0] == DEVICE_TYPE
