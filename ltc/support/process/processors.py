"""The number of processors that this process may use.

Some machinery gains only where they are few: a thread that is in the wrong place then costs the
whole program. Above `FEW` the system has room, and nothing of the kind acts.
"""

from __future__ import annotations

import functools
import math
import os
import platform
import re
from pathlib import Path

from ltc.support.process.control_groups import own_groups

FEW = 4


_CPUINFO = Path("/proc/cpuinfo")


@functools.cache
def name() -> str:
    """Return the processor's name; where the system does not tell, the kind of the machine."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", _CPUINFO.read_text(), re.MULTILINE)
    except OSError:  # no Linux, or no /proc
        found = None
    return found[1] if found else platform.processor() or platform.machine()


@functools.cache
def count() -> int:
    """Return as many as its mask names, and as its share of time allows: containers limit both."""
    if hasattr(os, "sched_getaffinity"):
        there = len(os.sched_getaffinity(0))
    else:
        there = os.cpu_count() or 1
    return max(math.ceil(min(there, _quota())), 1)


def _quota() -> float:
    """Return the processors that this process's control group may use; infinity without a limit."""
    try:
        return min(map(_limit, own_groups("cpu")), default=math.inf)
    except OSError:  # no Linux, or no /proc
        return math.inf


def _limit(group: Path) -> float:
    """Return one group's limit: as version 2 of control groups writes it down, or version 1."""
    try:
        if (group / "cpu.max").exists():
            quota, period = (group / "cpu.max").read_text().split()
        else:
            quota = (group / "cpu.cfs_quota_us").read_text().strip()
            period = (group / "cpu.cfs_period_us").read_text()
        return math.inf if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):  # a container shows its own group at the root
        return math.inf


def are_few() -> bool:
    return count() <= FEW
