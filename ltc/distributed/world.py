"""The replicas of the run, and the ordinal of this one.

A replica is one device of one process. World size and ordinal come from the environment that a
launcher sets; inside a replicated thread the ordinal counts the thread's device too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ltc import config
from ltc.device.hooks.names import device_index, kind_of, real_devices, supported_devices
from ltc.device.recording import sync
from ltc.device.recording.tensors import device_of, set_current_device


class _ReplicasOfThread(threading.local):
    replicas: tuple[int, ...] = ()  # indices of the devices replicated with this thread's
    position = 0  # of this thread's device among them


_thread = _ReplicasOfThread()


def set_replication(device, devices: Sequence) -> None:
    """Make `device` the thread's current one and `devices` its replicas; none ends replication.

    Collectives that the thread recorded under its former number are started.
    """
    sync.start_collectives()
    indices = tuple(device_index(d) for d in devices)
    index = device_index(device)
    if indices and index not in indices:
        raise ValueError(f"ltc:{index} is not among the devices to replicate: {list(devices)}")
    _thread.replicas = indices
    _thread.position = indices.index(index) if indices else 0
    set_current_device(device_of(index))


def thread_name() -> str:
    """The calling thread's name where its replica may have other threads; "" for the main one.

    A thread that Python has not made, as one of autograd's, does what the main one waits for.
    """
    name = threading.current_thread().name
    is_alone = bool(_thread.replicas) or name.startswith(("MainThread", "Dummy", "ltc"))
    return "" if is_alone else name


@dataclass(frozen=True)
class Rank:
    """The place of the calling thread among all replicas.

    Attributes:
        process, processes: Its process's number, and the number of processes.
        devices: Indices of the devices replicated in this process; () for one replica.
        position: The position of the thread's device among them.
    """

    process: int
    processes: int
    devices: tuple[int, ...]
    position: int

    @property
    def replicas(self) -> int:
        return self.processes * max(len(self.devices), 1)

    @property
    def ordinal(self) -> int:
        return self.process * max(len(self.devices), 1) + self.position


def replication() -> tuple[tuple[int, ...], int]:
    """The devices replicated with the calling thread's, and its position among them."""
    return _thread.replicas, _thread.position


def place() -> Rank:
    """The calling thread's place; one of one where no launcher and no replication said otherwise."""
    return Rank(
        config.value("XRT_SHARD_ORDINAL"),
        config.value("XRT_SHARD_WORLD_SIZE"),
        _thread.replicas,
        _thread.position,
    )


def replication_devices(local_devices: Sequence[str]) -> list[str]:
    """The real names of the devices to replicate over: every device of the kind, in order.

    Raises:
        RuntimeError: If the given ones are of several kinds, or are not all of their kind.
    """
    real = real_devices(local_devices)
    kinds = {kind_of(name) for name in real}
    if len(kinds) != 1:
        raise RuntimeError(
            f"Cannot replicate across different device types: devices={list(local_devices)}/{real}"
        )
    everyone = real_devices(supported_devices(kinds.pop()) or [])
    if len(real) != len(everyone):
        raise RuntimeError(
            f"Cannot replicate if number of devices ({len(real)}) is different from {len(everyone)}"
        )
    return everyone


def world_size(default: int = 1) -> int:
    """Replicas in all processes; `default` where no launcher said."""
    processes = config.value("XRT_SHARD_WORLD_SIZE", default)
    return processes * max(len(_thread.replicas), 1)


def ordinal(default: int = 0) -> int:
    """This replica's number among all; `default` where no launcher said."""
    process = config.value("XRT_SHARD_ORDINAL", default)
    return process * max(len(_thread.replicas), 1) + _thread.position


def local_ordinal(default: int = 0) -> int:
    """This replica's number on its host; `default` where neither launcher nor thread says."""
    from_launcher = config.value("XRT_SHARD_LOCAL_ORDINAL")
    if from_launcher >= 0:
        return from_launcher * max(len(_thread.replicas), 1) + _thread.position
    return _thread.position if _thread.replicas else default


def is_master(local: bool = True) -> bool:
    """Return True if this is replica 0: of its host, or of all."""
    return (local_ordinal() if local else ordinal()) == 0


_rendezvous: Callable[[str, bytes], list[bytes]] | None = None
_name_of_run: Callable[[], str] | None = None


def install_rendezvous(
    rendezvous: Callable[[str, bytes], list[bytes]], name_of_run: Callable[[], str]
) -> None:
    """Say how replicas wait for each other; the layer that lets them calls this."""
    global _rendezvous, _name_of_run
    _rendezvous, _name_of_run = rendezvous, name_of_run


def meet(tag: str, payload: bytes = b"") -> list[bytes]:
    """Wait until every replica is here; those that do not come are named in the error.

    Returns:
        Each one's payload, in the order of the ordinals.
    """
    if world_size() == 1:
        return [payload]
    assert _rendezvous is not None, "ltc.distributed.rendezvous is not imported"
    return _rendezvous(tag, payload)


def name_of_run() -> str:
    """Twelve hexadecimal digits that the replicas of this run have in common, and no other run has.

    "" for a replica that is alone, and where they have no meeting point. None waits for another.
    """
    if world_size() == 1:
        return ""
    assert _name_of_run is not None, "ltc.distributed.rendezvous is not imported"
    return _name_of_run()
