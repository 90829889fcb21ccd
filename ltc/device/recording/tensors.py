"""Tensors and their states: made, uploaded, read, identified."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from threading import get_ident
from time import perf_counter_ns
from typing import Any

import torch

from ltc.aten.call import CallResult
from ltc.backends.interpreter.view_chains import shown
from ltc.device.call_observer import note_obstacle, note_uploads, watching
from ltc.device.evidence import misplaced
from ltc.device.recording.recorder import Device, Recorder, device_at
from ltc.device.recording.signature import Signature
from ltc.device.recording.state import State, in_python, new_state
from ltc.device.recording.sync import passes_read, ready_buffer
from ltc.device.torch_device import storage_of
from ltc.errors import NotLazyTensor
from ltc.explaining.no_sync import reads_are_forbidden
from ltc.runtime import backend_errors
from ltc.runtime.buffer import Buffer, input_key
from ltc.runtime.transfers import download, upload
from ltc.support.observation import metrics, spans
from ltc.support.observation.often import Often
from ltc.support.process import machine_memory
from ltc.support.torch_private import DEVICE_TYPE, plain_functions


def is_lazy(tensor: Any) -> bool:
    """Return True if it is a tensor on an ltc device."""
    return isinstance(tensor, torch.Tensor) and tensor.device.type == DEVICE_TYPE


# --- states of tensors ------------------------------------------------------------------------


def state_of(tensor: torch.Tensor, expected: Device | None = None) -> State:
    """The state of a lazy tensor; raises where it is not one, or is not on `expected`."""
    if tensor.device.type != DEVICE_TYPE:
        raise _not_lazy(tensor)
    try:
        state = storage_of(tensor).lazy
    except AttributeError:
        state = _uninitialised(tensor)
    if expected is not None and state.device is not expected:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, "
            f"{expected} and {state.device}! Move one of them: .to('{expected}')."
        )
    return state


def require_lazy(tensors: Iterable[torch.Tensor]) -> None:
    """Raise NotLazyTensor for the first that is none."""
    for tensor in tensors:
        if not is_lazy(tensor):
            raise _not_lazy(tensor)


def _not_lazy(tensor: torch.Tensor) -> NotLazyTensor:
    return NotLazyTensor(
        f"Input tensor is not a lazy tensor: {misplaced.description(tensor)}", tensor
    )


def _uninitialised(tensor: torch.Tensor) -> State:
    """The state of a tensor that C++ made without asking a kernel: zeros."""
    device = device_at(tensor.device.index)
    state = new_state(None, device)
    state.buffer = uploaded(torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu"), device)
    storage_of(tensor).lazy = state
    return state


def device_of_call(signature: Signature, values: list) -> Device | None:
    """The device a call runs on: its `device` argument's, else that of its first lazy tensor.

    None where the call asks for a result on another kind of device.
    """
    named = None if signature.device is None else values[signature.device]
    if named is not None:
        return device_of(named) if named.type == DEVICE_TYPE else None
    try:
        device: Device = storage_of(values[0]).lazy.device
    except (AttributeError, TypeError, NotImplementedError, IndexError):
        return device_among(values)
    return device


def device_among(operands: Iterable[Any]) -> Device:
    """The device of the first lazy tensor or ltc torch.device; the current one without any."""
    for operand in operands:
        for part in operand if isinstance(operand, (list, tuple)) else (operand,):
            if isinstance(part, torch.Tensor) and part.device.type == DEVICE_TYPE:
                return device_at(part.device.index)
            if isinstance(part, torch.device) and part.type == DEVICE_TYPE:
                return device_of(part)
    return current_device()


def device_of(device: torch.device | str | int) -> Device:
    """The Device of a torch.device, string or index; without an index, the thread's current one.

    Raises:
        RuntimeError: For a device of another kind, and if there is none of that index.
    """
    if isinstance(device, int):
        return device_at(device)
    named = device if isinstance(device, torch.device) else torch.device(device)
    if named.type != DEVICE_TYPE:
        raise RuntimeError(
            f"{named} is not an {DEVICE_TYPE} device: pass '{DEVICE_TYPE}', '{DEVICE_TYPE}:0', or "
            f"an index."
        )
    return current_device() if named.index is None else device_at(named.index)


def recorder_named(device: torch.device | None) -> Recorder:
    """The calling thread's recorder of the device that a call names.

    Raises:
        TypeError: If it names none of ltc's.
        RuntimeError: If there is none of that index.
    """
    if device is None or device.type != DEVICE_TYPE:
        raise TypeError
    here = current_device() if device.index is None else device_at(device.index)
    return here.recorder()


class _Current(threading.local):
    device: Device | None = None


_current = _Current()


def current_device() -> Device:
    """The device that `ltc` without an index means in the calling thread."""
    return _current.device or device_at(0)


_before_another: list[Callable[[], None]] = []


def before_another_is_current(prepare: Callable[[], None]) -> None:
    """Have a function called each time before a thread chooses another device than ltc:0."""
    _before_another.append(prepare)


def set_current_device(device: Device) -> None:
    if device.index:
        for prepare in _before_another:
            prepare()
    _current.device = device


# --- making tensors ---------------------------------------------------------------------------


def wrap(recorder: Recorder, value: CallResult) -> torch.Tensor:
    """A new tensor that holds a pending value."""
    tensor = recorder.new_tensor(value.shape, value.dtype)
    state = storage_of(tensor).lazy = new_state(value, recorder.device)
    recorder.live.append(state)
    return tensor


def wrap_all(recorder: Recorder, signature: Signature, values: Sequence[CallResult | None]) -> Any:
    """New tensors for what a call has made, as it returns them: one alone, a list or a tuple."""
    tensors = [None if value is None else wrap(recorder, value) for value in values]
    if signature.returns == ("List[Tensor]",):
        return tensors
    return tensors[0] if len(signature.returns) == 1 else tuple(tensors)


def wrap_buffer(buffer: Buffer, device: Device) -> torch.Tensor:
    """A new tensor that holds a buffer."""
    _, shape, dtype, _ = buffer.key
    tensor = device.new_tensor(shape, dtype)
    storage_of(tensor).lazy = state = State()
    state.device, state.buffer = device, buffer
    state.value = state.views = state.base = None
    return tensor


def tensor_of(state: State) -> torch.Tensor:
    """Another tensor of a state that is no view: what is written to either is seen in both."""
    shape, dtype = state.type
    tensor = state.device.new_tensor(shape, dtype)
    storage = storage_of(tensor)
    storage.lazy, storage.is_second = state, True
    return tensor


def _holding(buffer: Buffer, device: Device) -> State:
    state = new_state(None, device)
    state.buffer = buffer
    return state


_READS = Often((), (("TransferFromDeviceTime", "time"), ("InboundData", "bytes")))
DOWNLOADS = Often(  # of what an immediate call has computed
    ("EarlySyncLiveTensorsCount",),
    (("TransferFromDeviceTime", "time"), ("InboundData", "bytes")),
)
UPLOADS = Often(  # of one tensor
    ("DeviceDataCacheMiss",),
    (("TransferToDeviceTime", "time"), ("TensorToData", "time"), ("OutboundData", "bytes")),
)


def uploaded(tensor: torch.Tensor, device: Device) -> Buffer:
    """A buffer with a copy of a CPU tensor's elements."""
    started = perf_counter_ns()
    try:
        with plain_functions():
            buffer = _filled(tensor, device.index)
    except Exception as error:
        raise backend_errors.in_an_upload(error, device.index)  # noqa: B904  it may be the same
    if watching:
        note_uploads((tensor,), (buffer,))
    elapsed = perf_counter_ns() - started
    UPLOADS.happened(elapsed, elapsed, buffer.key[3])
    return buffer


