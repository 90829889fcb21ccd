"""Exchanges of CPU tensors among replicas, done at once, and what a process does before it ends."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Sequence

import torch

from ltc.device.recording import sync
from ltc.device.recording.user_line import user_line
from ltc.distributed.groups import Groups, frozen
from ltc.distributed.transport import session as sessions
from ltc.distributed.transport.folds import check_reduction
from ltc.ir.collective import Collective
from ltc.support.torch_private import plain_functions


def host_run(collective: Collective, operands: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """An exchange of CPU tensors done at once; new tensors.

    collective  what is exchanged: see ltc/ir/collective.py
    operands    contiguous CPU tensors, of the same types on every replica

    What is pending in the calling thread is started first, since others may wait for it.
    Raises ValueError where there is no other replica; PeerFailure where replicas disagree.

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

    kind    "sum", "mul", "and", "or", "min" or "max"
    groups  lists of ordinals that reduce among themselves; None: all together

    One replica: nothing is done. Raises RuntimeError for another kind, or one that the dtype has
    not; ValueError or AssertionError for groups that do not name each replica once, or differ in
    size; PeerFailure where replicas disagree.

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
