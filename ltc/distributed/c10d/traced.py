"""Collectives of a `torch.distributed` group as calls of a step: recorded, run with the rest of it.

They stand on the same chain as all other collectives of the device, whatever their groups, and run
in recorded order, read or not: ranks may read their values in different orders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from ltc.device.recording.sync import start_collectives, wait_device_ops
from ltc.device.recording.tensors import host_tensor
from ltc.device.user_line import user_line
from ltc.distributed import world
from ltc.distributed.c10d import group_calls, shared_memory_groups
from ltc.distributed.collectives import CHANNELS, record
from ltc.distributed.transport.folds import ORDERED
from ltc.errors import Unsupported
from ltc.ir.collective import Collective
from ltc.ir.tensor_type import TensorType
from ltc.support.observation import metrics
from ltc.support.torch_private import (
    backend_of_group,
    gather_flat,
    reduce_scatter_flat,
    resolve_process_group,
)

KINDS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.BAND: "band",
    dist.ReduceOp.BOR: "bor",
    dist.ReduceOp.BXOR: "bxor",
}
_OPERATIONS = {name: op for op, name in KINDS.items()}
_BITWISE = frozenset({"band", "bor", "bxor"})
_CHANNEL = "torch"


def settle() -> None:
    """Return when every collective recorded so far has run; raises the error of one that failed.

    A call that is not recorded waits for this: all ranks must run what they share in one order.
    """
    start_collectives()
    wait_device_ops()


# --- recording --------------------------------------------------------------------------------


def all_reduce(tensors: Sequence[torch.Tensor], kind: str, group: str) -> list[torch.Tensor]:
    """Every rank's tensors, reduced element by element.

    Args:
        kind: A value of KINDS; Unsupported for another.
        group: The name of a process group.
    """
    shapes = [x.shape for x in tensors]
    if kind == "avg" and not all(x.is_floating_point() for x in tensors):
        for x in tensors:
            _require_reduction("all_reduce", kind, x.dtype)
        sums = _record("all_reduce", tensors, group, shapes, reduction="sum")
        return [_mean(x, resolve_process_group(group).size()) for x in sums]
    return _record("all_reduce", tensors, group, shapes, reduction=kind)


def _mean(total: torch.Tensor, ranks: int) -> torch.Tensor:
    """Divide by the number of ranks; whole numbers are cut as NCCL cuts them, where gloo has an
    error.
    """
    if total.is_floating_point() or total.is_complex():
        return total / ranks
    return total.div(ranks, rounding_mode="trunc")


def all_gather(
    tensors: Sequence[torch.Tensor], size: int, group: str, exchange: Callable = record
) -> list[torch.Tensor]:
    """Join each tensor [D, ...] of every rank in rank order: [size * D, ...].

    Args:
        exchange: `record`, or `run_at_once`.
    """
    shapes = [(size * x.shape[0], *x.shape[1:]) for x in tensors]
    return _record("all_gather", tensors, group, shapes, exchange)


def reduce_scatter(
    tensors: Sequence[torch.Tensor], kind: str, size: int, group: str, agreed: str = ""
) -> list[torch.Tensor]:
    """Return this rank's part [D / size, ...] of each reduced tensor [D, ...].

    Args:
        agreed: Other facts that must be the same on every rank.

    Raises:
        ValueError: If D is no multiple of `size`.
    """
    for x in tensors:
        if x.shape[0] % size:
            raise ValueError(
                f"reduce_scatter: {TensorType(x.dtype, tuple(x.shape))} cannot be cut into {size} "
                f"equal parts, one for each rank. Pad it first."
            )
    shapes = [(x.shape[0] // size, *x.shape[1:]) for x in tensors]
    return _record("reduce_scatter", tensors, group, shapes, reduction=kind, agreed=agreed)


def broadcast(
    tensors: Sequence[torch.Tensor], root: int, group: str, exchange: Callable = record
) -> list[torch.Tensor]:
    """Record a broadcast of the tensors of rank `root` of the group; the others' values are ignored.

    Args:
        exchange: `record`, or `run_at_once`.

    Raises:
        ValueError: If the group has no such rank: all would wait for it, or get nothing.
    """
    size = resolve_process_group(group).size()
    if not 0 <= root < size:
        raise ValueError(f"broadcast from rank {root}: the group has ranks 0 to {size - 1}.")
    return _record("broadcast", tensors, group, [x.shape for x in tensors], exchange, root=root)


def all_to_all(
    x: torch.Tensor, output_splits: Sequence[int], input_splits: Sequence[int], group: str
) -> torch.Tensor:
    """From every rank the part of its `x` [D, ...] that is meant for this one, in rank order.

    Args:
        output_splits, input_splits: Extents along the first dimension, one for each rank.
    """
    shape = (sum(output_splits), *x.shape[1:])
    pairs = tuple(zip(output_splits, input_splits, strict=True))
    return _record("all_to_all", [x], group, [shape], pairs=pairs)[0]


def _record(
    kind: str, tensors, group: str, shapes, exchange: Callable = record, **how
) -> list[torch.Tensor]:
    if how.get("reduction", "sum") not in _OPERATIONS:
        raise Unsupported(
            f"{kind} with {how['reduction']}: the CPU has {', '.join(_OPERATIONS)}. To scale the "
            f"operands, multiply the tensor first."
        )
    for x in tensors:
        _require_reduction(kind, how.get("reduction", "sum"), x.dtype)
    metrics.count(f"c10d::{kind}", len(tensors))
    types = [TensorType(x.dtype, tuple(shape)) for x, shape in zip(tensors, shapes)]
    return exchange(Collective(kind, channel=f"{_CHANNEL}:{group}", **how), tensors, types)


def _require_reduction(kind: str, reduction: str, dtype: torch.dtype) -> None:
    """Raise RuntimeError for a reduction that the dtype lacks, before any rank begins to exchange."""
    if reduction in _BITWISE and (dtype.is_floating_point or dtype.is_complex):
        raise RuntimeError(f"{kind} with {reduction} needs integers or bool, not {dtype}")
    if reduction in ORDERED and dtype.is_complex:
        raise RuntimeError(f"{kind} with {reduction} needs numbers that have an order, not {dtype}")
    if reduction == "avg" and dtype is torch.bool:  # two that are True would make False
        raise RuntimeError(f"{kind} with avg needs numbers, not {dtype}")


# --- running ----------------------------------------------------------------------------------


def run_at_once(collective: Collective, tensors: Sequence[torch.Tensor], *_) -> list[torch.Tensor]:
    """Exchange as `record` does, but finish before returning; the results are CPU tensors.

    It is the exchange that a rank which records the same has: a rank may do the one, and others the
    other.
    """
    settle()
    channel = GroupChannel(collective.channel.partition(":")[2])
    channel.thread = world.thread_name()
    return channel.run(collective.at(user_line()), [host_tensor(x) for x in tensors])


class GroupChannel:
    """Exchanges of a process group: in memory where its ranks share a host, or over what it has for
    CPU tensors (gloo, mpi)."""

    thread = ""  # of the rank, where it is not the main one

    def __init__(self, group: str) -> None:
        # Not the group itself: its calls wait for what is recorded, which is what runs here.
        found = resolve_process_group(group)
        self.calls = group_calls.of(found)
        self.backend = backend_of_group(found, "cpu")
        self.size, self.rank = found.size(), found.rank()

    def post(self, collective: Collective, operands: list[torch.Tensor]) -> None:
        """Nothing is sent ahead: the group's own calls do not come in two parts."""

    def run(self, collective: Collective, operands: list[torch.Tensor]) -> list[torch.Tensor]:
        """The results, new tensors; the operands are contiguous CPU tensors."""
        try:
            return self._run(collective, operands)
        except RuntimeError as error:
            error.add_note(f"in {_described(collective, operands)} called at {collective.site}")
            raise

    def _run(self, collective: Collective, operands: list[torch.Tensor]) -> list[torch.Tensor]:
        calls = self.calls
        if calls is None:
            works, results = self._begin(collective, operands)
            for work in works:
                work.wait()
            return results
        if collective.kind == "all_to_all":
            self._compare_parts(calls, collective)
        text = _described(collective, operands)
        if self.thread:  # of those of a rank none comes first
            text += f" in thread {self.thread!r}"
        described = calls.described(text, collective.site)
        if calls.in_memory and shared_memory_groups.takes(collective, operands):
            with calls.turn:  # the mailboxes have room for one exchange at a time
                return shared_memory_groups.run(calls.communicator, collective, operands, described)
        return calls.run(described, lambda: self._begin(collective, operands))

    def _begin(self, collective: Collective, operands: list[torch.Tensor]) -> tuple[list, list]:
        """Return (works of gloo, the tensors that they fill)."""
        begin = _BEGIN[collective.kind]
        begun = [begin(self, collective, x) for x in operands]
        return [work for _, work in begun], [result for result, _ in begun]

    def _compare_parts(self, calls: group_calls.GroupCalls, collective: Collective) -> None:
        """Raise PeerFailure where a rank sends another number of rows than its receiver takes."""
        own = torch.tensor([collective.pairs], device="cpu")
        described = calls.described("all_to_all: sizes of its parts", collective.site)
        if calls.in_memory:
            gather = Collective("all_gather", site=collective.site)
            (everyone,) = calls.communicator.run(gather, [own], described)
        else:
            everyone = own.new_empty((self.size, *own.shape[1:]))
            calls.run(described, lambda: ([gather_flat(self.backend, everyone, own)], None))
        received, sent = everyone[:, :, 0], everyone[:, :, 1].t()
        for receiver, sender in (received != sent).nonzero().tolist():
            calls.communicator.fail(
                f"Rank {calls.ranks[sender]} sends {int(sent[receiver, sender])} rows to rank "
                f"{calls.ranks[receiver]}, which expects {int(received[receiver, sender])} from it, in "
                f"the all_to_all at {collective.site}:"
            )


