"""`torch_xla.core.xla_model`, where its signatures differ from ltm's."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, TypedDict

import torch

from ltc.compat.torch_xla.xla_device import XLA, XlaDevice, native, shown
from ltc.compat.torch_xla.xla_only import XlaOnly, ignored
from ltc.core import lazy_model as ltm
from ltc.device.hooks import names
from ltc.device.hooks.module import max_memory_allocated
from ltc.device.hooks.patches import barrier
from ltc.support.torch_private import DEVICE_TYPE


class MemoryInfo(TypedDict):
    """The memory of a device: in bytes as torch_xla says it now, in kilobytes as it did."""

    bytes_used: int
    bytes_limit: int
    peak_bytes_used: int
    kb_free: int
    kb_total: int


class DeviceContext:
    """The attributes that a script may keep with a device."""

    def __init__(self, device: Any) -> None:
        self.device = device


def _lazy_name(device: Any) -> str:
    """ "ltc:1" of "xla:1"; what is no such name stays, for ltm to judge."""
    text = str(device)
    kind, colon, index = text.partition(":")
    return f"{DEVICE_TYPE}{colon}{index}" if kind == XLA else text


def xla_device(n: int | None = None, devkind: str | None = None) -> XlaDevice:
    """Device number `n`, or the thread's current one; it becomes the current one."""
    _known_kind(devkind)
    return shown(ltm.lazy_device(n))


def get_xla_supported_devices(
    devkind: str | int | None = None, max_devices: int | None = None
) -> list[str]:
    """The names of all devices, at most `max_devices`; older releases took a kind first."""
    if isinstance(devkind, int):
        devkind, max_devices = None, devkind
    found = names.supported_devices(_known_kind(devkind), max_devices) or []
    return [f"{XLA}:{name.partition(':')[2]}" for name in found]


def _known_kind(kind: str | None) -> str | None:
    """The kind, where this process has devices of it; None, which means any, where it has not."""
    if kind is None or kind in names.device_kinds():
        return kind
    ignored(
        "devkind", f"no device is of the kind {kind} that is asked for; others take their place"
    )
    return None


def xla_real_devices(devices: Sequence | None = None) -> list[str]:
    """The names of the hardware behind the devices, all of this process where None."""
    chosen = get_xla_supported_devices() if devices is None else devices
    return names.real_devices(map(_lazy_name, chosen))


def xla_device_hw(device: Any) -> str:
    """The kind of hardware behind a device: "CPU"."""
    return ltm.lazy_device_hw(_lazy_name(native(device)))


def xla_device_kind(device: Any = None) -> str:
    """The vendor's name of the hardware behind a device."""
    return torch.get_device_module(DEVICE_TYPE).get_device_name(native(shown(device)))


def xla_replication_devices(local_devices: Sequence | None = None) -> list[str]:
    """The real names of all devices to replicate over."""
    chosen = get_xla_supported_devices() if local_devices is None else local_devices
    return ltm.lazy_replication_devices([_lazy_name(device) for device in chosen])


def set_replication(device: Any, devices: Sequence) -> None:
    """Make `device` the thread's current one, and a replica among `devices`; [] ends that."""
    ltm.set_replication(native(device), [native(one) for one in devices])


def get_memory_info(device: Any = None) -> MemoryInfo:
    """The memory of a device; the thread's current one where None."""
    chosen = native(shown(device))
    kilobytes = ltm.get_memory_info(chosen)
    used = kilobytes["kb_total"] - kilobytes["kb_free"]
    return {
        "bytes_used": used * 1024,
        "bytes_limit": kilobytes["kb_total"] * 1024,
        "peak_bytes_used": max_memory_allocated(chosen),
        "kb_free": kilobytes["kb_free"],
        "kb_total": kilobytes["kb_total"],
    }


def send_cpu_data_to_device(datas: Any, device: Any, input_sharding: Any = None) -> Any:
    """`datas` with every CPU tensor in it uploaded, all in one batch."""
    if input_sharding is not None:
        raise XlaOnly(
            "send_cpu_data_to_device(input_sharding=...): sharding by XLA's compiler is part of XLA. "
            "Omit the argument, and cut the batch with torch.distributed.tensor.distribute_tensor."
        )
    return ltm.send_cpu_data_to_device(datas, native(device))


def set_rng_state(seed: int, device: Any = None) -> None:
    """Seed a device: the thread's current one where None."""
    ltm.set_rng_state(seed, native(shown(device)))


def get_rng_state(device: Any = None) -> int:
    """The running seed of a device."""
    return ltm.get_rng_state(native(shown(device)))


@contextlib.contextmanager
def fork_rng(device: Any = None, enabled: bool = True) -> Iterator[None]:
    """A block after which the device's random numbers go on as if it had not been."""
    state = get_rng_state(device)
    try:
        yield
    finally:
        if enabled:
            set_rng_state(state, device)


def xla_rendezvous(
    payload: bytes = b"", ordinals: Sequence[int] | None = None, tag: str | None = None
) -> list[bytes]:
    """Everyone's payload, in the order of the ordinals, once all have come."""
    return ltm.rendezvous(tag or "torch_xla.rendezvous", payload, ordinals or ())


def optimization_barrier_(tensors: Sequence[torch.Tensor]) -> None:
    """Keep what comes after from being merged with what came before; values stay as they are."""
    with torch.no_grad():
        for tensor in tensors:
            tensor.data = barrier(tensor)
