"""The common cases of copies, of memory without values and of reads.

A tensor of the CPU that comes to the device, and a number that is there already, change no recording; a
copy in another dtype and new memory are mostly the call that followed here the last time.  They need
neither the lock of a recording nor a search for it, which take longer than the call itself.  Whatever
else such a call may be is left to the kernels of copies.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import get_ident
from time import perf_counter_ns
from typing import Any

import torch

from ltc.aten.call import CallResult
from ltc.backends.plain_dispatch import is_plain_now
from ltc.device.call_observer import watching
from ltc.device.evidence.nan_reads import number_read
from ltc.device.immediate.computed import computed
from ltc.device.recording.entries import STOPPED, Interrupted
from ltc.device.recording.recorder import Device, Recorder, device_at
from ltc.device.recording.slow_path import OTHER_OPERAND
from ltc.device.recording.state import State
from ltc.device.recording.sync import extends_recording, passes_read, ready_buffer, value_of
from ltc.device.recording.tensors import (
    UPLOADS,
    current_device,
    downloaded,
    recorder_named,
    to_device,
    wrap,
)
from ltc.device.recording.views import write
from ltc.device.torch_device import storage_of
from ltc.explaining.no_sync import reads_are_forbidden
from ltc.runtime.buffer import Buffer
from ltc.support.observation import spans
from ltc.support.observation.often import Often, counting
from ltc.support.process.held_signals import held
from ltc.support.torch_private import DEVICE_TYPE
from ltc.tracebacks import shorten

Kernel = Callable[..., Any]
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
STRIDED = torch.strided
COPY, ZEROS = torch.ops.aten._to_copy.default, torch.ops.aten.zeros.default
EXPAND = torch.ops.aten.expand_copy.default
_STRIDED = frozenset({None, STRIDED})
_count_number = counting("aten::_local_scalar_dense")
NUMBERS = Often(  # that are read where they have been computed
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
                uploaded = _uploaded_at_once(given, here)
                return to_device(given, here) if uploaded is None else uploaded
            copy = _copied_here(self, dtype, device) if layout in _STRIDED else None
            if copy is not None:
                return copy
            held.deliver()
            return thorough(self, dtype=dtype, layout=layout, device=device, **others)
        except BaseException as error:
            shorten(error)
            raise

    return kernel


@extends_recording
def _uploaded_at_once(given: torch.Tensor, device: Device) -> torch.Tensor | None:
    """Return a copy of a CPU tensor as the result of an immediate call; None if it must be an input.

    A copy that is still held at the end of the recording becomes a buffer. Most copies are the
    operand of one call.
    """
    recorder = device.recorders.get(get_ident())
    if recorder is None or recorder.now is None or watching or spans.timeline is not None:
        return None
    if recorder.now.notes is not None:
        return None  # it is to be an input
    if given.dtype.is_complex:
        return None
    started = perf_counter_ns()
    try:
        copy = given.clone(memory_format=torch.contiguous_format)
    except RuntimeError:  # no memory, say
        return None  # the thorough way says what was asked for
    elapsed = perf_counter_ns() - started
    UPLOADS.happened(elapsed, elapsed, copy.nbytes)
    return wrap(recorder, computed(recorder, copy))


@extends_recording
def _copied_here(
    self: torch.Tensor, dtype: torch.dtype | None, device: torch.device | None
) -> torch.Tensor | None:
    """The copy of a lazy tensor on its device; None where that takes a closer look."""
    try:
        state = storage_of(self).lazy
        if device is not None and device != state.device.torch_device:
            return None
        value = state.value or value_of(state)
        recorder = value.recorder
    except OTHER_OPERAND:
        return None
    dtype, session = dtype or self.dtype, recorder.now
    if session is None:
        copied = _expected(recorder, (COPY, value, dtype))
        return None if copied is None else wrap(recorder, copied)
    if recorder.thread != get_ident() or not is_plain_now() or session.notes is not None:
        return None
    session.calls += 1
    return wrap(recorder, computed(recorder, value.tensor.to(dtype, copy=True)))


def _overwriting(thorough: Kernel) -> Kernel:
    """aten::copy_."""

    def kernel(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False):
        try:
            return self if _overwritten(self, source) else thorough(self, source, non_blocking)
        except BaseException as error:
            shorten(error)
            raise

    return kernel


@extends_recording
def _overwritten(self: torch.Tensor, source: torch.Tensor) -> bool:
    """Overwrite `self` with the recorded value of `source`; return False if the slow path is
    needed.
    """
    try:
        written, state = storage_of(self).lazy, storage_of(source).lazy
        if written.device is not state.device:
            return False
        value: CallResult = state.value or value_of(state)
        recorder, dtype, shape = value.recorder, self.dtype, self.size()
    except OTHER_OPERAND:
        return False
    if recorder.now is not None:
        return _overwritten_at_once(written, value)
    is_cast, is_broadcast = value.dtype is not dtype, value.shape != shape
    if is_cast + is_broadcast + (written.base is not None) > 1:
        return False  # more than one call
    if is_cast:
        new = _expected(recorder, (COPY, value, dtype))
    elif is_broadcast:
        new = _expected(recorder, (EXPAND, value, list(shape)))
    else:
        new = value if _is_going_on(recorder) else None
    if new is None:
        return False
    try:
        write(written, new)
    except Interrupted:  # the call that gives a base its value is not to be recorded here
        return False
    return True


def _overwritten_at_once(written: State, value: CallResult) -> bool:
    """The same where calls run at once: into the memory that `written` shows, of whatever strides."""
    recorder = value.recorder
    session = recorder.now
    if recorder.thread != get_ident() or not is_plain_now() or session.notes is not None:
        return False
    old = written.value or value_of(written)
    if old.recorder is not recorder:
        return False
    session.calls += 1
    if old.tensor.is_set_to(value.tensor):
        return True  # as in `x[0] += y`, which ends with `x[0] = x[0]`
    if written.is_expanded or not session.shows_to_all(written, (value,)):
        return False
    old.tensor.copy_(value.tensor)
    return True


def _expected(recorder: Recorder, key: tuple) -> CallResult | None:
    """The result of the call that `key` names, where it is what followed here the last time."""
    entry = recorder.cursor
    if recorder.now is not None or entry.key != key or recorder.thread != get_ident():
        return None
    recorder.last, recorder.cursor = entry, entry.next
    value: CallResult = entry.value
    return value


def _is_going_on(recorder: Recorder) -> bool:
    """Return True if the recording is this thread's, and neither stopped by another nor run at
    once.

    Values of calls that ran at once may be written over.
    """
    is_stopped = recorder.cursor is STOPPED or recorder.now is not None
    return not is_stopped and recorder.thread == get_ident()


def _making(thorough: Kernel) -> Kernel:
    """aten::empty."""

    def kernel(
        size: Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        layout: torch.layout | None = None,
        device: torch.device | None = None,
        **others: Any,
    ):
        try:
            made = _made_here(size, dtype, device) if layout in _STRIDED else None
            if made is not None:
                return made
            return thorough(size, dtype=dtype, layout=layout, device=device, **others)
        except BaseException as error:
            shorten(error)
            raise

    return kernel


@extends_recording
def _made_here(
    size: Sequence[int], dtype: torch.dtype | None, device: torch.device | None
) -> torch.Tensor | None:
    """The tensor that was made here the last time; None where that takes a closer look."""
    try:
        recorder = recorder_named(device)
    except TypeError:  # none of ltc's
        return None
    value = _expected(recorder, (ZEROS, tuple(size), dtype or torch.get_default_dtype()))
    return None if value is None else wrap(recorder, value)


def _reading(thorough: Kernel) -> Kernel:
    """aten::_local_scalar_dense."""

    def kernel(self: torch.Tensor):
        try:
            held.deliver()
            state = getattr(storage_of(self), "lazy", None)
            if state is None or watching or reads_are_forbidden() or not is_plain_now():
                return thorough(self)
            if state.buffer is not None:
                return _number_in(state.buffer.settled())
            value = state.value
            if value is None or value.recorder.thread != get_ident():
                return thorough(self)
            session = value.recorder.now
            if session is not None:
                return _number_at_once(session, value)
            if state.base is not None or value.recorder.immediate is not None:
                return thorough(self)
            return _number_in(ready_buffer(state))
        except BaseException as error:
            shorten(error)
            raise

    return kernel


def _number_in(buffer: Buffer) -> Any:
    _count_number()
    return number_read(downloaded(buffer).item())


def _number_at_once(session: Any, value: Any) -> Any:
    """Return the number in a value whose call has run."""
    note_read(session, value)
    return number_read(value.tensor.item())


def note_read(session: Any, value: Any) -> None:
    """A number is read that a call of the session has computed: the recording ends there, or goes on."""
    passes_read(value, session)
    NUMBERS.happened(0, value.tensor.nbytes)


_QUICK = {
    "_to_copy": _copying,
    "copy_": _overwriting,
    "_local_scalar_dense": _reading,
    "empty.memory_format": _making,
}


def quickly(name: str, thorough: Kernel) -> Kernel:
    """The kernel of an overload that does the common case at once, and leaves others to `thorough`."""
    make = _QUICK.get(name)
    return thorough if make is None else make(thorough)
