"""Lazy tensors in torch.save, pickle, copy.deepcopy and multiprocessing queues.

A lazy tensor travels as a CPU tensor and the name of its device, and goes back to that device.
"""

from __future__ import annotations

import threading
from multiprocessing.reduction import ForkingPickler

import torch
import torch._utils
from torch.multiprocessing import reductions

from ltc.device.recorder import device_at
from ltc.device.tensor import device_of, host_tensor, is_lazy, state_of, to_device, wrap_buffer
from ltc.device.torch_api import (
    DEVICE_TYPE, StorageBase, contiguous_strides, storage_from_pointer,
)
from ltc.errors import LtcError


class _Saving(threading.local):
    """Tensors met by the torch.save under way in this thread, by the base they share; or None."""

    met: dict | None = None


_saving = _Saving()


def install() -> None:
    """Make lazy tensors picklable.  Once per process."""
    _patch_reduce()
    _patch_save()
    _patch_queues()
    _patch_storages()
    original = torch._C._has_storage
    # deepcopy then clones, which keeps the device, instead of copying a storage
    torch._C._has_storage = lambda tensor: not is_lazy(tensor) and original(tensor)


def _patch_reduce() -> None:
    original = torch.Tensor._reduce_ex_internal

    def _reduce_ex_internal(self, protocol):
        if not is_lazy(self):
            return original(self, protocol)
        _refuse_shared_view(self)
        plain = host_tensor(self.detach()).clone()
        return restore, (plain, str(self.device), self.requires_grad)

    torch.Tensor._reduce_ex_internal = _reduce_ex_internal
    torch.serialization.add_safe_globals([restore])


def restore(plain: torch.Tensor, device: str, requires_grad: bool) -> torch.Tensor:
    """The lazy tensor that was saved; raises where its device is missing here."""
    return to_device(plain, device_at(torch.device(device).index)).requires_grad_(requires_grad)


def _refuse_shared_view(tensor: torch.Tensor) -> None:
    """Saving a tensor together with a view of it would lose the relation: spec 004's error."""
    met = _saving.met
    if met is None:
        return
    state = state_of(tensor)
    base = state if state.base is None else state.base
    state.tensor_id  # numbered in the order of saving
    other = met.setdefault(base, state)
    if other is not state:
        raise RuntimeError(
            f"Tensor ID {state.tensor_id} is sharing a view with tensor ID {other.tensor_id}. "
            f"Save one of them, or copies: x.clone()."
        )


def _patch_save() -> None:
    original = torch.save

    def save(*args, **kwargs):
        before, _saving.met = _saving.met, {}
        try:
            return original(*args, **kwargs)
        finally:
            _saving.met = before

    save.__doc__ = original.__doc__
    torch.save = torch.serialization.save = save


def _patch_queues() -> None:
    original = reductions.reduce_tensor

    def reduce_tensor(tensor):
        if not is_lazy(tensor):
            return original(tensor)
        plain = host_tensor(tensor.detach())
        # by value: torch would send a handle of the copy's memory, which is freed at once
        content = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
        is_parameter = type(tensor) is torch.nn.Parameter
        return _restore_bytes, (
            content, plain.dtype, tuple(plain.shape), str(tensor.device), tensor.requires_grad,
            is_parameter,
        )

    for kind in (*torch._tensor_classes, torch.Tensor, torch.nn.Parameter):
        ForkingPickler.register(kind, reduce_tensor)


def _restore_bytes(content, dtype, shape, device, requires_grad, is_parameter):
    """The lazy tensor that another process sent."""
    plain = torch.frombuffer(bytearray(content), dtype=dtype) if content else torch.empty(0, dtype=dtype)
    tensor = restore(plain.reshape(shape), device, False)
    if is_parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)


# --- storages ---------------------------------------------------------------------------------
# torch.load with map_location="ltc:0" and FSDP make storages directly.  C++ would crash on them,
# so the bytes are kept on the Python object and become a value when a tensor is set to it.

def _patch_storages() -> None:
    storage = torch.UntypedStorage
    new, copy_, resize_ = storage.__new__, StorageBase.copy_, StorageBase.resize_

    def __new__(cls, *args, **kwargs):
        device = kwargs.get("device")
        if device is None or torch.device(device).type != DEVICE_TYPE:
            return new(cls, *args, **kwargs)
        size = args[0] if args and isinstance(args[0], int) else 0
        made = storage_from_pointer(1, device_of(torch.device(device)).torch_device, size)
        made.bytes_on_host = torch.zeros(size, dtype=torch.uint8)
        return made

    def copy_bytes_(self, source, non_blocking=None):
        if self.device.type != DEVICE_TYPE and source.device.type != DEVICE_TYPE:
            return copy_(self, source, non_blocking)
        content = _bytes_of(source)
        if self.device.type != DEVICE_TYPE:
            copy_(self, content.untyped_storage())
        elif hasattr(self, "lazy"):
            raise LtcError("The storage of a lazy tensor cannot be written to; use tensor.copy_().")
        else:
            self.bytes_on_host = content.clone()
        return self

    def resize_bytes_(self, size):
        return self if self.device.type == DEVICE_TYPE else resize_(self, size)

    storage.__new__, storage.copy_, storage.resize_ = __new__, copy_bytes_, resize_bytes_


def _bytes_of(storage) -> torch.Tensor:
    if storage.device.type != DEVICE_TYPE:
        return torch.empty(0, dtype=torch.uint8).set_(storage)
    state = getattr(storage, "lazy", None)
    if state is None:
        return getattr(storage, "bytes_on_host", torch.empty(0, dtype=torch.uint8))
    if state.buffer is None or state.base is not None:
        raise LtcError("The storage of this lazy tensor is not materialised; use tensor.cpu().")
    return host_tensor(wrap_buffer(state.buffer, state.device)).reshape(-1).view(torch.uint8)


def _set_to_storage(self, source, storage_offset=0, size=None, stride=None):
    """aten::set_ to a storage: the tensor gets a copy of the part it is to show."""
    content = _bytes_of(source).clone()
    if size is None:
        size = (content.numel() // self.element_size(),)
    stride = stride or contiguous_strides(size)
    plain = torch.empty(0, dtype=self.dtype)
    plain = plain.set_(content.untyped_storage(), storage_offset, size, stride).contiguous()
    self.data = to_device(plain, state_of(self).device)
    return self


KERNELS = {
    "set_.source_Storage": _set_to_storage,
    "set_.source_Storage_storage_offset": _set_to_storage,
}
