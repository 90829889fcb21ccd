"""Collectives of `torch.distributed` on lazy tensors, run at once on the host.

The operands are read, the same call runs on CPU tensors with whatever backend the group has for
them (gloo, mpi), and what it wrote comes back to the device.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ltc.debug import metrics
from ltc.device.recording.fallback import assign_host
from ltc.device.recording.tensors import host_tensor, is_lazy
from ltc.distributed.c10d import traced
from ltc.errors import Unsupported
from ltc.support.torch_private import (
    DEVICE_TYPE,
    OpOverload,
    ProcessGroup,
    Work,
    add_backend_to_group,
    backend_of_group,
    group_devices,
    plain_functions,
    schema_of_overload,
    work_from_future,
)

# By operation of the namespace c10d: the arguments it writes to, and whether it reads them first.
WRITTEN = {
    "allreduce_": (0, True),
    "allreduce_coalesced_": (0, True),
    "broadcast_": (0, True),
    "reduce_": (0, True),
    "allgather_": (0, False),
    "_allgather_base_": (0, False),
    "allgather_coalesced_": (0, False),
    "allgather_into_tensor_coalesced_": (0, False),
    "reduce_scatter_": (0, False),
    "_reduce_scatter_base_": (0, False),
    "reduce_scatter_tensor_coalesced_": (0, False),
    "alltoall_": (0, False),
    "alltoall_base_": (0, False),
    "gather_": (0, False),
    "scatter_": (0, False),
    "barrier": (0, False),
    "send": (None, True),
    "recv_": (0, False),
    "recv_any_source_": (0, False),
}


def kernel_of(name: str) -> Callable:
    """The kernel of `c10d::<name>` for lazy tensors."""
    overload = getattr(torch.ops.c10d, name).default
    written, reads_written = WRITTEN[name]
    group_at = position_of("process_group", overload)

    def kernel(*args, **kwargs):
        values = in_schema_order(overload, args, kwargs)
        group = group_of(values[group_at])
        copies = list(values)
        traced.settle()
        with torch.no_grad(), plain_functions():
            for i, value in enumerate(values):
                copies[i] = _on_host(value, blank=i == written and not reads_written)
            work = _work_of(overload(*_flattened(name, copies)))
            if name == "send":
                return Work.boxed(work)  # the backend's own: it holds the copy until it has left
            if name.startswith("recv"):
                return Work.boxed(PendingReceive(work, values[written], copies[written]))
            work.wait()
            metrics.count(f"c10d::{name}")
            if written is not None and not _is_bystander(name, group, values):
                _bring_back(values[written], copies[written])
        return returned(overload, values, done(values[written] if written is not None else []))

    return kernel


def position_of(name: str, overload: OpOverload) -> int | None:
    """Where the argument of that name stands; None where the overload has none."""
    names = [argument.name for argument in schema_of_overload(overload).arguments]
    return names.index(name) if name in names else None


def group_of(boxed: torch.ScriptObject) -> ProcessGroup:
    """The process group in an argument, which from now on serves CPU tensors as well."""
    group = ProcessGroup.unbox(boxed)
    require_host_backend(group)
    return group


def require_host_backend(group: ProcessGroup) -> None:
    """See to it that the group moves CPU tensors; Unsupported where it has nothing that could."""
    kinds = {device.type for device in group_devices(group)}
    if "cpu" in kinds:
        return
    if DEVICE_TYPE not in kinds:
        raise Unsupported(
            f"This process group serves {', '.join(sorted(kinds))} tensors, and ltc tensors travel "
            f"through the CPU. Create it with init_process_group('ltc'), 'gloo', or "
            f"'cpu:gloo,{DEVICE_TYPE}:ltc'."
        )
    add_backend_to_group(group, "cpu", backend_of_group(group, DEVICE_TYPE))


def in_schema_order(overload: OpOverload, args: tuple, kwargs: dict) -> list:
    """Every argument; those left out have their defaults."""
    arguments = schema_of_overload(overload).arguments
    return list(args) + [
        kwargs.get(argument.name, argument.default_value) for argument in arguments[len(args) :]
    ]


def _on_host(value, blank: bool):
    """CPU copies of lazy tensors, however nested; only of their type where `blank`."""
    if isinstance(value, (list, tuple)):
        return [_on_host(part, blank) for part in value]
    if not is_lazy(value):
        return value
    if blank:
        return torch.empty(value.shape, dtype=value.dtype, device="cpu")
    return host_tensor(value).clone()  # it may be the device's own memory


def _flattened(name: str, values: list) -> list:
    """gloo splits the whole tensor among the ranks along its first dimension, whatever that is."""
    if name not in ("_allgather_base_", "_reduce_scatter_base_"):
        return values
    return [v.reshape(-1) if isinstance(v, torch.Tensor) else v for v in values]


def _bring_back(target, result) -> None:
    if isinstance(target, (list, tuple)):
        for one, copy in zip(target, result):
            _bring_back(one, copy)
    elif is_lazy(target):
        assign_host(target, result)


def _is_bystander(name: str, group: ProcessGroup, values: list) -> bool:
    """Whether this rank's tensor stays as it is: a reduction to another rank only used it."""
    return name == "reduce_" and values[3] != group.rank()


def _work_of(result) -> Work:
    boxed = result[-1] if isinstance(result, (list, tuple)) else result
    return Work.unbox(boxed)


def returned(overload: OpOverload, values: list, work: Work):
    """What the overload returns: the tensors it was given, where it does, and the work."""
    boxed = Work.boxed(work)
    return boxed if len(schema_of_overload(overload).returns) == 1 else (values[0], boxed)


def done(tensors) -> Work:
    """Work that is over, whose future holds `tensors`."""
    future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
    future.set_result(tensors_in(tensors))
    return work_from_future(future)


def tensors_in(value) -> list[torch.Tensor]:
    """The tensors of an argument, however nested."""
    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in tensors_in(part)]
    return [value] if isinstance(value, torch.Tensor) else []


class PendingReceive(Work):
    """A receive that has begun: the tensors get what arrived when it is waited for."""

    _awaited: set[PendingReceive] = set()  # C++ does not keep the Python part of a Work alive

    def __init__(self, work: Work, tensors: list, copies: list) -> None:
        super().__init__()
        self._work, self._tensors, self._copies = work, tensors, copies
        self._awaited.add(self)

    def wait(self, timeout=None) -> bool:
        if self in self._awaited:
            self._work.wait() if not timeout else self._work.wait(timeout)
            self._awaited.discard(self)
            with torch.no_grad():
                _bring_back(self._tensors, self._copies)
        return True

    def is_completed(self) -> bool:
        return self not in self._awaited or self._work.is_completed()

    def get_future(self):
        self.wait()
        return done(self._tensors).get_future()

    def _source_rank(self) -> int:
        return self._work._source_rank()
