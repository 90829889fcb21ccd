"""Name the tensor that is on another device than the call: the parameter, attribute or variable."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch import nn

from ltc.errors import NotLazyTensor
from ltc.support.torch_private import DEVICE_TYPE, storage_identity
from ltc.tracebacks import is_of_the_program


def description(tensor: torch.Tensor) -> str:
    """Return the text of NotLazyTensor: the type, shape and device of the tensor, its name and the cure.

    The name is found in the frames of the calling thread.
    """
    found = f"{tensor.type()} of shape {list(tensor.shape)}. It is on {tensor.device}"
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        holder = _holder(frame, tensor)
        if holder is not None:
            return f"{found}: {holder}"
        frame = frame.f_back
    return f"{found}; move it with .to('{DEVICE_TYPE}')."


def name_argument(
    error: NotLazyTensor, overload: str, names: Iterable[str], values: Iterable[Any]
) -> None:
    """Add to the error which argument of the overload its tensor is."""
    for name, value in zip(names, values):
        parts = value if isinstance(value, (list, tuple)) else (value,)
        if error.tensor is not None and any(part is error.tensor for part in parts):
            error.args = (f"{error.args[0]} (Argument '{name}' of {overload}.)",)
            error.tensor = None  # the error keeps no tensor alive


def _holder(frame: FrameType, tensor: torch.Tensor) -> str | None:
    """Return what a frame's function holds the tensor as, and the cure; None if it does not hold it."""
    local = frame.f_locals
    module = local.get("self")
    if isinstance(module, nn.Module):
        owner = type(module).__name__
        for kind, named in (
            ("parameter", module.named_parameters(recurse=False)),
            ("buffer", module.named_buffers(recurse=False)),
        ):
            for name, one in named:
                if _is_same(one, tensor):
                    return (
                        f"the {kind} '{name}' of {owner}. "
                        f"Move the model before its first call: model.to('{DEVICE_TYPE}')."
                    )
        for name, value in vars(module).items():
            if _is_same(value, tensor):
                return (
                    f"the attribute '{name}' of {owner}, which model.to() does not move, since it is "
                    f"neither a parameter nor a buffer. Use self.register_buffer('{name}', ...)."
                )
    if is_of_the_program(frame.f_code.co_filename):
        words = frame.f_code.co_names  # globals that the function reads, among others
        read = {word: frame.f_globals[word] for word in words if word in frame.f_globals}
        for variable, one in _variables({**read, **local}):
            if _is_same(one, tensor):
                place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                return f"{variable} at {place}; move it with {variable}.to('{DEVICE_TYPE}')."
    return None


def _variables(local: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the name and value of each variable, and of the entries of dictionaries and sequences."""
    for name, value in local.items():
        yield name, value
        if type(value) is dict:
            yield from ((f"{name}[{key!r}]", part) for key, part in list(value.items()))
        elif type(value) in (list, tuple):
            yield from ((f"{name}[{k}]", part) for k, part in enumerate(value))


def _is_same(value: Any, tensor: torch.Tensor) -> bool:
    """Return True if the value is the tensor, or shares its memory as the transposed weight does."""
    if value is tensor:
        return True
    if not isinstance(value, torch.Tensor) or value.device != tensor.device:
        return False
    if value.layout is not torch.strided or tensor.layout is not torch.strided:
        return False
    return storage_identity(value.untyped_storage()) == storage_identity(tensor.untyped_storage())
