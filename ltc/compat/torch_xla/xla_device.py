"""The device of a script for torch_xla: it prints as "xla", and torch sees ltc's."""

from __future__ import annotations

from typing import Any

import torch

from ltc.device.recording.tensors import current_device, device_of
from ltc.support.torch_private import DEVICE_TYPE

XLA = "xla"


class XlaDevice(str):
    """A device that torch takes for `ltc:0`, and that a script reads as `xla:0`.

    torch accepts a string wherever it accepts a device, and no subclass of torch.device can be made.
    So this is the string "ltc:0" to whatever parses it, while `type`, `index`, str() and == answer
    as torch_xla's device does; it equals the `device` of the tensors that are on it.
    """

    __slots__ = ()

    def __new__(cls, index: int = 0) -> XlaDevice:
        return super().__new__(cls, f"{DEVICE_TYPE}:{index}")

    def __getnewargs__(self) -> tuple:
        return (self.index,)

    @property
    def type(self) -> str:
        return XLA

    @property
    def index(self) -> int:  # type: ignore[override]  # str has a method of this name
        return int(str.partition(self, ":")[2])

    def __str__(self) -> str:
        return f"{XLA}:{self.index}"

    def __repr__(self) -> str:
        return f"device(type='{XLA}', index={self.index})"

    def __format__(self, spec: str) -> str:
        return format(str(self), spec)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, (str, torch.device)):
            return _parts(other) == (XLA, self.index)
        return NotImplemented

    def __ne__(self, other: object) -> bool:
        equal = self.__eq__(other)
        return equal if equal is NotImplemented else not equal

    def __enter__(self) -> XlaDevice:
        torch.device(DEVICE_TYPE, self.index).__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.device(DEVICE_TYPE, self.index).__exit__(*error)

    def __hash__(self) -> int:
        return hash(torch.device(DEVICE_TYPE, self.index))  # as that of the tensors' device


def _parts(device: str | torch.device) -> tuple[str, int | None]:
    """The kind, which is "xla" of ltc's devices too, and the index."""
    if isinstance(device, torch.device):
        return (XLA if device.type == DEVICE_TYPE else device.type), device.index
    kind, _, digits = str(device).partition(":")
    return (XLA if kind == DEVICE_TYPE else kind), int(digits) if digits.isdecimal() else None


def is_xla(device: Any) -> bool:
    """Return True if it names an XLA device: "xla", "xla:1", torch.device("xla")."""
    if isinstance(device, torch.device):
        return device.type == XLA
    return isinstance(device, str) and str(device).partition(":")[0] == XLA


def native(device: Any) -> Any:
    """ltc's torch.device in place of an XLA device; anything else as it is."""
    if not is_xla(device):
        return device
    index = _parts(device)[1]
    return (current_device() if index is None else device_of(index)).torch_device


def shown(device: Any = None) -> XlaDevice:
    """Return one of ltc's devices as scripts see it; the thread's current one for None."""
    chosen = current_device() if device is None else device_of(native(device))
    return XlaDevice(chosen.index)
