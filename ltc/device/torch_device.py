"""The device type that torch is given: tensors without memory, and answers to what C++ asks.

The private names that it is made of are in ltc/support/torch_private.py.
"""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ltc.support.torch_private import (
    DEVICE_TYPE,
    NEWEST,
    OLDEST,
    PRIVATE_USE_1,
    PrivateUse1DeviceGuard,
    PrivateUse1Hooks,
    create_empty_tensor,
    from_dlpack,
    register_device_guard,
    register_device_module,
    register_hooks,
    reinterpret_tensor,
)

# Its Python object lives as long as the C++ storage; Any, since it has attributes of ltc's.
storage_of: Callable[[torch.Tensor], Any] = torch.Tensor.untyped_storage


def state_if_any(tensor: torch.Tensor) -> Any:
    """The state of a tensor on a device; None of one that nothing was ever asked of, or a sparse one.

    A sparse tensor has no storage: its indices and values have.
    """
    if tensor.layout is not torch.strided:
        return None
    return getattr(storage_of(tensor), "lazy", None)


# --- tensors of device index >= 1 -------------------------------------------------------------
# create_empty_tensor makes tensors of index 0 only; a DLPack capsule may carry any index, and
# one prebuilt capsule content per (index, dtype) makes it cost 1 us.


class _DLDevice(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("index", ctypes.c_int)]


class _DLDataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _DLManagedTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("dims", ctypes.c_int),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


_DLPACK_EXTENSION_DEVICE = 12  # kDLExtDev
_DLPACK_CODES = {  # DLDataTypeCode: int 0, uint 1, float 2, bfloat 4, complex 5, bool 6, fp8 10-14
    torch.float16: (2, 16),
    torch.float32: (2, 32),
    torch.float64: (2, 64),
    torch.bfloat16: (4, 16),
    torch.int8: (0, 8),
    torch.int16: (0, 16),
    torch.int32: (0, 32),
    torch.int64: (0, 64),
    torch.uint8: (1, 8),
    torch.uint16: (1, 16),
    torch.uint32: (1, 32),
    torch.uint64: (1, 64),
    torch.bool: (6, 8),
    torch.complex32: (5, 32),
    torch.complex64: (5, 64),
    torch.complex128: (5, 128),
    torch.float8_e4m3fn: (10, 8),
    torch.float8_e4m3fnuz: (11, 8),
    torch.float8_e5m2: (12, 8),
    torch.float8_e5m2fnuz: (13, 8),
    torch.float8_e8m0fnu: (14, 8),
}
DTYPES = frozenset(_DLPACK_CODES)  # of tensors on the device
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_prototypes: dict[tuple[int, torch.dtype], tuple] = {}


def _prototype(index: int, dtype: torch.dtype) -> tuple:
    if dtype not in _DLPACK_CODES:
        raise NotImplementedError(
            f"{dtype} has no DLPack code, by which tensors of ltc:1 and above are made. Use ltc:0."
        )
    shape, strides = (ctypes.c_int64 * 1)(0), (ctypes.c_int64 * 1)(1)
    managed = _DLManagedTensor(
        device=_DLDevice(_DLPACK_EXTENSION_DEVICE, index),
        dims=1,
        dtype=_DLDataType(*_DLPACK_CODES[dtype], 1),
        shape=shape,
        strides=strides,
    )
    # the capsule points into these objects, so they live as long as the table
    entry = _prototypes[index, dtype] = (ctypes.addressof(managed), managed, shape, strides)
    return entry


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a contiguous tensor of `shape`, as torch computes them."""
    strides, step = [1] * len(shape), 1
    for dim in range(len(shape) - 1, -1, -1):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def empty_tensor(shape: tuple[int, ...], dtype: torch.dtype, index: int) -> torch.Tensor:
    """A tensor of `shape` on ltc:`index` without any memory behind it."""
    if index == 0:
        return create_empty_tensor(shape, dtype)
    prototype = _prototypes.get((index, dtype)) or _prototype(index, dtype)
    seed = from_dlpack(_new_capsule(prototype[0], b"dltensor", None))
    # from torch 2.15 on it takes plain tuples alone: no list, no torch.Size
    return reinterpret_tensor(seed, tuple(shape), contiguous_strides(shape), 0)


# --- what C++ asks of a device ----------------------------------------------------------------


class Hooks(PrivateUse1Hooks):
    """Answers of the accelerator hooks; without them the autograd engine refuses to run."""

    def is_available(self) -> bool:
        return True

    def is_built(self) -> bool:
        return True

    def has_primary_context(self, index: int) -> bool:
        return True


class _Stash(threading.local):
    error: BaseException | None = None


_stash = _Stash()
_asked = itertools.starmap(itertools.repeat(PRIVATE_USE_1).__next__, itertools.repeat(()))


def _types() -> Iterator[Any]:
    """The device's type, again and again, until an error has come by; see `DeviceGuard`."""
    global _spares
    try:
        yield from _asked
    except SystemError as error:
        DeviceGuard.type_, _spares = _spares  # first: other threads run from the next call on
        _stash.error = error.__cause__
        one = staticmethod(_types().__next__)
        _spares = one, _spares
    yield PRIVATE_USE_1


