"""Recording exchanges among replicas: a start and a wait, on one chain of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ltc.aten.call import Call, CallResult
from ltc.backends.collective_runner import current_replica
from ltc.device.recording.recorder import Recorder
from ltc.device.recording.sync import exclusively, flush, value_of
from ltc.device.recording.tensors import state_of, wrap
from ltc.device.user_line import user_line
from ltc.ir.collective import Collective
from ltc.ir.tensor_type import TensorType
from ltc.support.torch_private import plain_functions

START, WAIT = "ltc::collective_start", "ltc::collective_wait"


def record(
    collective: Collective, tensors: Sequence[torch.Tensor], types: Sequence[TensorType]
) -> list[torch.Tensor]:
    """Record an exchange of at least one tensor and return new tensors with its results; nothing
    runs yet.

    The exchange begins as soon as its operands are computed. Calls that need its results wait for
    it; other calls, recorded before or after, run meanwhile. All collectives of a thread on one
    device run in the order in which they were recorded, read or not.

    Args:
        types: The types of the results.

    Raises:
        PeerFailure: When the step runs, if replicas disagree.

    Example:
        >>> from ltc.distributed import collectives
        >>> from ltc.distributed.lazy_multiprocessing import spawn
        >>> from ltc.ir.collective import Collective
        >>> from ltc.ir.tensor_type import TensorType
        >>> def replica(rank):
        ...     operand = torch.full((2,), rank + 1.0, device="ltc")
        ...     types = [TensorType(torch.float32, (2,))]
        ...     return collectives.record(Collective("all_reduce", "sum"), [operand], types)[0].tolist()
        >>> spawn(replica, nprocs=2, start_method="fork")
        [[3.0, 3.0], [3.0, 3.0]]
    """
    states = [state_of(tensor) for tensor in tensors]
    recorder = states[0].device.recorder()
    located = collective if collective.site else collective.at(user_line())

    def add() -> list[torch.Tensor]:
        if recorder.immediate is not None:
            flush(recorder)
        recorder.exchanges = True
        values = [value_of(state) for state in states]
        return [wrap(recorder, value) for value in _add(recorder, located, values, tuple(types))]

    with plain_functions():
        return exclusively(recorder, add)


def _add(
    recorder: Recorder, collective: Collective, values: list[CallResult], types: Sequence[Any]
) -> tuple[CallResult, ...]:
    token = recorder.token
    begun = recorder.advance(
        (START, values, token, collective),
        lambda: _call(recorder, START, (values, token, collective), [TensorType(torch.int64, ())]),
    )
    recorder.token = begun.value
    if recorder.replica is None:
        recorder.replica = current_replica()
    over = recorder.advance(
        (WAIT, begun.value, types), lambda: _call(recorder, WAIT, (begun.value,), types)
    )
    recorded: Any = over.call  # an exchange gives tensors alone
    results: tuple[CallResult, ...] = recorded.results
    return results


def _call(recorder: Recorder, name: str, args: tuple, types: Sequence[Any]) -> Call:
    call = Call(name, args, {}, line=user_line())
    recorder.values(call, [(type.shape, type.dtype) for type in types])
    return call
