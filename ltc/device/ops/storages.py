"""Storages of lazy tensors, and those on the device that torch makes directly.

torch.load with map_location="ltc:0" and FSDP make storages directly.  C++ would crash on them, so
the bytes are kept on the Python object and become a value when a tensor is set to it.  A tensor that
is set to the storage of a lazy tensor becomes a view of that one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.utils.dlpack

from ltc.device.ops.pickling import exact_storage
from ltc.device.ops.resizing import own_bytes, resize, root_of, storage_bytes
from ltc.device.recording.state import State
from ltc.device.recording.tensors import (
    device_of,
    host_value,
    is_lazy,
    state_of,
    tensor_of,
    to_device,
)
from ltc.device.torch_device import contiguous_strides
from ltc.errors import LtcError
from ltc.support.torch_private import (
    DEVICE_TYPE,
    TO_DLPACK,
    TYPED_STORAGE_SIZE,
    StorageBase,
    element_bytes,
    plain_functions,
    storage_from_pointer,
    untyped_part,
)

_NO_ADDRESS = 1 << 60  # nothing can be read there: no processor has such addresses


# Any: their methods are replaced, and have others in C++ than they are declared with.
_STORAGE: Any = torch.UntypedStorage
_TYPED: Any = torch.TypedStorage
_BASE: Any = StorageBase
_new, _data_ptr = _STORAGE.__new__, _STORAGE.data_ptr
_copy_, _resize_, _read_file = _BASE.copy_, _BASE.resize_, _BASE._set_from_file


def install() -> None:
    """Make storages on the device usable from Python.  Once per process."""
    _STORAGE.__new__, _STORAGE.copy_, _STORAGE.resize_ = _new_storage, _copy_bytes_, _resize_bytes_
    for kind in (_STORAGE, _TYPED):
        for name in ("tolist", "__getitem__", "__iter__"):
            setattr(kind, name, _refusing(getattr(kind, name)))
    _STORAGE.data_ptr = _identity
    _STORAGE.size = _size_in_bytes
    _STORAGE._set_from_file = _set_from_file
    TYPED_STORAGE_SIZE.replace(_size_in_elements)
    for place in TO_DLPACK:
        place.replace(_exporting(place.current))
    torch.utils.dlpack.to_dlpack = torch.to_dlpack = TO_DLPACK[0].current


def _new_storage(cls: type, *args: Any, **kwargs: Any):
    device = kwargs.get("device")
    if device is None or torch.device(device).type != DEVICE_TYPE:
        return _new(cls, *args, **kwargs)
    size = args[0] if args and isinstance(args[0], int) else 0
    made: Any = storage_from_pointer(1, device_of(torch.device(device)).torch_device, size)
    made.bytes_on_host = torch.zeros(size, dtype=torch.uint8, device="cpu")
    return made


def _copy_bytes_(self: Any, source: Any, non_blocking: bool | None = None):
    if self.device.type != DEVICE_TYPE and source.device.type != DEVICE_TYPE:
        return _copy_(self, source, non_blocking)
    content = _bytes_of(source)
    if self.device.type != DEVICE_TYPE:
        _copy_(self, content.untyped_storage())
    elif hasattr(self, "lazy"):
        raise LtcError("The storage of a lazy tensor cannot be written to; use tensor.copy_().")
    else:
        _put(self, content.clone())
    return self


def _set_from_file(self: Any, file: Any, *how: Any):
    """Read files of torch before 1.6: their tensors are set to storages that are filled last."""
    if self.device.type != DEVICE_TYPE:
        return _read_file(self, file, *how)
    plain: Any = torch.UntypedStorage(self.size(), device="cpu")
    _read_file(plain, file, *how)
    return self.copy_(plain)


def _put(storage: Any, content: torch.Tensor) -> None:
    """Give a storage that was made directly its bytes, and the tensors that were set to it, too."""
    storage.bytes_on_host = content
    for part, copy in getattr(storage, "copies_of_parts", {}).items():
        copy.copy_(_part_of(content, *part))


def _resize_bytes_(self: Any, size: int):
    if self.device.type != DEVICE_TYPE:
        return _resize_(self, size)
    if hasattr(self, "lazy"):
        resize(self.lazy, size)
    return self


def _size_in_bytes(self: Any):
    """Return the size that FSDP reads. nbytes() stays 0: its callers want memory at an address.

    An expanded view has more elements than its base: as many as are read from its storage.
    """
    state = getattr(self, "lazy", None) if self.device.type == DEVICE_TYPE else None
    if state is None:
        return self.nbytes()
    held = storage_bytes(state)
    return max(held, own_bytes(state)) if held and state.base is not None else held


def _size_in_elements(self: Any):
    return untyped_part(self).size() // element_bytes(self)


def _identity(self: Any):
    """Different for storages that share nothing: safetensors and others find ties by it."""
    state = getattr(self, "lazy", None) if self.device.type == DEVICE_TYPE else None
    return _data_ptr(self) if state is None else _NO_ADDRESS + (root_of(state).tensor_id << 32)


def _refusing(original: Callable[..., Any]):
    def read(self: Any, *args: Any):
        if self.device.type == DEVICE_TYPE:
            raise LtcError(
                "A lazy tensor has no storage to read: its backend keeps its values. Use "
                "tensor.cpu()."
            )
        return original(self, *args)

    return read


def _exporting(original: Callable[..., Any]):
    """`original`, which hands a tensor's memory to another library, where there is such memory."""

    @functools.wraps(original)
    def to_dlpack(tensor: torch.Tensor, *args: Any, **kwargs: Any):
        wanted = kwargs.get("dl_device")  # a copy there is exported
        if is_lazy(tensor) and (
            wanted is None or wanted[0] == torch.utils.dlpack.DLDeviceType.kDLExtDev
        ):
            raise BufferError(
                "A lazy tensor has no memory that another library could share. Pass tensor.cpu()."
            )
        return original(tensor, *args, **kwargs)

    return to_dlpack


