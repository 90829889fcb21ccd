"""The calling thread's connection to all other replicas, made when it is first needed."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import traceback
import uuid
from collections.abc import Callable, Iterator
from typing import Any

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
from ltc.distributed.transport.communicator import Communicator
from ltc.distributed.transport.inter_host import HostsWire
from ltc.distributed.transport.shm_segment import PeerFailure, Region, SymmetricMemory
from ltc.distributed.transport.status_board import HostsStatusBoard, StatusBoard
from ltc.distributed.transport.symmetric_memory import OneShotReducer
from ltc.distributed.transport.thread_wire import ThreadsWire
from ltc.distributed.transport.wire import SharedMemoryWire
from ltc.errors import NowhereToMeet

# Programs run behind their caller, so what they exchange and what the caller exchanges at once
# would mix differently on every replica: each has a region of its own.
_log = logging.getLogger("ltc")
PROGRAMS, HOST = "programs", "host"


class Session:
    """One replica's two communicators: of the collectives in programs, and of those at once."""

    def __init__(
        self, communicators: dict[str, Communicator], ordinal: int, memory: SymmetricMemory | None
    ) -> None:
        """`memory`: that the replicas share, where one host has them all."""
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
    """What `world.name_of_run` says where there are several replicas."""
    place = world.place()
    if place.processes == 1:
        return _sessions.name_of_threads(place.devices)
    with contextlib.suppress(NowhereToMeet):  # each of them is told to do its part by itself
        return bootstrap.name_of_run(place.processes)
    return ""


def any_in_use() -> bool:
    """Whether this process has exchanged anything with other replicas."""
    return bool(_sessions.sessions)


def flush() -> None:
    """Return when all that this process has sent to other hosts has left it."""
    for session in list(_sessions.sessions.values()):
        for communicator in (session.programs, session.host):
            if isinstance(communicator.wire, HostsWire):
                communicator.wire.flush()


def abort_threads(error: BaseException) -> None:
    """Have every replica that is a thread of this process, and waits for another, raise.

    The text of what is raised is the error's. For whoever runs the threads, when one has failed.
    """
    _sessions.abort_threads("".join(traceback.format_exception_only(error)).strip())


def say_returned() -> None:
    """Tell the threads that wait for the calling one that it comes to no collective any more.

    What it began is over by now. Who waits for a process hears of it from whoever started that.
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
    """What the replicas of this host share."""
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
