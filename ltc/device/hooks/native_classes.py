"""torch.Generator, torch.Stream and torch.Event for an ltc device.

C++ makes these objects of a device by hooks that Python cannot supply. So the classes in `torch` are
subclasses, which make torch's own object for every device but ltc, and ltc's for that.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from ltc.device.hooks.streams import Event, Stream
from ltc.device.recording.tensors import device_of
from ltc.support.torch_private import DEVICE_TYPE
from ltc.support.torch_private import Generator as NativeGenerator


class _NativeClass(type(NativeGenerator)):  # type: ignore[misc]  # `type`, or a subclass of it
    """The class of a stand-in: instances and subclasses of torch's own class count as its own."""

    native: type[Any]
    of_ltc: Callable[..., Any]
    default_type: Callable[[], str]

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, cls.native)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.native)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        device = kwargs["device"] if "device" in kwargs else next(iter(args), None)
        if "device_type" in kwargs:  # a stream by its numbers
            return cls.native(*args, **kwargs)
        if (cls.default_type() if device is None else torch.device(device).type) != DEVICE_TYPE:
            return cls.native(*args, **kwargs)
        return cls.of_ltc(*args, **kwargs)


def install() -> None:
    """Put the stand-ins into `torch`.  Once per process."""
    for native, own, make, default_type in (
        (NativeGenerator, Generator, Generator, lambda: "cpu"),
        (torch.Stream, Stream, Stream, _accelerator_type),
        (torch.Event, Event, _event, _accelerator_type),
    ):
        members = {
            "native": native,
            "of_ltc": staticmethod(make),
            "default_type": staticmethod(default_type),
            "__doc__": native.__doc__,
            "__module__": "torch",
        }
        for name, method in vars(own).items():
            if inspect.isfunction(method) and not name.startswith("__"):
                members[name] = _method_of_either(own, method, getattr(native, name))
        setattr(torch, native.__name__, _NativeClass(native.__name__, (native,), members))


def _method_of_either(own: type, ours: Callable[..., Any], theirs: Callable[..., Any]) -> Any:
    """Return the method as it is called through the class: torch.Event.synchronize(event)."""

    @functools.wraps(theirs)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return (ours if isinstance(self, own) else theirs)(self, *args, **kwargs)

    return method


def _accelerator_type() -> str:
    accelerator = torch.accelerator.current_accelerator()
    return "cpu" if accelerator is None else accelerator.type


def _event(device: Any = None, *, enable_timing: bool = False, **kwargs: Any) -> Event:
    """Return an event of ltc; it belongs to the device on which it is recorded."""
    if device is not None:
        device_of(torch.device(device))  # raises if there is no such device
    return Event(enable_timing, **kwargs)


class Generator(NativeGenerator):
    """A random state of its own for calls on an ltc device.

    Its state is that of the CPU generator it inherits from, since C++ hands kernels the native
    object, not this one; a call on the device takes its seed from there.
    """

    ltc_device: torch.device

    def __new__(cls, device: torch.device | str | int = DEVICE_TYPE) -> Generator:
        generator = super().__new__(cls)
        generator.ltc_device = device_of(torch.device(device)).torch_device
        return generator

    @property
    def device(self) -> torch.device:
        return self.ltc_device

    def clone_state(self) -> Generator:
        copy: Generator = type(self)(self.device)
        copy.set_state(self.get_state())
        return copy

    def __reduce__(self) -> tuple[Any, ...]:
        _, _, *state = super().__reduce__()  # what it left out names the CPU
        return type(self), (self.device,), *state
