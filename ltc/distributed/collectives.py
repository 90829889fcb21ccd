"""Exchanges among replicas, recorded as part of the step; and those of the host, done at once.

`groups` are lists of ordinals that exchange among themselves, every replica in exactly one of them,
all of one size; None means all together. Results are the same bits on every replica, and in every
run. Inside a host sums are taken in the order of the ordinals.

groups         the groups of replicas that exchange
recorded_sums  the engine that adds
gradients      the gradients of a model, in buckets
"""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Sequence
from typing import Any

import torch

from ltc.backends import collective_runner as backend_collective
from ltc.device.recording import sync
from ltc.device.recording.collective_calls import record
from ltc.device.recording.tensors import require_lazy
from ltc.device.user_line import user_line
from ltc.distributed.gradients import buckets, gradients_of, reduce_gradients
from ltc.distributed.groups import (
    Groups,
    frozen,
    group_of,
    ordinal,
    replica_count,
    require_other,
    require_replica,
)
from ltc.distributed.recorded_sums import agreed_scale, exchange, reduced, type_of
from ltc.distributed.transport import session as sessions
from ltc.distributed.transport.folds import check_reduction
from ltc.distributed.transport.progress_thread import CHANNELS, ProgressRunner
from ltc.ir.collective import Collective
from ltc.ir.tensor_type import TensorType
from ltc.support.torch_private import plain_functions

__all__ = [
    "CHANNELS",
    "Groups",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "buckets",
    "collective_permute",
    "gradients_of",
    "group_of",
    "host_all_reduce",
    "host_run",
    "ordinal",
    "record",
    "recv",
    "reduce_gradients",
    "reduce_scatter",
    "replica_count",
    "send",
]

backend_collective.RUNNER[:] = [ProgressRunner()]


def _scaled(x: torch.Tensor, scale: float) -> torch.Tensor:
    return x if scale == 1.0 else (x * scale).to(x.dtype)


