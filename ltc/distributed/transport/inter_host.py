"""Messages to replicas on other hosts, over point-to-point calls of torch.distributed.

Those of one host use its shared memory as ever.  Messages between hosts take Python and the GIL,
so each one is counted as `collective.host_message`.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ltc import config
from ltc.debug import metrics
from ltc.distributed.transport.inter_host_choice import ENGINES, InterHostChoice
from ltc.distributed.transport.shm_segment import NAP_SECONDS, PeerFailure, Region
from ltc.distributed.transport.wire import LONG_SECONDS, Consume, Mismatch, SharedMemoryWire

MESSAGE_BYTES = 512 << 10
_FOR_EVER = timedelta(days=1)  # how long to wait is decided here, where a fault can be seen
_MOST_NAMED = 16  # replicas that an error lists
_HEADER, _CONTENT = 1, 0  # gloo's own tags: of what goes before a message, and of the message
_POLL_SECONDS = 0.2  # how often a waiting replica asks the store whether another host reports


class HostsWire:
    """A wire to every replica of a run: shared memory inside a host, torch.distributed between.

    store     reached by every process; its keys are this wire's own
    region    of the replicas of this host
    local     this replica's number in the region; `per_host` replicas are on each host
    """

    def __init__(self, store, region: Region, local: int, host: int, hosts: int) -> None:
        self.per_host, self.host, self.hosts = region.replicas, host, hosts
        self.replica, self.replicas = host * self.per_host + local, hosts * self.per_host
        self.region, self.store = region, store
        self.inside = SharedMemoryWire(region, local)
        self.message_bytes = min(self.inside.message_bytes, MESSAGE_BYTES)
        self._blocking_calls = _BlockingCalls()
        self._asked = 0.0
        self.ask = lambda: None  # looks whether another host has found a fault
        self.late = lambda peer, waited_seconds: None
        self.inside.late = lambda peer, waited: self._waits(self._first + peer, waited)
        self._meet()
        self._group = self._connected("pairs", tuple(range(self.replicas)))
        transport = config.value("LTC_TRANSPORT")
        self.inter_host_choice = InterHostChoice(transport if transport in ENGINES else "")
        self._columns: dict[tuple[int, ...], Any] = {}
        self._sending: list = []

    def _meet(self) -> None:
        """Wait for every replica: gloo, which connects them, could not say who is missing."""
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
        named = ", ".join(f"{r} (host {r // self.per_host})" for r in missing[:_MOST_NAMED])
        more = f" and {len(missing) - _MOST_NAMED} more" if len(missing) > _MOST_NAMED else ""
        return (
            f"Replica(s) {named}{more} of {self.replicas} did not come within {limit:g} s "
            f"(LTC_PEER_TIMEOUT) to where the hosts connect. Replica {self.replica}, on "
            f"{socket.gethostname()}, has waited for them."
        )

    def _connected(self, name: str, members: tuple[int, ...]) -> Any:
        """A group of `members`, who are all about to make it."""
        limit = config.value("LTC_PEER_TIMEOUT")
        group = self._blocking_calls.begin(
            lambda: dist.ProcessGroupGloo(
                dist.PrefixStore(name, self.store),
                members.index(self.replica),
                len(members),
                _FOR_EVER,
            )
        )
        deadline = time.monotonic() + limit
        while not _is_done(group):
            self.region.raise_abort_report()
            if time.monotonic() > deadline:
                raise PeerFailure(
                    f"Replica {self.replica}, on {socket.gethostname()}, could not connect with "
                    f"all of {list(members[:_MOST_NAMED])} within {limit:g} s (LTC_PEER_TIMEOUT), "
                    f"though all have come: one has died since, or its host cannot be reached "
                    f"(scripts/cluster/hosts --check says)."
                )
        return group.result()

    @property
    def _first(self) -> int:
        return self.host * self.per_host

    def _is_inside(self, replica: int) -> bool:
        return replica // self.per_host == self.host

    def send(self, receiver: int, part: torch.Tensor, tag: int) -> None:
        if self._is_inside(receiver):
            self.inside.send(receiver - self._first, part, tag)
            return
        metrics.count("collective.host_message")
        header = torch.tensor([tag, part.nbytes], device="cpu")
        copy = part.clone()  # gloo reads it until the other side has received
        for sent, gloo_tag in ((header, _HEADER), (copy, _CONTENT)):
            if sent.numel():
                self._sending.append((receiver, self._group.send([sent], receiver, gloo_tag)))

    def finish(self) -> None:
        for receiver, sending in self._sending:
            self._await(sending, receiver)
        self._sending.clear()

    def receive(self, sender: int, like: torch.Tensor, tag: int, consume: Consume | None) -> None:
        if self._is_inside(sender):
            self._receive_inside(sender, like, tag, consume)
            return
        header = torch.empty(2, dtype=torch.int64, device="cpu")
        self._receive(sender, header, _HEADER)
        found, nbytes = header.tolist()
        if found != tag or nbytes != like.nbytes:
            raise Mismatch(sender, found)
        part = torch.empty(like.numel(), dtype=like.dtype, device="cpu")
        if part.numel():
            self._receive(sender, part, _CONTENT)
        if consume is not None:
            consume(part)

    def sum_by_backend(self, members: tuple[int, ...], flat: torch.Tensor) -> None:
        """Sum a tensor in place among members on different hosts, by the backend's all_reduce.

        The backend compares nothing: who calls has seen that all are about to do the same.
        """
        metrics.count("collective.backend_sum")
        position = members.index(self.replica)
        if members not in self._columns:
            self._columns[members] = self._connected(f"column-{members[0]}", members)
        self._await(self._columns[members].allreduce([flat]), members[position - 1])

    def _receive_inside(self, sender, like, tag, consume) -> None:
        try:
            self.inside.receive(sender - self._first, like, tag, consume)
        except Mismatch as mismatch:
            raise Mismatch(self._first + mismatch.peer, mismatch.found) from None

    def _receive(self, sender: int, into: torch.Tensor, gloo_tag: int) -> None:
        self._await(self._group.recv([into], sender, gloo_tag), sender)

    def _await(self, work, peer: int) -> None:
        """Wait until a transfer of gloo is over, whose own wait no abort report could interrupt."""
        ended = self._blocking_calls.begin(work.wait)
        started = time.monotonic()
        while not _is_done(ended):
            self._waits(peer, time.monotonic() - started)
            self.region.raise_abort_report()

    def _waits(self, peer: int, waited_seconds: float) -> None:
        """Called now and then while this replica waits: has others hear of it, and hears of them."""
        now = time.monotonic()
        if now - self._asked > _POLL_SECONDS:
            self._asked = now
            self.ask()
        if waited_seconds >= LONG_SECONDS:
            self.late(peer, waited_seconds)


def _is_done(future: Future) -> bool:
    """Whether the call has ended, waiting for NAP_SECONDS at most; raises its error."""
    try:
        future.result(NAP_SECONDS)
    except NotYet:
        return False
    return True


class _BlockingCalls:
    """Calls that cannot be interrupted, one after another in a thread.

    The thread is a daemon: one that waits for a replica that never comes must not keep the process.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Future, Callable[[], Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._loop, name="ltc host messages", daemon=True).start()

    def begin(self, call: Callable[[], Any]) -> Future:
        """Have the thread make the call after those before it."""
        future: Future = Future()
        self._queue.put((future, call))
        return future

    def _loop(self) -> None:
        while True:
            future, call = self._queue.get()
            try:
                future.set_result(call())
            except BaseException as error:  # raised to whoever waits
                future.set_exception(error)
            del future, call
