"""What replicas do together with values of any kind: reduce them, or act on some replicas only."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ltc.distributed import world
from ltc.distributed.rendezvous import rendezvous
from ltc.support.torch_private import plain_functions
from ltc.tracebacks import entrance
from ltc.utils import transfer


@entrance
def mesh_reduce(tag: str, data: Any, reduce_fn: Callable[[list], Any]) -> Any:
    """`reduce_fn` of the list of everyone's `data`, in ordinal order, its tensors on the CPU.

    tag   names the exchange: the same on every replica
    data  what torch.save can write; lazy tensors in it arrive as CPU tensors

    Every replica calls it and gets the same. Raises PeerFailure where they call it with other tags,
    or one does not come.

    >>> ltm.mesh_reduce("accuracy", 0.75, lambda all: sum(all) / len(all))
    0.75
    """
    file = io.BytesIO()
    torch.save(transfer.to_cpu(data), file)
    payloads = rendezvous(tag, file.getvalue())
    with plain_functions():
        values = [torch.load(io.BytesIO(p), weights_only=False) for p in payloads]
    return reduce_fn(values)


def do_on_ordinals(target: Callable, data: tuple = (), ordinals: Sequence[int] = (0,)) -> Any:
    """`target(*data)`, with tensors on the CPU, on the listed ordinals; None on the others.

    data  its lazy tensors are computed on every replica, and are CPU tensors in the call

    Every replica returns after all have called. Raises PeerFailure where one does not come.

    >>> ltm.do_on_ordinals(print, ("epoch", torch.ones(2, device="ltc").sum()))
    epoch tensor(2.)
    """
    chosen = world.place().ordinal in ordinals
    transfer.materialize([x for x in data if isinstance(x, torch.Tensor)])
    result = target(*transfer.to_cpu(data)) if chosen else None
    rendezvous("ltc.do_on_ordinals")
    return result
