"""ltm's exchanges among replicas, as the lazy tensor core calls them.

`groups` are lists of ordinals that exchange among themselves, each replica in exactly one, all of
one size; None means all together. `pin_layout`, `channel_id`, `cctx` and `use_global_device_ids`
are taken for compatibility and ignored: tensors have one layout here, and exchanges happen in the
order in which they are recorded.

All are recorded as part of the step: nothing is exchanged before it runs.  Where replicas record
different exchanges, or one of them does not come, each raises PeerFailure when the step runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ltc.core.training import mark_step
from ltc.distributed import bucketed, collectives
from ltc.distributed.bucketed import all_gather_bucketized, reduce_scatter_bucketized
from ltc.distributed.collectives import Groups
from ltc.tracebacks import make_entrances

__all__ = [
    "REDUCE_AND",
    "REDUCE_MAX",
    "REDUCE_MIN",
    "REDUCE_MUL",
    "REDUCE_OR",
    "REDUCE_SUM",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast_master_param",
    "collective_broadcast",
    "collective_permute",
    "recv",
    "reduce_scatter",
    "send",
]

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

    reduce_type       "sum", "mul", "and", "or", "min" or "max" (REDUCE_SUM and its neighbours)
    inputs            a tensor: the result is a new one; a list: reduced in place, as one exchange.
                      Shapes and dtypes are the same on every replica
    groups            of ordinals that reduce among themselves; None: all together
    cctx, pin_layout  ignored
    return            the new tensor, of the input's shape; or the list itself

    One replica: a copy, or the list untouched; `scale` is not applied.
    Raises RuntimeError for another kind, "and" and "or" of floats, or "min" and "max" of complex
    numbers; ValueError or AssertionError for groups that do not name each replica once, or differ
    in size; PeerFailure when the step runs, where replicas disagree.

    >>> def replica(rank):
    ...     mine = torch.full((2,), rank + 1.0, device="ltc")
    ...     return ltm.all_reduce(ltm.REDUCE_SUM, mine, scale=0.5).tolist()
    >>> from ltc.distributed.lazy_multiprocessing import spawn
    >>> spawn(replica, nprocs=2, start_method="fork")
    [[1.5, 1.5], [1.5, 1.5]]
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
    """Everyone's `value`, joined along `dim` in the order of the ordinals.

    value   a tensor, or a list of them; one without dimensions counts as [1]
    groups  of ordinals that gather among themselves; None: all together
    output  where it goes: a tensor for a tensor, a list for a list; the result is returned too
    return  of `value`'s shape, `dim` as many times as long as there are members

    pin_layout must not be true for a list; the rest is ignored.
    Raises TypeError for what is neither tensor nor list, IndexError for a `dim` that `value` lacks,
    RuntimeError for a list with `pin_layout`, ValueError for an `output` of another shape or count;
    ValueError or AssertionError for groups as `all_reduce` does; PeerFailure when the step runs.

    >>> def replica(rank):
    ...     return ltm.all_gather(torch.full((1, 2), rank, device="ltc")).tolist()
    >>> from ltc.distributed.lazy_multiprocessing import spawn
    >>> spawn(replica, nprocs=2, start_method="fork")
    [[[0, 0], [1, 1]], [[0, 0], [1, 1]]]
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
    """This replica's part, along `scatter_dim`, of everyone's `input` reduced and scaled.

    input        a tensor, or a list of them; the dimension must be a multiple of `shard_count`
    shard_count  the members of the group: part j goes to member j
    output       where it goes: a tensor for a tensor, a list for a list; returned too
    return       of `input`'s shape, with 1 / shard_count of the dimension

    pin_layout must not be true for a list; the rest is ignored.
    Raises ValueError for another `shard_count`, a dimension that cannot be cut into so many, an
    `output` of another shape; RuntimeError for a kind that does not exist, or a list with
    `pin_layout`; IndexError for a dimension that there is not; TypeError for an `output` that is no
    list; ValueError or AssertionError for groups as `all_reduce` does; PeerFailure when the step
    runs.

    >>> def replica(rank):
    ...     mine = torch.arange(4.0, device="ltc") + rank
    ...     return ltm.reduce_scatter("sum", mine, 1.0, scatter_dim=0, shard_count=2).tolist()
    >>> from ltc.distributed.lazy_multiprocessing import spawn
    >>> spawn(replica, nprocs=2, start_method="fork")
    [[1.0, 3.0], [5.0, 7.0]]
    """
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
    """`value` cut into parts, part j sent to member j; the parts received, joined in their order.

    value             its `split_dimension` is a multiple of `split_count`
    concat_dimension  along which the received parts are joined
    split_count       the members of the group
    pin_layout        ignored

    Raises ValueError for another `split_count`, or a dimension that cannot be cut into so many;
    IndexError for a dimension that there is not; ValueError or AssertionError for groups as
    `all_reduce` does; PeerFailure when the step runs.

    >>> def replica(rank):
    ...     mine = torch.tensor([10 * rank, 10 * rank + 1]).to("ltc")
    ...     return ltm.all_to_all(mine, split_dimension=0, concat_dimension=0, split_count=2).tolist()
    >>> from ltc.distributed.lazy_multiprocessing import spawn
    >>> spawn(replica, nprocs=2, start_method="fork")
    [[0, 10], [1, 11]]
    """
    return collectives.all_to_all(value, split_dimension, concat_dimension, split_count, groups)


