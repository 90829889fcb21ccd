"""The most memory that this process can have.

Linux promises more than there is, and kills a process that writes to it. So ltc does not ask for
memory that can never be there.
"""

from __future__ import annotations

import functools
import math
import re
import sys
from pathlib import Path

from ltc.errors import OutOfMemory
from ltc.support.process.control_groups import own_groups

_MEMORY = Path("/proc/meminfo")


@functools.cache
def total() -> int:
    """Bytes: the machine's with its swap, and no more than the control groups may have of them."""
    try:
        kibibytes = dict(re.findall(r"^(\w+): +(\d+) kB$", _MEMORY.read_text(), re.MULTILINE))
        memory, swap = (int(kibibytes[name]) << 10 for name in ("MemTotal", "SwapTotal"))
        limits = [_limit(group, swap) for group in own_groups("memory")]
    except (OSError, KeyError):  # no Linux: who asks for too much is told so
        return sys.maxsize
    return int(min([memory + swap, *limits]))


def _limit(group: Path, swap: int) -> float:
    """Return one group's limit: as version 2 of control groups writes it down, or version 1."""
    if (group / "memory.max").exists():
        return _bytes(group / "memory.max") + min(_bytes(group / "memory.swap.max"), swap)
    with_swap = _bytes(group / "memory.memsw.limit_in_bytes")
    return min(_bytes(group / "memory.limit_in_bytes") + swap, with_swap)


def _bytes(file: Path) -> float:
    """The limit in a file; infinity where there is none."""
    try:
        return float(int(file.read_text()))
    except (OSError, ValueError):  # "max"
        return math.inf


def require(nbytes: int) -> None:
    """Raise OutOfMemory where that much memory can never be had."""
    if nbytes > total():
        raise OutOfMemory(
            f"Tried to allocate {nbytes} bytes: this process can have {total()} at most.", nbytes
        )
