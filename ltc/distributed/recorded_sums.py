"""Reductions over the replicas, recorded as part of the step; which engine adds is chosen here.

A sum of few replicas of one host, of types that the backend can add in place, gets a slot of
symmetric memory: then the program itself adds (see docs/distributed.md, "The way of a sum").
Everything else is an exchange that runs beside the program, in `transport/`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch

from ltc.backends.capabilities import BackendCapabilities
from ltc.device.recording import sync
from ltc.device.recording.collective_calls import record
from ltc.device.recording.tensors import state_of
from ltc.distributed.groups import replica_count
from ltc.distributed.transport import session as sessions
from ltc.ir.collective import Collective
from ltc.ir.tensor_type import TensorType
from ltc.runtime.transfers import backend


def exchange(collective: Collective, tensors, types) -> list[torch.Tensor]:
    """Exchange `tensors` and return new tensors of these types, one for each of them."""
    sessions.current()  # from now on the other replicas notice if this one fails
    return record(collective, tensors, types)


def reduced(
    kind: str,
    tensors: Sequence[torch.Tensor],
    groups: tuple,
    line: str,
    bucket: int = -1,
    parameters: str = "",
    scale: float = 1.0,
    agreed: str = "",
) -> list[torch.Tensor]:
    """Return new tensors: all replicas' `tensors` reduced, as one exchange; not scaled yet.

    Args:
        groups: Frozen; () means all together.
        line: The user's line, for messages.
        bucket: The number of this bucket of gradients in the call.
        parameters: The names of the parameters, if not all tensors of the call have one.
        scale: The factor by which each replica multiplies the results.
        agreed: Other facts that must be the same on all replicas.
    """
    types = [type_of(x) for x in tensors]
    agreed, checked = (agreed, []) if scale == 1.0 else agreed_scale(scale, tensors[0])
    in_place = kind == "sum" and not checked
    place = _place_of(tensors, types, groups, bucket) if in_place else (-1, 0)
    collective = _all_reduce_at(kind, groups, parameters, agreed, len(checked), line, *place)
    return exchange(collective, [*tensors, *checked], types)


def agreed_scale(scale: float, like: torch.Tensor) -> tuple[str, list[torch.Tensor]]:
    """Return what the exchange compares of a scale: words, or a tensor that travels along.

    A scale in words is part of the program. Those are few: powers of two, and their products with the
    mean's. Any other may be a new one in each step, and compiles nothing anew as a tensor. Nothing but
    the scale and the number of replicas decides, so that all replicas decide alike.
    """
    if isinstance(scale, (int, float)):
        mantissa, _ = math.frexp(scale)
        if mantissa in (0.5, math.frexp(1 / replica_count())[0]):
            return f"scale {scale}", []
    number = torch.full((1,), 1.0, dtype=torch.float64, device=like.device) * scale
    return "scale", [number]


def type_of(x: torch.Tensor) -> TensorType:
    return TensorType(x.dtype, tuple(x.shape))


@functools.lru_cache(256)
def _all_reduce_at(
    kind: str,
    groups: tuple,
    parameters: str,
    agreed: str,
    checked: int,
    line: str,
    place: int,
    sharers: int,
) -> Collective:
    """The same object every time: recording compares it with the one of the step before."""
    return Collective(
        "all_reduce",
        kind,
        groups,
        parameters=parameters,
        agreed=agreed,
        checked=checked,
        site=line,
        place=place,
        sharers=sharers,
    )


def _place_of(tensors, types: list[TensorType], groups: tuple, bucket: int) -> tuple[int, int]:
    """The slot for a sum's operands in symmetric memory, and how many replicas add; else (-1, 0)."""
    session = sessions.current()
    reducer = None if session is None else session.one_shot_reducer
    if session is None or reducer is None:
        return -1, 0
    sums = BackendCapabilities.of(backend()).one_shot_sums
    slot = reducer.slot_for(sums, groups, types, bucket)
    if slot < 0:
        return -1, 0
    recorder = state_of(tensors[0]).device.recorder()
    if reducer.is_full(slot, (recorder, recorder.recordings)):
        sync.start_collectives()  # what is recorded so far becomes a program of its own
    reducer.count_recorded(slot, (recorder, recorder.recordings))
    return slot, len(groups[0]) if groups else session.replicas
