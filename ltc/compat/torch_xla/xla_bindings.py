"""`torch_xla._XLAC`: the names of its C++ module that scripts call in spite of the underscore."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import ltc
from ltc.compat.torch_xla.xla_device import native, shown
from ltc.compat.torch_xla.xla_model import (
    get_memory_info,
    get_rng_state,
    get_xla_supported_devices,
    set_rng_state,
    xla_real_devices,
)
from ltc.core import lazy_model as ltm
from ltc.debug import graphs
from ltc.device.recording.tensors import upload_many
from ltc.training_loop import transfer


def get_git_revs() -> dict[str, str]:
    """The versions of ltc and torch, where torch_xla has its commits."""
    return {"xla": ltc.__version__, "torch": torch.__version__}


def all_devices() -> list[str]:
    """The real names of all devices."""
    return xla_real_devices()


def supported_devices() -> list[str]:
    """The names of all devices."""
    return get_xla_supported_devices()


def real_devices(devices: Sequence | None = None) -> list[str]:
    """The real names of the devices; all where none are given."""
    return xla_real_devices(devices or None)


def default_device() -> str:
    """The name of the thread's current device."""
    return str(shown())


def set_default_device(device: Any) -> str:
    """Make a device the thread's current one; the name of the one before."""
    before = default_device()
    ltm.lazy_device(native(device).index)
    return before


def cpu_tensors(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of the tensors on the CPU, fetched in one go."""
    return transfer.to_cpu(list(tensors))


def tensors_from_aten(tensors: Sequence[torch.Tensor], devices: Sequence) -> list[torch.Tensor]:
    """Copies of CPU tensors, each on its device."""
    return [upload_many([one], native(device))[0] for one, device in zip(tensors, devices)]


def sync_multi(
    tensors: Sequence[torch.Tensor],
    devices: Sequence = (),
    wait: bool = True,
    sync_xla_data: bool = True,
) -> None:
    """Compute the tensors."""
    ltm.unlazy(tensors)


def step_marker(device: Any = "", devices: Sequence = (), wait: bool = True, **_: Any) -> None:
    """End a step of a device; the thread's current one where none is named."""
    ltm.mark_step(native(device) if device else None, wait=wait)


def wait_device_ops(devices: Sequence | None = None) -> None:
    """Block until everything started on the devices (all where none are given) is over."""
    ltm.wait_device_ops([native(device) for device in devices or ()])


def memory_info(device: Any = None) -> dict[str, int]:
    """The memory of a device."""
    return dict(get_memory_info(device))  # type: ignore[arg-type]  # all its values are numbers


def set_rng_seed(seed: int = 101, device: Any = "") -> None:
    """Seed a device."""
    set_rng_state(seed, device or None)


def get_rng_seed(device: Any = "") -> int:
    """The running seed of a device."""
    return get_rng_state(device or None)


def dimension_size(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """The extent of a dimension, as a tensor on the same device."""
    return torch.tensor(tensor.size(dim), dtype=torch.int32, device=tensor.device)


def save_tensors_graph(save_dir: str, name: str, tensors: Sequence[torch.Tensor]) -> None:
    """Write how the tensors will be computed into a file of the folder."""
    Path(save_dir, f"{name}.txt").write_text(graphs.text(*tensors))