def collective_permute(value: torch.Tensor, pairs: Sequence) -> torch.Tensor:
    """What the replica that is paired with this one sends, of `value`'s shape; zeros where none is.

    pairs  (from, to) ordinals, the same on every replica; each sends and receives at most once

    Raises ValueError where an ordinal sends or receives twice, or there is no such replica;
    PeerFailure when the step runs.

    >>> def replica(rank):
    ...     mine = torch.full((2,), rank + 1.0, device="ltc")
    ...     return ltm.collective_permute(mine, pairs=[(0, 1)]).tolist()
    >>> from ltc.distributed.lazy_multiprocessing import spawn
    >>> spawn(replica, nprocs=2, start_method="fork")
    [[0.0, 0.0], [1.0, 1.0]]
    """
    return collectives.collective_permute(value, pairs)


def collective_broadcast(
    tensors: Sequence[torch.Tensor],
    root_ordinal: int = 0,
    groups: Groups = None,
    pin_layout: bool = True,
) -> None:
    """Every replica's tensors become those of the root, in place, whatever they held.

    root_ordinal  with groups, its position in each of them
    pin_layout    ignored

    Nothing is computed with what the others held, so a NaN there does no harm.
    Raises ValueError where there is no such root; ValueError or AssertionError for groups as
    `all_reduce` does; PeerFailure when the step runs.

    >>> def replica(rank):
    ...     mine = torch.full((2,), float(rank), device="ltc")
    ...     ltm.collective_broadcast([mine], root_ordinal=1)
    ...     return mine.tolist()
    >>> from ltc.distributed.lazy_multiprocessing import spawn
    >>> spawn(replica, nprocs=2, start_method="fork")
    [[1.0, 1.0], [1.0, 1.0]]
    """
    collectives.broadcast(tensors, root_ordinal, groups)


def broadcast_master_param(model: torch.nn.Module) -> None:
    """Every replica's parameters and buffers become those of ordinal 0, in place; ends the step.

    Raises what `mark_step` raises: PeerFailure, where replicas' models differ in their shapes.

    >>> def replica(rank):
    ...     model = torch.nn.Linear(1, 1, bias=False, device="ltc")
    ...     torch.nn.init.constant_(model.weight, rank + 5.0)
    ...     ltm.broadcast_master_param(model)
    ...     return model.weight.item()
    >>> from ltc.distributed.lazy_multiprocessing import spawn
    >>> spawn(replica, nprocs=2, start_method="fork")
    [5.0, 5.0]
    """
    collectives.broadcast([*model.parameters(), *model.buffers()])
    mark_step()


def send(value: torch.Tensor, channel_id: int, target: int | None = None) -> None:
    """Send `value` to the replica `target`, which calls `recv`.

    channel_id  ignored: messages between two replicas keep their order
    target      an ordinal; None, where there are two replicas: the other

    Two replicas may both send first and then receive, up to 16 KiB between threads, 2 MiB between
    processes of a host: more than that, and what goes to another host, waits for its receiver.

    Raises ValueError where `target` is None and there are not two replicas, or it is no other one;
    PeerFailure when the step runs, where the other does not receive.

    >>> def replica(rank):
    ...     x = torch.full((2,), rank + 1.0, device="ltc")
    ...     if rank == 0:
    ...         ltm.send(x, channel_id=1)
    ...     else:
    ...         ltm.recv(x, channel_id=1)
    ...     return x.tolist()
    >>> from ltc.distributed.lazy_multiprocessing import spawn
    >>> spawn(replica, nprocs=2, start_method="fork")
    [[1.0, 1.0], [1.0, 1.0]]
    """
    collectives.send(value, _other(target))


def recv(output: torch.Tensor, channel_id: int, source: int | None = None) -> torch.Tensor:
    """What the replica `source` sends: as a new tensor, and in `output`.

    output      of the shape and dtype of what is sent
    channel_id  ignored: messages between two replicas keep their order
    source      an ordinal; None, where there are two replicas: the other

    Raises ValueError where `source` is None and there are not two replicas, or it is no other one;
    PeerFailure when the step runs, where the other does not send, or sends another shape.

    >>> def replica(rank):
    ...     if rank == 0:
    ...         ltm.send(torch.ones(2, device="ltc"), channel_id=1, target=1)
    ...     else:
    ...         return ltm.recv(torch.empty(2, device="ltc"), channel_id=1, source=0).tolist()
    >>> from ltc.distributed.lazy_multiprocessing import spawn
    >>> spawn(replica, nprocs=2, start_method="fork")
    [None, [1.0, 1.0]]
    """
    return collectives.recv(output, _other(source))


def _other(ordinal: int | None) -> int:
    if ordinal is None and collectives.replica_count() != 2:
        raise ValueError("send and recv among more than two replicas need a target and a source")
    return 1 - collectives.ordinal() if ordinal is None else ordinal


make_entrances(globals(), __all__)