def _uploaded_together(tensors: Sequence[torch.Tensor], device: Device) -> list[Buffer]:
    """Buffers with copies of CPU tensors, counted as one transfer."""
    started = perf_counter_ns()
    try:
        with plain_functions():
            buffers = [_filled(tensor, device.index) for tensor in tensors]
    except Exception as error:
        raise backend_errors.in_an_upload(error, device.index)  # noqa: B904  it may be the same
    if watching:
        note_uploads(tensors, buffers)
    elapsed = perf_counter_ns() - started
    metrics.note(
        (("DeviceDataCacheMiss", len(buffers)),),
        (
            ("TransferToDeviceTime", elapsed, "time"),
            ("TensorToData", elapsed, "time"),
            ("OutboundData", sum([buffer.nbytes for buffer in buffers]), "bytes"),
        ),
    )
    return buffers


def _filled(tensor: torch.Tensor, device: int) -> Buffer:
    plain = tensor.detach() if tensor.requires_grad else tensor
    if plain.is_conj() or plain.is_neg() or not plain.is_contiguous():
        machine_memory.require(plain.nbytes)
        plain = plain.detach().resolve_conj().resolve_neg().contiguous()
    return Buffer(input_key(tuple(plain.shape), plain.dtype), device, upload(plain, device))


