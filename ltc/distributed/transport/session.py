"""The calling thread's connection to all other replicas, made when it is first needed."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ltc import config
from ltc.distributed import world
from ltc.distributed.transport import bootstrap
from ltc.distributed.transport.bootstrap import (
    folder_of_host,
    host,
    process_said,
    processes_per_host,
    store,
)
from ltc.distributed.transport.collective_schedule import HOP_BYTES, one_hop_bytes
from ltc.distributed.transport.communicator import Communicator
from ltc.distributed.transport.inter_host import HostsWire
from ltc.distributed.transport.shm_segment import LINE, Region, SymmetricMemory
from ltc.distributed.transport.status_board import HostsStatusBoard, StatusBoard
from ltc.distributed.transport.symmetric_memory import OneShotReducer
from ltc.distributed.transport.wire import Mismatch, Share, SharedMemoryWire, Waiter
from ltc.errors import NowhereToMeet, PeerFailure, RankFailed
from ltc.support.process.last_collections import leave_out_after

# Programs run behind their caller, so what they exchange and what the caller exchanges at once
# would mix differently on every replica: each has a region of its own.
_log = logging.getLogger("ltc")
PROGRAMS, HOST = "programs", "host"
_END_SECONDS = 3.0  # for the others to end, where an exchange has failed


class Session:
    """One replica's two communicators: for collectives in programs, and for those run at once."""

    def __init__(
        self, communicators: dict[str, Communicator], ordinal: int, memory: SymmetricMemory | None
    ) -> None:
        """`memory`: that the replicas share, where one host has them all."""
        self.programs_agree = True  # of all replicas so far: see Progress.agree
        self.ordinal = ordinal
        self.programs, self.host = communicators[PROGRAMS], communicators[HOST]
        self.replicas = self.host.replicas
        # threads of a replica take turns: at a whole program, and at what is exchanged at once
        self.turn_of_programs, self._turn_at_host = threading.Lock(), threading.RLock()
        self.one_shot_reducer = None if memory is None else OneShotReducer(self.programs, memory)

    @contextlib.contextmanager
    def at_once(self) -> Iterator[Communicator]:
        """The communicator for what the calling thread exchanges inside the block."""
        with self._turn_at_host:
            self.host.exchange_in(world.thread_name())
            yield self.host

    def say_returned(self) -> None:
        """Say that this replica comes to no collective any more; those that it began are over."""
        for communicator in (self.programs, self.host):
            communicator.board.say_returned()

    def abort(self, text: str) -> None:
        """Have every replica that waits for another raise PeerFailure with this text."""
        for communicator in (self.programs, self.host):
            communicator.board.fail(text)

    def abort_with(self, error: BaseException) -> None:
        """Tell the others that this replica has failed, unless it is one of them that said so."""
        if not isinstance(error, PeerFailure):
            text = "".join(traceback.format_exception_only(error)).strip()
            self.abort(f"Replica {self.ordinal} of {self.replicas} has failed:\n{text}")


