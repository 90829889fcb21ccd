"""Processes that do not outlive the one that has started them."""

from __future__ import annotations

import ctypes
import sys

_PR_SET_PDEATHSIG = 1  # of Linux's prctl(2)


def end_with_parent(number: int) -> None:
    """Have the kernel send this process a signal once its parent ends; on Linux alone.

    The parent is the thread that has started this process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
