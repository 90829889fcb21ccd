"""Collectives of a `torch.distributed` group as calls of a step: recorded, run with the rest of it.

Each reads the device's token and makes the next one, so those of a device run in the order in which
they were recorded, whatever their groups: ranks may read their values in different orders.  The
token is alive at the end of every walk, so each walk runs all of its collectives, read or not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from ltc.aten.call import Call, Value
from ltc.debug import metrics
from ltc.device.lines import user_line
from ltc.device.recorder import Device
from ltc.device.state import State
from ltc.device.step import exclusively, value_of
from ltc.device.tensor import host_value, state_of, uploaded, wrap
from ltc.device.views import write

KINDS = {
    dist.ReduceOp.SUM: "sum", dist.ReduceOp.AVG: "avg", dist.ReduceOp.PRODUCT: "product",
    dist.ReduceOp.MIN: "min", dist.ReduceOp.MAX: "max", dist.ReduceOp.BAND: "band",
    dist.ReduceOp.BOR: "bor", dist.ReduceOp.BXOR: "bxor",
}
_OPERATIONS = {name: op for op, name in KINDS.items()}


# --- the token --------------------------------------------------------------------------------

_tokens: dict[Device, State] = {}


def _token_of(device: Device) -> State:
    """What the collectives of a device read and write: how many there have been."""
    token = _tokens.get(device)
    if token is None:
        token = State(None, device)
        token.buffer = uploaded(torch.zeros((), dtype=torch.int64), device)
        token = _tokens.setdefault(device, token)  # another thread may have won the race
    return token


def settle() -> None:
    """Return when every collective recorded so far has run; raises the error of one that failed.

    A collective that is not recorded waits for this: all ranks run them in the same order.
    """
    for token in list(_tokens.values()):
        if token.buffer is None or token.buffer.execution is not None:
            host_value(token)


# --- recording --------------------------------------------------------------------------------

def all_reduce(x: torch.Tensor, kind: str, group: str) -> torch.Tensor:
    """The elements of every rank's `x`, reduced.

    kind   a value of KINDS
    group  the name of a process group
    """
    return _record("all_reduce", x, (kind, group), tuple(x.shape))


def all_gather(x: torch.Tensor, size: int, group: str) -> torch.Tensor:
    """Every rank's `x` [D, ...], joined in rank order: [size * D, ...]."""
    return _record("all_gather", x, (size, group), (size * x.shape[0], *x.shape[1:]))


