"""The lazy tensors that safetensors is to write once: it compares addresses, and they have none."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch

from ltc.device.ops.resizing import storage_bytes
from ltc.device.recording.tensors import is_lazy, state_of
from ltc.device.storage_sharing import arranged
from ltc.integrations.around import around


def install(torch_files: ModuleType) -> None:
    """Put what is below around functions of `safetensors.torch`."""
    around(torch_files, "_find_shared_tensors", _find)
    around(torch_files, "_is_complete", _is_complete)


def _find(original: Callable, tensors: dict[str, torch.Tensor]) -> list[set[str]]:
    """The names of tensors that share elements, in sets.

    One that shares none is in no set: written by itself, it is no larger than it seems.
    """
    lazy = {name: x for name, x in tensors.items() if isinstance(x, torch.Tensor) and is_lazy(x)}
    found: list[set[str]] = original({n: x for n, x in tensors.items() if n not in lazy})
    sets: dict[int, set[str]] = {}
    for name, placement in zip(lazy, arranged(lazy.items())[1]):
        if lazy[name].numel():
            sets.setdefault(id(placement.entry), set()).add(name)
    return [*found, *(names for names in sets.values() if len(names) > 1)]


def _is_complete(original: Callable, tensor: torch.Tensor) -> bool:
    """Return True if it is all that its storage holds."""
    if not is_lazy(tensor):
        return bool(original(tensor))
    return tensor.nbytes == storage_bytes(state_of(tensor))
