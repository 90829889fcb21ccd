"""Names of devices: `ltc:1` as torch says it, `CPU:1` as the backend knows it.

A bare `ltc` means the thread's current device. Where C++ looks at it before a kernel does, it asks
the device guard, which Python can not tell and which answers 0. So once a thread has chosen another
device, the few functions that do so are given the name with its index. For the same reason what is
made like a tensor, on its device, is given that device.
"""

from __future__ import annotations

import functools
import re
import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.compiler import is_compiling

from ltc.device.recording.recorder import devices
from ltc.device.recording.tensors import before_another_is_current, current_device
from ltc.device.user_line import called_from
from ltc.runtime.transfers import backend
from ltc.support.stand_in import stand_in
from ltc.support.torch_private import (
    DEVICE_TYPE,
    UNDER_DEVICE_CONTEXT,
    builtin_of_scripts,
    device_constructors,
    name_for_scripts,
    taken_uninitialized,
)

_REAL = re.compile(r"(CPU|TPU|GPU):(\d+)")
_PREFERENCE = ("TPU", "GPU", "CPU")  # which kind is meant where none is asked for


def device_index(device: torch.device | str | int) -> int:
    """The index that a torch.device, a string or an int means; of a bare `ltc`, the current one."""
    if isinstance(device, int):
        return device
    named = torch.device(device)
    if named.type != DEVICE_TYPE:
        raise RuntimeError(
            f"Invalid device format: {device}. Pass an {DEVICE_TYPE} device: '{DEVICE_TYPE}', "
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


# --- a bare `ltc` -----------------------------------------------------------------------------

# What looks at a device before the dispatcher is asked.
_TAKE_A_DEVICE: dict[Any, str] = {
    torch: "tensor as_tensor asarray sparse_coo_tensor",
    torch.Tensor: "to new_tensor",
}
_replacing = threading.RLock()
_done: list[bool] = []


def install() -> None:
    """Let a bare `ltc` mean the thread's current device everywhere.  Once per process."""
    before_another_is_current(_name_devices)
    for name in ("new", "new_tensor"):
        stand_in(torch.Tensor, name, _on_own_device(getattr(torch.Tensor, name)))


def replace_what_takes_a_device(
    replacement_of: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> dict[Any, Any]:
    """Put replacements where C++ looks at a device first; by what was there until now."""
    replaced = {}
    for holder, names in _TAKE_A_DEVICE.items():
        for name in names.split():
            original = getattr(holder, name)
            replacement = replaced[original] = replacement_of(original)
            stand_in(holder, name, replacement)
            operation = builtin_of_scripts(original)
            if operation is not None:  # torch.jit.script knows functions by themselves
                name_for_scripts(replacement, operation)
            if original in taken_uninitialized:
                taken_uninitialized.append(replacement)
    return replaced


def _name_devices() -> None:
    with _replacing:
        if _done:
            return
        constructors = device_constructors()  # those that are given torch's default device
        replaced = replace_what_takes_a_device(_with_named_device)
        under_context = UNDER_DEVICE_CONTEXT.current

        @functools.wraps(under_context)
        def with_replaced(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            return under_context(self, replaced.get(func, func), types, args, kwargs)

        constructors.update(replaced[one] for one in set(replaced) & constructors)
        UNDER_DEVICE_CONTEXT.replace(with_replaced)
        _done.append(True)


def _with_named_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with the thread's current device in place of each bare `ltc`."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any):
        if current_device().index:
            args = tuple(map(_named, args))
            kwargs = {name: _named(value) for name, value in kwargs.items()}
        return _as_the_caller(function, args, kwargs)

    return wrapped


_SHOWN = (torch.Tensor, torch.UntypedStorage, torch.TypedStorage)  # by what `new` makes of them


def _on_own_device(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, given the tensor's device where no other is named."""

    @functools.wraps(method)
    def wrapped(self: torch.Tensor, *args: Any, **kwargs: Any):
        device = self.device
        if device.type != DEVICE_TYPE or kwargs.get("device") is not None:
            return _as_the_caller(method, (self, *args), kwargs)
        if method.__name__ == "new":
            if args and isinstance(args[0], _SHOWN):  # which take no device
                return method(self, *args, **kwargs)
            if not args and not kwargs.keys() - {"device"}:
                args = (0,)  # without a size C++ forgets the device
        return _as_the_caller(method, (self, *args), {**kwargs, "device": device})

    return wrapped


def _as_the_caller(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call the function as if from the caller's frame: C++ warnings name the innermost Python line."""
    if is_compiling():  # Dynamo, which runs no C++ and knows no frames
        return function(*args, **kwargs)
    caller = sys._getframe(1).f_back
    if caller is None:  # a thread of C++'s, or one that begins here
        return function(*args, **kwargs)
    return called_from(caller, function, args, kwargs)


def _named(value: Any) -> Any:
    is_bare = isinstance(value, (str, torch.device)) and str(value) == DEVICE_TYPE
    return current_device().torch_device if is_bare else value
