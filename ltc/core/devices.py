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
    """Return True if `tensor` is a tensor on an ltc device; False for anything else.

    Args:
        tensor: Any object.

    Example:
        >>> ltm.is_lazy_tensor(torch.ones(2, device="ltc")), ltm.is_lazy_tensor(torch.ones(2))
        (True, False)
    """
    return is_lazy(tensor)


def parse_lazy_device(device: str) -> tuple[str, int] | None:
    """The kind and the index in a real device's name; None where it is no such name.

    Args:
        device: A name such as "CPU:3".

    Returns:
        The kind and the index; None if it is no name of a real device.

    Example:
        >>> ltm.parse_lazy_device("CPU:3"), ltm.parse_lazy_device("ltc:3")
        (('CPU', 3), None)
    """
    return names.parse_real_device(device)


def get_lazy_supported_devices(
    devkind: str | None = None, max_devices: int | None = None
) -> list[str] | None:
    """The names of every device of a kind, at most `max_devices`; None where there is none.

    Args:
        devkind: "TPU", "GPU" or "CPU"; None means the first of these that this process has.
        max_devices: The most names to return; None: all.

    Returns:
        The names of the devices; None if there is none of the kind.

    Example:
        >>> ltm.get_lazy_supported_devices("CPU", max_devices=1)
        ['ltc:0']
    """
    return names.supported_devices(devkind, max_devices)


def lazy_device(n: int | None = None, devkind: str | None = None) -> torch.device:
    """The lazy device number `n`, or the thread's current one; it becomes the current one.

    Args:
        n: The device's number.
        devkind: If `n` is None, take the first device of this kind: "TPU", "GPU" or "CPU".

    Returns:
        The device.

    Raises:
        AssertionError: If there is no device of the kind.
        RuntimeError: If there is no device of that number.

    Example:
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

    Args:
        devices: Lazy devices, their names, or names of real devices.

    Returns:
        Names of real devices, in the same order.

    Raises:
        RuntimeError: If one is neither, or is a device that this process does not have.

    Example:
        >>> ltm.lazy_real_devices(["ltc:0", "CPU:1"])
        ['CPU:0', 'CPU:1']
    """
    return names.real_devices(devices)


def lazy_device_hw(device) -> str:
    """The kind of hardware behind a lazy device: "TPU", "GPU" or "CPU".

    Args:
        device: A lazy device, or its name.

    Returns:
        "TPU", "GPU" or "CPU".

    Raises:
        RuntimeError: If `device` is no lazy device of this process.

    Example:
        >>> ltm.lazy_device_hw("ltc:0")
        'CPU'
    """
    return names.kind_of(names.real_devices([device])[0])


def get_memory_info(device=None) -> dict[str, int]:
    """The memory of a device, in units of 1024 bytes: "kb_free" and "kb_total".

    Args:
        device: The thread's current one where None.

    Returns:
        Numbers by "kb_free" and "kb_total".

    Raises:
        RuntimeError: If there is no such device.

    Example:
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

    Args:
        seed: Any integer, or what `get_rng_state` returned.
        device: The thread's current one where None.

    Raises:
        RuntimeError: If there is no such device.
        TypeError: If `seed` is no integer.

    Example:
        >>> ltm.set_rng_state(7)
        >>> first = torch.rand(3, device="ltc")
        >>> ltm.set_rng_state(7)
        >>> torch.equal(first, torch.rand(3, device="ltc"))
        True
    """
    (current_device() if device is None else device_of(device)).random.restore_number(seed)


def get_rng_state(device=None) -> int:
    """The random state of a device: setting it again repeats what is drawn from here on.

    Args:
        device: The thread's current one where None.

    Returns:
        The seed while nothing was drawn in this step; behind a draw, a larger integer.

    Raises:
        RuntimeError: If there is no such device.

    Example:
        >>> state = ltm.get_rng_state()
        >>> first = torch.rand(3, device="ltc")
        >>> ltm.set_rng_state(state)
        >>> torch.equal(first, torch.rand(3, device="ltc"))
        True
    """
    return (current_device() if device is None else device_of(device)).random.as_number()


make_entrances(globals(), __all__)
