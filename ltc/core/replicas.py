"""ltm's replicas: how many train together, and which one this is."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from ltc.distributed import world
from ltc.tracebacks import make_entrances

__all__ = [
    "get_local_ordinal",
    "get_ordinal",
    "is_master_ordinal",
    "lazy_replication_devices",
    "master_print",
    "set_replication",
    "xrt_world_size",
]


def xrt_world_size(defval: int = 1) -> int:
    """How many replicas train together, in all processes; `defval` where no launcher said.

    >>> ltm.xrt_world_size()
    1
    """
    return world.world_size(defval)


def get_ordinal(defval: int = 0) -> int:
    """This replica's number among all; `defval` where no launcher said.

    >>> ltm.get_ordinal()
    0
    """
    return world.ordinal(defval)


def get_local_ordinal(defval: int = 0) -> int:
    """This replica's number among those of its host; `defval` where nobody said.

    >>> ltm.get_local_ordinal()
    0
    """
    return world.local_ordinal(defval)


def is_master_ordinal(local: bool = True) -> bool:
    """Whether this replica is number 0 of its host, or, where not `local`, of all.

    >>> ltm.is_master_ordinal(), ltm.is_master_ordinal(local=False)
    (True, True)
    """
    return world.is_master(local)


def master_print(*args: Any, fd=None, local: bool = False, flush: bool = False) -> None:
    """`print(*args)` on replica 0 alone: of all, or, where `local`, of each host.

    fd  the file that is written to; stdout where None

    >>> ltm.master_print("loss", 0.5)
    loss 0.5
    """
    if world.is_master(local):
        print(*args, file=sys.stdout if fd is None else fd, flush=flush)


def lazy_replication_devices(local_devices: Sequence) -> list[str]:
    """The real names of all devices to replicate over.

    local_devices  every device that this process has of one kind

    Raises RuntimeError where they are of several kinds, or are not all of their kind.

    >>> names = ltm.lazy_replication_devices(ltm.get_lazy_supported_devices())
    >>> names[0], len(names) == ltc.device_count()
    ('CPU:0', True)
    """
    return world.replication_devices(local_devices)


def set_replication(device, devices: Sequence) -> None:
    """Make `device` the thread's current one, and a replica among `devices`.

    devices  those that exchange, each in a thread of its own; [] ends the replication

    Collectives that the thread has recorded as who it was before are started. Raises ValueError
    where `device` is none of `devices`. `DataParallel` calls this in each of its threads.

    >>> ltm.set_replication("ltc:0", ["ltc:0"])
    >>> ltm.xrt_world_size(), ltm.get_ordinal()
    (1, 0)
    >>> ltm.set_replication("ltc:0", [])
    """
    world.set_replication(device, devices)


make_entrances(globals(), __all__)
