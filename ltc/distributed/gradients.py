"""The gradients of a model, averaged over the replicas in buckets while the backward still runs."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence

import torch

from ltc import config
from ltc.device.user_line import user_line
from ltc.distributed.groups import Groups, frozen, group_of
from ltc.distributed.recorded_sums import exchange, reduced
from ltc.distributed.rendezvous import rendezvous
from ltc.distributed.transport import session as sessions
from ltc.ir.collective import Collective
from ltc.ir.tensor_type import TensorType
from ltc.support.torch_private import (
    count_of,
    elements_of,
    foreach_copy_,
    foreach_mul,
    places_of,
)


def gradients_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The gradients of an optimizer's parameters, those that there are, in order.

    Example:
        >>> from ltc.distributed import collectives
        >>> w, unused = (torch.ones(2, device="ltc", requires_grad=True) for _ in range(2))
        >>> w.sum().backward()
        >>> [g.tolist() for g in collectives.gradients_of(torch.optim.SGD([w, unused]))]
        [[1.0, 1.0]]
    """
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
    bucket holds depends on the list of parameters alone. One replica: nothing is done.

    Args:
        groups: Lists of ordinals that average among themselves; None: all together.

    Raises:
        ValueError: For another `reduce`, or groups that do not name each replica once.
        AssertionError: If groups differ in size.
        PeerFailure: When the step runs, if replicas disagree.

    Example:
        >>> from ltc.distributed import collectives
        >>> w = torch.ones(2, device="ltc", requires_grad=True)
        >>> w.sum().backward()
        >>> collectives.reduce_gradients(torch.optim.SGD([w]))  # the mean of one
        >>> w.grad.tolist()
        [1.0, 1.0]
    """
    if reduce not in ("mean", "sum"):
        raise ValueError(f"reduce_gradients(reduce={reduce!r}): pass 'mean' or 'sum'")
    session, gradients = sessions.current(), gradients_of(optimizer)[::-1]
    if session is None or not gradients:
        return
    named, line, results = frozen(groups), user_line(), []
    whose = _parameters_with_gradients(optimizer, len(gradients))
    scale = 1.0 / (len(named[0]) if named else session.replicas) if reduce == "mean" else 1.0
    sparse = [gradient for gradient in gradients if gradient.is_sparse]
    if sparse:
        gradients = [gradient for gradient in gradients if not gradient.is_sparse]
        for gradient, total in zip(sparse, _joined_over_replicas(sparse, named, line, reduce)):
            gradient.copy_(total * scale)
        if not gradients:
            return
    made = buckets(gradients, config.value("ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB"))
    for number, bucket in enumerate(made):
        results += reduced("sum", bucket, named, line, number, whose, agreed=reduce)
    if reduce == "mean":
        results = foreach_mul(results, scale)
    foreach_copy_(gradients, results)


def _parameters_with_gradients(optimizer: torch.optim.Optimizer, gradients: int) -> str:
    """The numbers of the parameters that have one, as "0-3, 7"; "" where all of them have.

    Gradients of one shape could stand for other parameters on another replica.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if gradients == len(parameters):
        return ""
    has = [number for number, p in enumerate(parameters) if p.grad is not None]
    runs = itertools.groupby(enumerate(has), lambda pair: pair[1] - pair[0])
    spans = [[number for _, number in run] for _, run in runs]
    return ", ".join(str(one[0]) if len(one) == 1 else f"{one[0]}-{one[-1]}" for one in spans)


def buckets(tensors: Sequence[torch.Tensor], megabytes: float) -> list[list[torch.Tensor]]:
    """The tensors in order, as many in a list as `megabytes` hold; a larger one stands alone.

    Args:
        megabytes: In units of 2**20 bytes.

    Example:
        >>> from ltc.distributed import collectives
        >>> tensors = [torch.ones(n) for n in (100, 100, 200_000, 100)]
        >>> [len(bucket) for bucket in collectives.buckets(tensors, megabytes=0.5)]
        [2, 1, 1]
    """
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


# --- sparse gradients: those of an embedding with sparse=True ------------------------------------


def _joined_over_replicas(
    gradients: Sequence[torch.Tensor], groups: tuple, line: str, reduce: str
) -> list[torch.Tensor]:
    """The sum of each over the replicas: everyone's elements, one replica's behind the other's.

    Batches may look up different numbers of rows: these are exchanged at once, and the elements in
    the step.

    Args:
        groups: Frozen; () means all together.
        line: The user's, for messages.
        reduce: "mean" or "sum".
    """
    gather = Collective("all_gather", groups=groups, agreed=reduce, site=line)
    return [
        _joined(gradient, counts, gather)
        for gradient, counts in zip(gradients, _counts_of_all(gradients, groups))
    ]


def _counts_of_all(gradients: Sequence[torch.Tensor], groups: tuple) -> list[tuple[int, ...]]:
    """Return for each gradient how many elements each member of the group has."""
    members, layout = group_of(groups), f"{len(gradients)}q"
    own = struct.pack(layout, *map(count_of, gradients))
    shapes = ", ".join(str(list(gradient.shape)) for gradient in gradients)
    payloads = rendezvous(f"sparse gradients of {shapes}", own, members)  # in ordinal order
    of_member = dict(zip(sorted(members), payloads))
    return list(zip(*(struct.unpack(layout, of_member[member]) for member in members)))


def _joined(gradient: torch.Tensor, counts: tuple[int, ...], gather: Collective) -> torch.Tensor:
    places = _of_all(places_of(gradient).t(), counts, gather).t()
    return torch.sparse_coo_tensor(
        places,
        _of_all(elements_of(gradient), counts, gather),
        gradient.shape,
        device=gradient.device,  # whatever the thread's default device
        check_invariants=False,  # they are those of gradients that there were
    )


def _of_all(own: torch.Tensor, counts: tuple[int, ...], gather: Collective) -> torch.Tensor:
    """The rows of all members; each travels with as many as the member that has most of them."""
    most = max(counts)
    filled = torch.cat([own, own.new_zeros(most - len(own), *own.shape[1:])])
    gathered = TensorType(own.dtype, (most * len(counts), *own.shape[1:]))
    (everyone,) = exchange(gather, [filled], [gathered])
    parts = everyone.split(most) if most else [everyone] * len(counts)
    return torch.cat([part[:count] for part, count in zip(parts, counts)])
