"""What replicas say of themselves while they exchange, and the one report when that goes wrong."""

from __future__ import annotations

import os
import time

from ltc.distributed.transport.shm_segment import Region

HEAD = "replica  collective  is     what"
_ANSWER_SECONDS = 1.0  # how long the maker of an abort report waits for the other hosts' rows


class StatusBoard:
    """The board of one host: its region's entries, under the ordinals of the whole run.

    replica  whose board it is
    first    ordinal of the region's first replica
    """

    def __init__(self, region: Region, replica: int, first: int = 0) -> None:
        self.region, self.replica, self.first = region, replica, first

    def begin(self, count: int, text: bytes) -> None:
        """Say that this replica is inside its collective number `count`."""
        self.region.begin(self.replica - self.first, count, text)

    def end(self) -> None:
        self.region.end(self.replica - self.first)

    def count(self) -> int:
        """How many collectives this replica has begun, in this process or one before it."""
        return self.region.entry(self.replica - self.first)[0]

    def is_here(self, replica: int) -> bool:
        return 0 <= replica - self.first < self.region.replicas

    def entry(self, replica: int) -> tuple[int, bool, int, str]:
        """(collectives begun, whether inside one, process, the line) of a replica of this host."""
        return self.region.entry(replica - self.first)

    def waits_for(self, replica: int) -> int | None:
        """Whom a replica of this host has been waiting for long, where that is of this host too."""
        peer = self.region.waits_for(replica - self.first)
        return None if peer is None else peer + self.first

    def say_returned(self) -> None:
        """Say that the function of this replica is over: it comes to no collective any more."""
        self.region.say_returned(self.replica - self.first, True)

    def has_returned(self, replica: int) -> bool:
        """Whether a replica of this host has said so."""
        return self.region.has_returned(replica - self.first)

    def ordinals(self) -> range:
        """The replicas of this host."""
        return range(self.first, self.first + self.region.replicas)

    def rows(self) -> str:
        """One line for each replica of this host."""
        found = []
        for replica in self.ordinals():
            count, inside, _, text = self.entry(replica)
            found.append(f"{replica:7}  {count:10}  {'in' if inside else 'after':5}  {text}")
        return "\n".join(found)

    def fail(self, reason: str) -> None:
        """Make the abort report: the reason and the table of all replicas, the same for everyone."""
        self.region.fail(f"{reason}\n{HEAD}\n{self.rows()}")

    def ask(self) -> None:
        """Learn of an abort report that another host has made."""


class HostsStatusBoard(StatusBoard):
    """The boards of several hosts: a report of one reaches the others through the run's store."""

    def __init__(self, region: Region, replica: int, first: int, store, hosts: int) -> None:
        super().__init__(region, replica, first)
        self.store, self.hosts, self.host = store, hosts, first // region.replicas

    def fail(self, reason: str) -> None:
        self.store.set(f"rows/{self.host}", self.rows())
        me = f"{self.replica} {os.getpid()}"
        # the first alarm counts: its maker gathers the rows, and everyone else waits for that
        if self.store.compare_set("alarm", "", me).decode() == me:
            deadline = time.monotonic() + _ANSWER_SECONDS
            keys = [f"rows/{host}" for host in range(self.hosts) if host != self.host]
            while not self.store.check(keys) and time.monotonic() < deadline:
                time.sleep(0.05)
            rows = [self._rows_of(host) for host in range(self.hosts)]
            self.store.set("abort report", "\n".join([reason, HEAD, *rows]))
        self.store.wait(["abort report"])
        self.region.fail(self.store.get("abort report").decode())

    def ask(self) -> None:
        if self.region.failed or not self.store.check(["alarm"]):
            return
        self.store.set(f"rows/{self.host}", self.rows())
        if self.store.check(["abort report"]):
            self.region.fail(self.store.get("abort report").decode())

    def _rows_of(self, host: int) -> str:
        if host == self.host:
            return self.rows()
        if self.store.check([f"rows/{host}"]):
            return self.store.get(f"rows/{host}").decode()
        first = host * self.region.replicas
        return "\n".join(
            f"{replica:7}  its host has not answered"
            for replica in range(first, first + self.region.replicas)
        )
