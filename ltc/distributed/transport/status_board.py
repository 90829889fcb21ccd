"""The state that replicas report while they exchange, and the one report when that goes wrong."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence

from ltc.distributed.transport.shm_segment import Region
from ltc.support.process.neighbours import neighbour, own_name

HEAD = "replica  collective  is     what"
_ANSWER_SECONDS = 1.0  # how long the maker of an abort report waits for the other hosts' rows
_MAKER_SECONDS = 9.0  # how much longer the others wait for the report, on a busy machine


class StatusBoard:
    """The board of one host: its region's entries, under the ordinals of the whole run.

    Args:
        replica: The replica that writes on this board.
        first: Ordinal of the region's first replica.
        names: The numbers of the replicas in reports; () for their ordinals.
    """

    def __init__(
        self, region: Region, replica: int, first: int = 0, names: Sequence[int] = ()
    ) -> None:
        self.region, self.replica, self.first, self.names = region, replica, first, names

    def name(self, replica: int) -> int:
        """Return the number of a replica in reports."""
        return self.names[replica] if self.names else replica

    def begin(self, count: int, text: bytes) -> None:
        """Say that this replica is inside its collective number `count`."""
        self.region.begin(self.replica - self.first, count, text)

    def end(self) -> None:
        self.region.end(self.replica - self.first)

    def count(self) -> int:
        """Return how many collectives this replica has begun, in this process or one before it."""
        return self.region.entry(self.replica - self.first)[0]

    def is_here(self, replica: int) -> bool:
        return 0 <= replica - self.first < self.region.replicas

    def entry(self, replica: int) -> tuple[int, bool, int, str]:
        """(collectives begun, whether inside one, process, the line) of a replica of this host."""
        return self.region.entry(replica - self.first)

    def waits_for(self, replica: int) -> int | None:
        """Return the peer that a replica of this host has long waited for, if that is of this host
        too.
        """
        peer = self.region.waits_for(replica - self.first)
        return None if peer is None else peer + self.first

    def say_returned(self) -> None:
        """Say that the function of this replica is over: it comes to no collective any more."""
        self.region.say_returned(self.replica - self.first, True)

    def has_returned(self, replica: int) -> bool:
        """Return True if a replica of this host has reported its return."""
        return self.region.has_returned(replica - self.first)

    def ordinals(self) -> range:
        """The replicas of this host."""
        return range(self.first, self.first + self.region.replicas)

    def rows(self) -> str:
        """Return one line for each replica of this host."""
        found = []
        for replica in self.ordinals():
            count, inside, _, text = self.entry(replica)
            found.append(
                f"{self.name(replica):7}  {count:10}  {'in' if inside else 'after':5}  {text}"
            )
        return "\n".join(found)

    def fail(self, reason: str) -> None:
        """Make the abort report: the reason and the table of all replicas, the same on each replica."""
        self.region.fail(f"{reason}\n{HEAD}\n{self.rows()}")

    def ask(self) -> None:
        """Look for an abort report of another host."""


class HostsStatusBoard(StatusBoard):
    """The boards of several hosts: a report of one reaches the others through the run's store.

    Where the store has gone, with the process that held it, a report has the rows of this host alone.
    """

    def __init__(
        self, region: Region, replica: int, first: int, store, hosts: int, names: Sequence[int] = ()
    ) -> None:
        super().__init__(region, replica, first, names)
        self.store, self.hosts, self.host = store, hosts, first // region.replicas
        self._processes: dict[int, int] = {}
        store.set(f"process/{replica}", own_name())

    def fail(self, reason: str) -> None:
        try:
            self._fail_everywhere(reason)
        except RuntimeError as error:
            lost = f"(The run's store cannot be reached: {str(error).splitlines()[0]})"
            self.region.fail("\n".join([reason, HEAD, self.rows(), lost]))

    def _fail_everywhere(self, reason: str) -> None:
        self.store.set(f"rows/{self.host}", self.rows())
        me = f"{self.replica} {os.getpid()}"
        # the first alarm counts: its maker gathers the rows, and all others wait for that
        if self.store.compare_set("alarm", "", me).decode() == me:
            deadline = time.monotonic() + _ANSWER_SECONDS
            keys = [f"rows/{host}" for host in range(self.hosts) if host != self.host]
            while not self.store.check(keys) and time.monotonic() < deadline:
                time.sleep(0.05)
            rows = [self._rows_of(host) for host in range(self.hosts)]
            silent = [str(self.name(r)) for host in self._silent() for r in self._replicas_of(host)]
            if silent:
                reason = (
                    f"{reason.removesuffix(':')}; no answer from replica(s) {', '.join(silent)}:"
                )
            self.store.set("abort report", "\n".join([reason, HEAD, *rows]))
        deadline = time.monotonic() + _ANSWER_SECONDS + _MAKER_SECONDS
        while not self.store.check(["abort report"]):
            if time.monotonic() > deadline:  # the maker has died meanwhile
                raise RuntimeError("the process that gathers the rows of all hosts has ended")
            time.sleep(0.02)
        self.region.fail(self.store.get("abort report").decode())

    def ask(self) -> None:
        with contextlib.suppress(
            RuntimeError
        ):  # without a store there is no report of another host
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
        return "\n".join(
            f"{self.name(replica):7}  its host has not answered"
            for replica in self._replicas_of(host)
        )

    def _silent(self) -> list[int]:
        """The other hosts that have given no rows."""
        others = [host for host in range(self.hosts) if host != self.host]
        return [host for host in others if not self.store.check([f"rows/{host}"])]

    def _replicas_of(self, host: int) -> range:
        return range(host * self.region.replicas, (host + 1) * self.region.replicas)

    def process_of(self, replica: int) -> int:
        """The process of a replica that runs on this machine, as on a host of its own; else 0."""
        with contextlib.suppress(RuntimeError):  # it has gone
            if replica not in self._processes and self.store.check([f"process/{replica}"]):
                self._processes[replica] = neighbour(self.store.get(f"process/{replica}"))
        return self._processes.get(replica, 0)
