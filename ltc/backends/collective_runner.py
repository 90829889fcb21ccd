"""The meeting point of a running program and the replicas it exchanges with.

The layer that knows them fills `RUNNER`. The launcher of a program with collectives names the
replica for which it runs (`running_as`), and a backend calls `start` and `wait` for its two nodes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ltc.errors import PeerFailure
from ltc.ir.collective import Collective
from ltc.ir.tensor_type import TensorType

Exchanges = tuple[tuple[Collective, Sequence[TensorType]], ...]


class Place(Protocol):
    """The place of a replica among all.

    Attributes:
        process, processes: Its process's number, and the number of processes.
        devices: Indices of the devices replicated in each process; () for one replica.
        position: The position of the replica's device among them.
    """

    @property
    def process(self) -> int: ...

    @property
    def processes(self) -> int: ...

    @property
    def devices(self) -> tuple[int, ...]: ...

    @property
    def position(self) -> int: ...

    def __hash__(self) -> int: ...


@dataclass(frozen=True)
class ProgramOfReplicas:
    """The facts of a program whose exchanges may be part of it, compared before replicas launch it.

    Attributes:
        name: Sixteen bytes, equal on replicas whose programs are.
        exchanges: The exchanges of all replicas in their order, and the types of their operands.
        is_compiled: Tells whether it can be launched.
        compile: Makes it so.
    """

    name: bytes
    exchanges: Exchanges
    is_compiled: Callable[[], bool] = lambda: True
    compile: Callable[[], object] = lambda: None


class CollectiveRunner(Protocol):
    """The interface that ltc.distributed.collectives provides."""

    def place(self, replica: Any) -> Place:
        """The place of a replica."""

    def agree(self, replica: Any, program: ProgramOfReplicas) -> bool:
        """Return True if all replicas come with this program, and have compiled it.

        It waits for them. Once it was False it is, without a wait: until threads are started anew.
        It raises PeerFailure where the exchanges of their programs differ.
        """

    def current(self) -> Any:
        """The replica that the calling thread is."""

    def start(self, replica: Any, collective: Collective, operands: list[torch.Tensor]) -> int:
        """Begin an exchange; its number. The operands may be read until `wait` returns."""

    def wait(self, replica: Any, number: int) -> Sequence[torch.Tensor]:
        """The results of an exchange, new tensors; raises its error."""

    def begin(self, replica: Any, sums: Any) -> list[int]:
        """Return the words that llvm/ops/one_shot_sync.py reads in the frame of a program about to
        run.

        Args:
            sums: A PlannedSums of backends/llvm/program_plan.py, the same for each run of a
                program.
        """

    def wait_for_members(self, replica: Any, number: int) -> None:
        """Block until all members have written their operands of that sum; raises their error."""

    def finish(self, replica: Any) -> None:
        """Block until everything begun is over; raises the first error."""

    def lose(self, replica: Any, error: BaseException) -> None:
        """Raise PeerFailure if an error of the devices' own exchange is another replica's end."""

    def abort(self, replica: Any, error: BaseException) -> None:
        """Tell the other replicas that this one will not take part any more."""


class ServiceOfFirst(Protocol):
    """A service of a backend that the run's first process has for all of them."""

    def address(self, processes: int) -> str:
        """The host and port that it has chosen; raises NowhereToMeet where there is no way to ask."""

    def wait_for_others(self, processes: int) -> None:
        """Say that this process ends; the first one waits for the others, if they can come."""


RUNNER: list[CollectiveRunner] = []
SERVICE: list[ServiceOfFirst] = []
# What backends do once a replica has failed: others may wait in an exchange of the devices' own.
ENDS: list[Callable[[], object]] = []


class _ReplicaOfThread(threading.local):
    replica: Any = None
    program: ProgramOfReplicas | None = None  # that is to be compared before its first exchange


_thread = _ReplicaOfThread()


def current_replica() -> Any:
    """Return the replica as which the calling thread launches collectives; None if it is not known."""
    return RUNNER[0].current() if RUNNER else None


def current_place() -> Place | None:
    """Return the place of the calling thread; None if there is no other replica."""
    return RUNNER[0].place(RUNNER[0].current()) if RUNNER else None


def running_place() -> Place:
    """Return the place of the replica as which the calling thread runs a program."""
    return RUNNER[0].place(_thread.replica)


def agree(program: ProgramOfReplicas) -> bool:
    """Return True if all replicas are about to launch this program: see RUNNER."""
    return RUNNER[0].agree(_thread.replica, program)


def as_told(error: Exception) -> Exception:
    """PeerFailure for an error of the devices' own exchange by another replica's end; others as they are.

    The caller is a replica's thread, or runs a program as one.
    """
    if not RUNNER:
        return error
    try:
        RUNNER[0].lose(_thread.replica or RUNNER[0].current(), error)
    except PeerFailure as told:
        _end_exchanges()
        told.__cause__ = error
        return told
    return error


def _end_exchanges() -> None:
    """End the devices' own exchanges: a replica that waits in one then looks for the report."""
    for end in ENDS:
        end()


@contextmanager
def running_as(replica: Any) -> Iterator[None]:
    """Collectives started inside the block are this replica's; at its end all are over.

    Where the block raises, the other replicas are told.
    """
    before, _thread.replica = _thread.replica, replica
    try:
        yield
        RUNNER[0].finish(replica)
    except BaseException as error:
        abort(replica, error)
        raise
    finally:
        _thread.replica = before


def abort(replica: Any, error: BaseException) -> None:
    """Tell the other replicas that this one will not take part any more."""
    RUNNER[0].abort(replica, error)
    _end_exchanges()


@contextmanager
def comparing(program: ProgramOfReplicas | None) -> Iterator[None]:
    """Inside the block, the program is compared with the others' before the first exchange of all.

    Not earlier: before it, one replica may send what another one needs to come so far.
    """
    _thread.program = program
    try:
        yield
    finally:
        _thread.program = None


def start(collective: Collective, operands: list[torch.Tensor]) -> torch.Tensor:
    """The token of an exchange that has begun: a 0-dim int64 tensor."""
    program = _thread.program
    if program is not None and collective.is_among_all():
        _thread.program = None
        agree(program)
    return torch.tensor(RUNNER[0].start(_thread.replica, collective, operands), device="cpu")


def begin(sums: Any) -> list[int]:
    """The frame's words for the sums of a program that the calling thread is about to run."""
    return RUNNER[0].begin(_thread.replica, sums)


def wait_for_members(number: int) -> None:
    """Return when all members have written their operands of a sum of the running program."""
    RUNNER[0].wait_for_members(_thread.replica, number)


def wait(token: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The results of the exchange that `token` stands for."""
    return tuple(RUNNER[0].wait(_thread.replica, int(token)))
