"""Compares the calls of a process group's ranks before gloo makes them, and ends waits that cannot end.

gloo compares nothing: of calls with other roots, operations or sizes it waits for ever, computes with
what comes, or ends the process.  So each group that moves CPU tensors has a `GroupCalls`, made with the
group by all its ranks: a log of calls and a board, in shared memory where they share a host, else in the
group's store.
"""

from __future__ import annotations

import functools
import os
import re
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ltc import config
from ltc.device.user_line import user_line
from ltc.distributed.c10d.shared_memory_groups import SharedFiles, shared_files
from ltc.distributed.transport import bootstrap
from ltc.distributed.transport.call_log import LANES, StoreCallLog
from ltc.distributed.transport.communicator import Communicator, tag_of
from ltc.distributed.transport.shm_segment import NAP_SECONDS, Region
from ltc.distributed.transport.status_board import HostsStatusBoard, StatusBoard
from ltc.distributed.transport.wire import LONG_SECONDS, Share, SharedMemoryWire
from ltc.errors import PeerFailure
from ltc.ir.tensor_type import TensorType
from ltc.support.process.neighbours import this_machine
from ltc.support.torch_private import (
    DEVICE_TYPE,
    MATCH_USED_MAP,
    NEW_GROUP,
    WAIT_FOR_WORK,
    ProcessGroup,
    Work,
    backend_of_group,
    group_devices,
    name_custom_backend,
    timeout_of_backend,
)

_NAP = timedelta(seconds=NAP_SECONDS)
_ASK_SECONDS = 0.2  # how often a waiting rank asks the store whether another one reports
_wait_of_torch = WAIT_FOR_WORK.current
# gloo makes these of other calls, and a wait for them heeds no timeout
_WAIT_IN_ONE_CALL = (b"reduce_scatter", b"_reduce_scatter", b"allgather_into_tensor_coalesced")

_of_group: weakref.WeakKeyDictionary[ProcessGroup, GroupCalls] = weakref.WeakKeyDictionary()
_here = threading.local()  # `unchecked`: see is_unchecked
_of_work: weakref.WeakKeyDictionary[Work, tuple[GroupCalls, bytes]] = weakref.WeakKeyDictionary()


def _forget_groups() -> None:
    """A function of ltc's, in which a signal waits: what a hook in Python raises is lost."""
    _of_group.clear()


os.register_at_fork(after_in_child=_forget_groups)


class GroupCalls:
    """The calls of one rank of a group.

    Args:
        ranks: The ranks of the group, as the world counts them.
        communicator: Compares the calls; between ranks that share memory it carries them too.
        in_memory: True if the ranks share memory.
    """

    def __init__(
        self, ranks: Sequence[int], communicator: Communicator, in_memory: bool, backend: Any
    ) -> None:
        self.ranks, self.communicator, self.in_memory = ranks, communicator, in_memory
        self.backend = backend
        self.members = tuple(range(len(ranks)))
        self.turn = threading.Lock()
        self._asked = 0.0

    def described(self, text: str, line: str = "") -> tuple[bytes, int]:
        """The line for the board, and the number that all ranks must agree on."""
        shown = f"{text} in the group of ranks {list(self.ranks)} at {line or user_line()}"
        return shown.encode(), tag_of(text)

    def run(self, described: tuple[bytes, int], begin: Callable[[], Any], lane: int = 0) -> Any:
        """Make a call that all ranks make: `begin` gives the works to wait for, and the result.

        Args:
            lane: The lane of the calling thread; 0 for recorded calls, which have one order.
        """

        def exchange(*_) -> Any:
            works, result = begin()
            for work in works:
                self.wait(work, described[0])
            return result

        return self.communicator.guarded(self.members, described, exchange, lane=lane)

    def begin(self, described: tuple[bytes, int], call: Callable[[], Work]) -> Work:
        """Make a call whose work the caller waits for."""
        self.communicator.announce(self.members, described, lane_of_thread())
        work = call()
        if isinstance(work, Work):
            _of_work[work] = self, described[0]
        return work

    def wait(self, work: Any, text: bytes) -> None:
        """Wait for a work of gloo; raises PeerFailure where a rank will not come.

        Args:
            text: The line for the board.
        """
        if text.startswith(_WAIT_IN_ONE_CALL):
            self.await_call(lambda: _wait_of_torch(work))
            return
        started = time.monotonic()
        while not work.is_completed():
            try:
                _wait_of_torch(work, _NAP)
                return
            except RuntimeError:
                if not work.is_completed():  # the nap is over, not the work
                    self.watch(time.monotonic() - started)
        _wait_of_torch(work)

    def await_call(self, call: Callable[[], Any], peer: int = -1) -> Any:
        """The result of a call that blocks, made in a thread; raises as `wait`.

        Args:
            peer: The rank for which it waits; -1 for all of them.
        """
        return self.await_future(in_thread(call), peer)

    def await_future(self, future: Future, peer: int = -1) -> Any:
        started = time.monotonic()
        while True:
            try:
                return future.result(NAP_SECONDS)
            except NotYet:
                if future.done():
                    raise
                self.watch(time.monotonic() - started, peer)
            except RuntimeError:  # of gloo, whose timeout may end a moment before this one
                self.watch(time.monotonic() - started, peer)
                raise

    def watch(self, waited_seconds: float, peer: int = -1) -> None:
        """Called now and then while this rank waits: hears of the others, and has them hear of it."""
        communicator, now = self.communicator, time.monotonic()
        if now - self._asked > _ASK_SECONDS:
            self._asked = now
            communicator.board.ask()
        if waited_seconds >= LONG_SECONDS:
            communicator.late(peer, waited_seconds)
        communicator.board.region.raise_abort_report()

    def run_with(
        self, ranks: Sequence[int], described: tuple[bytes, int], call: Callable[[], Any]
    ) -> Any:
        """The result of a call that blocks, once the members of these numbers have come to the same."""
        communicator, started = self.communicator, time.monotonic()
        log = communicator.calls
        assert log is not None

        def exchange(*_) -> Any:
            while not set(log.absent(communicator.numbers[0])).isdisjoint(ranks):
                self.watch(time.monotonic() - started)
                time.sleep(0.001)
            return self.await_call(call) if ranks else call()

        return communicator.guarded(self.members, described, exchange)