def _bytes_of(storage: Any) -> torch.Tensor:
    """Return a storage's bytes, on the CPU; a lazy tensor is computed first."""
    if storage.device.type != DEVICE_TYPE:
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)
    state = getattr(storage, "lazy", None)
    if state is None:
        return getattr(storage, "bytes_on_host", torch.empty(0, dtype=torch.uint8, device="cpu"))
    with torch.no_grad(), plain_functions():
        content = host_value(state).reshape(-1).view(torch.uint8)
        # A view's own bytes stand first, without offset or gaps; it counts as large as its base.
        missing = storage_bytes(state) - content.numel()
        whole = torch.nn.functional.pad(content, (0, missing)) if missing > 0 else content
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(exact_storage(whole))


# --- tensors that are set to a storage ----------------------------------------------------------


def _set_to_storage(
    self: torch.Tensor,
    source: torch.UntypedStorage,
    storage_offset: int = 0,
    size: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
):
    """aten::set_ to a storage: the tensor shows the part that it names.

    Of a lazy tensor it becomes a view. Of a storage that was made directly it gets a copy, which all
    share that are set to the same part.
    """
    state = getattr(source, "lazy", None)
    _require_settable(self, source, state)
    if size is None:
        held = len(_bytes_of(source)) if state is None else storage_bytes(state)
        size = (held // self.element_size(),)
    part = (self.dtype, storage_offset, tuple(size), tuple(stride or contiguous_strides(size)))
    if state is not None:
        self.data = _view_of_part(state, *part)
    elif source.device.type == DEVICE_TYPE:
        copies = vars(source).setdefault("copies_of_parts", {})
        if part not in copies:
            copies[part] = to_device(_part_of(_bytes_of(source), *part), state_of(self).device)
        self.data = copies[part]
    else:
        self.data = to_device(_part_of(_bytes_of(source), *part), state_of(self).device)
    return self


def _require_settable(tensor: torch.Tensor, source: Any, state: State | None) -> None:
    if source.device.type == DEVICE_TYPE and source.device != tensor.device:
        raise RuntimeError(
            f"A tensor on {tensor.device} cannot be set to a storage on {source.device}."
        )
    if state is not None and state.base is not None:
        raise LtcError(
            "A tensor cannot be set to the storage of a view, whose offset is always 0. Set it to "
            "the storage of the view's base, or slice the view."
        )


def _part_of(
    content: torch.Tensor, dtype: torch.dtype, offset: int, size: tuple, strides: tuple
) -> torch.Tensor:
    plain = torch.empty(0, dtype=dtype, device="cpu")
    return plain.set_(content.untyped_storage(), offset, size, strides).contiguous()


def _view_of_part(
    root: State, dtype: torch.dtype, offset: int, size: tuple, strides: tuple
) -> torch.Tensor:
    elements = tensor_of(root).view(-1)
    if elements.dtype is not dtype:
        left = elements.nbytes % dtype.itemsize  # behind the last element of the other dtype
        whole = (elements.nbytes - left) // elements.element_size()
        elements = elements[:whole].view(dtype)
    return elements.as_strided(size, strides, offset)


KERNELS = {
    "set_.source_Storage": _set_to_storage,
    "set_.source_Storage_storage_offset": _set_to_storage,
}
