"""torch.Generator(device="ltc"): C++ refuses to make one, so this is a Python subclass."""

from __future__ import annotations

from typing import Any

import torch

from ltc.device.recording.tensors import device_of
from ltc.support.torch_private import DEVICE_TYPE
from ltc.support.torch_private import Generator as NativeGenerator


class _GeneratorType(type(NativeGenerator)):  # type: ignore[misc]  # it is `type` itself
    """Calling `torch.Generator` gives torch's own generator, except for device type ltc."""

    def __instancecheck__(cls, instance: object) -> bool:
        return type.__instancecheck__(NativeGenerator, instance)

    def __call__(cls, device: torch.device | str | int = "cpu") -> NativeGenerator:
        if torch.device(device).type != DEVICE_TYPE:
            return NativeGenerator(device)
        generator: Generator = type.__call__(cls)
        generator.ltc_device = device_of(torch.device(device)).torch_device
        return generator


class Generator(NativeGenerator, metaclass=_GeneratorType):
    """Random state of its own for calls on an ltc device.

    Its state is that of the CPU generator it inherits from, since C++ hands kernels the native
    object, not this one; a call on the device takes its seed from there.
    """

    ltc_device: torch.device

    @property
    def device(self) -> torch.device:
        return self.ltc_device

    def clone_state(self) -> Generator:
        copy: Generator = type(self)(self.device)
        copy.set_state(self.get_state())
        return copy

    def __reduce__(self) -> tuple[Any, ...]:
        _, _, *state = super().__reduce__()  # what it left out names the CPU
        return type(self), (self.device,), *state


def install() -> None:
    torch.Generator = Generator  # type: ignore[misc]  # in its place