def of(group: ProcessGroup) -> GroupCalls | None:
    """The calls of a group; None for a single rank, and where gloo carries nothing."""
    return _of_group.get(group)


def forget(group: Any) -> None:
    """Drop what belongs to a group that ends; with None or the first one all groups end."""
    if group is None or group is dist.group.WORLD:
        _of_group.clear()
    elif isinstance(group, ProcessGroup):
        _of_group.pop(group, None)


def is_unchecked() -> bool:
    """True in a call that the other ranks make in C++: of the used map, by a rank that has joined."""
    return bool(getattr(_here, "unchecked", False))


def wait_for_checked(work: Work) -> bool:
    """Wait for a work if it is that of a checked call; whether it is."""
    found = _of_work.get(work)
    if found is None:
        return False
    calls, text = found
    communicator = calls.communicator
    communicator.show(text, 0)
    try:
        calls.wait(work, text)
    except RuntimeError as error:
        communicator.lose(error)
        raise
    finally:
        communicator.board.end()
    _of_work.pop(work, None)  # one that failed would raise again
    return True


def in_thread(call: Callable[[], Any]) -> Future:
    """The future of a call that blocks; its thread does not keep the process."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # raised to whoever waits
            future.set_exception(error)

    threading.Thread(target=run, name="ltc group call", daemon=True).start()
    return future


def lane_of_thread() -> int:
    """The lane of the log for what the calling thread does at once: that of threads of its name.

    Threads that Python has not made, as autograd's, do what the main one waits for.
    """
    name = threading.current_thread().name
    if name.startswith(("MainThread", "Dummy", "ltc")):
        return 0
    return 1 + tag_of(re.sub(r"[\d_-]+", "", name)) % (LANES - 1)


def types_of(tensors: Sequence[torch.Tensor]) -> str:
    """The types of tensors as a description has them: gloo looks at elements, not at shapes."""
    return ", ".join(str(TensorType(x.dtype, (x.numel(),))) for x in tensors)


# --- made with the group ------------------------------------------------------------------------


def install() -> None:
    """Compare the calls that make a group of some ranks, too.  Once per process."""
    new_group = NEW_GROUP.current

    @functools.wraps(new_group)
    def _new_group_with_tag(ranks=None, *args, use_local_synchronization=False, **kwargs):
        kwargs["use_local_synchronization"] = use_local_synchronization
        make_it = functools.partial(new_group, ranks, *args, **kwargs)
        world = _of_group.get(dist.group.WORLD) if dist.is_initialized() else None
        members = _members_of(world, ranks)
        if world is None or use_local_synchronization or members is None:
            return make_it()
        is_member = world.communicator.replica in members
        described = world.described(f"new_group {members}")
        return world.run_with(members if is_member else (), described, make_it)

    match = MATCH_USED_MAP.current

    @functools.wraps(match)
    def _match_unused_params_allreduce(model):
        _here.unchecked = True
        try:
            return match(model)
        finally:
            _here.unchecked = False

    MATCH_USED_MAP.replace(_match_unused_params_allreduce)
    NEW_GROUP.replace(_new_group_with_tag)


def new_process_group(original, *args, **kwargs):
    """Make a group with its `GroupCalls`: what torch calls for each group, the default one too."""
    group, store = original(*args, **kwargs)
    if isinstance(group, ProcessGroup) and args[3] == dist.Backend.UNDEFINED:
        _name_backend(group)
    if isinstance(group, ProcessGroup) and store is not None and group not in _of_group:
        calls, word = _made(group, store, list(args[2]) or list(range(group.size())))
        if calls is not None:
            _of_group[group] = calls
        if not args[2]:
            bootstrap.name_world(word)
    return group, store


def _name_backend(group: ProcessGroup) -> None:
    """Let a group that was made without a backend's name know that its backend is ltc's."""
    if any(device.type == DEVICE_TYPE for device in group_devices(group)):
        name_custom_backend(group)


def _members_of(world: GroupCalls | None, ranks: Sequence[int] | None) -> list[int] | None:
    """The ranks of a new group; None where torch's own error tells what is wrong with them.

    gloo connects those that it is told of: where ranks are told otherwise, it waits for ever.
    """
    if world is None or ranks is None:
        return None if world is None else list(world.ranks)
    is_right = set(ranks) <= set(world.ranks) and len(set(ranks)) == len(ranks)
    return sorted(ranks) if is_right else None


def _made(group: ProcessGroup, store: Any, ranks: list[int]) -> tuple[GroupCalls | None, str]:
    """The calls of a new group, and a word that no other group has."""
    backend = _gloo_of(group)
    rank, size = group.rank(), group.size()
    if backend is None or size == 1:
        return None, ""
    limit = _given_seconds(backend)
    files, token = _Setup(backend, rank, size, limit).agree()
    if files is not None:
        region = files.region
        communicator = Communicator(
            SharedMemoryWire(region, rank), StatusBoard(region, rank, names=ranks)
        )
        communicator.calls = files.calls
    else:
        own = dist.PrefixStore(f"ltc/{token}", store)
        region = Region.of_threads(1)
        board = HostsStatusBoard(region, rank, rank, own, size, names=ranks)
        communicator = Communicator(_NoWire(rank, size), board, board.process_of)
        communicator.calls = StoreCallLog(own, rank, size)
    communicator.limit_seconds = limit
    return GroupCalls(ranks, communicator, files is not None, backend), token


_BY_GLOO = "gloo carries the messages of this group"


class _NoWire:
    """The wire of a group whose messages gloo carries."""

    message_bytes = hop_bytes = 0

    def __init__(self, replica: int, replicas: int) -> None:
        self.replica, self.replicas = replica, replicas
        self.late: Callable[[int, float], None] = lambda peer, waited: None

    def share(self, flat: torch.Tensor, copies: bool = True) -> Share:
        raise AssertionError(_BY_GLOO)

    def send(self, receiver: int, part: torch.Tensor, tag: int, share: Share | None = None) -> None:
        raise AssertionError(_BY_GLOO)

    def take(self, sender: int, like: torch.Tensor, tag: int, fills: bool = False) -> torch.Tensor:
        raise AssertionError(_BY_GLOO)

    def give_back(self, sender: int) -> None:
        raise AssertionError(_BY_GLOO)

    def finish(self) -> None:
        """gloo's works have been waited for."""