class DeviceGuard(PrivateUse1DeviceGuard):
    """The device guard.

    C++ calls `type_` at every operation, and takes no exception from it (noexcept): one ends the
    process.  So it is a generator in a `yield from`, where Python looks for no signal: the handler
    of Ctrl-C would raise here. Nor does it switch threads there, and no generator may be asked
    while it runs in another one.

    It is called while C++ unwinds an exception raised by a Python hook of a backward as well, with
    Python's error indicator still set. CPython then turns the result of any call, that in `_asked`,
    into a SystemError. So the error is stashed, and `run_backward` raises it in the caller. Since
    that takes lines between which threads are switched, a spare generator answers from there on.
    """

    type_ = staticmethod(_types().__next__)


_SPARES = 64  # of threads that meet an error at the same moment
_spares: Any = None  # a chain: Python takes the first of a pair without a switch of threads
for _ in range(_SPARES):
    _spares = staticmethod(_types().__next__), _spares


def take_stashed_error() -> BaseException | None:
    error, _stash.error = _stash.error, None
    return error


_HOOKS, _GUARD = Hooks(), DeviceGuard()  # C++ holds plain pointers to them


def _has_gpu() -> bool:
    """Return True if the autograd engine starts threads at the first backward, whatever ltc does.

    Asked without starting a driver, where that is possible: children of fork would have none.
    """
    return any(torch.get_device_module(kind).device_count() for kind in ("cuda", "xpu", "mps"))


def _start_engine() -> None:
    """Run one backward on the CPU before ltc is a device: so the engine finds none to start threads for.

    After it has started one, no child of fork may run a backward.
    """
    with torch.inference_mode(False), torch.enable_grad():  # whoever imports ltc, and where
        torch.ones(1, requires_grad=True, device="cpu").sum().backward()


def register_device(module: Any) -> int | None:
    """Make `ltc` a device type of torch whose Python module is `module`.  Once per process.

    Returns:
        The seed that torch.manual_seed got since torch was imported; None if that is not known.
    """
    if not _has_gpu():
        _start_engine()
    waiting = vars(torch).pop(DEVICE_TYPE, None)  # what ltc_autoload has put there
    if waiting is None:
        torch.utils.rename_privateuse1_backend(DEVICE_TYPE)
        torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    else:
        waiting.reveal()  # ltc is the accelerator from here on, and pins memory itself
    register_device_module(DEVICE_TYPE, module)
    register_hooks(_HOOKS)
    register_device_guard(_GUARD)
    return getattr(waiting, "seed", None)


def self_test() -> None:
    """Check at import the behaviour of torch that ltc relies on; raise ImportError if it is missing."""
    failures = []
    for index in (0, 1):
        tensor = empty_tensor((2, 3), torch.float32, index)
        if tuple(tensor.shape) != (2, 3) or tensor.device.index != index:
            failures.append(f"an empty tensor on ltc:{index}")
        storage_of(tensor).ltc_self_test = index
        if getattr(storage_of(tensor.detach()), "ltc_self_test", None) != index:
            failures.append("a storage object that outlives its Python references")
    if failures:
        raise ImportError(
            f"torch {torch.__version__} lacks behaviour that ltc needs: {' and '.join(failures)}. "
            f"Use a torch from {OLDEST[0]}.{OLDEST[1]} up to (without) {NEWEST[0]}.{NEWEST[1]}."
        )
