"""Exchanges among replicas, recorded as part of the step; and those of the host, done at once.

`groups` are lists of ordinals that exchange among themselves, every replica in exactly one of them;
None means all together. Results are the same bits on every replica. Inside a host they are so every
time, since sums are taken in the order of the ordinals; between hosts, while the way is the same
(see crossing.py).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch

from ltc import config
from ltc.backends import collective_runner as backend_collective
from ltc.device.recording import sync
from ltc.device.recording.collective import record
from ltc.device.recording.tensors import state_of
from ltc.device.recording.user_line import user_line
from ltc.device.torch_api import plain_functions
from ltc.distributed import world
from ltc.distributed.transport import session as sessions
from ltc.distributed.transport.folds import check_reduction
from ltc.distributed.transport.progress_thread import CHANNELS, ProgressRunner
from ltc.ir.collective import Collective
from ltc.ir.tensor_type import TensorType
from ltc.llvm.ops.one_shot_sync import is_possible

__all__ = [
    "CHANNELS",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "collective_permute",
    "gradients_of",
    "group_of",
    "host_all_reduce",
    "host_run",
    "record",
    "recv",
    "reduce_gradients",
    "reduce_scatter",
    "replica_count",
    "send",
]

Groups = Sequence[Sequence[int]] | None

# A sum of few is added up by everyone: each more is one more operand to read for all of them.
MOST_SHARERS = 4
ADDED_IN_PLACE = frozenset({torch.float32, torch.float64, torch.int32, torch.int64})

backend_collective.RUNNER[:] = [ProgressRunner()]


def replica_count() -> int:
    """Replicas that exchange with the calling thread's, itself among them."""
    return world.place().replicas


def ordinal() -> int:
    """This replica's number among them."""
    return world.place().ordinal


def group_of(groups: Groups) -> tuple[int, ...]:
    """The ordinals of the calling thread's group, in order; ValueError where it is in none."""
    place = world.place()
    if not groups:
        return tuple(range(place.replicas))
    for group in groups:
        if place.ordinal in group:
            return tuple(group)
    raise ValueError(f"replica {place.ordinal} is in no group of {groups}: put each in exactly one")


def _frozen(groups: Groups) -> tuple[tuple[int, ...], ...]:
    if not groups:
        return ()
    frozen = tuple(tuple(int(ordinal) for ordinal in group) for group in groups)
    if len({len(group) for group in frozen}) > 1:
        raise AssertionError(f"groups must be of one size, since results are: {groups}")
    named = [ordinal for group in frozen for ordinal in group]
    if frozen and sorted(named) != list(range(replica_count())):
        raise ValueError(
            f"groups {groups} must name each of the {replica_count()} replicas exactly once"
        )
    return frozen


def _type(x: torch.Tensor) -> TensorType:
    return TensorType(x.dtype, tuple(x.shape))


def _scaled(x: torch.Tensor, scale: float) -> torch.Tensor:
    return x if scale == 1.0 else (x * scale).to(x.dtype)


