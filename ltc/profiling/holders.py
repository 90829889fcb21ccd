"""What holds the device's memory: parameters, gradients and optimizer states by their names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from ltc.device.recording.tensors import is_lazy
from ltc.device.torch_device import storage_of
from ltc.support.module_names import models


def names_of_buffers(optimizers: Iterable[Optimizer]) -> dict[int, tuple[str, Any]]:
    """By the identity of a buffer: "parameter layers.0.weight", and its type.

    Of every model that has been called, and these optimizers.
    """
    found: dict[int, tuple[str, Any]] = {}
    names: dict[int, str] = {}  # of parameters, by their identity
    for kind, name, tensor in _of_modules():
        names.setdefault(id(tensor), name)
        _note(found, f"{kind} {name}", tensor)
        if tensor.grad is not None:
            _note(found, f"gradient {name}", tensor.grad)
    for optimizer in list(optimizers):
        for parameter, state in optimizer.state.items():
            name = names.get(id(parameter), "a parameter")
            for key, tensor in state.items() if isinstance(state, dict) else ():
                if isinstance(tensor, torch.Tensor):
                    _note(found, f"optimizer {key} of {name}", tensor)
    return found


def _of_modules() -> Iterator[tuple[str, str, torch.Tensor]]:
    for module in models():
        yield from (("parameter", *named) for named in module.named_parameters())
        yield from (("buffer", *named) for named in module.named_buffers())


def _note(found: dict[int, tuple[str, Any]], name: str, tensor: torch.Tensor) -> None:
    state = getattr(storage_of(tensor), "lazy", None) if is_lazy(tensor) else None
    buffer = getattr(state, "buffer", None)
    if buffer is not None:
        found.setdefault(id(buffer), (name, buffer.key))
