"""Lazy tensors in torch.save, pickle, copy.deepcopy and multiprocessing queues.

A lazy tensor travels as a CPU tensor and the name of its device, and goes back to that device.
Tensors of one value (tied parameters) come out tied.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.serialization
from torch.multiprocessing import reductions

from ltc.device.ops.resizing import resize, storage_bytes
from ltc.device.recording.recorder import device_at
from ltc.device.recording.state import State
from ltc.device.recording.tensors import (
    device_of,
    host_tensor,
    host_value,
    is_lazy,
    state_of,
    to_device,
)
from ltc.device.torch_device import contiguous_strides
from ltc.errors import LtcError
from ltc.support.torch_private import (
    DEVICE_TYPE,
    HAS_STORAGE,
    REDUCE_TENSOR,
    TENSOR_CLASSES,
    TYPED_STORAGE_SIZE,
    StorageBase,
    dtypes_without_typed_storage,
    element_bytes,
    plain_functions,
    rebuild_tensor,
    rebuild_tensor_with_dtype,
    storage_from_pointer,
    typed_storage,
    untyped_part,
)
from ltc.tracebacks import entrance


class _Saving(threading.local):
    """What the torch.save under way in this thread has met, by base; None where none is."""

    met: dict[State, tuple[State, Any]] | None = None


_saving = _Saving()


def install() -> None:
    """Make lazy tensors picklable.  Once per process."""
    _patch_reduce()
    _patch_save()
    _patch_queues()
    _patch_storages()
    _patch_deepcopy()
    torch.serialization.register_package(_BEFORE_CPU, _saved_from, lambda storage, location: None)


# --- torch.save -------------------------------------------------------------------------------
# A lazy tensor is written as torch writes any other: a storage with the name of its device.  So
# torch.load puts it back there, or where map_location says, which needs no ltc.

_BEFORE_CPU = 5  # torch asks in this order whose storage it is; the CPU, which says yes, is at 10


def _patch_save() -> None:
    original = torch.save

    def save(*args: Any, **kwargs: Any):
        before = _saving.met
        met = _saving.met = {}
        try:
            return original(*args, **kwargs)
        finally:
            for _, storage in met.values():
                del storage.saved_from
            _saving.met = before

    save.__doc__ = original.__doc__
    torch.save = torch.serialization.save = save


def _patch_reduce() -> None:
    original = REDUCE_TENSOR.current

    def _reduce_ex_internal(self: torch.Tensor, protocol: int):
        if not is_lazy(self) or self.is_sparse:  # which is written as two others
            return original(self, protocol)
        return _pickled(self) if _saving.met is None else _saved(self)

    REDUCE_TENSOR.replace(entrance(_reduce_ex_internal))


def _saved(tensor: torch.Tensor) -> tuple:
    """How torch.save is to write a lazy tensor; tensors of one value share a storage."""
    storage, size = _storage_to_save(tensor), tuple(tensor.shape)
    hooks: OrderedDict[int, Any] = OrderedDict()
    described = (0, size, contiguous_strides(size), tensor.requires_grad, hooks)
    if tensor.dtype in dtypes_without_typed_storage():  # there is no typed storage of them
        return rebuild_tensor_with_dtype, (storage, *described, tensor.dtype)
    return rebuild_tensor, (typed_storage(storage, tensor.dtype), *described)


def _storage_to_save(tensor: torch.Tensor) -> Any:
    """A CPU storage with the elements; raises spec 004's error for a view beside its base."""
    state = state_of(tensor)
    base = state if state.base is None else state.base
    state.tensor_id  # noqa: B018  numbered in the order of saving
    met = _saving.met
    assert met is not None
    if base not in met:
        whole: Any = _exact_storage(host_tensor(tensor.detach()))
        whole.saved_from = str(tensor.device)
        met[base] = state, whole
    first, storage = met[base]
    if first is not state:
        raise RuntimeError(
            f"Tensor ID {state.tensor_id} is sharing a view with tensor ID {first.tensor_id}. "
            f"Save one of them, or copies: x.clone()."
        )
    return storage


def _exact_storage(plain: torch.Tensor) -> torch.UntypedStorage:
    """The storage of a contiguous tensor, copied where it holds more than the tensor."""
    storage = plain.untyped_storage()
    if plain.storage_offset() or storage.nbytes() != plain.numel() * plain.element_size():
        return plain.clone().untyped_storage()
    return storage


def _saved_from(storage: Any) -> str | None:
    """The device a storage is saved from, where it is a lazy tensor's."""
    return getattr(storage, "saved_from", None)


# --- pickle and queues ------------------------------------------------------------------------


