"""Kernels that no schema describes: copies between devices, memory without values, reading.

Each runs `exclusively`: register.py sees to that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.types import Device as DeviceLike

from ltc.aten.call import Call, CallResult
from ltc.backends.plain_dispatch import PlainDispatch
from ltc.device.evidence.nan_reads import number_read
from ltc.device.immediate.computed import computed
from ltc.device.recording.fallback import assign_host
from ltc.device.recording.sync import value_of
from ltc.device.recording.tensors import (
    current_device,
    device_of,
    host_tensor,
    is_lazy,
    state_of,
    to_device,
    wrap,
)
from ltc.device.recording.views import write
from ltc.device.shapes.meta import result_types
from ltc.device.torch_device import storage_of
from ltc.device.user_line import user_line
from ltc.errors import NotLazyTensor, Unsupported
from ltc.support.observation import metrics
from ltc.support.process import machine_memory

aten = torch.ops.aten


def _recorded(value: Any, overload: Any, args: tuple, kwargs: dict):
    """The value of one functional call on `value`."""
    recorder = value.recorder
    if recorder.immediate is not None:
        return _run(recorder, value, overload, args, kwargs)
    key = (overload, value, *args, *kwargs.values())

    def make_call() -> Call:
        call = Call(overload, (value, *args), kwargs, line=user_line())
        recorder.values(call, result_types(call))
        return call

    return recorder.advance(key, make_call).value


def _run(recorder: Any, value: Any, overload: Any, args: tuple, kwargs: dict):
    session = recorder.immediate
    session.calls += 1
    with PlainDispatch():
        made = overload(value.tensor, *args, **kwargs)

    def make_call() -> Call:
        call = Call(overload, (value.noted, *args), kwargs, line=user_line())
        recorder.values(call, [(tuple(made.shape), made.dtype)])
        return call

    noted = session.noted_one(lambda: (overload, value.noted, *args, *kwargs.values()), make_call)
    return computed(recorder, made, noted)


def _cast(value: CallResult, dtype: torch.dtype):
    if value.dtype is dtype:
        return value
    return _recorded(value, aten._to_copy.default, (), {"dtype": dtype})


def _broadcast(value: CallResult, shape: tuple):
    if value.shape == shape:
        return value
    _require_broadcast(shape, value.shape)
    return _recorded(value, aten.expand_copy.default, (list(shape),), {})


def _require_broadcast(shape: tuple, source: tuple) -> None:
    """Raise eager's error where a tensor of shape `source` cannot be copied into one of `shape`."""
    behind = shape[max(len(shape) - len(source), 0) :]
    if len(source) > len(shape) or any(b not in (1, a) for a, b in zip(behind, source)):
        one = torch.zeros((), device="cpu")
        torch.empty(shape, device="cpu").copy_(one.expand(source))  # raises


_WIDEST = {float: torch.float64, complex: torch.complex128}  # whatever the default dtype is


def copy_(
    self: torch.Tensor, source: torch.Tensor | complex, non_blocking: bool = False
) -> torch.Tensor:
    """aten::copy_ from, to, or between lazy tensors; or of a number, which torch takes for one."""
    if not isinstance(source, torch.Tensor):
        source = torch.tensor(source, dtype=_WIDEST.get(type(source)), device="cpu")
    if not is_lazy(self):
        self.copy_(host_tensor(source))
        return self
    state, shape = state_of(self), tuple(self.size())  # torch's uninitialized ones refuse .shape
    if is_lazy(source) and state_of(source).device is state.device:
        value = value_of(state_of(source))
        new = _broadcast(_cast(value, self.dtype), shape)
        if (
            new is value and value.recorder.immediate is not None
        ):  # where values may be written over
            with PlainDispatch():
                new = computed(value.recorder, value.tensor.clone(), value.noted)
        write(state, new)
        return self
    plain = host_tensor(source) if is_lazy(source) else source.detach()
    _require_broadcast(shape, tuple(plain.shape))
    machine_memory.require(self.nbytes)
    assign_host(self, plain.to("cpu", self.dtype).expand(shape).clone())
    return self


def _copy_from(self: torch.Tensor, destination: torch.Tensor, non_blocking: bool = False):
    """aten::_copy_from: `destination` gets the values of `self`."""
    return copy_(destination, self)


def _copy_from_and_resize(self: torch.Tensor, destination: torch.Tensor) -> torch.Tensor:
    destination.resize_(self.shape)
    return copy_(destination, self)


def _to_copy(
    self: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool | None = False,
    memory_format: torch.memory_format | None = None,
):
    """aten::_to_copy: a copy on another device, of another dtype, or both."""
    _require_strided(layout)
    dtype = dtype or self.dtype
    target = self.device if device is None else device
    if not is_lazy(self):
        if dtype is not self.dtype:
            machine_memory.require(self.numel() * dtype.itemsize)
        return to_device(self.detach().to("cpu", dtype), device_of(target))
    if target.type != self.device.type:
        return host_tensor(self).to(target, dtype, copy=True)
    here, there = state_of(self).device, device_of(target)
    if here is not there:
        return to_device(host_tensor(self).to(dtype), there)
    value = value_of(state_of(self))
    copied = _recorded(value, aten._to_copy.default, (), {"dtype": dtype})
    return wrap(value.recorder, copied)


def _local_scalar_dense(self: torch.Tensor):
    """aten::_local_scalar_dense: the number in a tensor of one element."""
    metrics.count("aten::_local_scalar_dense")
    return number_read(host_tensor(self).item())


