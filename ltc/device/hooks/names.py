"""Names of devices: `ltc:1` as torch says it, `CPU:1` as the backend knows it."""

from __future__ import annotations

import re
from collections.abc import Iterable

import torch

from ltc.device.recording.recorder import devices
from ltc.device.recording.tensors import current_device
from ltc.runtime.transfers import backend
from ltc.support.torch_private import DEVICE_TYPE

_REAL = re.compile(r"(CPU|TPU|GPU):(\d+)")
_PREFERENCE = ("TPU", "GPU", "CPU")  # which kind is meant where none is asked for


def device_index(device: torch.device | str | int) -> int:
    """The index that a torch.device, a string or an int means; of a bare `ltc`, the current one."""
    if isinstance(device, int):
        return device
    named = torch.device(device)
    if named.type != DEVICE_TYPE:
        raise RuntimeError(
            f"Invalid device format: {device}. An {DEVICE_TYPE} device is wanted: '{DEVICE_TYPE}', "
            f"'{DEVICE_TYPE}:0', or an index."
        )
    return current_device().index if named.index is None else named.index


def parse_real_device(name: str) -> tuple[str, int] | None:
    """("CPU", 0) of "CPU:0"; None of anything else."""
    match = _REAL.fullmatch(name)
    return (match[1], int(match[2])) if match else None


def device_kinds() -> list[str]:
    """The kind of every device of this process, by index."""
    known = backend().devices()
    return [known[min(d.index, len(known) - 1)].kind for d in devices()]


def supported_devices(kind: str | None = None, at_most: int | None = None) -> list[str] | None:
    """`ltc:i` of every device of a kind (the best one there is where None); None where none is."""
    kinds = device_kinds()
    for wanted in (kind,) if kind else (*_PREFERENCE, *kinds):
        found = [f"{DEVICE_TYPE}:{i}" for i, k in enumerate(kinds) if k == wanted]
        if found:
            return found[: at_most or None]
    return None


def real_devices(names: Iterable) -> list[str]:
    """`CPU:0` for each `ltc:0`; a name that is real already stays as it is."""
    return [_real_name(str(name)) for name in names]


def _real_name(name: str) -> str:
    if parse_real_device(name):
        return name
    match = re.fullmatch(rf"{DEVICE_TYPE}:(\d+)", name)
    if match is None or int(match[1]) >= len(devices()):
        raise RuntimeError(f"Invalid device format: {name}")
    return f"{device_kinds()[int(match[1])]}:{match[1]}"


def kind_of(real_name: str) -> str:
    """ "CPU" of "CPU:0"."""
    return real_name.partition(":")[0]
