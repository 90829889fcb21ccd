"""ltm's steps: their end, the optimizer's step, closures that run after them, and files."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ltc import config
from ltc.checkpointing import checked_archive
from ltc.checkpointing.saving import save_for_cpu
from ltc.device.recording import sync
from ltc.device.recording.tensors import current_device, device_of
from ltc.distributed import collectives, world
from ltc.distributed.collectives import Groups
from ltc.tracebacks import make_entrances
from ltc.training_loop import steps, transfer

__all__ = [
    "RateTracker",
    "add_step_closure",
    "load",
    "mark_step",
    "optimizer_step",
    "reduce_gradients",
    "save",
    "unlazy",
    "wait_device_ops",
]


def mark_step(device=None, wait: bool = False) -> None:
    """End a step: everything recorded so far becomes one program, which is started.

    Raises the error of a step that failed since the last mark: this one, if it ran at once, or an
    earlier one; and what a step closure raises. RuntimeError where there is no such device.

    Args:
        device: The thread's current one where None.
        wait: Return only when it has run; LTC_SYNC_WAIT=1 does so for every step.

    Example:
        >>> x = torch.ones(3, device="ltc") + 1
        >>> ltm.mark_step(wait=True)
        >>> x.tolist()
        [2.0, 2.0, 2.0]
    """
    steps.mark(None if device is None else device_of(device), wait)


def reduce_gradients(
    optimizer: torch.optim.Optimizer,
    groups: Groups = None,
    pin_layout: bool = True,
    reduce: str = "mean",
) -> None:
    """Every gradient of the optimizer's parameters becomes its mean over the replicas, in place.

    The gradients travel in buckets of ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB, those of the last
    parameters first, while the rest of the backward still runs. One replica: nothing is done.

    Args:
        groups: Lists of ordinals that average among themselves, each replica in exactly one, all of
            one size; None: all together. The mean is over the replica's own group.
        reduce: "mean", or "sum", which leaves out the division.
        pin_layout: Ignored: tensors have one layout here.

    Raises:
        ValueError: For another `reduce`, or groups that do not name each replica once.
        AssertionError: If groups differ in size.
        PeerFailure: In the step, if replicas disagree.

    Example:
        >>> def replica(rank):
        ...     w = torch.ones(2, device="ltc", requires_grad=True)
        ...     (w * (rank + 1)).sum().backward()
        ...     ltm.reduce_gradients(torch.optim.SGD([w], lr=0.1))
        ...     return w.grad.tolist()
        >>> from ltc.distributed.lazy_multiprocessing import spawn
        >>> spawn(replica, nprocs=2, start_method="fork")
        [[1.5, 1.5], [1.5, 1.5]]
    """
    collectives.reduce_gradients(optimizer, groups, reduce)


def optimizer_step(
    optimizer: torch.optim.Optimizer,
    barrier: bool = False,
    optimizer_args: dict | None = None,
    groups: Groups = None,
    pin_layout: bool = True,
    reduce: str = "mean",
) -> Any:
    """Average the gradients over the replicas, `optimizer.step(**optimizer_args)`, end the step.

    Raises what `reduce_gradients` and `mark_step` raise.

    Args:
        barrier: True to end the step here; a device loader ends it at its next batch.
        groups: Groups of ordinals to average among; None: all. One replica averages nothing.
        reduce: "mean": k replicas with a mean loss over b samples each train as one does with a
            mean loss over k * b; "sum": the same for losses that are sums.

    Returns:
        The result of `optimizer.step`.

    Example:
        >>> w = torch.ones(2, device="ltc", requires_grad=True)
        >>> optimizer = torch.optim.SGD([w], lr=0.5)
        >>> w.sum().backward()
        >>> ltm.optimizer_step(optimizer, barrier=True)
        >>> w.tolist()
        [0.5, 0.5]
    """
    reduce_gradients(optimizer, groups, pin_layout, reduce)
    result = optimizer.step(**(optimizer_args or {}))
    if barrier:
        mark_step()
    return result


def add_step_closure(closure: Callable, args: tuple = (), run_async: bool = False) -> None:
    """Have `closure(*args)` called when the current step has been marked.

    What the closure raises, the mark raises; of one in another thread, a later call. The closures
    behind it are kept for the next mark.

    Args:
        args: Tensors among them are computed with the step: reading them needs no program of its
            own.
        run_async: Call it in another thread, behind the training.

    Example:
        >>> loss = torch.ones(4, device="ltc").sum()
        >>> ltm.add_step_closure(lambda loss: print("loss", loss.item()), args=(loss,))
        >>> ltm.mark_step()
        loss 4.0
    """
    steps.closures_of(current_device()).add(closure, args, run_async)


def wait_device_ops(devices: Sequence | None = None) -> None:
    """Block until everything started on the devices (all where none are given) is over.

    Raises the error of a step that failed, once; RuntimeError where one is no ltc device. What is
    only recorded is not started: a mark does that.

    Args:
        devices: Lazy devices, or their names; None: all.

    Example:
        >>> x = torch.ones(3, device="ltc") * 2
        >>> ltm.mark_step()
        >>> ltm.wait_device_ops()
    """
    sync.wait_device_ops([device_of(d) for d in devices or ()] or None)


def unlazy(tensors: Sequence[torch.Tensor]) -> None:
    """Compute the tensors and wait for them; tensors of other devices stay as they are.

    Raises the error of an operation that they depend on, where that failed.

    Args:
        tensors: Tensors on any devices.

    Example:
        >>> x = torch.ones(3, device="ltc") * 2
        >>> ltm.unlazy([x])
        >>> x.tolist()
        [2.0, 2.0, 2.0]
    """
    transfer.materialize(tensors)


def save(
    data: Any,
    file_or_path,
    master_only: bool = True,
    global_master: bool = False,
    barrier: bool = False,
) -> None:
    """torch.save of `data` with every lazy tensor as a CPU tensor, fetched in one go.

    Args:
        file_or_path: A path is replaced when the whole file is on disk, or not at all.
        master_only: Only replica 0 writes (of its host, or of all with `global_master`).
        barrier: Return only when every replica has saved, so that the file is complete for all;
            every replica must call it then. Without it no replica waits for another.

    Raises:
        OSError: If the file cannot be written; a file that was there is then as it was.

    Example:
        >>> ltm.save({"weight": torch.ones(2, device="ltc")}, "model.pt")
        >>> torch.load("model.pt")
        {'weight': tensor([1., 1.])}
    """
    save_for_cpu(data, file_or_path, not master_only or world.is_master(local=not global_master))
    if barrier:
        world.meet("ltc.core.lazy_model.save")


def load(
    file_or_path: Any, map_location: Any = None, *, weights_only: bool = True, mmap: bool = False
) -> Any:
    """torch.load of a file that `save` or torch.save wrote, with its checksums compared.

    torch.load itself ignores the checksums, so a damaged file gives other values.

    Args:
        file_or_path: A path, or a file object.
        map_location: The device to load to, as for torch.load.
        weights_only: Load no arbitrary objects, as for torch.load.
        mmap: Map the file. It is read once to be checked; later changes of it are not noticed.

    Returns:
        The object that was saved.

    Raises:
        DamagedFile: If a checksum differs, naming the file and the record; or if the file has none.

    Example:
        >>> ltm.save({"weight": torch.ones(2, device="ltc")}, "model.pt")
        >>> ltm.load("model.pt", map_location="ltc")
        {'weight': tensor([1., 1.], device='ltc:0')}
    """
    return checked_archive.load(file_or_path, map_location, weights_only, mmap)


make_entrances(globals(), __all__)


# --- The rate of items ------------------------------------------------------------------------


class RateTracker:
    """Counts items and tells their rate, now and since the start.

    Args:
        smooth_factor: Weight of the previous rate in the next one, 0 to 1; None:
            RATE_TRACKER_SMOOTHING.

    Example:
        >>> tracker = ltm.RateTracker()
        >>> tracker.add(64)  # a batch
        >>> tracker.rate() > 0  # items a second
        True
    """

    def __init__(self, smooth_factor: float | None = None):
        if smooth_factor is None:
            smooth_factor = config.value("RATE_TRACKER_SMOOTHING")
        self._smooth_factor = smooth_factor
        self._start = self._partial_start = time.perf_counter()
        self._count = self._partial_count = 0.0
        self._previous: float | None = None

    def add(self, count: float) -> None:
        """Count that many items."""
        self._count += count
        self._partial_count += count

    def rate(self) -> float:
        """Items a second since the previous call, blended with its answer; 0.0 if no time passed."""
        now = time.perf_counter()
        elapsed = now - self._partial_start
        current = self._partial_count / elapsed if elapsed > 0 else 0.0
        self._partial_start, self._partial_count = now, 0.0
        if self._previous is not None:
            current = (1 - self._smooth_factor) * current + self._smooth_factor * self._previous
        self._previous = current
        return current

    def global_rate(self) -> float:
        """Items a second since this object was made."""
        elapsed = time.perf_counter() - self._start
        return self._count / elapsed if elapsed > 0 else 0.0
