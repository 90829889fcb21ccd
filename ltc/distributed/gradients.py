"""The gradients of a model, averaged over the replicas in buckets while the backward still runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ltc import config
from ltc.device.recording.user_line import user_line
from ltc.distributed.groups import Groups, frozen
from ltc.distributed.recorded_sums import reduced
from ltc.distributed.transport import session as sessions
from ltc.support.torch_private import foreach_copy_, foreach_mul


def gradients_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The gradients of an optimizer's parameters, those that there are, in order.

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

    groups  lists of ordinals that average among themselves; None: all together

    The gradients of the last parameters, which a backward makes first, travel first: their bucket
    leaves as soon as it is complete, while the rest of the backward still runs. Which gradients a
    bucket holds depends on the list of parameters alone. One replica: nothing is done.

    Raises ValueError for another `reduce`, or groups that do not name each replica once;
    AssertionError where groups differ in size; PeerFailure when the step runs, where replicas
    disagree.

    >>> from ltc.distributed import collectives
    >>> w = torch.ones(2, device="ltc", requires_grad=True)
    >>> w.sum().backward()
    >>> collectives.reduce_gradients(torch.optim.SGD([w]))  # the mean of one
    >>> w.grad.tolist()
    [1.0, 1.0]
    """
    if reduce not in ("mean", "sum"):
        raise ValueError(f"reduce_gradients(reduce={reduce!r}): it is 'mean' or 'sum'")
    session, gradients = sessions.current(), gradients_of(optimizer)[::-1]
    if session is None or not gradients:
        return
    named, line, results = frozen(groups), user_line(), []
    made = buckets(gradients, config.value("ALLREDUCE_GRADIENTS_BUCKET_SIZE_MB"))
    for number, bucket in enumerate(made):
        results += reduced("sum", bucket, named, line, number)
    if reduce == "mean":
        results = foreach_mul(results, 1.0 / (len(named[0]) if named else session.replicas))
    foreach_copy_(gradients, results)


def buckets(tensors: Sequence[torch.Tensor], megabytes: float) -> list[list[torch.Tensor]]:
    """The tensors in order, as many in a list as `megabytes` hold; a larger one stands alone.

    megabytes  in units of 2**20 bytes

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
