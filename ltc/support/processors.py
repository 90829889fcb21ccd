"""How many processors this process may use.

Some machinery gains only where they are few: a thread that is in the wrong place then costs the
whole program. Above `FEW` the system has room, and nothing of the kind acts.
"""

from __future__ import annotations

import functools
import os

FEW = 4


@functools.cache
def count() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def are_few() -> bool:
    return count() <= FEW
