"""Who exchanges with whom, as a snapshot: what code written for the lazy tensor core asks for."""

from __future__ import annotations

from dataclasses import dataclass, field

from ltc.distributed import world


@dataclass(frozen=True)
class CollectiveContext:
    """The calling thread's place among the replicas when this was made.

    groups             of ordinals that exchange among themselves; None means all together
    replica_devcount   replicas of this process
    world_size         of all processes

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
        """Whether devices of this process exchange."""
        return self.replica_devcount > 1

    @property
    def requires_interhost_reduce(self) -> bool:
        """Whether processes exchange."""
        return self.place.processes > 1

    @property
    def intercore_group(self) -> list[list[int]]:
        """The ordinals of each process."""
        count = self.replica_devcount
        return [list(range(p * count, (p + 1) * count)) for p in range(self.place.processes)]
