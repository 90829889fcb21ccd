"""The calls of the system by which a thread waits for another, and wakes it; and its processes.

It is imported before the first fork that matters: with the backend.
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys

# The number of the system call futex.
FUTEX = {"x86_64": 202, "AMD64": 202, "aarch64": 98, "riscv64": 98}
_FUNCTIONS = ("pthread_create", "pthread_detach", "sched_yield", "syscall", "clock_gettime")


def has_futex() -> bool:
    return sys.platform.startswith("linux") and platform.machine() in FUTEX


@functools.cache
def has_threads() -> bool:
    """Return True if this system has all that a pool of threads needs, and sums over replicas."""
    return has_futex() and all(hasattr(ctypes.CDLL(None), name) for name in _FUNCTIONS)


_forked = [False]


def is_forked() -> bool:
    """Return True if this process is the child of one that used a device: it has none of its threads."""
    return _forked[0]


def _after_fork_in_child() -> None:
    _forked[0] = True


os.register_at_fork(after_in_child=_after_fork_in_child)
