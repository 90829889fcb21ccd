"""torch.Generator(device="ltc"): C++ refuses to make one, so this is a Python subclass."""

from __future__ import annotations

import torch

from ltc.device.rng import RandomState
from ltc.device.tensor import device_of
from ltc.device.torch_api import DEVICE_TYPE
from ltc.device.torch_api import Generator as NativeGenerator


class _GeneratorType(type(NativeGenerator)):
    """Calling `torch.Generator` gives torch's own generator, except for device type ltc."""

    def __instancecheck__(cls, instance) -> bool:
        return type.__instancecheck__(NativeGenerator, instance)

    def __call__(cls, device="cpu"):
        if torch.device(device).type != DEVICE_TYPE:
            return NativeGenerator(device)
        generator = type.__call__(cls)
        generator.ltc_device = device_of(torch.device(device)).torch_device
        generator.random = RandomState()
        return generator


class Generator(NativeGenerator, metaclass=_GeneratorType):
    """Random state of its own for calls on an ltc device."""

    @property
    def device(self) -> torch.device:
        return self.ltc_device

    def draw(self) -> int:
        """The seed of the next call that uses this generator."""
        return self.random.draw()

    def manual_seed(self, seed: int) -> "Generator":
        self.random.reset(int(seed))
        return self

    def seed(self) -> int:
        fresh = torch.seed()
        self.random.reset(fresh)
        return fresh

    def initial_seed(self) -> int:
        return self.random.initial

    def get_state(self) -> torch.Tensor:
        return self.random.as_tensor()

    def set_state(self, state: torch.Tensor) -> "Generator":
        self.random.restore(state)
        return self

    def clone_state(self) -> "Generator":
        twin = Generator(self.device)
        twin.set_state(self.get_state())
        return twin


def install() -> None:
    torch.Generator = Generator
