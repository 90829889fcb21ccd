"""safetensors' files opened for the device: `load_file(path, device="ltc")`, `safe_open`.

Its reader, which is not Python, has a list of devices. It reads for the CPU, and what is asked of it
is moved.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from ltc.integrations.around import around
from ltc.support.torch_private import DEVICE_TYPE


def install(safetensors: ModuleType) -> None:
    """Put `_open` around `safetensors.safe_open`."""
    around(safetensors, "safe_open", _open)


def _open(
    original: Callable, filename: Any, framework: str, device: Any = "cpu", **options: Any
) -> Any:
    if str(device).partition(":")[0] != DEVICE_TYPE:
        return original(filename, framework, device=device, **options)
    return _OpenFile(original(filename, framework, device="cpu", **options), torch.device(device))


class _OpenFile:
    """An open file whose tensors come on a device; all else is the file's own."""

    def __init__(self, file: Any, device: torch.device):
        self.file, self.device = file, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def __enter__(self) -> _OpenFile:
        self.file.__enter__()
        return self

    def __exit__(self, *error: Any) -> Any:
        return self.file.__exit__(*error)

    def get_tensor(self, name: str) -> torch.Tensor:
        return self.file.get_tensor(name).to(self.device)

    def get_tensors(self) -> dict[str, torch.Tensor]:
        return {name: x.to(self.device) for name, x in self.file.get_tensors().items()}

    def get_slice(self, name: str) -> _PartOfFile:
        return _PartOfFile(self.file.get_slice(name), self.device)


class _PartOfFile:
    """A tensor of the file that is read by indexing, likewise."""

    def __init__(self, part: Any, device: torch.device):
        self.part, self.device = part, device

    def __getattr__(self, name: str) -> Any:
        return getattr(self.part, name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.part[index].to(self.device)