class _Pickled:
    """The value of one state on its way into a pickle, which writes it once."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    @entrance
    def __reduce__(self):
        plain = host_tensor(self.tensor)
        # by value: torch would send a handle of a tensor's memory, which is freed at once
        content = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
        return restore, (content, plain.dtype, tuple(plain.shape), str(self.tensor.device))


# By the number of the state: a pickler holds its _Pickled until it is done, and nobody longer.
_being_pickled: WeakValueDictionary[int, _Pickled] = WeakValueDictionary()


def _pickled(tensor: torch.Tensor) -> tuple:
    number = state_of(tensor).tensor_id
    shared = _being_pickled.get(number)
    if shared is None:
        shared = _being_pickled[number] = _Pickled(tensor.detach())
    return tied, (shared, tensor.requires_grad)


def restore(content: bytes, dtype: torch.dtype, shape: tuple, device: str) -> torch.Tensor:
    """The lazy tensor that was pickled; raises where its device is missing here."""
    elements = torch.empty(0, dtype=dtype, device="cpu")
    if content:
        elements = torch.frombuffer(bytearray(content), dtype=dtype)
    return to_device(elements.reshape(shape), device_at(torch.device(device).index))


def tied(tensor: torch.Tensor, requires_grad: bool) -> torch.Tensor:
    """Another tensor of the same value."""
    return tensor.detach().requires_grad_(requires_grad)


def _tied_parameter(tensor: torch.Tensor, requires_grad: bool) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor.detach(), requires_grad)


def _patch_queues() -> None:
    original = reductions.reduce_tensor

    def reduce_tensor(tensor: torch.Tensor):
        if not is_lazy(tensor):
            return original(tensor)
        function, arguments = _pickled(tensor)
        return (_tied_parameter if type(tensor) is torch.nn.Parameter else function), arguments

    shortened = entrance(reduce_tensor)
    for kind in (*TENSOR_CLASSES, torch.Tensor, torch.nn.Parameter):
        ForkingPickler.register(kind, shortened)


# --- deepcopy ---------------------------------------------------------------------------------


def _patch_deepcopy() -> None:
    has_storage, original = HAS_STORAGE.current, torch.Tensor.__deepcopy__
    # deepcopy then clones, which keeps the device, instead of copying a storage
    HAS_STORAGE.replace(lambda tensor: not is_lazy(tensor) and has_storage(tensor))

    def __deepcopy__(self: torch.Tensor, memo: dict[int, Any]):
        if not is_lazy(self) or id(self) in memo or not self.is_leaf:
            return original(self, memo)
        others: Any = memo  # whose other keys are numbers
        copies = others.setdefault("ltc", {})  # by state: what shared a value shares its copy
        copied = copies.get(state_of(self))
        if copied is None or self.grad is not None or vars(self):
            copied = copies[state_of(self)] = original(self, memo)
            return copied
        again = memo[id(self)] = tied(copied, self.requires_grad)
        return again

    torch.Tensor.__deepcopy__ = entrance(__deepcopy__)


# --- storages ---------------------------------------------------------------------------------
# torch.load with map_location="ltc:0" and FSDP make storages directly.  C++ would crash on them,
# so the bytes are kept on the Python object and become a value when a tensor is set to it.

_NO_ADDRESS = 1 << 60  # nothing can be read there: no processor has such addresses


# Any: their methods are replaced, and have others in C++ than they are declared with.
_STORAGE: Any = torch.UntypedStorage
_TYPED: Any = torch.TypedStorage
_BASE: Any = StorageBase
_new, _data_ptr = _STORAGE.__new__, _STORAGE.data_ptr
_copy_, _resize_ = _BASE.copy_, _BASE.resize_


def _patch_storages() -> None:
    _STORAGE.__new__, _STORAGE.copy_, _STORAGE.resize_ = _new_storage, _copy_bytes_, _resize_bytes_
    for kind in (_STORAGE, _TYPED):
        for name in ("tolist", "__getitem__", "__iter__"):
            setattr(kind, name, _refusing(getattr(kind, name)))
    _STORAGE.data_ptr = _identity
    _STORAGE.size = _size_in_bytes
    TYPED_STORAGE_SIZE.replace(_size_in_elements)


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
        self.bytes_on_host = content.clone()
    return self


def _resize_bytes_(self: Any, size: int):
    if self.device.type != DEVICE_TYPE:
        return _resize_(self, size)
    if hasattr(self, "lazy"):
        resize(self.lazy, size)
    return self


def _size_in_bytes(self: Any):
    """What FSDP asks for.  nbytes() stays 0: who asks for that wants memory at an address."""
    state = getattr(self, "lazy", None) if self.device.type == DEVICE_TYPE else None
    return self.nbytes() if state is None else storage_bytes(state)


def _size_in_elements(self: Any):
    return untyped_part(self).size() // element_bytes(self)


def _identity(self: Any):
    """Different for storages that share nothing: safetensors and others find ties by it."""
    state = getattr(self, "lazy", None) if self.device.type == DEVICE_TYPE else None
    if state is None:
        return _data_ptr(self)
    return _NO_ADDRESS + ((state if state.base is None else state.base).tensor_id << 32)


def _refusing(original: Callable[..., Any]):
    def read(self: Any, *args: Any):
        if self.device.type == DEVICE_TYPE:
            raise LtcError(
                "A lazy tensor has no storage to read: its values are where its backend keeps "
                "them. Use tensor.cpu()."
            )
        return original(self, *args)

    return read


def _bytes_of(storage: Any) -> torch.Tensor:
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
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(_exact_storage(whole))


def _set_to_storage(
    self: torch.Tensor,
    source: torch.UntypedStorage,
    storage_offset: int = 0,
    size: Sequence[int] | None = None,
    stride: Sequence[int] | None = None,
):
    """aten::set_ to a storage: the tensor gets a copy of the part it is to show.

    Tensors set to the same part of one storage share that copy.
    """
    content = _bytes_of(source)
    if size is None:
        size = (content.numel() // self.element_size(),)
    stride = stride or contiguous_strides(size)
    part = (self.dtype, self.device, storage_offset, tuple(size), tuple(stride))
    copies = vars(source).setdefault("copies_of_parts", {})
    if part not in copies:
        plain = torch.empty(0, dtype=self.dtype, device="cpu")
        plain = plain.set_(content.untyped_storage(), storage_offset, size, stride).contiguous()
        copies[part] = to_device(plain, state_of(self).device)
    self.data = copies[part]
    return self


KERNELS = {
    "set_.source_Storage": _set_to_storage,
    "set_.source_Storage_storage_offset": _set_to_storage,
}
