"""`torch.distributed` on lazy tensors: any process group that moves CPU tensors moves ltc's too.

The calls `c10d::*` get kernels for the device type, so DistributedDataParallel, FSDP, DTensor and
everything else that PyTorch builds on process groups works without knowing of ltc.  The backend
name "ltc" stands for gloo, for CPU and ltc tensors alike.  registration.py imports this module when
the first group is made.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import sys
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist

from ltc import config
from ltc.device.recording.tensors import is_lazy
from ltc.distributed.c10d import ddp, group_calls, kernels, on_host, point_to_point, traced
from ltc.distributed.c10d.kernels import FUNCTIONAL, IN_PLACE
from ltc.distributed.transport import session
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
    """Change what torch.distributed does with groups. The import of this module calls it."""
    _make_groups_anew()
    group_calls.install()
    _register_kernels()
    _settle_before_other_calls()
    _settle_before_functional_calls()
    _take_timeouts_of_what_is_over()
    ddp.install()


def _make_groups_anew() -> None:
    """Make new groups instead of splitting: for a device_id on ltc torch would split, which gloo
    cannot.
    """
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
    atexit.register(_settle_at_exit)


def _settle_before_functional_calls() -> None:
    """Settle before `_c10d_functional` too, whose calls on CPU tensors never come to Python."""
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


def destroy_process_group(original: Callable, group=None):
    """Settle, then end a group as torch does: `dist.destroy_process_group`."""
    try:
        traced.settle()
    finally:
        group_calls.forget(group)
        original(group)
        _forget_arguments()


new_process_group = group_calls.new_process_group


class _Told(contextlib.ExitStack):
    """The settings that arguments of init_process_group gave; closing it takes them back."""

    by_arguments = False

    def close(self) -> None:
        self.by_arguments = False
        super().close()


_told = _Told()


def init_process_group(original: Callable, *args, **kwargs):
    """Make the default group, and take rank and size from it: `dist.init_process_group`.

    Those that it is told alone count as if a launcher had said them: else the collectives of ltm
    would find one replica in each process, and exchange nothing.
    """
    if _told.by_arguments and not dist.is_initialized():  # who it was in an earlier world
        traced.settle()
        session.forget()
        _told.close()
    original(*args, **kwargs)
    take_arguments()


def take_arguments() -> None:
    """Let the rank and size of the default group count where no launcher has told another."""
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
    """Forget them when the default group is gone; a process that met the others by it keeps its
    rank.
    """
    if not dist.is_initialized() and not session.any_in_use():
        _told.close()


def _settle_at_exit() -> None:
    """The others wait for what this rank recorded; after an error it just ends, which they see."""
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        traced.settle()


def monitored_barrier(original, group=None, timeout=None, wait_all_ranks=False):
    """Accept a group of "ltc", which is gloo underneath: torch accepts the name "gloo" alone."""
    chosen = dist.group.WORLD if group is None else group
    if not isinstance(chosen, dist.ProcessGroup) or dist.get_backend(chosen) != DEVICE_TYPE:
        return original(group, timeout, wait_all_ranks)
    return chosen.monitored_barrier(timeout or dist.default_pg_timeout, wait_all_ranks)


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
