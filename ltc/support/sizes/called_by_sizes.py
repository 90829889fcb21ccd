"""What expressions of sizes may call."""

from __future__ import annotations

import struct
from collections.abc import Callable


def double_bits(number: float) -> int:
    """The bits of a float64, as an integer."""
    return int(struct.unpack("<q", struct.pack("<d", number))[0])


def float_bits(number: float) -> int:
    """The bits of a float32, as an integer."""
    return int(struct.unpack("<i", struct.pack("<f", number))[0])


FUNCTIONS: dict[str, Callable[..., int]] = {
    "max": max,
    "min": min,
    "double_bits": double_bits,
    "float_bits": float_bits,
}
