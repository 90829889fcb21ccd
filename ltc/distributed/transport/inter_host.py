"""Messages to replicas on other hosts, over point-to-point calls of torch.distributed.

Replicas of one host use its shared memory. A message is a *frame* in one of two sizes: a head with the
caller's tag, the number of bytes and the message's number, and behind it the content. A larger content
follows in a packet of its own. A receive of the next small frame is always under way, since gloo sends
nothing before the other side receives. The last word of a packet is 1: the waiting thread looks at it
between naps, which leave the processor to gloo's own thread. Only a long wait gets a thread of its own.

Messages between hosts take Python and the GIL, so each one is counted as `collective.host_message`.
"""

from __future__ import annotations

import contextlib
import queue
import socket
import struct
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ltc import config
from ltc.backends import shared_counters
from ltc.distributed.transport.collective_schedule import HOP_BYTES_OF_NETWORK, one_hop_bytes
from ltc.distributed.transport.shm_segment import NAP_SECONDS, Region
from ltc.distributed.transport.wire import LONG_SECONDS, Mismatch, Share, SharedMemoryWire
from ltc.errors import PeerFailure
from ltc.support.observation import metrics

MESSAGE_BYTES = 512 << 10
_FOR_EVER = timedelta(days=1)  # how long to wait is decided here, where a fault can be seen
_MOST_NAMED = 16  # replicas that an error lists
_HEAD_BYTES, _WORD_BYTES = 32, 8  # behind a head lie elements of up to 16 bytes
# Of a small frame, which takes a fifth of the time of a hop; of a large one, all that takes one hop.
_SMALL, _LARGE = 8 << 10, one_hop_bytes(2, HOP_BYTES_OF_NETWORK)
_GLOO_TAGS = {_SMALL: 0, _LARGE: 1}
_FIRST_TAG = 2  # of what follows a frame
_MOST_SENDING_BYTES = 4 << 20  # that are sent, and may not be received yet
_SHORTEST_NAP = 1e-6  # the system makes some 50 us of it
_QUICK_SECONDS = 0.1  # after which a thread waits, which hears of a connection that is gone
_POLL_SECONDS = 0.2  # how often a waiting replica asks the store whether another host reports


