"""Copies and reads that change no recording: a tensor of the CPU that comes to the device, and a number
that is there already.

They need neither the lock of a recording nor a search for it, which take as long as the copy itself.
Whatever else such a call may be is left to the kernels of copies.py.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch

from ltc.backends.plain_dispatch import is_plain_now
from ltc.debug import metrics
from ltc.device.call_observer import watching
from ltc.device.recording.tensors import device_of, to_device
from ltc.device.torch_device import storage_of
from ltc.explaining.no_sync import reads_are_forbidden
from ltc.support.torch_private import DEVICE_TYPE
from ltc.tracebacks import entrance

Kernel = Callable[..., Any]
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
_STRIDED = frozenset({None, torch.strided})


def _copying(thorough: Kernel) -> Kernel:
    """aten::_to_copy."""

    def kernel(
        self: torch.Tensor,
        *,
        dtype: torch.dtype | None = None,
        layout: torch.layout | None = None,
        device: torch.device | None = None,
        **others: Any,
    ):
        if (
            self.is_cpu
            and device is not None
            and device.type == DEVICE_TYPE
            and self.__class__ in _PLAIN
            and layout in _STRIDED
            and self.layout is torch.strided
            and is_plain_now()
        ):
            given = self if dtype is None or dtype is self.dtype else self.detach().to(dtype)
            return to_device(given, device_of(device))
        return thorough(self, dtype=dtype, layout=layout, device=device, **others)

    return kernel


def _reading(thorough: Kernel) -> Kernel:
    """aten::_local_scalar_dense."""

    def kernel(self: torch.Tensor):
        state = getattr(storage_of(self), "lazy", None)
        value: Any = None if state is None or state.buffer is not None else state.value
        session: Any = None if value is None else value.recorder.now
        if (
            session is None
            or value.recorder.thread != get_ident()
            or not (session.goes_on and is_plain_now())
            or watching
            or reads_are_forbidden()
        ):
            return thorough(self)
        read: torch.Tensor = value.tensor
        session.note_read()
        metrics.note(
            (("aten::_local_scalar_dense", 1), ("EarlySyncLiveTensorsCount", 1)),
            (("TransferFromDeviceTime", 0, "time"), ("InboundData", read.nbytes, "bytes")),
        )
        return read.item()

    return kernel


_QUICK = {"_to_copy": _copying, "_local_scalar_dense": _reading}


def quickly(name: str, thorough: Kernel) -> Kernel:
    """The kernel of an overload that does the common case at once, and leaves others to `thorough`."""
    make = _QUICK.get(name)
    return thorough if make is None else entrance(make(thorough))
