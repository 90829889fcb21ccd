"""Check the system at import: one sentence, before a missing part causes a worse message."""

from __future__ import annotations

import sys

_POSIX = "linux", "darwin"


def require_known_system() -> None:
    """Raise ImportError on a system or processor that ltc does not support."""
    if sys.platform not in _POSIX:
        raise ImportError(
            f"ltc runs on Linux and macOS, not on {sys.platform}: it needs their file locks, shared "
            f"memory and fork. On Windows, use it in WSL 2."
        )
    if sys.byteorder != "little":
        raise ImportError(
            "ltc runs on little-endian processors only, and this one is big-endian: the layout of the "
            "memory that ltc shares between processes and threads depends on it."
        )
