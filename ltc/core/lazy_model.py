"""ltm: devices, steps, data and checkpoints, under the names of the lazy tensor core.

This file is a front door: it holds names and documentation, and no state or logic.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ltc.checkpointing.saving import save_for_cpu
from ltc.device.hooks import names
from ltc.device.recording import sync
from ltc.device.recording.tensors import current_device, device_of, is_lazy, set_current_device
from ltc.distributed import bucketed, collectives, world
from ltc.distributed.bucketed import (
    CoalescingBuckets,
    all_gather_bucketized,
    all_reduce_bucketized_gradients,
    reduce_scatter_bucketized,
)
from ltc.distributed.collective_context import CollectiveContext
from ltc.distributed.collectives import Groups
from ltc.distributed.mesh import do_on_ordinals, mesh_reduce
from ltc.distributed.rendezvous import rendezvous
from ltc.runtime.account import account_of
from ltc.runtime.transfers import backend
from ltc.tracebacks import make_entrances
from ltc.utils import steps, transfer
from ltc.utils.rate_tracker import RateTracker
from ltc.utils.transfer import ToLazyTensorArena, check_view_sharing, send_cpu_data_to_device

__all__ = [
    "CoalescingBuckets",
    "CollectiveContext",
    "REDUCE_AND",
    "REDUCE_MAX",
    "REDUCE_MIN",
    "REDUCE_MUL",
    "REDUCE_OR",
    "REDUCE_SUM",
    "RateTracker",
    "ToLazyTensorArena",
    "add_step_closure",
    "all_gather",
    "all_gather_bucketized",
    "all_reduce",
    "all_reduce_bucketized_gradients",
    "all_to_all",
    "broadcast_master_param",
    "check_view_sharing",
    "collective_broadcast",
    "collective_permute",
    "do_on_ordinals",
    "get_lazy_supported_devices",
    "get_local_ordinal",
    "get_memory_info",
    "get_ordinal",
    "get_rng_state",
    "is_lazy_tensor",
    "is_master_ordinal",
    "lazy_device",
    "lazy_device_hw",
    "lazy_real_devices",
    "lazy_replication_devices",
    "mark_step",
    "master_print",
    "mesh_reduce",
    "optimizer_step",
    "parse_lazy_device",
    "recv",
    "reduce_gradients",
    "reduce_scatter",
    "reduce_scatter_bucketized",
    "rendezvous",
    "save",
    "send",
    "send_cpu_data_to_device",
    "set_replication",
    "set_rng_state",
    "unlazy",
    "wait_device_ops",
    "xrt_world_size",
]


# --- devices ----------------------------------------------------------------------------------


def is_lazy_tensor(tensor) -> bool:
    """Whether it is a tensor on an ltc device."""
    return is_lazy(tensor)


def parse_lazy_device(device: str) -> tuple[str, int] | None:
    """("CPU", 3) of "CPU:3", a real device's name; None of anything else."""
    return names.parse_real_device(device)


def get_lazy_supported_devices(
    devkind: str | None = None, max_devices: int | None = None
) -> list[str] | None:
    """`ltc:i` for every device of a kind, at most `max_devices`; None where there is none.

    devkind  "TPU", "GPU" or "CPU"; None means the first of these that this process has
    """
    return names.supported_devices(devkind, max_devices)


def lazy_device(n: int | None = None, devkind: str | None = None) -> torch.device:
    """The lazy device number `n`, or the thread's current one; it becomes the current one.

    devkind  the first device of this kind; AssertionError where there is none
    """
    if n is not None:
        device = device_of(n)
    elif devkind is not None:
        found = names.supported_devices(devkind)
        assert found, f"No devices of {devkind} kind"
        device = device_of(found[0])
    else:
        device = current_device()
    set_current_device(device)
    return device.torch_device


def lazy_real_devices(devices: Sequence) -> list[str]:
    """What the lazy devices really are: ["CPU:0"] of ["ltc:0"]; RuntimeError for another format."""
    return names.real_devices(devices)


def lazy_device_hw(device) -> str:
    """The kind of hardware behind a lazy device: "CPU"."""
    return names.kind_of(names.real_devices([device])[0])


