"""Collectives of `torch.distributed` on lazy tensors, run at once on the host.

The operands are read, the same call runs on CPU tensors with whatever backend the group has for
them (gloo, mpi), and what it wrote comes back to the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ltc.device.recording.fallback import assign_host
from ltc.device.recording.tensors import host_tensor, is_lazy
from ltc.distributed.c10d import group_calls, point_to_point, traced
from ltc.errors import Unsupported
from ltc.support.observation import metrics
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
            if name in point_to_point.CALLS:
                work = point_to_point.begun(name, group, copies[0], values)
                if name == "send":
                    return Work.boxed(work)  # it holds the copy until that has left
                return Work.boxed(PendingReceive(work, values[written], copies[written]))

            def begin() -> tuple[list[Work], None]:
                return [_work_of(overload(*_flattened(name, copies)))], None

            run_checked(group, checked_text(name, overload, copies), begin)
            metrics.count(f"c10d::{name}")
            if written is not None and not _is_bystander(name, group, values):
                _bring_back(values[written], copies[written])
        return returned(overload, values, done(values[written] if written is not None else []))

    return kernel


def run_checked(group: ProcessGroup, text: str, begin: Callable) -> None:
    """Make a call and wait for it, compared with the other ranks' where the group can do that."""
    calls = group_calls.of(group)
    if calls is not None:
        calls.run(calls.described(text), begin, group_calls.lane_of_thread())
        return
    works, _ = begin()
    for work in works:
        work.wait()


# By call: which argument's tensors have the same number of elements on every rank, and one type.
_ALIKE = {
    "allgather": 1,
    "_allgather_base": 1,
    "allgather_coalesced": 1,
    "allgather_into_tensor_coalesced": 1,
    "reduce_scatter": 1,
    "_reduce_scatter_base": 1,
    "reduce_scatter_tensor_coalesced": 1,
    "gather": 1,
}
_SAME_CALLS = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}


def checked_text(name: str, overload: OpOverload | None, values: Sequence[Any]) -> str:
    """Describe the parts of a c10d or process group call that must be the same on every rank.

    Args:
        overload: None for the method of that name of a process group.
    """
    name = name.removesuffix("_")
    name = _SAME_CALLS.get(name, name)
    parts = [name]
    if overload is None:
        options = next((v for v in values if hasattr(v, "asyncOp")), None)
        operation, root = getattr(options, "reduceOp", None), getattr(options, "rootRank", None)
        plain = [v for v in values if isinstance(v, (int, dist.ReduceOp.RedOpType, dist.ReduceOp))]
        if options is None and plain and name in ("broadcast", "reduce", "gather", "scatter"):
            root = next((v for v in plain if isinstance(v, int)), None)
        operation = operation or next((v for v in plain if not isinstance(v, int)), None)
    else:
        named = dict(zip((a.name for a in schema_of_overload(overload).arguments), values))
        operation, root = named.get("reduce_op"), named.get("root_rank")
    if operation is not None and "reduce" in name:
        parts.append(_name_of(operation))
    if root is not None:
        parts.append(f"root {int(root)}")
    if not name.startswith(("alltoall", "barrier")):
        tensors = tensors_in(values[_ALIKE.get(name, 0)])
        parts.append(f"of {group_calls.types_of(tensors)}")
    return " ".join(parts)


def _name_of(operation: Any) -> str:
    """Return the name of a reduction: given as a number of torch's, its wrapper, or a boxed one."""
    if isinstance(operation, torch.ScriptObject):
        operation = operation.op()  # type: ignore[attr-defined]  # it is c10d's own
    elif not isinstance(operation, dist.ReduceOp.RedOpType):
        operation = operation.op
    return dist.ReduceOp.RedOpType(operation).name.lower()


def position_of(name: str, overload: OpOverload) -> int | None:
    """Return the position of the argument of that name; None if the overload has none."""
    names = [argument.name for argument in schema_of_overload(overload).arguments]
    return names.index(name) if name in names else None


def group_of(boxed: torch.ScriptObject) -> ProcessGroup:
    """The process group in an argument, which from now on serves CPU tensors as well."""
    group = ProcessGroup.unbox(boxed)
    require_host_backend(group)
    return group


def require_host_backend(group: ProcessGroup) -> None:
    """Make the group move CPU tensors; raise Unsupported if it has no backend that can."""
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
    """Return True if this rank's tensor stays as it is: a reduction to another rank only used it."""
    return name == "reduce_" and values[3] != group.rank()


def _work_of(result) -> Work:
    boxed = result[-1] if isinstance(result, (list, tuple)) else result
    return Work.unbox(boxed)


def returned(overload: OpOverload, values: list, work: Work):
    """Return the overload's results: the work, and the given tensors where its schema returns them."""
    boxed = Work.boxed(work)
    return boxed if len(schema_of_overload(overload).returns) == 1 else (values[0], boxed)


def done(tensors) -> Work:
    """Return finished work whose future holds `tensors`."""
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
