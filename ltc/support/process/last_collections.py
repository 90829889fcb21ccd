"""Python's last collections of garbage, left out where another rank's failure ends a process.

They look through every object that torch has made, a million: a second of processor time, in which a
process that another one's failure has ended still holds its connections, and its launcher waits.
"""

from __future__ import annotations

import atexit
import functools
import gc
import sys


@functools.cache
def leave_out_after(*kinds: type[BaseException]) -> None:
    """Have this process end without them where an uncaught error of these kinds ends it."""
    atexit.register(_freeze_after, kinds)


def _freeze_after(kinds: tuple[type[BaseException], ...]) -> None:
    # Where a user types, an error ends nothing. Elsewhere Python notes the one that ends a program.
    if not hasattr(sys, "ps1") and isinstance(getattr(sys, "last_value", None), kinds):
        gc.freeze()
