"""Messages to replicas on other hosts, over TCP. Replicas of one host use its shared memory.

The replica that waits moves all its messages: it sends what the system has not taken yet, and takes what
has come, whether it was asked for or not. So two may both send first, and a message needs one wake-up of
one thread at either end.

Messages between hosts take Python and the GIL, so each one is counted as `collective.host_message`.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import time
from collections.abc import Callable

import torch

from ltc import config
from ltc.distributed.transport.collective_schedule import HOP_BYTES_OF_NETWORK, one_hop_bytes
from ltc.distributed.transport.shm_segment import NAP_SECONDS, Region
from ltc.distributed.transport.tcp_link import Link, Message
from ltc.distributed.transport.tcp_mesh import Invitation, Listener, connected
from ltc.distributed.transport.wire import LONG_SECONDS, Mismatch, Share, SharedMemoryWire
from ltc.errors import PeerFailure
from ltc.support.observation import metrics

MESSAGE_BYTES = 2 << 20
# Of a message that may change while it leaves: whatever takes one hop is reduced where it lies.
SMALL_BYTES = one_hop_bytes(2, HOP_BYTES_OF_NETWORK)
_MOST_NAMED = 16  # replicas that an error lists
_LOOK_SECONDS = 0.0005  # how often shared memory is looked at while messages leave
_POLL_SECONDS = 0.2  # how often a waiting replica asks the store whether another host reports


class HostsWire:
    """A wire to every replica of a run: shared memory inside a host, TCP between.

    Args:
        store: Reached by every process; its keys are this wire's own.
        region: The region of this host's replicas.
        local: This replica's number in the region; `per_host` replicas are on each host.
    """

    def __init__(self, store, region: Region, local: int, host: int, hosts: int) -> None:
        self.per_host, self.host, self.hosts = region.replicas, host, hosts
        self.replica, self.replicas = host * self.per_host + local, hosts * self.per_host
        self.region, self.store = region, store
        self.inside = SharedMemoryWire(region, local)
        self.message_bytes = min(self.inside.message_bytes, MESSAGE_BYTES)  # or another host's
        self.hop_bytes = HOP_BYTES_OF_NETWORK
        self._asked = 0.0
        self.ask = lambda: None  # looks whether another host has found a fault
        self.late = lambda peer, waited_seconds: None
        self.inside.late = self._waits_inside
        self._links: dict[int, Link] = {}
        self._taken: dict[int, Message] = {}  # by sender: what is to be given back
        self._leaving: set[Link] = set()  # those that have not sent everything yet
        self._selector = selectors.DefaultSelector()
        self._connect()

    def _connect(self) -> None:
        """Meet every replica, and connect with those of other hosts."""
        listener = Listener(self.message_bytes)
        try:
            self.store.set(f"at/{self.replica}", listener.invitation.text())
            self._meet()
            hosts = range(0, self.replicas, self.per_host)
            self.message_bytes = min(self._invitation(first).message_bytes for first in hosts)
            for peer, connection in self._connections(listener).items():
                link = self._links[peer] = Link(peer, connection)
                self._moved(link)
        finally:
            listener.close()

    def _connections(self, listener: Listener) -> dict[int, socket.socket]:
        """A connection with each replica of another host: those before this one, then those behind it."""
        found: dict[int, socket.socket] = {}
        first, stop = self._first, self._first + self.per_host
        limit = config.value("LTC_PEER_TIMEOUT")
        deadline = time.monotonic() + limit

        def check() -> None:
            self.region.raise_abort_report()
            if time.monotonic() > deadline:
                raise PeerFailure(self._who_is_not_connected(found, limit))

        likely = 0
        with contextlib.ExitStack() as if_this_fails:
            if_this_fails.callback(_close, found)
            for peer in range(first):
                found[peer], likely = connected(self._invitation(peer), self.replica, check, likely)
            listener.accept(range(stop, self.replicas), found, check)
            if_this_fails.pop_all()
        return found

    def _invitation(self, peer: int) -> Invitation:
        return Invitation.of_text(self.store.get(f"at/{peer}"))

    def _meet(self) -> None:
        """Wait for every replica: a connection could not name a missing one."""
        self.store.set(f"here/{self.replica}", socket.gethostname())
        # one word to look at, however many there are
        come, limit = self.store.add("come", 1), config.value("LTC_PEER_TIMEOUT")
        deadline = time.monotonic() + limit
        while come < self.replicas:
            if time.monotonic() > deadline:
                raise PeerFailure(self._who_is_missing(limit))
            self.region.raise_abort_report()
            time.sleep(NAP_SECONDS)
            come = self.store.add("come", 0)

    def _who_is_missing(self, limit: float) -> str:
        missing = [r for r in range(self.replicas) if not self.store.check([f"here/{r}"])]
        return (
            f"Replica(s) {self._named(missing)} of {self.replicas} did not reach the meeting point of "
            f"the hosts within {limit:g} s (LTC_PEER_TIMEOUT). Replica {self.replica}, on "
            f"{socket.gethostname()}, has waited for them."
        )

    def _who_is_not_connected(self, found: dict[int, socket.socket], limit: float) -> str:
        missing = [r for r in range(self.replicas) if r not in found and not self._is_inside(r)]
        return (
            f"Replica {self.replica}, on {socket.gethostname()}, could not connect with replica(s) "
            f"{self._named(missing)} within {limit:g} s (LTC_PEER_TIMEOUT), though all have arrived: one "
            f"has died since, or its host cannot be reached (scripts/cluster/hosts --check tests that; "
            f"GLOO_SOCKET_IFNAME names the interface to use)."
        )

    def _named(self, replicas: list[int]) -> str:
        named = ", ".join(f"{r} (host {r // self.per_host})" for r in replicas[:_MOST_NAMED])
        more = len(replicas) - _MOST_NAMED
        return f"{named} and {more} more" if more > 0 else named

    @property
    def _first(self) -> int:
        return self.host * self.per_host

    def _is_inside(self, replica: int) -> bool:
        return replica // self.per_host == self.host

    def share(self, flat: torch.Tensor, copies: bool = True) -> Share:
        if self.per_host > 1:
            return self.inside.share(flat, copies)
        return Share(flat, is_copy=False)

    def send(self, receiver: int, part: torch.Tensor, tag: int, share: Share | None = None) -> None:
        if self._is_inside(receiver):
            self.inside.send(receiver - self._first, part, tag, share)
            return
        metrics.count("collective.host_message")
        link = self._links[receiver]
        may_change = part.nbytes <= SMALL_BYTES or (share is not None and share.is_copy)
        link.send(tag, part, may_change)
        self._moved(link)
        link.require_open()

    def take(self, sender: int, like: torch.Tensor, tag: int, fills: bool = False) -> torch.Tensor:
        if self._is_inside(sender):
            return self._take_inside(sender, like, tag)
        link = self._links[sender]
        if not link.arrived:
            link.offer(tag, like if fills else None)
            link.pull()
            self._wait_until(link, lambda: link.arrived or link.lost)
            link.offer(tag, None)
        if not link.arrived:
            link.require_open()
        message = self._taken[sender] = link.arrived.popleft()
        self._moved(link)
        if message.tag != tag or message.nbytes != like.nbytes:
            raise Mismatch(sender, message.tag)
        return message.read(like)

    def _take_inside(self, sender: int, like: torch.Tensor, tag: int) -> torch.Tensor:
        local = sender - self._first
        if self._leaving:  # others wait for that
            self._move_until(lambda: not self._leaving or self.inside.has_come(local), sender)
        try:
            return self.inside.take(local, like, tag)
        except Mismatch as mismatch:
            raise Mismatch(self._first + mismatch.peer, mismatch.found) from None

    def give_back(self, sender: int) -> None:
        if self._is_inside(sender):
            self.inside.give_back(sender - self._first)
        elif sender in self._taken:
            self._links[sender].give_back(self._taken.pop(sender))

    def finish(self) -> None:
        """Wait until every sent message has left: its memory may change from now on."""
        for link in tuple(self._leaving):
            self._let_leave(link)

    def _let_leave(self, link: Link) -> None:
        self._wait_until(link, lambda: not link.is_leaving)
        link.require_open()

    def flush(self) -> None:
        """At the end of the process: what others still receive must not go with it."""
        if not self.region.failed:
            with contextlib.suppress(RuntimeError):  # who should receive it is gone
                self.finish()

    # --- waiting

    def _wait_until(self, link: Link, is_over: Callable[[], object]) -> None:
        """Move messages until it is over, which the other end of the link brings about.

        Where something is raised, all connections end: the others are told by that, and the memory of
        what was to leave, and to come, is the caller's again.
        """
        moved, started = link.moved_bytes, time.monotonic()
        try:
            while not is_over():
                self._move(NAP_SECONDS)
                if link.moved_bytes != moved:  # slow is not absent
                    moved, started = link.moved_bytes, time.monotonic()
                self._waits(link.peer, time.monotonic() - started)
                self.region.raise_abort_report()
        except BaseException as error:
            for one in self._links.values():
                one.lose(f"ended by {type(error).__name__}")
            raise

    def _move_until(self, is_over: Callable[[], object], peer: int) -> None:
        """Move messages until it is over; shared memory, which wakes no selector, may tell of that."""
        started = time.monotonic()
        while not is_over():
            self._move(_LOOK_SECONDS)
            self._waits(peer, time.monotonic() - started)
            self.region.raise_abort_report()

    def _move(self, seconds: float) -> None:
        """Send and take what can be within that time, and return."""
        for key, events in self._selector.select(seconds):
            link = key.data
            if events & selectors.EVENT_READ:
                link.pull()
            if events & selectors.EVENT_WRITE:
                link.push()
            self._moved(link)

    def _moved(self, link: Link) -> None:
        """Wait for what the link waits for now."""
        if link.is_leaving:
            self._leaving.add(link)
        else:
            self._leaving.discard(link)
        watched, link.watched = link.watched, link.awaits
        if not watched and link.watched:
            self._selector.register(link.socket, link.watched, link)
        elif watched and not link.watched:
            self._selector.unregister(link.socket)
        elif watched != link.watched:
            self._selector.modify(link.socket, link.watched, link)

    def _waits_inside(self, peer: int, waited_seconds: float) -> None:
        """Called now and then while this replica waits for one of its host, which may wait for what
        has not left.
        """
        self._move(0)
        self._waits(self._first + peer, waited_seconds)

    def _waits(self, peer: int, waited_seconds: float) -> None:
        """Called now and then while this replica waits: has others hear of it, and hears of them."""
        now = time.monotonic()
        if now - self._asked > _POLL_SECONDS:
            self._asked = now
            self.ask()
        if waited_seconds >= LONG_SECONDS:
            self.late(peer, waited_seconds)


def _close(connections: dict[int, socket.socket]) -> None:
    for connection in connections.values():
        connection.close()
