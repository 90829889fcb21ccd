"""ltm's steps: their end, the optimizer's step, what runs behind them, and files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ltc.checkpointing import checked_archive
from ltc.checkpointing.saving import save_for_cpu
from ltc.device.recording import sync
from ltc.device.recording.tensors import current_device, device_of
from ltc.distributed import collectives, world
from ltc.distributed.collectives import Groups
from ltc.tracebacks import make_entrances
from ltc.utils import steps, transfer

__all__ = [
    "add_step_closure",
    "mark_step",
    "optimizer_step",
    "reduce_gradients",
    "save",
    "unlazy",
    "wait_device_ops",
]


def mark_step(device=None, wait: bool = False) -> None:
    """End a step: everything recorded so far becomes one program, which is started.

    device  the thread's current one where None
    wait    return only when it has run; LTC_SYNC_WAIT=1 does so for every step

    Raises the error of a step that failed since the last mark: this one, if it ran at once, or an
    earlier one; and what a step closure raises. RuntimeError where there is no such device.

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

    groups      lists of ordinals that average among themselves, each replica in exactly one, all of
                one size; None: all together. The mean is over the replica's own group
    reduce      "mean", or "sum", which leaves out the division
    pin_layout  ignored: tensors have one layout here

    The gradients travel in buckets of ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB, those of the last
    parameters first, while the rest of the backward still runs. One replica: nothing is done.
    Raises ValueError for another `reduce`, or groups that do not name each replica once;
    AssertionError where groups differ in size; PeerFailure in the step, where replicas disagree.

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

    barrier  whether to end it: a device loader does so at its next batch
    groups   of ordinals to average among; None means all, and one replica averages nothing
    reduce   "mean": k replicas with a mean loss over b samples each train as one does with a mean
             loss over k * b; "sum": the same for losses that are sums
    return   what `optimizer.step` returned

    Raises what `reduce_gradients` and `mark_step` raise.

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

    args       tensors among them are computed with the step: reading them needs no program of its
               own
    run_async  call it in another thread, behind the training

    What the closure raises, the mark raises; of one in another thread, a later call. The closures
    behind it are kept for the next mark.

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

    >>> x = torch.ones(3, device="ltc") * 2
    >>> ltm.mark_step()
    >>> ltm.wait_device_ops()
    """
    sync.wait_device_ops([device_of(d) for d in devices or ()] or None)


def unlazy(tensors: Sequence[torch.Tensor]) -> None:
    """Compute the tensors and wait for them; those of other devices are let be.

    Raises the error of what they need, where that failed.

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

    file_or_path   a path is replaced when the whole file is on disk, or not at all
    master_only    only replica 0 writes (of its host, or of all with `global_master`)
    barrier        return only when every replica has saved, so that the file is complete for all;
                   every replica must call it then. Without it no replica waits for another

    Raises OSError where the file cannot be written; a file that was there is then as it was.

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

    map_location, weights_only, mmap  as torch.load takes them. With `mmap` the file is read once to
                                      be checked, and what changes in it later is not noticed

    torch.load itself ignores the checksums, so a damaged file gives other values. Raises DamagedFile,
    with the file and the record, where one differs, and where the file has none.

    >>> ltm.save({"weight": torch.ones(2, device="ltc")}, "model.pt")
    >>> ltm.load("model.pt", map_location="ltc")
    {'weight': tensor([1., 1.], device='ltc:0')}
    """
    return checked_archive.load(file_or_path, map_location, weights_only, mmap)


make_entrances(globals(), __all__)
