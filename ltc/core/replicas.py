"""ltm's replicas: how many train together, and which one this is."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ltc.distributed import world
from ltc.tracebacks import make_entrances

__all__ = [
    "CollectiveContext",
    "get_local_ordinal",
    "get_ordinal",
    "is_master_ordinal",
    "lazy_replication_devices",
    "master_print",
    "set_replication",
    "xrt_world_size",
]


def xrt_world_size(defval: int = 1) -> int:
    """Return the number of replicas that train together, in all processes; `defval` without a
    launcher.

    Args:
        defval: The number to return if no launcher has set one.

    Example:
        >>> ltm.xrt_world_size()
        1
    """
    return world.world_size(defval)


def get_ordinal(defval: int = 0) -> int:
    """This replica's number among all; `defval` where no launcher said.

    Args:
        defval: The number to return if no launcher has set one.

    Returns:
        The number, from 0 on.

    Example:
        >>> ltm.get_ordinal()
        0
    """
    return world.ordinal(defval)


def get_local_ordinal(defval: int = 0) -> int:
    """Return this replica's number among those of its host; `defval` without a launcher.

    Args:
        defval: The number to return if no launcher has set one.

    Example:
        >>> ltm.get_local_ordinal()
        0
    """
    return world.local_ordinal(defval)


def is_master_ordinal(local: bool = True) -> bool:
    """Return True if this replica is number 0 of its host, or, with `local=False`, of all.

    Args:
        local: True for number 0 of the host; False for number 0 of all.

    Example:
        >>> ltm.is_master_ordinal(), ltm.is_master_ordinal(local=False)
        (True, True)
    """
    return world.is_master(local)


def master_print(*args: Any, fd=None, local: bool = False, flush: bool = False) -> None:
    """`print(*args)` on replica 0 alone: of all, or, where `local`, of each host.

    Args:
        fd: The file that is written to; stdout where None.

    Example:
        >>> ltm.master_print("loss", 0.5)
        loss 0.5
    """
    if world.is_master(local):
        print(*args, file=sys.stdout if fd is None else fd, flush=flush)


def lazy_replication_devices(local_devices: Sequence) -> list[str]:
    """The real names of all devices to replicate over.

    Args:
        local_devices: Every device that this process has of one kind.

    Returns:
        Names of real devices.

    Raises:
        RuntimeError: If they are of several kinds, or are not all of their kind.

    Example:
        >>> names = ltm.lazy_replication_devices(ltm.get_lazy_supported_devices())
        >>> names[0], len(names) == ltc.device_count()
        ('CPU:0', True)
    """
    return world.replication_devices(local_devices)


def set_replication(device, devices: Sequence) -> None:
    """Make `device` the thread's current one, and a replica among `devices`.

    Collectives that the thread recorded under its former number are started. `DataParallel` calls
    this in each of its threads.

    Args:
        devices: The devices that exchange, each in a thread of its own; [] ends the replication.

    Raises:
        ValueError: If `device` is none of `devices`.

    Example:
        >>> ltm.set_replication("ltc:0", ["ltc:0"])
        >>> ltm.xrt_world_size(), ltm.get_ordinal()
        (1, 0)
        >>> ltm.set_replication("ltc:0", [])
    """
    world.set_replication(device, devices)


make_entrances(globals(), __all__)


# --- A snapshot, for code written for the lazy tensor core ------------------------------------


@dataclass(frozen=True)
class CollectiveContext:
    """The calling thread's place among the replicas when the context was made.

    Attributes:
        groups: Groups of ordinals that exchange among themselves; None means all together.
        replica_devcount: Number of replicas of this process.
        world_size: Number of replicas of all processes.

    Example:
        >>> context = ltm.CollectiveContext()
        >>> context.ordinal, context.world_size, context.requires_interhost_reduce
        (0, 1, False)
    """

    groups: list | None = None
    place: world.Rank = field(default_factory=world.place)

    @property
    def replica_devcount(self) -> int:
        return max(len(self.place.devices), 1)

    @property
    def world_size(self) -> int:
        return self.place.replicas

    @property
    def ordinal(self) -> int:
        return self.place.ordinal

    @property
    def requires_intercore_reduce(self) -> bool:
        """Return True if devices of this process exchange."""
        return self.replica_devcount > 1

    @property
    def requires_interhost_reduce(self) -> bool:
        """Return True if processes exchange."""
        return self.place.processes > 1

    @property
    def intercore_group(self) -> list[list[int]]:
        """The ordinals of each process."""
        count = self.replica_devcount
        return [list(range(p * count, (p + 1) * count)) for p in range(self.place.processes)]
