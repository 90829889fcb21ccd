"""ltm's exchanges among replicas, as the lazy tensor core calls them.

`groups` are lists of ordinals that exchange among themselves, each replica in exactly one, all of
one size; None means all together. `pin_layout`, `channel_id`, `cctx` and `use_global_device_ids`
are taken for compatibility and ignored: tensors have one layout here, and exchanges happen in the
order in which they are recorded.

All are recorded as part of the step: nothing is exchanged before it runs.  Where replicas record
different exchanges, or one of them does not come, each raises PeerFailure when the step runs.
"""

from __future__ import annotations

import collections
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ltc.core.training import mark_step
from ltc.device.storage_sharing import as_bytes
from ltc.distributed import bucketed, collectives
from ltc.distributed.bucketed import all_gather_bucketized, reduce_scatter_bucketized
from ltc.distributed.collectives import Groups
from ltc.distributed.rendezvous import rendezvous
from ltc.errors import ReplicasDiffer
from ltc.support.torch_private import plain_functions
from ltc.tracebacks import entrance, make_entrances
from ltc.training_loop import transfer

__all__ = [
    "REDUCE_AND",
    "REDUCE_MAX",
    "REDUCE_MIN",
    "REDUCE_MUL",
    "REDUCE_OR",
    "REDUCE_SUM",
    "ReplicasDiffer",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast_master_param",
    "check_replicas",
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
    """Reduce the values of all replicas, then multiply by `scale`.

    One replica: a copy, or the list untouched; `scale` is not applied.

    Args:
        reduce_type: "sum", "mul", "and", "or", "min" or "max" (REDUCE_SUM and its neighbours).
        inputs: A tensor: the result is a new one; a list: reduced in place, as one exchange. Shapes
            and dtypes are the same on every replica.
        groups: Groups of ordinals that reduce among themselves; None: all together.
        cctx: Ignored.
        pin_layout: Ignored.

    Returns:
        The new tensor, of the input's shape; or the list itself.

    Raises:
        RuntimeError: For another kind, "and" and "or" of floats, or "min" and "max" of complex
            numbers.
        ValueError or AssertionError: For groups that do not name each replica once, or differ in
            size.
        PeerFailure: When the step runs, if replicas disagree.

    Example:
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
    """Join the `value` of all replicas along `dim`, in the order of the ordinals.

    Args:
        pin_layout: Must not be true for a list; the rest is ignored.
        value: A tensor, or a list of them; one without dimensions counts as [1].
        groups: Groups of ordinals that gather among themselves; None: all together.
        output: The tensor, or list for a list, that gets the result, which is returned too.

    Returns:
        A tensor of `value`'s shape, with `dim` as many times as long as there are members.

    Raises:
        TypeError: For a value that is neither a tensor nor a list.
        IndexError: For a `dim` that `value` lacks.
        RuntimeError: For a list with `pin_layout`.
        ValueError: For an `output` of another shape or count.
        ValueError or AssertionError: For groups as `all_reduce` does.
        PeerFailure: When the step runs.

    Example:
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
        raise TypeError(f"all_gather of a {type(value).__name__}: pass a tensor or a list of them")
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
    """Reduce and scale the `input` of all replicas; return this replica's part along `scatter_dim`.

    Args:
        pin_layout: Must not be true for a list; the rest is ignored.
        input: A tensor, or a list of them; the dimension must be a multiple of `shard_count`.
        shard_count: The members of the group: part j goes to member j.
        output: The tensor, or list for a list, that gets the result, which is returned too.

    Returns:
        A tensor of `input`'s shape, with 1 / shard_count of the dimension.

    Raises:
        ValueError: For another `shard_count`, a dimension that cannot be cut into so many, an
            `output` of another shape.
        RuntimeError: For a kind that does not exist, or a list with `pin_layout`.
        IndexError: For a dimension that there is not.
        TypeError: For an `output` that is no list.
        ValueError or AssertionError: For groups as `all_reduce` does.
        PeerFailure: When the step runs.

    Example:
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

    Args:
        value: Its `split_dimension` is a multiple of `split_count`.
        split_dimension: The dimension that is cut into parts.
        concat_dimension: Along which the received parts are joined.
        split_count: The members of the group.
        groups: Lists of ordinals that exchange among themselves; None: all.
        pin_layout: Ignored.

    Returns:
        The parts that this replica has received, joined.

    Raises:
        ValueError: For another `split_count`, or a dimension that cannot be cut into so many.
        IndexError: For a dimension that there is not.
        ValueError or AssertionError: For groups as `all_reduce` does.
        PeerFailure: When the step runs.

    Example:
        >>> def replica(rank):
        ...     mine = torch.tensor([10 * rank, 10 * rank + 1]).to("ltc")
        ...     return ltm.all_to_all(mine, split_dimension=0, concat_dimension=0, split_count=2).tolist()
        >>> from ltc.distributed.lazy_multiprocessing import spawn
        >>> spawn(replica, nprocs=2, start_method="fork")
        [[0, 10], [1, 11]]
    """
    return collectives.all_to_all(value, split_dimension, concat_dimension, split_count, groups)


def collective_permute(value: torch.Tensor, pairs: Sequence) -> torch.Tensor:
    """Return the tensor that this replica's partner sends, of `value`'s shape; zeros where none is.

    Args:
        pairs: (from, to) ordinals, the same on every replica; each sends and receives at most once.

    Raises:
        ValueError: If an ordinal sends or receives twice, or there is no such replica.
        PeerFailure: When the step runs.

    Example:
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

    Nothing is computed with what the others held, so a NaN there does no harm.

    Args:
        root_ordinal: With groups, its position in each of them.
        pin_layout: Ignored.

    Raises:
        ValueError: If there is no such root.
        ValueError or AssertionError: For groups as `all_reduce` does.
        PeerFailure: When the step runs.

    Example:
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

    Args:
        model: A module whose parameters and buffers are on a lazy device.

    Example:
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

    Two replicas may both send first and then receive, up to 16 KiB between threads, 2 MiB between
    processes of a host: more than that, and what goes to another host, waits for its receiver.

    Args:
        channel_id: Ignored: messages between two replicas keep their order.
        target: An ordinal; None, where there are two replicas: the other.

    Raises:
        ValueError: If `target` is None and there are not two replicas, or it is no other one.
        PeerFailure: When the step runs, if the other does not receive.

    Example:
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
    """Receive the tensor that the replica `source` sends: as a new tensor, and in `output`.

    Args:
        output: A tensor of the sent one's shape and dtype.
        channel_id: Ignored: messages between two replicas keep their order.
        source: An ordinal; None, where there are two replicas: the other.

    Returns:
        The tensor that came.

    Raises:
        ValueError: If `source` is None and there are not two replicas, or it is no other one.
        PeerFailure: When the step runs, if the other does not send, or sends another shape.

    Example:
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


# --- Comparing replicas -----------------------------------------------------------------------

# A bit that flips in one of them stays there.


@entrance
def check_replicas(model: torch.nn.Module | Mapping[str, torch.Tensor]) -> None:
    """Raise ReplicasDiffer, on every replica, where a parameter has not the same bits on all.

    Every replica calls it, in the same place, every thousand steps say. It reads all parameters and
    exchanges eight bytes for each. Buffers are not looked at where a model is given: statistics of
    batches differ by right.

    Args:
        model: Its parameters are looked at; or tensors by name, such as `model.state_dict()`.

    Raises:
        PeerFailure: If a replica does not come.

    Example:
        >>> model = torch.nn.Linear(4, 2).to("ltc")
        >>> ltm.check_replicas(model)
    """
    tensors = model if isinstance(model, Mapping) else dict(model.named_parameters())
    with plain_functions(), torch.no_grad():
        values = transfer.to_cpu([tensor.detach() for tensor in tensors.values()])
        mine = {name: _digest(value) for name, value in zip(tensors, values)}
    payloads = rendezvous("ltc.check_replicas", json.dumps(mine).encode())
    _compare([json.loads(payload) for payload in payloads])


def _digest(value: torch.Tensor) -> str:
    """Return a digest of dtype, shape and bits."""
    digest = hashlib.blake2b(f"{value.dtype} {list(value.shape)} ".encode(), digest_size=8)
    digest.update(as_bytes(value).numpy().data)
    return digest.hexdigest()


def _compare(replicas: list[dict[str, str]]) -> None:
    names = list(dict.fromkeys(name for digests in replicas for name in digests))
    differing = [name for name in names if len({one.get(name) for one in replicas}) > 1]
    if not differing:
        return
    held = [one.get(differing[0]) for one in replicas]
    usual, count = collections.Counter(held).most_common(1)[0]
    is_clear = 2 * count > len(held)
    ordinals = [k for k, digest in enumerate(held) if digest != usual or not is_clear]
    others = f"the other {count}" if is_clear else "each other"
    who = (
        f"Replica {ordinals[0]} differs"
        if len(ordinals) == 1
        else f"Replicas {_listed(ordinals)} differ"
    )
    raise ReplicasDiffer(
        f"{who} from {others} in {differing[0]!r}, {_counted(differing)} not the same bits on all "
        f"{len(replicas)} replicas. All replicas run the same computation, so either the program of "
        f"one differs (other initial values, an additional step), or its memory is faulty. Restart "
        f"from a checkpoint; `broadcast_master_param` makes the replicas equal.",
        differing,
        ordinals,
    )


def _listed(ordinals: list[int]) -> str:
    """ "0, 2 and 3"."""
    return f"{', '.join(map(str, ordinals[:-1]))} and {ordinals[-1]}"


def _counted(names: list[str]) -> str:
    more = len(names) > 1
    return f"the first of {len(names)} tensors that are" if more else "the only tensor that is"
