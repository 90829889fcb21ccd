"""Training with one process per replica: `spawn`, and what its functions need from one another."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import nn

from ltc import config
from ltc.distributed import world
from ltc.distributed.launch.child import finish
from ltc.distributed.launch.error_file import error_recorded
from ltc.distributed.launch.parent import Ranks, peers_watched
from ltc.distributed.mesh import values_of_all
from ltc.distributed.transport.bootstrap import end_with_torchrun
from ltc.errors import RankFailed
from ltc.tracebacks import make_entrances

__all__ = ["MpModelWrapper", "MpSerialExecutor", "RankFailed", "Ranks", "launch", "spawn"]

_log = logging.getLogger(__name__)


def spawn(
    fn: Callable,
    args: tuple = (),
    nprocs: int | None = None,
    join: bool = True,
    daemon: bool = False,
    start_method: str = "spawn",
) -> list | Ranks:
    """Run `fn(rank, *args)` in `nprocs` new processes and return the results in order of rank.

    The cores are shared out among the processes, unless OMP_NUM_THREADS is set. The memory of CPU
    tensors in `args` is shared, not copied. In a process that a launcher has started (torchrun, or
    this function) `fn` runs right there, with the rank it has, and `nprocs` has no say.

    No process is left then. Raises ValueError for less than one process, RuntimeError where a
    script calls it while the processes that it has started import it; PeerFailure where `fn` runs
    right there, and another process does not call this.

    Args:
        nprocs: None: LTC_NUM_DEVICES processes of one device each. 1 runs `fn` in this process.
        join: False: return the Ranks at once; their `join()` gives the values.
        daemon: The processes are daemons of multiprocessing: they can start none of their own.
        start_method: "spawn", "fork" or "forkserver".

    Raises:
        RankFailed: Within seconds, when a process ends in any other way than by returning: with the
            rank, the cause, its traceback, and where the other ranks were.

    Example:
        >>> from ltc.distributed.lazy_multiprocessing import spawn
        >>> def replica(rank, base):
        ...     return base + rank, ltm.xrt_world_size()
        >>> spawn(replica, args=(10,), nprocs=2, start_method="fork")
        [(10, 2), (11, 2)]
    """
    _refuse_while_imported()
    if world_is_given():
        return _run_as_given(fn, args, nprocs)
    count = _count(nprocs)
    if count == 1 and join:
        return _run_alone(fn, args)
    # A thread other than the main one may end while its ranks go on.
    bound = join or threading.current_thread() is threading.main_thread()
    ranks = Ranks(
        fn,
        args,
        count,
        start_method=start_method,
        daemon=daemon,
        devices=1 if nprocs is None else None,
        dies_with_thread=bound,
    )
    return ranks.join() if join else ranks


def launch(
    fn: Callable, args: tuple = (), nprocs: int | None = None, start_method: str = "spawn"
) -> list:
    """Spawn processes, and put the rank before each line that they print.

    Raises what `spawn` raises: RankFailed when a process ends in any other way than by returning,
    ValueError for less than one, RuntimeError where it is called while its script is imported.

    Args:
        fn: The function, as for `spawn`; so are the others.
        args: Its arguments behind the rank.
        nprocs: The number of processes; None: one for each device.
        start_method: "spawn" or "fork".

    Returns:
        The values that `fn(rank, *args)` returns, in order of rank.

    Example:
        >>> ltc.launch(lambda rank: ltm.get_ordinal(), nprocs=1)
        [0]
    """
    _refuse_while_imported()
    if world_is_given():
        return _run_as_given(fn, args, nprocs)
    count = _count(nprocs)
    if count == 1:
        return _run_alone(fn, args)
    return Ranks(
        fn,
        args,
        count,
        start_method=start_method,
        devices=1 if nprocs is None else None,
        prefixed=True,
    ).join()


def world_is_given() -> bool:
    """Return True if a launcher has made this process one rank of a world."""
    return config.value("XRT_SHARD_LOCAL_ORDINAL") >= 0


def _refuse_while_imported() -> None:
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "spawn() was called while its script was imported by the processes that it had started. "
            "Put the call below `if __name__ == '__main__':`."
        )


def _count(nprocs: int | None) -> int:
    count = (config.value("LTC_NUM_DEVICES") or 1) if nprocs is None else nprocs
    if count < 1:
        raise ValueError(f"nprocs={nprocs} must be at least 1.")
    return count


def _run_alone(fn: Callable, args: tuple) -> list:
    with config.override(XRT_SHARD_WORLD_SIZE=1, XRT_SHARD_ORDINAL=0, XRT_SHARD_LOCAL_ORDINAL=0):
        value = fn(0, *args)
        finish()
    return [value]


def _run_as_given(fn: Callable, args: tuple, nprocs: int | None) -> list:
    """The values of all ranks, where each of them is a process that calls this."""
    if nprocs not in (None, world.world_size()) and world.is_master():
        _log.warning(
            "spawn(nprocs=%s) runs in a world of %s ranks that a launcher has made: nprocs is "
            "ignored.",
            nprocs,
            world.world_size(),
        )
    end_with_torchrun()  # before anything waits for the other ranks
    with peers_watched(), error_recorded():
        value = fn(world.ordinal(), *args)
        finish()
    return values_of_all("ltc.spawn.values", value)


class MpSerialExecutor:
    """Lets the processes of a launch do something one after another.

    One that is made before the launch, or by every rank in the same order, is the same for all.

    Example:
        >>> from ltc.distributed.lazy_multiprocessing import MpSerialExecutor
        >>> MpSerialExecutor().run(lambda: "downloaded, and the next rank finds it there")
        'downloaded, and the next rank finds it there'
    """

    _made = itertools.count()

    def __init__(self) -> None:
        who = "rank" if world_is_given() else f"launcher-{os.getpid()}"
        self._name = f"serial-{who}-{next(self._made)}"

    def run(self, fn: Callable[[], Any]) -> Any:
        """Return the result of `fn()`, called while no other rank is in this executor's `run`."""
        with self._turn():
            return fn()

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        folder = config.value("LTC_RENDEZVOUS")
        if not folder:  # a world of one process
            yield
            return
        with open(Path(folder, self._name), "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # the kernel unlocks it when the process dies
            yield


class MpModelWrapper:
    """A model that all ranks begin from: its CPU memory is shared between them.

    Made before the launch, and passed to the ranks' function, or inherited by fork.

    Example:
        >>> from ltc.distributed.lazy_multiprocessing import MpModelWrapper
        >>> wrapped = MpModelWrapper(torch.nn.Linear(2, 1))
        >>> wrapped.to("ltc").weight.device
        device(type='ltc', index=0)
    """

    def __init__(self, model: nn.Module):
        self._model, self._executor = model, MpSerialExecutor()

    def to(self, device) -> nn.Module:
        """The model on the device; ranks go one after another, so that copies do not pile up."""
        return self._executor.run(lambda: self._model.to(device))


make_entrances(globals(), __all__)