def _described(collective: Collective, operands: Sequence[torch.Tensor]) -> str:
    """All that must be the same on every rank: the parts of an all_to_all are compared by themselves."""
    shown = replace(collective, channel="", pairs=())
    types = ", ".join(str(TensorType(x.dtype, tuple(x.shape))) for x in operands)
    if collective.kind == "all_to_all":
        types = f"rows of {TensorType(operands[0].dtype, tuple(operands[0].shape[1:]))}"
    return f"{shown.text()} of {types}"


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor: what only moves may be of a dtype unknown to gloo."""
    return x.reshape(-1).view(torch.uint8)


def _options(make: Callable, reduction: str):
    options = make()
    options.reduceOp = _OPERATIONS[reduction]
    return options


def _all_reduce(channel: GroupChannel, how: Collective, x: torch.Tensor):
    result = x.clone()
    options = _options(dist.AllreduceOptions, how.reduction)
    return result, channel.backend.allreduce([result], options)


def _all_gather(channel: GroupChannel, how: Collective, x: torch.Tensor):
    result = x.new_empty((channel.size * x.shape[0], *x.shape[1:]))
    return result, gather_flat(channel.backend, _as_bytes(result), _as_bytes(x))


def _reduce_scatter(channel: GroupChannel, how: Collective, x: torch.Tensor):
    result = x.new_empty((x.shape[0] // channel.size, *x.shape[1:]))
    options = _options(dist.ReduceScatterOptions, how.reduction)
    # gloo works in the memory of what it is given
    source = x.reshape(-1).clone()
    return result, reduce_scatter_flat(channel.backend, result.reshape(-1), source, options)


def _broadcast(channel: GroupChannel, how: Collective, x: torch.Tensor):
    result, options = x.clone(), dist.BroadcastOptions()
    options.rootRank = how.root
    return result, channel.backend.broadcast([_as_bytes(result)], options)


def _all_to_all(channel: GroupChannel, how: Collective, x: torch.Tensor):
    outputs, inputs = zip(*how.pairs)
    result = x.new_empty((sum(outputs), *x.shape[1:]))
    row = x[:1].nbytes if len(x) else result[:1].nbytes
    work = channel.backend.alltoall_base(
        _as_bytes(result), _as_bytes(x), [row * n for n in outputs], [row * n for n in inputs]
    )
    return result, work


_BEGIN = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "broadcast": _broadcast,
    "all_to_all": _all_to_all,
}

CHANNELS[_CHANNEL] = GroupChannel