class HostsWire:
    """A wire to every replica of a run: shared memory inside a host, torch.distributed between.

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
        self.message_bytes = min(self.inside.message_bytes, MESSAGE_BYTES)
        self.hop_bytes = HOP_BYTES_OF_NETWORK
        self._blocking_calls = _BlockingCalls()
        self._asked = 0.0
        self.ask = lambda: None  # looks whether another host has found a fault
        self.late = lambda peer, waited_seconds: None
        self.inside.late = lambda peer, waited: self._waits(self._first + peer, waited)
        self._meet()
        self._group = self._connected("pairs", tuple(range(self.replicas)))
        self._columns: dict[tuple[int, ...], Any] = {}
        self._sent, self._taken = Counter[int](), Counter[int]()  # messages, by the other replica
        self._coming: dict[tuple[int, int], tuple[_Packet, Any]] = {}  # by sender and kind of frame
        self._sending: deque[tuple[int, Any, _Packet]] = deque()  # (receiver, send, what is sent)

    def _meet(self) -> None:
        """Wait for every replica: gloo, which connects them, could not name a missing one."""
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
            f"Replica(s) {named}{more} of {self.replicas} did not reach the meeting point of the hosts "
            f"within {limit:g} s (LTC_PEER_TIMEOUT). Replica {self.replica}, on "
            f"{socket.gethostname()}, has waited for them."
        )

    def _connected(self, name: str, members: tuple[int, ...]) -> Any:
        """Return a group of `members`, each of which is about to make it."""
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
        failed = (
            f"Replica {self.replica}, on {socket.gethostname()}, could not connect with all of "
            f"{list(members[:_MOST_NAMED])} within {limit:g} s (LTC_PEER_TIMEOUT), though all have "
            f"arrived: one has died since, or its host cannot be reached (scripts/cluster/hosts "
            f"--check tests that)."
        )
        while not self._is_made(group, failed):
            self.region.raise_abort_report()
            if time.monotonic() > deadline:
                raise PeerFailure(failed)
        return group.result()

    def _is_made(self, group: Future, failed: str) -> bool:
        try:
            return _is_done(group)
        except RuntimeError as error:  # gloo's, which names addresses alone
            raise PeerFailure(f"{failed} {str(error).splitlines()[0]}") from error

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
        self._expect(receiver, _SMALL)  # what two exchange mostly goes both ways
        self._sent[receiver] += 1
        kind = _kind_of(part.nbytes)
        frame = _Packet(_HEAD_BYTES + kind)
        frame.write_head(tag, part.nbytes, self._sent[receiver])
        if part.nbytes <= kind:
            frame.write(_HEAD_BYTES, part)
        self._begin_send(frame, receiver, _GLOO_TAGS[kind])
        if part.nbytes > kind:
            content = _Packet(part.nbytes)
            content.write(0, part)
            self._begin_send(content, receiver, _content_tag(tag, part.nbytes))

    def _begin_send(self, packet: _Packet, receiver: int, gloo_tag: int) -> None:
        packet.complete()
        sending = self._group.send([packet.bytes], receiver, gloo_tag)
        self._sending.append((receiver, sending, packet))

    def finish(self) -> None:
        """Wait only if many copies are being sent: a copy leaves by itself."""
        if sum(len(packet) for _, _, packet in self._sending) > _MOST_SENDING_BYTES:
            self._let_leave(_MOST_SENDING_BYTES // 2)

    def _let_leave(self, rest: int) -> None:
        """Wait until at most so many bytes are being sent."""
        nbytes = sum(len(packet) for _, _, packet in self._sending)
        left: list[tuple[int, Any, _Packet]] = []
        while nbytes > rest:
            left.append(self._sending.popleft())
            nbytes -= len(left[-1][2])
        if left:
            self._await(_All([sending for _, sending, _ in left]), left[-1][0])

    def flush(self) -> None:
        """At the end of the process: what others still receive must not go with it."""
        if not self.region.failed:
            with contextlib.suppress(RuntimeError):  # who should receive it is gone
                self._let_leave(0)

    def take(self, sender: int, like: torch.Tensor, tag: int) -> torch.Tensor:
        if self._is_inside(sender):
            return self._take_inside(sender, like, tag)
        self._taken[sender] += 1
        kind, content = _kind_of(like.nbytes), None
        if like.nbytes > kind:
            content = self._begin_receive(
                _Packet(like.nbytes), sender, _content_tag(tag, like.nbytes)
            )
        frame = self._next_frame(sender, kind)
        self._expect(sender, _SMALL)
        found, nbytes, _ = frame.head()
        if found != tag or nbytes != like.nbytes:
            raise Mismatch(sender, found)
        if content is None:
            return frame.read(_HEAD_BYTES, like)
        self._await_packet(content, sender)
        return content[0].read(0, like)

    def _next_frame(self, sender: int, kind: int) -> _Packet:
        """The next frame from there: of that kind, where both are at the same collective."""
        packet, receiving = self._expect(sender, kind)
        if _is_quick(lambda: self._kind_here(sender) is not None):
            packet, receiving = self._coming.pop((sender, self._kind_here(sender)))
            receiving.wait()  # its last word is here: so it is over, or is in a moment
            return packet
        self._expect(sender, _LARGE)  # the sender may be at another one
        self._await(receiving, sender, lambda: self._kind_here(sender) is not None)
        return self._coming.pop((sender, self._kind_here(sender)))[0]

    def _kind_here(self, sender: int) -> Any:
        """Return the kind of the frame that holds the next message, or None."""
        return next((kind for kind in _GLOO_TAGS if self._has_come(sender, kind)), None)

    def _has_come(self, sender: int, kind: int) -> bool:
        """Return True if the next message is here, in a frame of that kind."""
        packet, _ = self._coming.get((sender, kind), (None, None))
        if packet is None or not packet.is_complete():
            return False
        return packet.head()[2] == self._taken[sender]

    def _expect(self, sender: int, kind: int) -> tuple[_Packet, Any]:
        """The receive of the next frame of that kind from there."""
        if (sender, kind) not in self._coming:
            self._coming[sender, kind] = self._begin_receive(
                _Packet(_HEAD_BYTES + kind), sender, _GLOO_TAGS[kind]
            )
        return self._coming[sender, kind]

    def _begin_receive(self, packet: _Packet, sender: int, gloo_tag: int) -> tuple[_Packet, Any]:
        return packet, self._group.recv([packet.bytes], sender, gloo_tag)

    def _await_packet(self, coming: tuple[_Packet, Any], sender: int) -> None:
        packet, receiving = coming
        if _is_quick(packet.is_complete):
            receiving.wait()
        else:
            self._await(receiving, sender)

    def give_back(self, sender: int) -> None:
        if self._is_inside(sender):
            self.inside.give_back(sender - self._first)

    def sum_by_gloo(self, members: tuple[int, ...], flat: torch.Tensor) -> None:
        """Sum a tensor in place among members on different hosts, by gloo's all_reduce.

        Gloo compares nothing: the caller has seen that all are about to do the same.
        """
        metrics.count("collective.backend_sum")
        position = members.index(self.replica)
        if members not in self._columns:
            self._columns[members] = self._connected(f"column-{members[0]}", members)
        work = self._columns[members].allreduce([flat])
        if _is_quick(work.is_completed):
            work.wait()
        else:
            self._await(work, members[position - 1])

    def _take_inside(self, sender: int, like: torch.Tensor, tag: int) -> torch.Tensor:
        try:
            return self.inside.take(sender - self._first, like, tag)
        except Mismatch as mismatch:
            raise Mismatch(self._first + mismatch.peer, mismatch.found) from None

    def _await(self, work, peer: int, is_over: Callable[[], bool] = lambda: False) -> None:
        """Wait until a transfer of gloo is over; an abort report could not interrupt gloo's own
        wait.
        """
        ended = self._blocking_calls.begin(work.wait)
        started = time.monotonic()
        while not is_over() and not _is_done(ended):
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


class _Packet:
    """Bytes on their way between hosts: the last word is 1 where they are complete."""

    def __init__(self, nbytes: int) -> None:
        """With room for so many bytes, and the last word."""
        whole = -(-nbytes // _WORD_BYTES) * _WORD_BYTES
        self._memory = bytearray(whole + _WORD_BYTES)
        self.bytes = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.last_word = self.bytes.data_ptr() + whole

    def __len__(self) -> int:
        return len(self._memory)

    def complete(self) -> None:
        struct.pack_into("q", self._memory, len(self) - _WORD_BYTES, 1)

    def is_complete(self) -> bool:
        return bool(shared_counters.load(self.last_word))

    def write_head(self, tag: int, nbytes: int, number: int) -> None:
        struct.pack_into("qqq", self._memory, 0, tag, nbytes, number)

    def head(self) -> tuple[int, ...]:
        """(tag, bytes, number)"""
        return struct.unpack_from("qqq", self._memory)

    def write(self, start: int, part: torch.Tensor) -> None:
        self._room(start, part).copy_(part)

    def read(self, start: int, like: torch.Tensor) -> torch.Tensor:
        """Return the content at `start`, as a tensor of `like`'s size and dtype."""
        return self._room(start, like)

    def _room(self, start: int, like: torch.Tensor) -> torch.Tensor:
        return self.bytes[start : start + like.nbytes].view(like.dtype)


def _content_tag(tag: int, nbytes: int) -> int:
    """Return a tag that differs from message to message, so that a receiver takes only its own."""
    return _FIRST_TAG + hash((tag, nbytes)) % (1 << 30)


def _kind_of(nbytes: int) -> int:
    """Return the kind of the frame for a message; the largest messages go behind a small frame."""
    return _LARGE if _SMALL < nbytes <= _LARGE else _SMALL


class _All:
    """Transfers that are waited for together."""

    def __init__(self, works: list) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


def _is_quick(has_come: Callable[[], bool]) -> bool:
    """Return True if it comes so soon that no thread need wait for it."""
    deadline = time.monotonic() + _QUICK_SECONDS
    while not has_come():
        if time.monotonic() > deadline:
            return False
        time.sleep(_SHORTEST_NAP)
    return True


def _is_done(future: Future) -> bool:
    """Return True if the call has ended, waiting for NAP_SECONDS at most; raise its error."""
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
