"""Storages that give their memory back and take it again, as fully sharded training does.

`storage.resize_(0)` drops the value of a tensor and of its views; `storage.resize_(size)` makes it
zeros again, to be written over. Other sizes are refused.
"""

from __future__ import annotations

import torch

from ltc.device.recording.state import State
from ltc.device.recording.sync import exclusively, value_of
from ltc.device.recording.tensors import state_of
from ltc.device.recording.views import write
from ltc.errors import LtcError
from ltc.runtime.buffer import Buffer, Execution, Failure, byte_size, input_key


class Freed(Buffer):
    """The stand-in for a tensor's memory that was given back; reading it raises an error."""

    __slots__ = ()

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: int) -> None:
        failure = Failure(
            LtcError(
                f"A {dtype} tensor of shape {list(shape)} is read whose storage was freed by "
                f"resize_(0). Resize the storage to its full size, and write to the tensor, first."
            )
        )
        failure.note_reported()  # an error of whoever reads it, not of the device
        self.handle, self.key, self.device = None, input_key(shape, dtype), device
        self.execution, self.previous, self.shared = Execution(), None, True
        self.execution.finish(failure)

    def __del__(self) -> None:
        """Count nothing: it was never counted as memory."""


def storage_bytes(state: State) -> int:
    """Bytes that the storage of a tensor stands for: its base's, or 0 once it is freed."""
    root = root_of(state)
    return 0 if root.buffer.__class__ is Freed else _whole_bytes(root)


def own_bytes(state: State) -> int:
    """Bytes of the elements of a tensor that is not freed."""
    value = exclusively(state.device.recorder(), lambda: value_of(state))
    return byte_size(value.shape, value.dtype)


def resize(state: State, size: int) -> None:
    """Resize the tensor that holds `state`, as `storage.resize_(size)` does; see the file's text."""
    root = root_of(state)
    if size == storage_bytes(root):
        return
    if size == 0:
        exclusively(root.device.recorder(), lambda: _free(root))
    elif size == _whole_bytes(root):
        exclusively(root.device.recorder(), lambda: _restore(root))
    else:
        raise LtcError(
            f"The storage of a lazy tensor of {_whole_bytes(root)} bytes cannot be resized to "
            f"{size} bytes, only to 0 and back. Use tensor.resize_()."
        )


def root_of(state: State) -> State:
    """The state that a view shows, or the state itself."""
    return state if state.base is None else state.base


def _whole_bytes(root: State) -> int:
    return byte_size(*root.type)


def _free(root: State) -> None:
    shape, dtype = root.type
    for view in root.living_views():
        view.value = None
    root.value, root.buffer = None, Freed(shape, dtype, root.device.index)


def _restore(root: State) -> None:
    shape, dtype = root.type
    zeros = torch.zeros(shape, dtype=dtype, device=root.device.torch_device)
    write(root, value_of(state_of(zeros)))
