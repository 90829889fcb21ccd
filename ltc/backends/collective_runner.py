"""Where a running program meets the replicas it exchanges with.

The layer that knows them fills `RUNNER`; whoever launches a program with collectives says for which
replica it runs (`running_as`), and a backend calls `start` and `wait` for its two nodes.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from ltc.ir.collective import Collective


class CollectiveRunner(Protocol):
    """What ltc.distributed.collectives provides."""

    def current(self) -> Any:
        """The replica that the calling thread is."""

    def start(self, replica: Any, collective: Collective, operands: list[torch.Tensor]) -> int:
        """Begin an exchange; its number. The operands may be read until `wait` returns."""

    def wait(self, replica: Any, number: int) -> Sequence[torch.Tensor]:
        """The results of an exchange, new tensors; raises its error."""

    def begin(self, replica: Any, sums: Any) -> list[int]:
        """What llvm/ops/one_shot_sync.py reads in the frame of a program that is about to run.

        sums  a PlannedSums of backends/llvm/one_shot_buffers.py, the same for each run of a program
        """

    def wait_for_members(self, replica: Any, number: int) -> None:
        """Block until all members have written their operands of that sum; raises their error."""

    def finish(self, replica: Any) -> None:
        """Block until everything begun is over; raises the first error."""

    def abort(self, replica: Any, error: BaseException) -> None:
        """Tell the other replicas that this one will not take part any more."""


RUNNER: list[CollectiveRunner] = []


class _ReplicaOfThread(threading.local):
    replica: Any = None


_thread = _ReplicaOfThread()


def current_replica() -> Any:
    """Who the calling thread is to the collectives it launches; None where nobody can say."""
    return RUNNER[0].current() if RUNNER else None


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
        RUNNER[0].abort(replica, error)
        raise
    finally:
        _thread.replica = before


def abort(replica: Any, error: BaseException) -> None:
    """Tell the other replicas that this one will not take part any more."""
    RUNNER[0].abort(replica, error)


def start(collective: Collective, operands: list[torch.Tensor]) -> torch.Tensor:
    """The token of an exchange that has begun: a 0-dim int64 tensor."""
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
