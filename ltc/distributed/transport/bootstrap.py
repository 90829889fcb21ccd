"""The ways by which a run's processes meet: a store they all reach, and a folder on each host."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import re
import signal
import socket
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from ltc import config
from ltc.distributed.transport.shm_segment import LANES, region_bytes
from ltc.errors import LtcError, NowhereToMeet, PeerFailure
from ltc.support.process.neighbours import is_running, neighbour, own_name
from ltc.support.process.parent_death import end_with_parent
from ltc.support.process.private_folder import (
    private_folder,
    require_from_store,
    require_private,
)
from ltc.support.torch_private import default_store

_POLL_SECONDS = 0.02
_LISTENS_SECONDS = 3.0

_until_exit = contextlib.ExitStack()
atexit.register(_until_exit.close)


def folder_of_host(processes: int) -> str:
    """Return a folder that this host's processes share and no other user may enter.

    It is LTC_RENDEZVOUS where a launcher set that; else the first process of the host makes one,
    which goes when it ends, and tells the others through the store.
    """
    chosen = config.value("LTC_RENDEZVOUS")
    if chosen:
        require_private(chosen)
    return chosen or _folder_through_store(processes)


@functools.cache  # a second folder under the same key would part those who have the first
def _folder_through_store(processes: int) -> str:
    shared = store(processes)
    key = f"folder/{host(processes)}"
    if config.value("XRT_SHARD_ORDINAL") % processes_per_host(processes) == 0:
        nbytes = LANES * region_bytes(processes_per_host(processes))
        shared.set(key, _until_exit.enter_context(private_folder(nbytes)))
    _await(shared, key, processes, host(processes) * processes_per_host(processes), "this host")
    return require_from_store(shared.get(key))


def _await(shared, key: str, processes: int, first: int, of: str) -> None:
    """Wait for the first process, of all or of this host, to say something in the store."""
    limit = config.value("LTC_PEER_TIMEOUT")
    deadline = time.monotonic() + limit
    while not shared.check([key]):
        if time.monotonic() > deadline:
            raise PeerFailure(
                f"Replica {first} is absent: process {first} of {processes}, the first of {of}, "
                f"did not reach the meeting point within {limit:g} s (LTC_PEER_TIMEOUT), where process "
                f"{config.value('XRT_SHARD_ORDINAL')} waits for it."
            )
        time.sleep(_POLL_SECONDS)


# a forked child is another process, which may be given another place
os.register_at_fork(after_in_child=_folder_through_store.cache_clear)


def address_of_first(processes: int) -> str:
    """Return the host and port that the first process has chosen for a service of its own to listen at.

    At the end, `wait_for_others` is to be called.

    Raises:
        NowhereToMeet: If the run has no store.
        PeerFailure: If the first process does not come.
    """
    shared, key = store(processes), f"address of the first of {processes}"
    shared.set(f"process {config.value('XRT_SHARD_ORDINAL')} of {processes}", own_name())
    if config.value("XRT_SHARD_ORDINAL") == 0:
        address = "127.0.0.1" if config.value("LTC_RENDEZVOUS") else config.value("MASTER_ADDR")
        with socket.socket() as free:
            free.bind((address, 0))
            shared.set(key, f"{address}:{free.getsockname()[1]}")
    _await(shared, key, processes, 0, "all")
    _met[:] = [(shared, config.value("XRT_SHARD_ORDINAL"))]
    return shared.get(key).decode()


# The store by which the processes of that service have met, and this one's number among them: at the
# end of a process, neither may be known any more.
_met: list[tuple[dist.Store, int]] = []


def wait_for_others(processes: int, seconds_left: Callable[[], float]) -> None:
    """Say that this process ends; if it is the first one, wait until the others have said so, or are gone.

    Args:
        seconds_left: Called while it waits: how long it may go on.
    """
    with contextlib.suppress(RuntimeError):  # the store is gone with the process that held it
        for shared, own in _met:
            shared.set(f"end of {own} of {processes}", "")
            others = [] if own else [f"{number} of {processes}" for number in range(1, processes)]
            while seconds_left() > 0:
                others = [other for other in others if not _has_ended(shared, other)]
                if not others:
                    break
                time.sleep(_POLL_SECONDS)


def _has_ended(shared: dist.Store, process: str) -> bool:
    """Return True if a process has said so, or was one of this machine and is gone."""
    if shared.check([f"end of {process}"]):
        return True
    known = shared.check([f"process {process}"]) and neighbour(shared.get(f"process {process}"))
    return bool(known) and not is_running(known)


def say_process(folder: str, number: int) -> None:
    """Leave the id of this process, number `number` of its run, where the others of its host see it."""
    Path(folder, f"process-{number}").write_text(str(os.getpid()))


def process_said(number: int) -> int:
    """The id of a process of this host, whether or not it has met anyone; 0 where none is said."""
    folder = config.value("LTC_RENDEZVOUS")
    if not folder:
        return 0
    try:
        return int(Path(folder, f"process-{number}").read_text() or 0)
    except FileNotFoundError:  # it has not begun, or no launcher of ltc's has started it
        return 0


def end_with_torchrun() -> None:
    """A rank of torchrun's gets SIGTERM when that is gone, as where torchrun itself ends it.

    Else it would train on beside those that the next torchrun starts at the same checkpoint.
    """
    if config.value("TORCHELASTIC_USE_AGENT_STORE"):
        end_with_parent(signal.SIGTERM)


def store(processes: int):
    """The torch.distributed store of this run: in its folder, its launcher's, or its default group's.

    Raises:
        NowhereToMeet: If there is none.
    """
    folder = config.value("LTC_RENDEZVOUS")
    if folder:
        require_private(folder)
        return dist.FileStore(os.path.join(folder, "store"), processes)
    end_with_torchrun()
    if dist.is_initialized():
        return dist.PrefixStore(f"ltc/{_world.word}", default_store())
    if config.value("TORCHELASTIC_USE_AGENT_STORE"):
        return _store_of_torchrun(processes)
    raise NowhereToMeet(
        f"This is process {config.value('XRT_SHARD_ORDINAL')} of {processes}, and the processes have "
        f"no meeting point. Start them with ltc.launch, lazy_multiprocessing.spawn or torchrun, "
        f"call torch.distributed.init_process_group first, or set LTC_RENDEZVOUS to a folder that "
        f"all can see."
    )


class _World:
    word = ""  # that no other default group has: one may be made in the store of the one before it


_world = _World()


def name_world(word: str) -> None:
    """Say by which word the processes of a new default group tell it from those before it."""
    _world.word = word


def forget() -> None:
    """Forget the processes that this one has met: it is about to meet others."""
    _folder_through_store.cache_clear()
    name_of_run.cache_clear()


def _store_of_torchrun(processes: int):
    address, port = config.value("MASTER_ADDR"), config.value("MASTER_PORT")
    _check_listens(address, port)
    tcp = dist.TCPStore(
        address,
        port,
        processes,
        False,
        timeout=timedelta(seconds=config.value("LTC_PEER_TIMEOUT")),
    )
    # a restarted worker group must not meet what the one before it left
    attempt = config.value("TORCHELASTIC_RESTART_COUNT")
    return dist.PrefixStore(f"ltc/{attempt}", tcp)


@functools.cache
def name_of_run(processes: int) -> str:
    """Return the name of `world.name_of_run`: the first process at the store draws it, without
    waiting.

    Raises:
        NowhereToMeet: If the run has no store.
    """
    drawn = uuid.uuid4().hex[:12]
    if config.value("TORCHELASTIC_USE_AGENT_STORE") and not config.value("LTC_RENDEZVOUS"):
        shared = _store_of_torchrun(processes)  # some may have a default group already
    else:
        shared = store(processes)
    name = shared.compare_set(f"name of the run of {processes}", "", drawn).decode(errors="replace")
    if re.fullmatch("[0-9a-f]{12}", name) is None:  # it becomes a part of paths
        raise LtcError(
            f"The run's store names the run {name[:40]!r}, which is no name that ltc draws. Any process "
            f"that reaches the store can write to it: keep its port (MASTER_PORT) from other users and "
            f"machines."
        )
    return name


os.register_at_fork(after_in_child=name_of_run.cache_clear)


def _check_listens(address: str, port: int) -> None:
    """Check that torchrun listens: it does so before it starts a rank, unless it has ended
    meanwhile.

    A TCPStore would go on trying to reach it.
    """
    deadline = time.monotonic() + _LISTENS_SECONDS
    while True:
        try:
            socket.create_connection((address, port), _LISTENS_SECONDS).close()
            return
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise LtcError(
                    f"torchrun's store does not answer at {address}:{port}: torchrun has ended. Start it "
                    f"again."
                ) from None
            time.sleep(_POLL_SECONDS)
        except OSError:  # no way to it, or too slow: the store's own error says more
            return


def host(processes: int) -> int:
    """This host's number among those of the run."""
    return config.value("XRT_SHARD_ORDINAL") // processes_per_host(processes)


def processes_per_host(processes: int) -> int:
    """Processes on each host: all of them where no launcher spoke of hosts.

    Raises:
        LtcError: If the hosts have different numbers.
    """
    local = config.value("LOCAL_WORLD_SIZE") or processes
    if config.value("LTC_TRANSPORT") == "memory":
        local = processes
    elif config.value("LTC_TRANSPORT") == "hosts":
        local = 1
    if processes % local:
        raise LtcError(
            f"{processes} processes with {local} on this host: every host must run the same number"
        )
    return local
