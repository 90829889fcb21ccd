"""Lazy tensors in torch.save, pickle, copy.deepcopy and multiprocessing queues.

A lazy tensor travels as a CPU tensor and the name of its device, and goes back to that device.
Tensors of one value (tied parameters) come out tied.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.serialization
from torch.multiprocessing import reductions
from torch.utils.hooks import warn_if_has_hooks

from ltc.device.ops.resizing import root_of, storage_bytes
from ltc.device.recording.recorder import device_at
from ltc.device.recording.state import State
from ltc.device.recording.tensors import (
    host_tensor,
    is_lazy,
    state_of,
    to_device,
)
from ltc.device.torch_device import contiguous_strides
from ltc.support.stand_in import stand_in
from ltc.support.torch_private import (
    HAS_STORAGE,
    REDUCE_TENSOR,
    TENSOR_CLASSES,
    dtypes_without_typed_storage,
    rebuild_tensor,
    rebuild_tensor_with_dtype,
    storage_identity,
    typed_storage,
)
from ltc.tracebacks import entrance


class _Saving(threading.local):
    """The values met by the torch.save under way in this thread, by base; None without one.

    Attributes:
        devices: The devices of these storages, by their identities.
    """

    met: dict[State, tuple[State, Any]] | None = None
    devices: dict[int, str] = {}


_saving = _Saving()


def install() -> None:
    """Make lazy tensors picklable.  Once per process."""
    _patch_reduce()
    _patch_save()
    _patch_bytes_to_write()
    _patch_queues()
    _patch_deepcopy()
    torch.serialization.register_package(_BEFORE_CPU, _saved_from, lambda storage, location: None)


# --- torch.save -------------------------------------------------------------------------------
# A lazy tensor is written as torch writes any other: a storage with the name of its device.  So
# torch.load puts it back there, or where map_location says, which needs no ltc.

_BEFORE_CPU = 5  # torch asks in this order whose storage it is; the CPU, which says yes, is at 10


def _patch_save() -> None:
    original = torch.save

    def save(*args: Any, **kwargs: Any):
        before = _saving.met, _saving.devices
        _saving.met, _saving.devices = {}, {}
        try:
            return original(*args, **kwargs)
        finally:
            _saving.met, _saving.devices = before

    save.__doc__ = original.__doc__
    stand_in(torch.serialization, "save", save)
    stand_in(torch, "save", save)


def _patch_bytes_to_write() -> None:
    """torch.save writes as much of a storage, given to it as such, as its nbytes() says."""
    original: Callable[..., int] = torch.UntypedStorage.nbytes

    def nbytes(self: Any) -> int:
        if _saving.met is None or not hasattr(self, "lazy"):
            return original(self)
        return storage_bytes(self.lazy)

    torch.UntypedStorage.nbytes = nbytes


def _patch_reduce() -> None:
    original = REDUCE_TENSOR.current

    def _reduce_ex_internal(self: torch.Tensor, protocol: int):
        if not is_lazy(self) or self.is_sparse:  # which is written as two others
            return original(self, protocol)
        warn_if_has_hooks(self)
        return _pickled(self) if _saving.met is None else _saved(self)

    REDUCE_TENSOR.replace(entrance(_reduce_ex_internal))


def _saved(tensor: torch.Tensor) -> tuple:
    """Return a lazy tensor's form for torch.save; tensors of one value share a storage."""
    storage, size = _storage_to_save(tensor), tuple(tensor.shape)
    hooks: OrderedDict[int, Any] = OrderedDict()
    described = (0, size, contiguous_strides(size), tensor.requires_grad, hooks)
    if tensor.dtype in dtypes_without_typed_storage():  # there is no typed storage of them
        return rebuild_tensor_with_dtype, (storage, *described, tensor.dtype)
    return rebuild_tensor, (typed_storage(storage, tensor.dtype), *described)


def _storage_to_save(tensor: torch.Tensor) -> Any:
    """A CPU storage with the elements; raises spec 004's error for a view beside its base."""
    state = state_of(tensor)
    base = root_of(state)
    state.tensor_id  # noqa: B018  numbered in the order of saving
    met = _saving.met
    assert met is not None
    if base not in met:
        whole = exact_storage(host_tensor(tensor.detach()))
        if _saved_from(whole) is not None:  # equal values of one program may be one buffer
            whole = whole.clone()
        _saving.devices[storage_identity(whole)] = str(tensor.device)
        met[base] = state, whole
    first, storage = met[base]
    if first is not state:
        raise RuntimeError(
            f"Tensor ID {state.tensor_id} is sharing a view with tensor ID {first.tensor_id}. "
            f"Save one of them, or copies: x.clone()."
        )
    return storage


def exact_storage(plain: torch.Tensor) -> torch.UntypedStorage:
    """The storage of a contiguous tensor, copied where it holds more than the tensor."""
    storage = plain.untyped_storage()
    if plain.storage_offset() or storage.nbytes() != plain.numel() * plain.element_size():
        return plain.clone().untyped_storage()
    return storage


def _saved_from(storage: Any) -> str | None:
    """The device a storage is saved from, where it is a lazy tensor's."""
    return _saving.devices.get(storage_identity(storage))


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


_NOT_ACROSS = (  # torch's own text
    "Cowardly refusing to serialize non-leaf tensor which requires_grad, since autograd does not "
    "support crossing process boundaries.  If you just want to transfer the data, call detach() on "
    "the tensor before serializing (e.g., putting it on the queue)."
)


def _patch_queues() -> None:
    original = reductions.reduce_tensor

    def reduce_tensor(tensor: torch.Tensor):
        if not is_lazy(tensor):
            return original(tensor)
        if not tensor.is_leaf:
            raise RuntimeError(_NOT_ACROSS)
        warn_if_has_hooks(tensor)
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