def _gloo_of(group: ProcessGroup) -> Any:
    """Return the group's backend for CPU tensors, if that is gloo; else None."""
    kinds = {device.type for device in group_devices(group)}
    kind = next((kind for kind in ("cpu", DEVICE_TYPE) if kind in kinds), None)
    backend = None if kind is None else backend_of_group(group, kind)
    return backend if isinstance(backend, dist.ProcessGroupGloo) else None


def _given_seconds(backend: Any) -> float | None:
    """Return the group's timeout in seconds; None if it is torch's default."""
    given = timeout_of_backend(backend)
    return None if given in (None, dist.default_pg_timeout) else given.total_seconds()


class _Setup:
    """Let the ranks of a new group agree, over its own connections.

    Names would not do: torch numbers groups anew when the world has ended, and ranks that were in
    other groups before count otherwise.
    """

    def __init__(self, backend: Any, rank: int, size: int, limit: float | None) -> None:
        self.backend, self.rank, self.size = backend, rank, size
        self.limit = config.value("LTC_PEER_TIMEOUT") if limit is None else limit

    def agree(self) -> tuple[SharedFiles | None, str]:
        """Return the memory that the ranks share, None if they cannot, and a word that no other
        group has.
        """
        with shared_files(self.rank, self.size, self._broadcast) as (token, open_files):
            wanted = config.value("LTC_TRANSPORT") != "hosts"
            files = open_files() if wanted else None
            facts = torch.tensor([files is not None, this_machine()], device="cpu")
            everyone = torch.empty(self.size, 2, dtype=torch.int64, device="cpu")
            self._wait(self.backend.allgather([list(everyone)], [facts]))
        is_here = everyone[:, 1] == this_machine()
        return files if bool(everyone[:, 0].all() and is_here.all()) else None, token

    def _broadcast(self, content: torch.Tensor) -> None:
        self._wait(self.backend.broadcast([content], dist.BroadcastOptions()))

    def _wait(self, work: Any) -> None:
        started = time.monotonic()
        while not work.is_completed():
            try:
                _wait_of_torch(work, _NAP)
                return
            except RuntimeError:
                if time.monotonic() - started > self.limit and not work.is_completed():
                    raise PeerFailure(
                        f"A rank of the {self.size} of a process group did not create it within "
                        f"{self.limit:g} s; rank {self.rank} waits for that."
                    ) from None
        _wait_of_torch(work)
