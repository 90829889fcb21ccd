"""`torch.distributed` on lazy tensors: any process group that moves CPU tensors moves ltc's too.

The calls `c10d::*` get kernels for the device type, so DistributedDataParallel, FSDP, DTensor and
everything else that PyTorch builds on process groups works without knowing of ltc.  The backend
name "ltc" stands for gloo, for CPU and ltc tensors alike.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import register_rendezvous_handler

from ltc import config
from ltc.device.recording.tensors import is_lazy
from ltc.distributed.c10d import ddp, group_calls, kernels, on_host, point_to_point, traced
from ltc.distributed.c10d.kernels import FUNCTIONAL, IN_PLACE
from ltc.distributed.transport import session
from ltc.support.process.private_folder import require_private
from ltc.support.torch_private import (
    DEVICE_TYPE,
    SPLIT_SOURCE,
    WAIT_FOR_WORK,
    DispatchKey,
    DispatchKeySet,
)
from ltc.tracebacks import entrance

_libraries: list[torch.library.Library] = []  # a library unregisters its kernels when it is freed


def install() -> None:
    """Teach torch.distributed about ltc: backend "ltc", init_method "ltc://". `import ltc` calls it.

    Once per process.

    >>> import torch.distributed as dist
    >>> dist.is_backend_available("ltc")
    True
    >>> dist.init_process_group("ltc", init_method="ltc://")
    >>> x = torch.ones(2, device="ltc")
    >>> dist.all_reduce(x)
    >>> x.tolist()
    [1.0, 1.0]
    >>> dist.destroy_process_group()
    """
    dist.Backend.register_backend(DEVICE_TYPE, _gloo, devices=["cpu", DEVICE_TYPE])
    dist.Backend.backend_capability["gloo"].append(DEVICE_TYPE)
    _choose_for_who_names_no_backend()
    _make_groups_anew()
    group_calls.install()
    register_rendezvous_handler(DEVICE_TYPE, _meet)
    _register_kernels()
    _settle_before_other_calls()
    _settle_before_functional_calls()
    _go_by_arguments_too()
    _allow_monitored_barriers()
    _take_timeouts_of_what_is_over()
    ddp.install()


def _gloo(store, rank: int, size: int, timeout):
    """What carries a group of the backend "ltc": gloo, as one would make it by name."""
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


_stores = itertools.count()  # a second process group of a run has a store of its own


def _meet(url: str, timeout=dist.default_pg_timeout, **_) -> Iterator[tuple]:
    """init_method "ltc://": the processes of this run, whoever started them."""
    folder = config.value("LTC_RENDEZVOUS")
    world, rank = config.value("XRT_SHARD_WORLD_SIZE"), config.value("XRT_SHARD_ORDINAL")
    if folder:
        require_private(folder)
        yield dist.FileStore(str(Path(folder) / f"torch{next(_stores)}"), world), rank, world
    elif world == 1:
        yield dist.HashStore(), 0, 1
    else:
        yield from dist.rendezvous("env://", timeout=timeout)


def _choose_for_who_names_no_backend() -> None:
    """init_process_group() without a backend, as init_device_mesh calls it, means gloo for both.

    torch would register gloo for the device alone, and CPU tensors could not travel.
    """
    dist.Backend.default_device_backend_map[DEVICE_TYPE] = "gloo"
    make = dist.distributed_c10d.BackendConfig.__init__

    @functools.wraps(make)
    def __init__(self, backend):
        make(self, backend)
        if backend == dist.Backend.UNDEFINED and DEVICE_TYPE in self.device_backend_map:
            gloo = self.device_backend_map[DEVICE_TYPE]
            self.device_backend_map = {"cpu": gloo, DEVICE_TYPE: gloo}

    dist.distributed_c10d.BackendConfig.__init__ = __init__


def _make_groups_anew() -> None:
    """Where device_id names an ltc device, torch would split groups off, which gloo cannot do."""
    original = SPLIT_SOURCE.current

    def _get_split_source(group):
        bound = group.bound_device_id
        return None if bound is not None and bound.type == DEVICE_TYPE else original(group)

    SPLIT_SOURCE.replace(_get_split_source)


def _register_kernels() -> None:
    library = torch.library.Library("c10d", "IMPL")
    _libraries.append(library)
    with warnings.catch_warnings():  # torch has kernels for outside devices, which need C++ there
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for name in on_host.WRITTEN:
            if hasattr(torch.ops.c10d, name):
                known = kernels.in_place_kernel if name in IN_PLACE else on_host.kernel_of
                library.impl(name, entrance(known(name)), "PrivateUse1")
    functional = torch.library.Library("_c10d_functional", "IMPL")
    _libraries.append(functional)
    for name in FUNCTIONAL:
        if hasattr(torch.ops._c10d_functional, name):
            kernel = entrance(kernels.functional_kernel(name))
            functional.impl(name, kernel, "PrivateUse1")


# --- calls on CPU tensors ---------------------------------------------------------------------

_CALLS = (
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "allgather",
    "all_gather_single",
    "allgather_coalesced",
    "all_gather_single_coalesced",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "alltoall",
    "all_to_all_single",
    "gather",
    "scatter",
    "send",
    "recv",
    "recv_anysource",
    "barrier",
    "monitored_barrier",
    "_allgather_base",
    "_reduce_scatter_base",
    "allgather_into_tensor_coalesced",
    "reduce_scatter_tensor_coalesced",
    "alltoall_base",
)


def _settle_before_other_calls() -> None:
    """A call on CPU tensors comes after the collectives that were recorded before it.

    Otherwise this rank could wait in a barrier for one that waits for a collective of this rank.
    """
    for name in _CALLS:
        if hasattr(dist.ProcessGroup, name):
            setattr(dist.ProcessGroup, name, _settling(getattr(dist.ProcessGroup, name)))
    dist.destroy_process_group = dist.distributed_c10d.destroy_process_group = _settled_end(
        dist.destroy_process_group
    )
    atexit.register(_settle_at_exit)


def _settle_before_functional_calls() -> None:
    """The same for `_c10d_functional`, whose calls on CPU tensors never come to Python."""
    library = torch.library.Library("_c10d_functional", "IMPL")
    _libraries.append(library)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for name in FUNCTIONAL:
            packet = getattr(torch.ops._c10d_functional, name, None)
            if packet is not None and name != "wait_tensor":
                library.impl(name, _settling_kernel(packet.default), "CPU")


def _settling_kernel(overload) -> Callable:
    """Settles, then runs torch's kernel, which is one for all backends.

    It is asked for by the key of a backend that has none of its own, as that of the CPU is this
    one. A redispatch lets other threads run Python meanwhile: gloo's need it to free the tensors
    of a call that is over, before they take the next one.
    """
    other_backend = DispatchKeySet(DispatchKey.IPU)

    def settled(*args, **kwargs):
        traced.settle()
        return overload.redispatch(other_backend, *args, **kwargs)

    return settled


def _settling(call: Callable) -> Callable:
    name = call.__name__.replace("anysource", "any_source")

    @functools.wraps(call)
    def settled(group, *args, **kwargs):
        values = (*args, *kwargs.values())
        if any(map(is_lazy, on_host.tensors_in(values))):
            return call(group, *args, **kwargs)  # its kernel compares it
        traced.settle()
        calls = group_calls.of(group)
        if calls is None or group_calls.is_unchecked():
            return call(group, *args, **kwargs)
        at_gloo = functools.partial(call, group, *args, **kwargs)
        if name in point_to_point.CALLS:
            return point_to_point.begun(name, group, values[0], (values[0], group, *values[1:]))
        if name == "monitored_barrier":
            return on_host.run_checked(group, name, lambda: ([], calls.await_call(at_gloo)))
        described = calls.described(on_host.checked_text(name, None, values))
        return calls.begin(described, at_gloo)

    return settled


def _settled_end(destroy: Callable) -> Callable:
    @functools.wraps(destroy)
    def settled(group=None):
        try:
            traced.settle()
        finally:
            group_calls.forget(group)
            destroy(group)
            _forget_arguments()

    return settled


class _Told(contextlib.ExitStack):
    """What arguments of init_process_group have said; closing it takes that back."""

    by_arguments = False

    def close(self) -> None:
        self.by_arguments = False
        super().close()


_told = _Told()


def _go_by_arguments_too() -> None:
    """Rank and size that init_process_group is told alone count as if a launcher had said them.

    Else the collectives of ltm would find one replica in each process, and exchange nothing.
    """
    original = dist.init_process_group

    @functools.wraps(original)
    def init_process_group(*args, **kwargs):
        if _told.by_arguments and not dist.is_initialized():  # who it was in an earlier world
            traced.settle()
            session.forget()
            _told.close()
        original(*args, **kwargs)
        _take_arguments()

    dist.init_process_group = dist.distributed_c10d.init_process_group = init_process_group
    if dist.is_initialized():  # before the device was first used, so before ltc was imported
        _take_arguments()


def _take_arguments() -> None:
    if config.value("XRT_SHARD_WORLD_SIZE") == 1 < dist.get_world_size():
        rank, local = dist.get_rank(), config.value("XRT_SHARD_LOCAL_ORDINAL")
        settings = {
            "XRT_SHARD_WORLD_SIZE": dist.get_world_size(),
            "XRT_SHARD_ORDINAL": rank,
            "XRT_SHARD_LOCAL_ORDINAL": local if local >= 0 else rank,
        }
        _told.enter_context(config.override(**settings))
        _told.by_arguments = True


def _forget_arguments() -> None:
    """The default group is gone; a process that has met the others by it stays who it was."""
    if not dist.is_initialized() and not session.any_in_use():
        _told.close()


def _settle_at_exit() -> None:
    """The others wait for what this rank recorded; after an error it just ends, which they see."""
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        traced.settle()


def _allow_monitored_barriers() -> None:
    """dist.monitored_barrier accepts the name "gloo" only, which "ltc" is underneath."""
    original = dist.monitored_barrier

    @functools.wraps(original)
    def monitored_barrier(group=None, timeout=None, wait_all_ranks=False):
        chosen = dist.group.WORLD if group is None else group
        if not isinstance(chosen, dist.ProcessGroup) or dist.get_backend(chosen) != DEVICE_TYPE:
            return original(group, timeout, wait_all_ranks)
        return chosen.monitored_barrier(timeout or dist.default_pg_timeout, wait_all_ranks)

    dist.monitored_barrier = dist.distributed_c10d.monitored_barrier = monitored_barrier


def _take_timeouts_of_what_is_over() -> None:
    """Work made of a future raises where it is given a timeout, even if there is nothing to wait for."""
    original = WAIT_FOR_WORK.current

    @functools.wraps(original)
    def wait(self, timeout=None):
        if timeout is None and group_calls.wait_for_checked(self):
            return True
        if timeout is None or self.is_completed():
            return original(self)
        return original(self, timeout)

    WAIT_FOR_WORK.replace(wait)


install()