def empty(
    size: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: DeviceLike = None,
    pin_memory: bool | None = None,
    memory_format: torch.memory_format | None = None,
) -> torch.Tensor:
    """aten::empty: recorded as zeros, so that a program does the same every time it runs."""
    _require_strided(layout)
    shape, dtype = tuple(size), dtype or torch.get_default_dtype()
    if any(extent < 0 for extent in shape):
        raise RuntimeError(
            f"Trying to create tensor with negative dimension {min(shape)}: {list(shape)}"
        )
    target = current_device() if device is None else device_of(device)
    recorder = target.recorder()

    def make_call() -> Call:
        call = Call(aten.zeros.default, (list(shape),), {"dtype": dtype}, line=user_line())
        recorder.values(call, [(shape, dtype)])
        return call

    key = (aten.zeros.default, shape, dtype)
    if recorder.immediate is None:
        return wrap(recorder, recorder.advance(key, make_call).value)
    with PlainDispatch():
        zeros = _zeros(shape, dtype)
    noted = recorder.immediate.noted_one(lambda: key, make_call)
    return wrap(recorder, computed(recorder, zeros, noted))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Make zeros on the CPU, also of packed dtypes, which PyTorch makes but does not fill."""
    try:
        return torch.zeros(shape, dtype=dtype, device="cpu")
    except NotImplementedError:
        zeros = torch.zeros((*shape, dtype.itemsize), dtype=torch.uint8, device="cpu")
        return zeros.view(dtype).view(shape)


def empty_strided(
    size: Sequence[int],
    stride: Sequence[int],
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: DeviceLike = None,
    pin_memory: bool | None = None,
) -> torch.Tensor:
    """aten::empty_strided: like empty, since lazy tensors are always contiguous."""
    return empty(size, dtype=dtype, layout=layout, device=device)


def _require_strided(layout: torch.layout | None) -> None:
    if layout is not None and layout is not torch.strided:
        raise Unsupported(
            f"An ltc device holds strided tensors only, not {layout}. Keep sparse tensors on the "
            f"CPU, or call .to_dense() first."
        )


def resize_(
    self: torch.Tensor, size: Sequence[int], *, memory_format: torch.memory_format | None = None
) -> torch.Tensor:
    """aten::resize_: the first elements stay, new ones are zero."""
    shape = tuple(size)
    if shape == tuple(self.shape):
        return self
    if self.numel() == 0:  # nothing stays, so nothing is read
        self.data = empty(shape, dtype=self.dtype, device=self.device)
    else:
        old = host_tensor(self).reshape(-1)
        new = torch.zeros(shape, dtype=self.dtype, device="cpu")
        kept = min(old.numel(), new.numel())
        new.reshape(-1)[:kept] = old[:kept]
        self.data = to_device(new, state_of(self).device)
    return self


def set_source_tensor(self: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """aten::set_.source_Tensor: both share one storage from now on."""
    if not is_lazy(source):
        raise NotLazyTensor(f"Input tensor is not a lazy tensor: {source.type()}")
    self.data = source.detach()
    return self


def set_(self: torch.Tensor) -> torch.Tensor:
    """aten::set_: nothing in it any more."""
    return resize_(self, (0,))


def zeros_for_tangent(
    self: torch.Tensor, other: torch.Tensor, *, self_num_batch_dims: int = 0
) -> torch.Tensor:
    """aten::_new_zeros_with_same_feature_meta: memory for a tangent, where its tensor is.

    A dual tensor may be copied to the CPU: then one of both is there.
    """
    shape = (*self.shape[:self_num_batch_dims], *other.shape)
    return torch.zeros(shape, dtype=other.dtype, device=other.device)


def equal(self: torch.Tensor, other: torch.Tensor) -> bool:
    """aten::equal: read at once, since the answer is a Python bool."""
    metrics.count("aten::equal")
    state_of(self)
    state_of(other, state_of(self).device)
    return torch.equal(host_tensor(self), host_tensor(other))


def is_set_to(self: torch.Tensor, other: torch.Tensor) -> bool:
    """aten::is_set_to: whether both are the same tensor over the same storage."""
    return storage_of(self) is storage_of(other) and self.shape == other.shape


def record_stream(self: torch.Tensor, stream: Any) -> None:
    """aten::record_stream: streams of an ltc device are all the same one."""


def view_in_place(functional: Callable[..., Any]):
    """The kernel of an overload such as aten::transpose_: the tensor becomes its own view."""

    def kernel(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self.data = functional(self, *args, **kwargs)
        return self

    return kernel


VIEWS_IN_PLACE = {
    "transpose_": aten.transpose.int,
    "t_": aten.t.default,
    "squeeze_": aten.squeeze.default,
    "squeeze_.dim": aten.squeeze.dim,
    "squeeze_.dims": aten.squeeze.dims,
    "unsqueeze_": aten.unsqueeze.default,
    "as_strided_": aten.as_strided.default,
}

KERNELS = {
    "copy_": copy_,
    "_copy_from": _copy_from,
    "_copy_from_and_resize": _copy_from_and_resize,
    "_to_copy": _to_copy,
    "_local_scalar_dense": _local_scalar_dense,
    "empty.memory_format": empty,
    "empty_strided": empty_strided,
    "resize_": resize_,
    "set_.source_Tensor": set_source_tensor,
    "set_": set_,
    "_new_zeros_with_same_feature_meta": zeros_for_tangent,
    "equal": equal,
    "is_set_to": is_set_to,
    "record_stream": record_stream,
    **{name: view_in_place(overload) for name, overload in VIEWS_IN_PLACE.items()},
}