def _assign(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Each target holds its value from now on; nothing is copied when the step runs."""
    with torch.no_grad():
        for target, value in zip(targets, values, strict=True):
            target.copy_(value)


# --- in the graph -----------------------------------------------------------------------------


@torch.no_grad()
def all_reduce(
    kind: str,
    inputs: torch.Tensor | Sequence[torch.Tensor],
    scale: float = 1.0,
    groups: Groups = None,
) -> Any:
    """Everyone's values reduced, then multiplied by `scale`.

    kind     "sum", "mul", "and", "or", "min" or "max"
    inputs   a tensor: the result is a new one; a list: reduced in place, as one exchange
    return   the new tensor, or the list itself

    One replica: a copy, or the list untouched; `scale` is not applied.
    Raises RuntimeError for another kind.
    """
    single = isinstance(inputs, torch.Tensor)
    tensors: list[torch.Tensor] = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    for tensor in tensors:
        check_reduction(kind, tensor.dtype)
    if replica_count() == 1 or not tensors:
        return inputs.clone() if isinstance(inputs, torch.Tensor) else inputs
    results = reduced(kind, tensors, groups)
    results = [_scaled(result, scale) for result in results]
    if single:
        return results[0]
    _assign(tensors, results)
    return inputs


def _exchange(collective: Collective, tensors, types) -> list[torch.Tensor]:
    sessions.current()  # from now on the others hear of it if this replica fails
    return record(collective, tensors, types)


def reduced(kind: str, tensors: Sequence[torch.Tensor], groups: Groups) -> list[torch.Tensor]:
    """New tensors with everyone's `tensors` reduced, as one exchange."""
    return _reduced(kind, tensors, _frozen(groups), user_line())


def _reduced(kind: str, tensors, groups: tuple, line: str, bucket: int = -1) -> list[torch.Tensor]:
    """`bucket`: of gradients, its number among those of the call."""
    types = [_type(x) for x in tensors]
    place = _place_of(tensors, types, groups, bucket) if kind == "sum" else (-1, 0)
    return _exchange(_all_reduce_at(kind, groups, line, *place), tensors, types)


@functools.lru_cache(256)
def _all_reduce_at(kind: str, groups: tuple, line: str, place: int, sharers: int) -> Collective:
    """The same object every time: recording compares it with the one of the step before."""
    return Collective("all_reduce", kind, groups, site=line, place=place, sharers=sharers)


def _place_of(tensors, types: list[TensorType], groups: tuple, bucket: int) -> tuple[int, int]:
    """The slot in which few replicas of one host lay a sum's operands, and how many; else (-1, 0)."""
    session = sessions.current()
    if session is None or session.shelf is None:
        return -1, 0
    members = len(groups[0]) if groups else session.replicas
    if members > MOST_SHARERS:
        return -1, 0
    if not is_possible() or any(t.size == 0 or t.dtype not in ADDED_IN_PLACE for t in types):
        return -1, 0
    slot = session.shelf.slot_for(groups, types, bucket)
    if slot < 0:
        return -1, 0
    recorder = state_of(tensors[0]).device.recorder()
    if session.shelf.is_full(slot, (recorder, recorder.walks)):
        sync.start_collectives()  # what is recorded so far becomes a program of its own
        session.shelf.is_full(slot, (recorder, recorder.walks))
    return slot, members


@torch.no_grad()
def all_gather(value: torch.Tensor, dim: int = 0, groups: Groups = None) -> torch.Tensor:
    """Everyone's `value`, joined along `dim` in ordinal order; a number counts as one element."""
    return gathered([value], dim, groups)[0]


@torch.no_grad()
def gathered(values: Sequence[torch.Tensor], dim: int, groups: Groups) -> list[torch.Tensor]:
    """`all_gather` of each, as one exchange."""
    values = [value.reshape(1) if value.dim() == 0 else value for value in values]
    if replica_count() == 1:
        return [value.clone() for value in values]
    size, frozen = len(group_of(groups)), _frozen(groups)
    (rank,) = {value.dim() for value in values}
    dim = _dim(dim, rank)
    types = [
        TensorType(x.dtype, (*x.shape[:dim], x.shape[dim] * size, *x.shape[dim + 1 :]))
        for x in values
    ]
    return _exchange(Collective("all_gather", groups=frozen, dim=dim), values, types)


def _dim(dim: int, rank: int) -> int:
    if not -rank <= dim < rank:
        raise IndexError(
            f"Dimension out of range (expected to be in range of [{-rank}, {rank - 1}], but got {dim})"
        )
    return dim % rank


def _share(x: torch.Tensor, dim: int, count: int) -> tuple[int, ...]:
    if x.shape[dim] % count:
        raise ValueError(
            f"dimension {dim} of {_type(x)} cannot be cut into {count} equal parts. Pad it first."
        )
    return (*x.shape[:dim], x.shape[dim] // count, *x.shape[dim + 1 :])


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

    count  the members of the group
    return a tensor for a tensor, a list for a list
    """
    single = isinstance(value, torch.Tensor)
    values: list[torch.Tensor] = [value] if isinstance(value, torch.Tensor) else list(value)
    for one in values:
        check_reduction(kind, one.dtype)
    members = group_of(groups)
    if count != len(members):
        raise ValueError(f"reduce_scatter into {count} parts among {len(members)} replicas")
    if len(members) == 1:
        results = [_scaled(one.clone(), scale) for one in values]
        return results[0] if single else results
    (rank,) = {one.dim() for one in values}
    dim = _dim(dim, rank)
    types = [TensorType(x.dtype, _share(x, dim, count)) for x in values]
    collective = Collective("reduce_scatter", kind, groups=_frozen(groups), dim=dim)
    results = [_scaled(one, scale) for one in _exchange(collective, values, types)]
    return results[0] if single else results


@torch.no_grad()
def all_to_all(
    value: torch.Tensor,
    split_dimension: int,
    concat_dimension: int,
    split_count: int,
    groups: Groups = None,
) -> torch.Tensor:
    """Part j of `value` goes to member j; what comes in is joined in member order."""
    members = group_of(groups)
    if split_count != len(members):
        raise ValueError(f"all_to_all of {split_count} parts among {len(members)} replicas")
    if len(members) == 1:
        return value.clone()
    split, join = _dim(split_dimension, value.dim()), _dim(concat_dimension, value.dim())
    shape = list(_share(value, split, split_count))
    shape[join] *= split_count
    collective = Collective("all_to_all", groups=_frozen(groups), dim=split, other_dim=join)
    return _exchange(collective, [value], [TensorType(value.dtype, tuple(shape))])[0]


@torch.no_grad()
def collective_permute(value: torch.Tensor, pairs: Sequence[Sequence[int]]) -> torch.Tensor:
    """What the replica paired with this one sends: pairs are (from, to); zeros where none does."""
    frozen = tuple((int(source), int(target)) for source, target in pairs)
    for ends in zip(*frozen):
        if len(set(ends)) != len(ends):
            raise ValueError(f"collective_permute: an ordinal sends or receives twice in {pairs}")
    if replica_count() == 1:
        return value.clone() if frozen else torch.zeros_like(value)
    return _exchange(Collective("permute", pairs=frozen), [value], [_type(value)])[0]


@torch.no_grad()
def broadcast(
    tensors: Sequence[torch.Tensor], root_ordinal: int = 0, groups: Groups = None
) -> None:
    """Every replica's `tensors` get the values of the root's, in place.

    Nothing is computed with what the others held, so a NaN there does no harm.
    root_ordinal  with groups, its position in each of them
    """
    tensors = list(tensors)
    if replica_count() == 1 or not tensors:
        return
    root = group_of(groups)[root_ordinal] if groups else root_ordinal
    if not 0 <= root < replica_count():
        raise ValueError(f"root {root_ordinal} is none of the {replica_count()} replicas")
    collective = Collective("broadcast", groups=_frozen(groups), root=root_ordinal)
    _assign(tensors, _exchange(collective, tensors, [_type(x) for x in tensors]))


@torch.no_grad()
def send(value: torch.Tensor, target: int) -> None:
    """Send `value` to another replica, which calls `recv` at the same place of its order."""
    pair = ((world.place().ordinal, int(target)),)
    _exchange(Collective("send", pairs=pair), [value], [])


@torch.no_grad()
def recv(output: torch.Tensor, source: int) -> torch.Tensor:
    """What another replica sends: as a new tensor, and in `output`, which gives its type."""
    pair = ((int(source), world.place().ordinal),)
    results = _exchange(Collective("receive", pairs=pair), [output], [_type(output)])
    _assign([output], results)
    return results[0]


# --- gradients --------------------------------------------------------------------------------


def gradients_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The gradients of an optimizer's parameters, those that there are, in order."""
    return [
        p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None
    ]


@torch.no_grad()
def reduce_gradients(
    optimizer: torch.optim.Optimizer, groups: Groups = None, reduce: str = "mean"
) -> None:
    """Every gradient becomes its mean (or "sum") over the replicas, in place.

    The gradients of the last parameters, which a backward makes first, travel first: their bucket
    leaves as soon as it is complete, while the rest of the backward still runs. Which gradients a
    bucket holds depends on the list of parameters alone.
    """
    if reduce not in ("mean", "sum"):
        raise ValueError(f"reduce_gradients(reduce={reduce!r}): it is 'mean' or 'sum'")
    session, gradients = sessions.current(), gradients_of(optimizer)[::-1]
    if session is None or not gradients:
        return
    frozen, line, results = _frozen(groups), user_line(), []
    made = buckets(gradients, config.value("ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB"))
    for number, bucket in enumerate(made):
        results += _reduced("sum", bucket, frozen, line, number)
    if reduce == "mean":
        share = 1.0 / (len(frozen[0]) if frozen else session.replicas)
        results = list(torch._foreach_mul(results, share))
    torch._foreach_copy_(gradients, results)


def buckets(tensors: Sequence[torch.Tensor], megabytes: float) -> list[list[torch.Tensor]]:
    """The tensors in order, as many in a list as `megabytes` hold; a larger one stands alone."""
    found: list[list[torch.Tensor]] = []
    room = 0.0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if size > room:
            found.append([])
            room = megabytes * (1 << 20)
        found[-1].append(tensor)
        room -= size
    return found


# --- at once, on CPU tensors ------------------------------------------------------------------


def host_run(collective: Collective, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """An exchange of CPU tensors done at once; new tensors.

    What is pending in the calling thread is started first, since others may wait for it.
    """
    session = _session()
    located = collective.at(collective.site or user_line())
    if session is None:
        raise ValueError(f"{collective.text()} needs other replicas, and this is the only one")
    with plain_functions():
        return session.host.run(located, operands)


def host_all_reduce(tensor: torch.Tensor, kind: str = "sum", groups: Groups = None) -> None:
    """Reduce a contiguous CPU tensor among the replicas, in place and at once."""
    session = _session()
    if session is not None:
        with plain_functions():
            session.host.reduce_in_place(kind, tensor, _frozen(groups), user_line())


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
