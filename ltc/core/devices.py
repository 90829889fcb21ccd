"""ltm's devices: their names, which one is current, their memory and their random numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ltc.device.hooks import names
from ltc.device.recording.sync import end_what_runs_at_once
from ltc.device.recording.tensors import current_device, device_of, is_lazy, set_current_device
from ltc.runtime.account import account_of
from ltc.runtime.transfers import backend
from ltc.tracebacks import make_entrances

__all__ = [
    "get_lazy_supported_devices",
    "get_memory_info",
    "get_rng_state",
    "is_lazy_tensor",
    "lazy_device",
    "lazy_device_hw",
    "lazy_real_devices",
    "parse_lazy_device",
    "set_rng_state",
]


def is_lazy_tensor(tensor) -> bool:
    """Whether `tensor` is a tensor on an ltc device; False for anything else.

    >>> ltm.is_lazy_tensor(torch.ones(2, device="ltc")), ltm.is_lazy_tensor(torch.ones(2))
    (True, False)
    """
    return is_lazy(tensor)


def parse_lazy_device(device: str) -> tuple[str, int] | None:
    """The kind and the index in a real device's name; None where it is no such name.

    >>> ltm.parse_lazy_device("CPU:3"), ltm.parse_lazy_device("ltc:3")
    (('CPU', 3), None)
    """
    return names.parse_real_device(device)


def get_lazy_supported_devices(
    devkind: str | None = None, max_devices: int | None = None
) -> list[str] | None:
    """The names of every device of a kind, at most `max_devices`; None where there is none.

    devkind  "TPU", "GPU" or "CPU"; None means the first of these that this process has

    >>> ltm.get_lazy_supported_devices("CPU", max_devices=1)
    ['ltc:0']
    """
    return names.supported_devices(devkind, max_devices)


def lazy_device(n: int | None = None, devkind: str | None = None) -> torch.device:
    """The lazy device number `n`, or the thread's current one; it becomes the current one.

    devkind  where `n` is None: the first device of this kind, "TPU", "GPU" or "CPU"

    Raises AssertionError where there is no device of the kind, RuntimeError where there is none of
    the number.

    >>> ltm.lazy_device(), ltm.lazy_device(0, devkind="CPU")
    (device(type='ltc', index=0), device(type='ltc', index=0))
    """
    if n is not None:
        device = device_of(n)
    elif devkind is not None:
        found = names.supported_devices(devkind)
        assert found, f"No devices of {devkind} kind"
        device = device_of(found[0])
    else:
        device = current_device()
    set_current_device(device)
    return device.torch_device


def lazy_real_devices(devices: Sequence) -> list[str]:
    """The names of the devices behind lazy ones; a name that is real already stays as it is.

    Raises RuntimeError where one is neither, or is a device that this process does not have.

    >>> ltm.lazy_real_devices(["ltc:0", "CPU:1"])
    ['CPU:0', 'CPU:1']
    """
    return names.real_devices(devices)


def lazy_device_hw(device) -> str:
    """The kind of hardware behind a lazy device: "TPU", "GPU" or "CPU".

    Raises RuntimeError where `device` is no lazy device of this process.

    >>> ltm.lazy_device_hw("ltc:0")
    'CPU'
    """
    return names.kind_of(names.real_devices([device])[0])


def get_memory_info(device=None) -> dict[str, int]:
    """The memory of a device, in units of 1024 bytes: "kb_free" and "kb_total".

    device  the thread's current one where None

    Raises RuntimeError where there is no such device.

    >>> sorted(ltm.get_memory_info())
    ['kb_free', 'kb_total']
    """
    chosen = current_device() if device is None else device_of(device)
    end_what_runs_at_once(chosen)
    known = backend().devices()
    total = known[min(chosen.index, len(known) - 1)].memory_bytes
    free = max(total - account_of(chosen.index).bytes, 0)
    return {"kb_free": free // 1024, "kb_total": total // 1024}


def set_rng_state(seed: int, device=None) -> None:
    """Seed a device: what is drawn from here on depends on `seed` alone.

    seed    any integer, or what `get_rng_state` returned
    device  the thread's current one where None

    Raises RuntimeError where there is no such device, TypeError where `seed` is no integer.

    >>> ltm.set_rng_state(7)
    >>> first = torch.rand(3, device="ltc")
    >>> ltm.set_rng_state(7)
    >>> torch.equal(first, torch.rand(3, device="ltc"))
    True
    """
    (current_device() if device is None else device_of(device)).random.restore_number(seed)


def get_rng_state(device=None) -> int:
    """The random state of a device: setting it again repeats what is drawn from here on.

    device  the thread's current one where None
    return  the seed while nothing was drawn in this step; behind a draw, a larger integer

    Raises RuntimeError where there is no such device.

    >>> state = ltm.get_rng_state()
    >>> first = torch.rand(3, device="ltc")
    >>> ltm.set_rng_state(state)
    >>> torch.equal(first, torch.rand(3, device="ltc"))
    True
    """
    return (current_device() if device is None else device_of(device)).random.as_number()


make_entrances(globals(), __all__)
