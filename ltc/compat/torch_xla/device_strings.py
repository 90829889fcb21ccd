""" "xla" where torch takes a device: the tensors made are ltc's.

torch itself knows a device type XLA, to which no library is linked here. So what torch would ask of
that type is asked of ltc; and where C++ wants the library before it asks, Python names ltc.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from ltc.amp import autocast
from ltc.aten.schema import schema_of
from ltc.compat.torch_xla.xla_device import XLA, XlaDevice, is_xla, native
from ltc.device.hooks.names import replace_what_takes_a_device
from ltc.device.recording.tensors import is_lazy
from ltc.support.torch_private import (
    DEVICE_CONTEXT,
    DEVICE_TYPE,
    all_overload_names,
    device_constructors,
    has_kernel,
)
from ltc.tracebacks import entrance, is_of_the_program

_libraries: list[torch.library.Library] = []  # a library unregisters its kernels when it is freed


def install() -> None:
    """Let torch take "xla" for ltc. Once per process."""
    _send_kernels_to_ltc()
    device_constructors()  # torch looks them up once: as they are before they are replaced below
    replace_what_takes_a_device(_with_native_device)
    DEVICE_CONTEXT.replace(_with_native_device(DEVICE_CONTEXT.current))
    for kind in (torch.amp.autocast, torch.amp.GradScaler, type(torch.Generator)):
        method = "__call__" if issubclass(kind, type) else "__init__"
        setattr(kind, method, _with_native_kind(getattr(kind, method)))
    torch.Tensor.is_xla = property(is_lazy)  # type: ignore[attr-defined]  # of every tensor
    torch.Tensor.device = property(_device_as_asked_for)  # type: ignore[assignment]
    torch.serialization.register_package(0, _no_tag, _restored)


_device_of: Callable[[torch.Tensor], torch.device] = torch.Tensor.device.__get__
_is_of_the_program = functools.cache(is_of_the_program)


def _device_as_asked_for(tensor: torch.Tensor) -> Any:
    """The device of a tensor: as the script knows it where the script asks, else as torch does.

    A branch on `tensor.device.type == "xla"` would be the one for the CPU otherwise, silently.
    """
    device = _device_of(tensor)
    if device.type != DEVICE_TYPE or not _is_of_the_program(sys._getframe(1).f_code.co_filename):
        return device
    return XlaDevice(device.index)


def _send_kernels_to_ltc() -> None:
    """Kernels of torch's device type XLA: the same call, on ltc.

    Overloads that make a tensor are registered one by one: torch would decompose them before it reaches
    this fallback.
    """
    everywhere = torch.library.Library("_", "IMPL")
    everywhere.fallback(entrance(_on_ltc), "XLA", with_keyset=False)
    aten = torch.library.Library("aten", "IMPL")
    for name in all_overload_names():
        if name.startswith("aten::") and _makes_a_tensor(name):
            aten.impl(name.removeprefix("aten::"), _maker(name), "XLA")
    _libraries.extend((everywhere, aten))


def _on_ltc(overload: Any, *args: Any, **kwargs: Any) -> Any:
    return overload(*map(native, args), **{name: native(kwargs[name]) for name in kwargs})


def _makes_a_tensor(name: str) -> bool:
    """Return True if the overload takes a device and no tensor, and is not made of others at once."""
    schema = schema_of(name)
    if schema is None or has_kernel(name, "CompositeImplicitAutograd"):
        return False
    arguments = schema.arguments
    takes_tensors = any("Tensor" in str(argument.type) for argument in arguments)
    return not takes_tensors and any(argument.name == "device" for argument in arguments)


def _maker(name: str) -> Callable[..., Any]:
    packet, _, variant = name.removeprefix("aten::").partition(".")
    overload = getattr(getattr(torch.ops.aten, packet), variant or "default")
    return entrance(functools.partial(_on_ltc, overload))


def _with_native_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with ltc's device in place of each "xla" among its arguments."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any):
        if is_xla(kwargs.get("device")):
            kwargs["device"] = native(kwargs["device"])
        return function(*[native(one) if is_xla(one) else one for one in args], **kwargs)

    return wrapped


def _with_native_kind(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with "ltc" in place of each "xla" among its arguments."""

    def native_kind(value: Any) -> Any:
        return DEVICE_TYPE if is_xla(value) else value

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any):
        return function(*map(native_kind, args), **{n: native_kind(v) for n, v in kwargs.items()})

    return wrapped


def _no_tag(storage: Any) -> None:
    """No storage is written under the name of XLA."""


def _restored(storage: Any, location: str) -> Any:
    """The storage on ltc, where a file or map_location says XLA; None where it says anything else."""
    if not is_xla(location):
        return None
    return torch.serialization.default_restore_location(storage, str(native(location)))


class XlaAutocast(autocast):
    """torch_xla's autocast: bfloat16 where nothing else is said."""

    def __init__(
        self,
        device: Any = XLA,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        cache_enabled: bool = True,
    ) -> None:
        super().__init__(native(device), enabled, dtype or torch.bfloat16, cache_enabled)
