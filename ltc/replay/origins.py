"""Where each input of a recorded call has come from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from ltc.aten.call import Call, Scalar
from ltc.checkpointing.storage_sharing import as_bytes
from ltc.device.call_observer import CallObserver
from ltc.device.recording.recorder import Entry
from ltc.replay.reachable import Reachable
from ltc.support.torch_private import storage_identity

_ON_THE_CPU = "it uses a CPU tensor among its arguments on the CPU"
_MOST_BYTES = 1 << 16  # of a tensor that is made on the CPU, the same in each call


class Origins(NamedTuple):
    """Of the inputs of one recording, in recorded order.

    inputs     ("root", number among the bases of the reachable ones on a device), ("upload", place
               among those on the CPU), or ("constant", its position)
    constants  by their position, small tensors that were made on the CPU and uploaded
    """

    inputs: list[tuple[str, int]]
    constants: dict[int, torch.Tensor]

    def other_constant(self, others: Origins) -> int | None:
        """The position of one of which both calls have made another."""
        for position, mine in self.constants.items():
            theirs = others.constants.get(position)
            if theirs is not None and not _same_bits(mine, theirs):
                return position
        return None


def origins_of(reachable: Reachable, observer: CallObserver, last: Entry) -> Origins | str:
    """The origins of the one recording that was watched, or the obstacle."""
    found = Origins([], {})
    uploads = {id(buffer): tensor for tensor, buffer in observer.uploads}
    for position, (root, buffer) in enumerate(zip(observer.origins[0], observer.inputs[0])):
        if root is not None:
            found.inputs.append(("root", root))
            continue
        source = uploads.get(id(buffer))
        place = None if source is None else _place_of_host(reachable, source)
        if place is not None:
            found.inputs.append(("upload", place))
        elif source is not None and source.nbytes <= _MOST_BYTES:
            if _is_of_an_argument(reachable, source):
                return _ON_THE_CPU
            found.constants[position] = source.detach().clone()
            found.inputs.append(("constant", position))
        else:
            return unknown_input(last, position, source is not None)
    firsts = {place for kind, place in found.inputs if kind == "upload"}
    uploaded = {place for place, first in enumerate(reachable.same_uploads) if first in firsts}
    return _use_on_the_cpu(reachable, uploaded) or found


def _use_on_the_cpu(reachable: Reachable, uploaded: set[int]) -> str:
    """An obstacle where a CPU tensor is more than moved to the device."""
    for place, found in enumerate(reachable.host):
        if not found.is_fixed and place not in uploaded:
            return _ON_THE_CPU
    if reachable.has_written_to_host():
        return "it writes to a CPU tensor that is there before"
    return ""


def _is_of_an_argument(reachable: Reachable, source: torch.Tensor) -> bool:
    """Whether it shows memory of a CPU tensor in whose place the next call has another."""
    memory = storage_identity(source.untyped_storage())
    return any(
        not found.is_fixed
        and found.tensor.layout is torch.strided
        and storage_identity(found.tensor.untyped_storage()) == memory
        for found in reachable.host
    )


def _same_bits(mine: torch.Tensor, other: torch.Tensor) -> bool:
    if (mine.shape, mine.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(as_bytes(mine), as_bytes(other))


def _place_of_host(reachable: Reachable, source: torch.Tensor) -> int | None:
    for place, found in enumerate(reachable.host):
        same = found.tensor
        if same.layout is not torch.strided:
            continue  # it has no memory of its own
        if (same.data_ptr(), same.shape, same.stride(), same.dtype) == (
            source.data_ptr(),
            source.shape,
            source.stride(),
            source.dtype,
        ) and same.numel():
            return place
    return None


def unknown_input(last: Entry, position: int, is_upload: bool) -> str:
    """What to say of an input that no later call can be given."""
    call = _user_of_input(last, position)
    line = call.line if call is not None else ""
    if is_upload:
        return f"it moves another tensor that it has made on the CPU to the device, for {line}"
    return f"{line} uses a tensor that is neither an argument nor found in what it closes over"


def _user_of_input(last: Entry, position: int) -> Call | None:
    path = recorded_path(last)
    inputs = (c for c in path if c.overload == "ltc::input" and c.args[0] == position)
    made = next(inputs, None)
    users = (c for c in path if made is not None and made.results[0] in _operands(c))
    return next(users, None)


def _operands(call: Call) -> Iterator[Any]:
    for operand in (*call.args, *call.kwargs.values()):
        if isinstance(operand, (list, tuple)):
            yield from operand
        else:
            yield operand


def slots_of(call: Call) -> list[int]:
    """Of the recording's numbers, those that a call is given."""
    return [operand.slot for operand in _operands(call) if isinstance(operand, Scalar)]


def recorded_path(last: Entry) -> list[Call]:
    """The calls of a recording that ended at that entry, in recorded order."""
    calls, entry = [], last
    while entry.call is not None:
        calls.append(entry.call)
        entry = entry.parent
    calls.reverse()
    return calls