def _assign(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Each target holds its value from now on; nothing is copied when the step runs."""
    with torch.no_grad():
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)


def _dim(dim: int, rank: int) -> int:
    if not -rank <= dim < rank:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-rank}, {rank - 1}], but got {dim})"
        )
    return dim % rank


def _share(x: torch.Tensor, dim: int, count: int) -> tuple[int, ...]:
    if x.shape[dim] % count:
        raise ValueError(
            f"dimension {dim} of {type_of(x)} cannot be cut into {count} equal parts. Pad it first."
        )
    return (*x.shape[:dim], x.shape[dim] // count, *x.shape[dim + 1 :])


@torch.no_grad()
def all_reduce(
    kind: str,
    inputs: torch.Tensor | Sequence[torch.Tensor],
    scale: float = 1.0,
    groups: Groups = None,
) -> Any:
    """Everyone's values reduced, then multiplied by `scale`.

    One replica: a copy, or the list untouched; `scale` is not applied.

    Args:
        kind: "sum", "mul", "and", "or", "min" or "max".
        inputs: A tensor: the result is a new one; a list: reduced in place, as one exchange.

    Returns:
        The new tensor, of the input's shape; or the list itself.

    Raises:
        RuntimeError: For another kind, "and" and "or" of floats, or "min" and "max" of complex
            numbers.
        ValueError or AssertionError: For groups that do not name each replica once, or differ in
            size.
        PeerFailure: When the step runs, if replicas disagree.

    Example:
        >>> from ltc.distributed import collectives
        >>> x = torch.ones(2, device="ltc")
        >>> collectives.all_reduce("sum", x).tolist()  # of two replicas: [2.0, 2.0]
        [1.0, 1.0]
    """
    single = isinstance(inputs, torch.Tensor)
    tensors: list[torch.Tensor] = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    require_lazy(tensors)
    for tensor in tensors:
        check_reduction(kind, tensor.dtype)
    named = frozen(groups)
    if replica_count() == 1 or not tensors:
        return inputs.clone() if isinstance(inputs, torch.Tensor) else inputs
    results = reduced(kind, tensors, named, user_line(), scale=scale)
    results = [_scaled(result, scale) for result in results]
    if single:
        return results[0]
    _assign(tensors, results)
    return inputs


@torch.no_grad()
def all_gather(value: torch.Tensor, dim: int = 0, groups: Groups = None) -> torch.Tensor:
    """Join the `value` of all replicas along `dim` in ordinal order; a number counts as one element.

    Returns:
        A tensor of `value`'s shape, with `dim` as many times as long as there are members.

    Raises:
        IndexError: For a `dim` that `value` lacks.
        ValueError or AssertionError: For groups that do not name each replica once, or differ in
            size.
        PeerFailure: When the step runs.

    Example:
        >>> from ltc.distributed import collectives
        >>> x = torch.ones(2, 3, device="ltc")
        >>> collectives.all_gather(x, dim=0).shape  # of two replicas: [4, 3]
        torch.Size([2, 3])
    """
    require_lazy([value])
    value = value.reshape(1) if value.dim() == 0 else value
    size, named = len(group_of(groups)), frozen(groups)
    dim = _dim(dim, value.dim())
    if replica_count() == 1:
        return value.clone()
    shape = (*value.shape[:dim], value.shape[dim] * size, *value.shape[dim + 1 :])
    collective = Collective("all_gather", groups=named, dim=dim)
    return exchange(collective, [value], [TensorType(value.dtype, shape)])[0]


@torch.no_grad()
def reduce_scatter(
    kind: str,
    value: torch.Tensor | Sequence[torch.Tensor],
    scale: float,
    dim: int,
    count: int,
    groups: Groups = None,
) -> Any:
    """The part of `all_reduce` along `dim` that is this replica's, of as many as there are members.

    Args:
        count: The members of the group.

    Returns:
        A tensor for a tensor, a list for a list, with 1 / count of the dimension.

    Raises:
        ValueError: For another `count`, or a dimension that cannot be cut into so many.
        RuntimeError: For a kind that does not exist, or "and" and "or" of floats.
        IndexError: For a `dim` that there is not.
        AssertionError: For groups of several sizes.
        PeerFailure: When the step runs.

    Example:
        >>> from ltc.distributed import collectives
        >>> x = torch.arange(4.0, device="ltc")
        >>> collectives.reduce_scatter("sum", x, 0.5, dim=0, count=1).tolist()
        [0.0, 0.5, 1.0, 1.5]
    """
    single = isinstance(value, torch.Tensor)
    values: list[torch.Tensor] = [value] if isinstance(value, torch.Tensor) else list(value)
    require_lazy(values)
    for one in values:
        check_reduction(kind, one.dtype)
    members = group_of(groups)
    if count != len(members):
        raise ValueError(f"reduce_scatter into {count} parts among {len(members)} replicas")
    (rank,) = {one.dim() for one in values}
    dim = _dim(dim, rank)
    if len(members) == 1:
        results = [_scaled(one.clone(), scale) for one in values]
        return results[0] if single else results
    types = [TensorType(x.dtype, _share(x, dim, count)) for x in values]
    agreed, checked = ("", []) if scale == 1.0 else agreed_scale(scale, values[0])
    collective = Collective(
        "reduce_scatter",
        kind,
        groups=frozen(groups),
        dim=dim,
        agreed=agreed,
        checked=len(checked),
    )
    results = exchange(collective, [*values, *checked], types)
    results = [_scaled(one, scale) for one in results]
    return results[0] if single else results


@torch.no_grad()
def all_to_all(
    value: torch.Tensor,
    split_dimension: int,
    concat_dimension: int,
    split_count: int,
    groups: Groups = None,
) -> torch.Tensor:
    """Part j of `value` goes to member j; what comes in is joined in member order.

    Args:
        split_dimension: Along which `value` is cut into `split_count` parts, one for each member.
        concat_dimension: Along which the received parts are joined.

    Raises:
        ValueError: For another `split_count`, or a dimension that cannot be cut into so many.
        IndexError: For a dimension that there is not.
        AssertionError: For groups of several sizes.
        PeerFailure: When the step runs.

    Example:
        >>> from ltc.distributed import collectives
        >>> x = torch.ones(4, 3, device="ltc")
        >>> collectives.all_to_all(x, 0, 1, split_count=1).shape  # of two replicas: [2, 6]
        torch.Size([4, 3])
    """
    require_lazy([value])
    members = group_of(groups)
    if split_count != len(members):
        raise ValueError(f"all_to_all of {split_count} parts among {len(members)} replicas")
    split, join = _dim(split_dimension, value.dim()), _dim(concat_dimension, value.dim())
    if len(members) == 1:
        return value.clone()
    shape = list(_share(value, split, split_count))
    shape[join] *= split_count
    collective = Collective("all_to_all", groups=frozen(groups), dim=split, other_dim=join)
    return exchange(collective, [value], [TensorType(value.dtype, tuple(shape))])[0]


@torch.no_grad()
def collective_permute(value: torch.Tensor, pairs: Sequence[Sequence[int]]) -> torch.Tensor:
    """Return the tensor that this replica's partner sends, of `value`'s shape; zeros without a
    partner.

    Args:
        pairs: (from, to) ordinals, the same on every replica.

    Raises:
        ValueError: If an ordinal sends or receives twice, or there is no such replica.
        PeerFailure: When the step runs.

    Example:
        >>> from ltc.distributed import collectives
        >>> x = torch.ones(2, device="ltc")
        >>> collectives.collective_permute(x, [(0, 0)]).tolist()
        [1.0, 1.0]
    """
    require_lazy([value])
    named = tuple((int(source), int(target)) for source, target in pairs)
    for ends in zip(*named):
        for one in ends:
            require_replica("collective_permute", one)
        if len(set(ends)) != len(ends):
            raise ValueError(f"collective_permute: an ordinal sends or receives twice in {pairs}")
    if replica_count() == 1:
        return value.clone() if named else torch.zeros_like(value)
    return exchange(Collective("permute", pairs=named), [value], [type_of(value)])[0]


@torch.no_grad()
def broadcast(
    tensors: Sequence[torch.Tensor], root_ordinal: int = 0, groups: Groups = None
) -> None:
    """Every replica's `tensors` get the values of the root's, in place.

    Nothing is computed with what the others held, so a NaN there does no harm.

    Args:
        root_ordinal: With groups, its position in each of them.

    Raises:
        ValueError: If there is no such root, or groups do not name each replica once.
        AssertionError: For groups of several sizes.
        PeerFailure: When the step runs.

    Example:
        >>> from ltc.distributed import collectives
        >>> x = torch.ones(2, device="ltc")
        >>> collectives.broadcast([x])  # the root is this replica itself
        >>> x.tolist()
        [1.0, 1.0]
    """
    tensors = list(tensors)
    require_lazy(tensors)
    members = group_of(groups)
    if not 0 <= root_ordinal < len(members):
        raise ValueError(f"root {root_ordinal} is none of the {len(members)} replicas")
    if replica_count() == 1 or not tensors:
        return
    collective = Collective("broadcast", groups=frozen(groups), root=root_ordinal)
    _assign(tensors, exchange(collective, tensors, [type_of(x) for x in tensors]))


@torch.no_grad()
def send(value: torch.Tensor, target: int) -> None:
    """Send `value` to another replica, which calls `recv` at the same place of its order.

    Args:
        target: Its ordinal.

    Raises:
        ValueError: If there is no such other replica.
        PeerFailure: When the step runs, if the other does not receive.

    Example:
        >>> from ltc.distributed import collectives
        >>> from ltc.distributed.lazy_multiprocessing import spawn
        >>> def replica(rank):
        ...     x = torch.full((2,), rank + 1.0, device="ltc")
        ...     collectives.send(x, target=1) if rank == 0 else collectives.recv(x, source=0)
        ...     return x.tolist()
        >>> spawn(replica, nprocs=2, start_method="fork")
        [[1.0, 1.0], [1.0, 1.0]]
    """
    require_other("send", int(target))
    pair = ((ordinal(), int(target)),)
    exchange(Collective("send", pairs=pair), [value], [])


@torch.no_grad()
def recv(output: torch.Tensor, source: int) -> torch.Tensor:
    """Receive another replica's tensor: as a new tensor, and in `output`, which gives its type.

    Args:
        source: The other's ordinal.

    Raises:
        ValueError: If there is no such other replica.
        PeerFailure: When the step runs, if the other does not send, or sends another shape.

    Example:
        >>> from ltc.distributed import collectives
        >>> from ltc.distributed.lazy_multiprocessing import spawn
        >>> def replica(rank):
        ...     if rank == 0:
        ...         collectives.send(torch.ones(2, device="ltc"), target=1)
        ...     else:
        ...         return collectives.recv(torch.empty(2, device="ltc"), source=0).tolist()
        >>> spawn(replica, nprocs=2, start_method="fork")
        [None, [1.0, 1.0]]
    """
    require_other("recv", int(source))
    pair = ((int(source), ordinal()),)
    results = exchange(Collective("receive", pairs=pair), [output], [type_of(output)])
    _assign([output], results)
    return results[0]


# --- CPU tensors, exchanged at once, and the end of a process ---------------------------------


def host_run(collective: Collective, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Exchange CPU tensors at once and return new tensors.

    Pending work of the calling thread is started first, since others may wait for it.

    Args:
        collective: The kind of exchange: see ltc/ir/collective.py.
        operands: Contiguous CPU tensors, of the same types on every replica.

    Raises:
        ValueError: If there is no other replica.
        PeerFailure: If replicas disagree.

    Example:
        >>> from ltc.distributed import collectives
        >>> from ltc.distributed.lazy_multiprocessing import spawn
        >>> from ltc.ir.collective import Collective
        >>> def replica(rank):
        ...     gather = Collective("all_gather")
        ...     return [x.tolist() for x in collectives.host_run(gather, [torch.tensor([rank])])]
        >>> spawn(replica, nprocs=2, start_method="fork")
        [[[0, 1]], [[0, 1]]]
    """
    session = _session()
    located = collective.at(collective.site or user_line())
    if session is None:
        raise ValueError(f"{collective.text()} needs other replicas, and this is the only one")
    with plain_functions(), session.at_once() as communicator:
        return communicator.run(located, operands)


def host_all_reduce(tensor: torch.Tensor, kind: str = "sum", groups: Groups = None) -> None:
    """Reduce a contiguous CPU tensor among the replicas, in place and at once.

    One replica: nothing is done.

    Args:
        kind: "sum", "mul", "and", "or", "min" or "max".
        groups: Lists of ordinals that reduce among themselves; None: all together.

    Raises:
        RuntimeError: For another kind, or one that the dtype has not.
        ValueError or AssertionError: For groups that do not name each replica once, or differ in
            size.
        PeerFailure: If replicas disagree.

    Example:
        >>> from ltc.distributed import collectives
        >>> from ltc.distributed.lazy_multiprocessing import spawn
        >>> def replica(rank):
        ...     x = torch.tensor([rank, 1])
        ...     collectives.host_all_reduce(x, "max")
        ...     return x.tolist()
        >>> spawn(replica, nprocs=2, start_method="fork")
        [[1, 1], [1, 1]]
    """
    check_reduction(kind, tensor.dtype)
    session, named = _session(), frozen(groups)
    if session is not None:
        with plain_functions(), session.at_once() as communicator:
            communicator.reduce_in_place(kind, tensor, named, user_line())


def _session() -> sessions.Session | None:
    sync.start_collectives()
    return sessions.current()


@atexit.register
def _run_the_rest() -> None:
    """Start what was recorded and never read: the other replicas wait for this one's part."""
    with contextlib.suppress(Exception):  # nobody is left to hear it
        sync.start_collectives()
        if sessions.any_in_use():
            sync.wait_device_ops()
    with contextlib.suppress(Exception):
        sessions.flush()