def lazy_replication_devices(local_devices: Sequence) -> list[str]:
    """The real names of all devices to replicate over; RuntimeError unless all are given."""
    return world.replication_devices(local_devices)


def set_replication(device, devices: Sequence) -> None:
    """Make `device` the thread's current one and a replica among `devices`; [] ends replication."""
    world.set_replication(device, devices)


def get_memory_info(device=None) -> dict[str, int]:
    """{"kb_free", "kb_total"} of a device's memory."""
    chosen = current_device() if device is None else device_of(device)
    known = backend().devices()
    total = known[min(chosen.index, len(known) - 1)].memory_bytes
    free = max(total - account_of(chosen.index).bytes, 0)
    return {"kb_free": free // 1024, "kb_total": total // 1024}


# --- who this replica is ----------------------------------------------------------------------


def xrt_world_size(defval: int = 1) -> int:
    """Replicas that train together; `defval` where no launcher said."""
    return world.world_size(defval)


def get_ordinal(defval: int = 0) -> int:
    """This replica's number among all; `defval` where no launcher said."""
    return world.ordinal(defval)


def get_local_ordinal(defval: int = 0) -> int:
    """This replica's number on its host; `defval` where nobody said."""
    return world.local_ordinal(defval)


def is_master_ordinal(local: bool = True) -> bool:
    """Whether this replica is number 0 of its host (`local`) or of all."""
    return world.is_master(local)


def master_print(*args: Any, fd=None, local: bool = False, flush: bool = False) -> None:
    """print(*args) on the master replica only; `fd` is the file, stdout where None."""
    if world.is_master(local):
        print(*args, file=sys.stdout if fd is None else fd, flush=flush)


# --- steps ------------------------------------------------------------------------------------


def mark_step(device=None, wait: bool = False) -> None:
    """End a step: everything recorded so far becomes one program, which is started.

    device  the thread's current one where None
    wait    return only when it has run; LTC_SYNC_WAIT=1 does so for every step
    """
    steps.mark(None if device is None else device_of(device), wait)


def reduce_gradients(
    optimizer: torch.optim.Optimizer,
    groups: Groups = None,
    pin_layout: bool = True,
    reduce: str = "mean",
) -> None:
    """Every gradient of the optimizer's parameters becomes its mean over the replicas, in place.

    groups  of ordinals that average among themselves; reduce "sum" leaves out the division
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
    """
    reduce_gradients(optimizer, groups, pin_layout, reduce)
    result = optimizer.step(**(optimizer_args or {}))
    if barrier:
        mark_step()
    return result


def add_step_closure(closure: Callable, args: tuple = (), run_async: bool = False) -> None:
    """Have `closure(*args)` called when the current step has been marked.

    Tensors in `args` are computed with the step; reading them needs no program of its own.
    run_async  call it in another thread, behind the training
    """
    steps.closures_of(current_device()).add(closure, args, run_async)


def wait_device_ops(devices: Sequence = ()) -> None:
    """Block until everything started on the devices (all where none are given) is over.

    Raises the error of a step that failed.
    """
    sync.wait_device_ops([device_of(d) for d in devices] or None)


def unlazy(tensors: Sequence[torch.Tensor]) -> None:
    """Compute the tensors and wait for them."""
    transfer.materialize(tensors)


# --- random numbers ---------------------------------------------------------------------------


def set_rng_state(seed: int, device=None) -> None:
    """Seed a device (the thread's current one where None)."""
    (current_device() if device is None else device_of(device)).random.reset(seed)


def get_rng_state(device=None) -> int:
    """The running seed of a device: setting it again repeats what is drawn from here on."""
    return (current_device() if device is None else device_of(device)).random.running


# --- exchanges among replicas -----------------------------------------------------------------
# `groups` are lists of ordinals, each replica in exactly one; None means all together. `pin_layout`
# is taken for compatibility: tensors have one layout here.

REDUCE_SUM, REDUCE_MUL, REDUCE_AND = "sum", "mul", "and"
REDUCE_OR, REDUCE_MIN, REDUCE_MAX = "or", "min", "max"


def all_reduce(
    reduce_type: str,
    inputs,
    scale: float = 1.0,
    groups: Groups = None,
    cctx=None,
    pin_layout: bool = True,
) -> Any:
    """Everyone's values reduced, then multiplied by `scale`.

    inputs  a tensor: the result is a new one; a list: reduced in place, and returned
    With one replica: a copy, or the list untouched, not scaled.
    """
    return collectives.all_reduce(reduce_type, inputs, scale, groups)


def all_gather(
    value,
    dim: int = 0,
    groups: Groups = None,
    output=None,
    pin_layout: bool | None = None,
    channel_id=None,
    use_global_device_ids=None,
) -> Any:
    """Everyone's `value`, a tensor or a list of them, joined along `dim` in ordinal order.

    output  where it goes: a tensor for a tensor, a list for a list
    """
    if isinstance(value, torch.Tensor):
        result = collectives.all_gather(value, dim, groups)
        return result if output is None else bucketed.into(output, result)
    if not isinstance(value, (list, tuple)):
        raise TypeError(f"all_gather of a {type(value).__name__}: give a tensor or a list of them")
    return all_gather_bucketized(value, dim, groups, _as_list(output), bool(pin_layout))


def reduce_scatter(
    reduce_type: str,
    input,
    scale: float,
    scatter_dim: int,
    shard_count: int,
    groups: Groups = None,
    output=None,
    pin_layout: bool | None = None,
    channel_id=None,
    use_global_device_ids=None,
) -> Any:
    """This replica's part, along `scatter_dim`, of everyone's `input` reduced and scaled."""
    if isinstance(input, torch.Tensor):
        result = collectives.reduce_scatter(
            reduce_type, input, scale, scatter_dim, shard_count, groups
        )
        return result if output is None else bucketed.into(output, result)
    return reduce_scatter_bucketized(
        reduce_type,
        input,
        scale,
        scatter_dim,
        shard_count,
        groups,
        _as_list(output),
        bool(pin_layout),
    )


def _as_list(output):
    if output is not None and not isinstance(output, (list, tuple)):
        raise TypeError(f"`output` is a {type(output).__name__}: a list goes with a list of inputs")
    return output


def all_to_all(
    value: torch.Tensor,
    split_dimension: int,
    concat_dimension: int,
    split_count: int,
    groups: Groups = None,
    pin_layout: bool = True,
) -> torch.Tensor:
    """`value` cut into parts, part j sent to member j; the parts received joined in their order."""
    return collectives.all_to_all(value, split_dimension, concat_dimension, split_count, groups)


def collective_permute(value: torch.Tensor, pairs: Sequence) -> torch.Tensor:
    """What the replica paired with this one sends: pairs are (from, to); zeros where none does."""
    return collectives.collective_permute(value, pairs)


def collective_broadcast(
    tensors: Sequence[torch.Tensor],
    root_ordinal: int = 0,
    groups: Groups = None,
    pin_layout: bool = True,
) -> None:
    """Every replica's tensors become those of the root, in place, whatever they held."""
    collectives.broadcast(tensors, root_ordinal, groups)


def broadcast_master_param(model: torch.nn.Module) -> None:
    """Every replica's parameters and buffers become those of ordinal 0; ends the step."""
    collectives.broadcast([*model.parameters(), *model.buffers()])
    mark_step()


def send(value: torch.Tensor, channel_id: int, target: int | None = None) -> None:
    """Send `value` to the replica `target`, which calls `recv`; of two replicas, to the other."""
    collectives.send(value, _other(target))


def recv(output: torch.Tensor, channel_id: int, source: int | None = None) -> torch.Tensor:
    """What the replica `source` sends, in `output` too; of two replicas, from the other."""
    return collectives.recv(output, _other(source))


def _other(ordinal: int | None) -> int:
    if ordinal is None and collectives.replica_count() != 2:
        raise ValueError("send and recv among more than two replicas need a target and a source")
    return 1 - collectives.ordinal() if ordinal is None else ordinal


# --- files ------------------------------------------------------------------------------------


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
                   every replica must call it then. Without it no replica waits for another.
    """
    save_for_cpu(data, file_or_path, not master_only or world.is_master(local=not global_master))
    if barrier:
        world.meet("ltc.core.lazy_model.save")


make_entrances(globals(), __all__)
