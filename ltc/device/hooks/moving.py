"""`module.to(device)` changes all of a module or nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.types import Device as DeviceLike

from ltc.device.recording.tensors import device_of, is_lazy
from ltc.support.torch_private import DEVICE_TYPE, MODULE_APPLY, own_buffers, own_parameters


def install() -> None:
    """Let modules move to ltc as a whole.  Once per process."""
    module = torch.nn.Module
    apply = MODULE_APPLY.current

    def _apply(self: torch.nn.Module, function: Callable[..., Any], recurse: bool = True):
        if isinstance(function, _Conversion):  # of a module that holds this one
            return apply(self, function, recurse)
        conversion = _Conversion(self, function)
        try:
            apply(self, conversion, recurse)
        except BaseException:
            conversion.undo()
            raise
        conversion.tell_scripts()
        return self

    def move_to_ltc(self: torch.nn.Module, device: DeviceLike = None):
        return self.to(device_of(DEVICE_TYPE if device is None else device).torch_device)

    _apply.__doc__ = apply.__doc__
    MODULE_APPLY.replace(_apply)
    setattr(module, DEVICE_TYPE, move_to_ltc)


class _Conversion:
    """What a module applies to each of its tensors, which can be undone.

    What only changes its device goes back by a copy of its value: kept until the end, the old
    values would take the memory of a second model.
    """

    def __init__(self, module: torch.nn.Module, function: Callable[..., Any]) -> None:
        self.function = function
        self.entries = [
            (own, dict(own))
            for one in module.modules()
            for own in (own_parameters(one), own_buffers(one))
        ]
        self.of_scripts = [
            (own_parameters(one), name, parameter, parameter.device)
            for one in module.modules()
            if isinstance(one, torch.jit.ScriptModule)
            for name, parameter in own_parameters(one).items()
        ]
        self.changed: list[tuple] = []

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        result = self.function(tensor)
        if result is not tensor and (is_lazy(tensor) or is_lazy(result)):
            same = result.dtype is tensor.dtype
            for one in (tensor, tensor.grad):
                if one is not None:
                    self.changed.append((one, one.device, None if same else one.data))
        return result

    def tell_scripts(self) -> None:
        """Give TorchScript, which holds contents in place of Python objects, those of now."""
        for own, name, parameter, before in self.of_scripts:
            if parameter.device != before:
                own[name] = parameter

    def undo(self) -> None:
        if not self.changed:
            return
        for tensor, device, old in self.changed:
            if old is not None:
                tensor.data = old
            elif tensor.device != device:
                tensor.data = tensor.data.to(device)
        for own, before in self.entries:
            for name, tensor in before.items():
                own[name] = tensor