class _Sessions:
    """Every session of this process; threads of one group of devices share their regions."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.renewals = object()  # another one when sessions are forgotten
        self.regions: dict[tuple, dict[str, Region]] = {}
        self.sessions: dict[tuple, Session] = {}
        self.names: dict[tuple[int, ...], str] = {}  # of the runs of threads, by their devices

    def of(self, place: world.Rank) -> Session:
        key = (place.processes, place.devices)
        with self.lock:
            session = self.sessions.get((*key, place.ordinal))
            if session is None:
                if key not in self.regions:
                    self.regions[key] = _regions(place)
                made = {
                    lane: _communicator(lane, region, place)
                    for lane, region in self.regions[key].items()
                }
                session = Session(made, place.ordinal, self.regions[key][PROGRAMS].one_shot_sums)
                self.sessions[*key, place.ordinal] = session
            return session

    def name_of_threads(self, devices: tuple[int, ...]) -> str:
        with self.lock:
            return self.names.setdefault(devices, uuid.uuid4().hex[:12])

    def abort_threads(self, text: str) -> None:
        with self.lock:
            for (processes, devices), regions in self.regions.items():
                if processes == 1 or devices:
                    for region in regions.values():
                        region.fail(text)

    def renew(self, devices: tuple[int, ...]) -> None:
        key = (1, devices)
        with self.lock:
            self.names.pop(devices, None)
            if key in self.regions and any(r.failed for r in self.regions[key].values()):
                self.renewals = object()
                del self.regions[key]
                for name in [name for name in self.sessions if name[:2] == key]:
                    del self.sessions[name]
            for name, session in self.sessions.items():
                if name[:2] == key:
                    session.programs_agree = True
            for region in self.regions.get(key, {}).values():
                for replica in range(region.replicas):
                    region.say_returned(replica, False)


_sessions = _Sessions()


class _SessionOfThread(threading.local):
    session: Session | None = None
    key: tuple | None = None  # what the session was found by


_thread = _SessionOfThread()


def current() -> Session | None:
    """The calling thread's session; None where it is the only replica.

    A thread that has one keeps it while its replication is the same: a process that has met the
    others does not become another one.
    """
    key = (world.replication(), _sessions.renewals)
    if _thread.session is None or _thread.key != key:
        place = world.place()
        _thread.session = None if place.replicas == 1 else _sessions.of(place)
        _thread.key = key
    return _thread.session


def of(place: world.Rank) -> Session:
    """The session of the replica at a place."""
    return _sessions.of(place)


def known(place: world.Rank) -> Session | None:
    """The session of the replica at a place, if it has met the others yet."""
    return _sessions.sessions.get((place.processes, place.devices, place.ordinal))


def name_of_run() -> str:
    """Return the name of `world.name_of_run` if there are several replicas."""
    place = world.place()
    if place.processes == 1:
        return _sessions.name_of_threads(place.devices)
    with contextlib.suppress(NowhereToMeet):  # each of them is told to do its part by itself
        return bootstrap.name_of_run(place.processes)
    return ""


def any_in_use() -> bool:
    """Return True if this process has exchanged anything with other replicas."""
    return bool(_sessions.sessions)


def wait_for_others(processes: int) -> None:
    """Say that this process ends; the first one waits for the others, whose service it has.

    It waits as long as a collective would, and a few seconds where one has failed: a process that is
    gone says nothing.
    """
    began = time.monotonic()

    def seconds_left() -> float:
        failed = any(r.failed for regions in _sessions.regions.values() for r in regions.values())
        limit = _END_SECONDS if failed else config.value("LTC_PEER_TIMEOUT")
        return began + limit - time.monotonic()

    bootstrap.wait_for_others(processes, seconds_left)


def flush() -> None:
    """Return when all that this process has sent to other hosts has left it."""
    for session in list(_sessions.sessions.values()):
        for communicator in (session.programs, session.host):
            if isinstance(communicator.wire, HostsWire):
                communicator.wire.flush()


def abort_threads(error: BaseException) -> None:
    """Make every replica that is a thread of this process, and waits for another, raise.

    The raised text is the error's. For the runner of the threads, when one has failed.
    """
    _sessions.abort_threads("".join(traceback.format_exception_only(error)).strip())


def say_returned() -> None:
    """Tell the threads that wait for the calling one that it comes to no collective any more.

    Its exchanges are over by now. A replica that waits for a process hears of its end from the
    launcher.
    """
    session = current() if world.place().processes == 1 else None
    if session is not None:
        session.say_returned()


def renew_threads(devices) -> None:
    """Forget that earlier threads of these devices failed, or returned; before any of them starts."""
    _sessions.renew(tuple(devices))


def forget() -> None:
    """Forget all sessions of this process, which is about to become one of another run."""
    _sessions.__init__()  # type: ignore[misc]  # it is of this very class
    bootstrap.forget()


def _regions(place: world.Rank) -> dict[str, Region]:
    """Return the regions that the replicas of this host share."""
    if place.processes == 1:
        regions = {lane: Region.of_threads(place.replicas) for lane in (PROGRAMS, HOST)}
        regions[PROGRAMS].one_shot_sums = SymmetricMemory.of_threads(place.replicas)
        return regions
    folder, here = folder_of_host(place.processes), _replicas_here(place)
    regions = {
        lane: Region.of_processes(
            here, os.path.join(folder, f"{lane}-{host(place.processes)}-{here}")
        )
        for lane in (PROGRAMS, HOST)
    }
    if _hosts(place) == 1:
        path = os.path.join(folder, f"symmetric-{here}")
        region = regions[PROGRAMS]
        region.one_shot_sums = SymmetricMemory.of_processes(here, region, path)
    return regions


def _replicas_here(place: world.Rank) -> int:
    return processes_per_host(place.processes) * max(len(place.devices), 1)


def _communicator(lane: str, region: Region, place: world.Rank) -> Communicator:
    if _hosts(place) == 1:
        kind = ThreadsWire if place.processes == 1 else SharedMemoryWire
        wire: Any = kind(region, place.ordinal)
        board: Any = StatusBoard(region, place.ordinal)
        process_of = _process_said(max(len(place.devices), 1))
        _log_once(f"{place.replicas} replicas exchange through shared memory")
    else:
        first = place.ordinal // region.replicas * region.replicas
        reached = dist.PrefixStore(f"{lane}-{place.replicas}", store(place.processes))
        wire = HostsWire(
            reached, region, place.ordinal - first, first // region.replicas, _hosts(place)
        )
        board = HostsStatusBoard(region, place.ordinal, first, reached, _hosts(place))
        wire.ask = board.ask
        process_of = board.process_of
        _log_once(
            f"{place.replicas} replicas on {_hosts(place)} hosts exchange through shared memory and "
            f"torch.distributed"
        )
    return Communicator(wire, board, process_of)


def _process_said(devices: int) -> Callable[[int], int]:
    return lambda peer: process_said(peer // devices)


def _hosts(place: world.Rank) -> int:
    return place.replicas // _replicas_here(place)


@functools.cache
def _log_once(text: str) -> None:
    _log.info("%s (LTC_TRANSPORT=%s)", text, config.value("LTC_TRANSPORT"))


os.register_at_fork(after_in_child=forget)
leave_out_after(PeerFailure, RankFailed)  # the launcher waits for this end, and others may


# --- Messages between threads of one process: the receiver reads the sender's own memory ---------

# Of a message that is copied: whatever takes one hop, as its result may be written where it lies.
SMALL_BYTES = one_hop_bytes(2, HOP_BYTES)
_ANY_BYTES = 1 << 40  # a message is never cut: nothing is copied on its way


class ThreadsWire:
    """A wire among the threads that share a region, which counts what they have sent and taken.

    A small message is copied, so that its sender need not wait until it is taken.
    """

    hop_bytes = HOP_BYTES

    def __init__(self, region: Region, replica: int) -> None:
        self.region, self.replica, self.replicas = region, replica, region.replicas
        self.message_bytes = _ANY_BYTES
        self._waiter = Waiter(region, replica)
        self._out = [region.mailbox(replica, peer) for peer in range(self.replicas)]
        self._in = [region.mailbox(peer, replica) for peer in range(self.replicas)]
        # counters and messages survive in the region: a wire made anew goes on where the old one was
        self._sent = [region.words[mailbox // 8] for mailbox in self._out]
        self._received = [region.words[(mailbox + LINE) // 8] for mailbox in self._in]
        self._to_be_read: set[int] = set()  # receivers that may still read memory of this replica

    @property
    def late(self):
        return self._waiter.late

    @late.setter
    def late(self, late) -> None:
        self._waiter.late = late

    def share(self, flat: torch.Tensor, copies: bool = True) -> Share:
        is_small = flat.nbytes <= SMALL_BYTES
        return Share(flat.clone() if is_small else flat, is_copy=is_small)

    def send(self, receiver: int, part: torch.Tensor, tag: int, share: Share | None = None) -> None:
        mailbox = self._out[receiver]
        if share is None or not share.is_copy:
            if part.nbytes <= SMALL_BYTES:
                part = part.clone()
            else:
                self._to_be_read.add(receiver)
        self._messages(mailbox).append((tag, part))
        self._sent[receiver] += 1
        self.region.store(mailbox, self._sent[receiver])

    def take(self, sender: int, like: torch.Tensor, tag: int, fills: bool = False) -> torch.Tensor:
        mailbox = self._in[sender]
        self._received[sender] += 1
        self._waiter.wait_at_least(mailbox, self._received[sender], sender)
        found, part = self._messages(mailbox).popleft()
        if found != tag or part.nbytes != like.nbytes:
            raise Mismatch(sender, found)
        return part.view(like.dtype)

    def give_back(self, sender: int) -> None:
        self.region.store(self._in[sender] + LINE, self._received[sender])

    def finish(self) -> None:
        for receiver in self._to_be_read:
            taken = self._out[receiver] + LINE
            self._waiter.wait_at_least(taken, self._sent[receiver], receiver)
        self._to_be_read.clear()

    def _messages(self, mailbox: int) -> deque:
        return self.region.thread_messages.setdefault(mailbox, deque())