def to_device(tensor: torch.Tensor, device: Device) -> torch.Tensor:
    """A CPU tensor's copy on an ltc device."""
    return wrap_buffer(uploaded(tensor, device), device)


def adopt(tensor: torch.Tensor, device: Device) -> State:
    """A state with a copy of a CPU operand, for overloads that accept one."""
    return _holding(uploaded(tensor, device), device)


def upload_many(
    tensors: Sequence[torch.Tensor], device: torch.device | str | int
) -> list[torch.Tensor]:
    """Copies of CPU tensors on one device, in order; `requires_grad` is kept."""
    target = device_of(device)
    strided = [tensor for tensor in tensors if tensor.layout is torch.strided]
    buffers = iter(_uploaded_together(strided, target))
    return [
        _on_device(tensor, target, buffers).requires_grad_(tensor.requires_grad)
        for tensor in tensors
    ]


def _on_device(tensor: torch.Tensor, target: Device, buffers: Iterator[Buffer]) -> torch.Tensor:
    """The tensor of the next buffer; torch itself moves the parts of a sparse one."""
    if tensor.layout is not torch.strided:
        return tensor.detach().to(target.torch_device)
    return wrap_buffer(next(buffers), target)


# --- reading ----------------------------------------------------------------------------------


def host_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A lazy tensor's value as a contiguous CPU tensor; it may be device memory: do not write."""
    return host_value(state_of(tensor))


def host_value(state: State) -> torch.Tensor:
    """A state's value as a contiguous CPU tensor; it may be device memory: do not write."""
    value = state.value
    if value is not None and state.buffer is None and value.recorder.now is not None:
        computed = _computed_here(value)
        if computed is not None:
            return computed
    if state.base is None or state.buffer is not None:
        return downloaded(ready_buffer(state))
    plain = downloaded(ready_buffer(state.base))
    with torch.no_grad(), plain_functions():
        part: torch.Tensor = shown(plain, state.chain)
        return part.resolve_conj().resolve_neg().contiguous()  # as every lazy tensor appears


def _computed_here(value: CallResult) -> torch.Tensor | None:
    """The value where it is there already, and its session goes on; else None."""
    session = value.recorder.now
    if session is None or value.recorder.thread != get_ident():
        return None
    if watching or reads_are_forbidden() or not passes_read(value, session):
        return None
    with plain_functions(), torch.no_grad():
        plain = value.tensor.resolve_neg().contiguous()
    DOWNLOADS.happened(0, plain.nbytes)
    return plain


def downloaded(buffer: Buffer) -> torch.Tensor:
    """A buffer's value, waited for, as a contiguous CPU tensor: do not write to it."""
    if not device_at(buffer.device).has_one_recorder():
        buffer.shared = True  # another thread's step must not overwrite it while it is read here
    if watching:
        note_obstacle("reads a value")
    started = perf_counter_ns()
    value = download(buffer.ready(), buffer.shape, buffer.dtype)
    elapsed = perf_counter_ns() - started
    _READS.happened(elapsed, buffer.key[3])
    if spans.timeline is not None:
        end, args = spans.now(), {"bytes": buffer.nbytes}
        spans.timeline.add("download", f"read {list(buffer.shape)}", end - elapsed, end, args)
    return value


def tensor_id(tensor: torch.Tensor) -> int:
    """A number that identifies a lazy tensor's value in messages."""
    return state_of(tensor).tensor_id


def alias_id(tensor: torch.Tensor) -> int:
    """The number of the base that a lazy tensor shares with its views; 0 where it has none."""
    state = in_python(state_of(tensor))
    if state.base is not None:
        return state.base.tensor_id
    return state.tensor_id if state.living_views() else 0
