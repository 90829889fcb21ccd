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
from ltc.debug.often import Often, counting
from ltc.device.call_observer import watching
from ltc.device.recording.recorder import device_at
from ltc.device.recording.sync import ready_buffer
from ltc.device.recording.tensors import current_device, downloaded, to_device
from ltc.device.torch_device import storage_of
from ltc.explaining.no_sync import reads_are_forbidden
from ltc.runtime.buffer import Buffer
from ltc.support.torch_private import DEVICE_TYPE
from ltc.tracebacks import shorten

Kernel = Callable[..., Any]
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
STRIDED = torch.strided
_STRIDED = frozenset({None, STRIDED})
_count_number = counting("aten::_local_scalar_dense")
_NUMBERS = Often(  # that are read where they have been computed
    ("aten::_local_scalar_dense", "EarlySyncLiveTensorsCount"),
    (("TransferFromDeviceTime", "time"), ("InboundData", "bytes")),
)


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
        try:
            if (
                self.is_cpu
                and device is not None
                and device.type == DEVICE_TYPE
                and self.__class__ in _PLAIN
                and layout in _STRIDED
                and self.layout is STRIDED
                and is_plain_now()
            ):
                given = self if dtype is None or dtype is self.dtype else self.detach().to(dtype)
                here = current_device() if device.index is None else device_at(device.index)
                return to_device(given, here)
            return thorough(self, dtype=dtype, layout=layout, device=device, **others)
        except BaseException as error:
            shorten(error)
            raise

    return kernel


def _reading(thorough: Kernel) -> Kernel:
    """aten::_local_scalar_dense."""

    def kernel(self: torch.Tensor):
        try:
            state = getattr(storage_of(self), "lazy", None)
            if state is None or watching or reads_are_forbidden() or not is_plain_now():
                return thorough(self)
            if state.buffer is not None:
                return _number_in(state.buffer.settled())
            value = state.value
            if value is None or value.recorder.thread != get_ident():
                return thorough(self)
            session = value.recorder.now
            if session is not None and session.goes_on:
                return _number_at_once(session, value.tensor)
            if state.base is not None or value.recorder.op_by_op is not None:
                return thorough(self)
            return _number_in(ready_buffer(state))
        except BaseException as error:
            shorten(error)
            raise

    return kernel


def _number_in(buffer: Buffer) -> Any:
    _count_number()
    return downloaded(buffer).item()


def _number_at_once(session: Any, read: torch.Tensor) -> Any:
    """Where calls run op by op, of what one has given."""
    session.note_read()
    _NUMBERS.happened(0, read.nbytes)
    return read.item()


_QUICK = {"_to_copy": _copying, "_local_scalar_dense": _reading}


def quickly(name: str, thorough: Kernel) -> Kernel:
    """The kernel of an overload that does the common case at once, and leaves others to `thorough`."""
    make = _QUICK.get(name)
    return thorough if make is None else make(thorough)