def reduce_scatter(x: torch.Tensor, kind: str, size: int, group: str) -> torch.Tensor:
    """This rank's part [D / size, ...] of the reduced `x` [D, ...]."""
    return _record("reduce_scatter", x, (kind, size, group), (x.shape[0] // size, *x.shape[1:]))


def broadcast(x: torch.Tensor, root: int, group: str) -> torch.Tensor:
    """The `x` of rank `root` of the group; what the others hold is not looked at."""
    return _record("broadcast", x, (root, group), tuple(x.shape))


def all_to_all(
    x: torch.Tensor, output_splits: list[int], input_splits: list[int], group: str
) -> torch.Tensor:
    """From every rank the part of its `x` [D, ...] that is meant for this one, in rank order.

    output_splits, input_splits  extents along the first dimension, one for each rank
    """
    shape = (sum(output_splits), *x.shape[1:])
    return _record("all_to_all", x, (list(output_splits), list(input_splits), group), shape)


def _record(name: str, x: torch.Tensor, attributes: tuple, shape: tuple) -> torch.Tensor:
    """The result of one collective on `x`, pending."""
    metrics.count(f"Recorded::{name}")
    state, overload = state_of(x), getattr(torch.ops.ltc_distributed, name).default
    device = state.device
    recorder, token = device.recorder(), _token_of(device)

    def record() -> torch.Tensor:
        value, before = value_of(state), value_of(token)

        def make_call() -> Call:
            call = Call(overload, (before, value, *attributes), {}, line=user_line())
            recorder.values(call, [((), torch.int64), (shape, value.dtype)])
            return call

        after, result = recorder.advance((overload, before, value, *attributes), make_call).call.results
        write(token, after)
        return wrap(recorder, result)

    return exclusively(recorder, record)


# --- running ----------------------------------------------------------------------------------
# Operators with a CPU kernel, so that a program calls them as it calls any other of torch's.

_SCHEMAS = (
    "all_reduce(Tensor token, Tensor x, str kind, str group) -> (Tensor, Tensor)",
    "all_gather(Tensor token, Tensor x, int size, str group) -> (Tensor, Tensor)",
    "reduce_scatter(Tensor token, Tensor x, str kind, int size, str group) -> (Tensor, Tensor)",
    "broadcast(Tensor token, Tensor x, int root, str group) -> (Tensor, Tensor)",
    "all_to_all(Tensor token, Tensor x, int[] output_splits, int[] input_splits, str group)"
    " -> (Tensor, Tensor)",
)
_library = torch.library.Library("ltc_distributed", "DEF")


def _runs(schema: str) -> Callable:
    """Makes the function below it the CPU kernel of an operator: it gets x, attributes, backend."""
    name = schema.partition("(")[0]
    _library.define(schema)

    def register(run: Callable) -> Callable:
        def kernel(token: torch.Tensor, x: torch.Tensor, *attributes):
            *attributes, group = attributes
            try:
                result = run(x, *attributes, _host_backend(group))
            except Exception as error:
                error.add_note(
                    f"in {name} number {int(token)} of this device, over the process group "
                    f"{group!r}: {list(x.shape)} {x.dtype}"
                )
                raise
            return token + 1, result

        _library.impl(name, kernel, "CPU")
        return run

    return register


def _host_backend(group: str) -> dist.Backend:
    """What moves CPU tensors for a group.  Not the group itself, whose calls wait for `settle`."""
    return dist.distributed_c10d._resolve_process_group(group)._get_backend(torch.device("cpu"))


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor: what only moves may have a dtype that gloo does not know."""
    return x.reshape(-1).view(torch.uint8)


@_runs(_SCHEMAS[0])
def _all_reduce(x, kind: str, backend) -> torch.Tensor:
    result, options = x.clone(), dist.AllreduceOptions()
    options.reduceOp = _OPERATIONS[kind]
    backend.allreduce([result], options).wait()
    return result


@_runs(_SCHEMAS[1])
def _all_gather(x, size: int, backend) -> torch.Tensor:
    result = x.new_empty((size * x.shape[0], *x.shape[1:]))
    backend._allgather_base(_as_bytes(result), _as_bytes(x)).wait()
    return result


@_runs(_SCHEMAS[2])
def _reduce_scatter(x, kind: str, size: int, backend) -> torch.Tensor:
    result, options = x.new_empty((x.shape[0] // size, *x.shape[1:])), dist.ReduceScatterOptions()
    options.reduceOp = _OPERATIONS[kind]
    backend._reduce_scatter_base(result.reshape(-1), x.reshape(-1).clone(), options).wait()
    return result


@_runs(_SCHEMAS[3])
def _broadcast(x, root: int, backend) -> torch.Tensor:
    result, options = x.clone(), dist.BroadcastOptions()
    options.rootRank = root
    backend.broadcast([_as_bytes(result)], options).wait()
    return result


@_runs(_SCHEMAS[4])
def _all_to_all(x, output_splits: list[int], input_splits: list[int], backend) -> torch.Tensor:
    result = x.new_empty((sum(output_splits), *x.shape[1:]))
    row = x[:1].nbytes if len(x) else result[:1].nbytes
    backend.alltoall_base(
        _as_bytes(result), _as_bytes(x),
        [row * extent for extent in output_splits], [row * extent for extent in input_splits],
    ).wait()
    return result
