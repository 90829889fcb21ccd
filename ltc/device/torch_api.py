"""Every private name of torch that ltc leans on, in one place, each with what it is used for.

A name that this torch lacks is reported once, here, by `require()`, together with the versions
that have it; no other module of ltc spells a private torch name that can disappear.
"""

from __future__ import annotations

import ctypes
import itertools
import re
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch

DEVICE_TYPE = "ltc"
OLDEST, NEWEST = (2, 10), (2, 16)

storage_of: Callable[[torch.Tensor], Any] = (
    torch.Tensor.untyped_storage
)  # its Python object lives as long as the C++ storage
is_view_replay_enabled = torch._C._is_view_replay_enabled
set_view_replay_enabled = torch._C._set_view_replay_enabled
is_multithreading_enabled = torch._C._is_multithreading_enabled
set_multithreading_enabled = torch._C._set_multithreading_enabled
has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
all_overload_names = torch._C._dispatch_get_all_op_names
storage_from_pointer = torch._C._construct_storage_from_data_pointer
exclude_dispatch_keys = torch._C._ExcludeDispatchKeyGuard
Generator = torch._C.Generator
plain_functions = torch._C.DisableTorchFunction  # a default device or a user's mode is not for us
graph_task = torch._C._current_graph_task_id  # -1 outside a backward
StorageBase = torch._C.StorageBase
TensorBase = torch._C.TensorBase
library_for_a_while = torch.library._scoped_library
RecursiveScriptModule = torch.jit._script.RecursiveScriptModule
OpOverload = torch._ops.OpOverload
below_autograd = torch._C._AutoDispatchBelowAutograd
is_transformed = torch._C._are_functorch_transforms_active
_dispatch_key: Any = torch._C.DispatchKey
AUTOCAST_KEYS = torch._C.DispatchKeySet(_dispatch_key.AutocastPrivateUse1)


_dynamo = torch._C._dynamo.eval_frame
_LEFT_ALONE = _dynamo._FrameExecStrategy(_dynamo._FrameAction.SKIP, _dynamo._FrameAction.SKIP)


def leave_to_python(code: types.CodeType) -> None:
    """Let torch.compile trace no frame of this code, nor any frame below one."""
    _dynamo.set_code_exec_strategy(code, _LEFT_ALONE)


def never_inline(package: str) -> None:
    """Let torch.compile end its graph where the user's code calls a function of this package."""
    torch._dynamo.trace_rules.add(package)


def is_forward_mode() -> bool:
    """Whether tensors may carry tangents."""
    return torch.autograd.forward_ad._current_level >= 0


def has_own_dispatch(tensor: torch.Tensor) -> bool:
    """Whether its class handles overloads itself, as DTensor does."""
    own = type(tensor).__torch_dispatch__
    return own is not torch._C._disabled_torch_dispatch_impl


def _version() -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])


def require() -> None:
    """Raise ImportError where this torch is too old, too new to be known, or already taken."""
    version = _version()
    if version < OLDEST:
        raise ImportError(
            f"ltc needs torch >= {OLDEST[0]}.{OLDEST[1]}: torch {torch.__version__} cannot host a "
            f"device written in Python. Install a newer one: pip install 'torch==2.13.*'."
        )
    taken = torch._C._get_privateuse1_backend_name()
    if taken not in ("privateuseone", DEVICE_TYPE):
        raise ImportError(
            f"torch has one slot for an outside device and {taken!r} holds it in this process. "
            f"Import ltc in a process that does not import that backend."
        )
    missing = [name for name in ("_acc", "_from_dlpack") if not hasattr(torch._C, name)]
    if missing:
        raise ImportError(
            f"torch {torch.__version__} lacks {', '.join('torch._C.' + n for n in missing)}, on "
            f"which ltc's device is built. Versions {OLDEST[0]}.{OLDEST[1]} up to (without) "
            f"{NEWEST[0]}.{NEWEST[1]} have them."
        )


require()
create_empty_tensor = torch._C._acc.create_empty_tensor
_guards: Any = torch._C._dynamo.guards
_reinterpret_tensor = _guards._reinterpret_tensor
_from_dlpack = torch._C._from_dlpack
exchange_contents = torch._C._swap_tensor_impl  # of two tensors; the Python objects stay
PRIVATE_USE_1 = torch._C._autograd.DeviceType.PrivateUse1


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
    seed = _from_dlpack(_new_capsule(prototype[0], b"dltensor", None))
    # from torch 2.15 on it takes plain tuples alone: no list, no torch.Size
    return _reinterpret_tensor(seed, tuple(shape), contiguous_strides(shape), 0)


# --- what C++ asks of a device ----------------------------------------------------------------


class Hooks(torch._C._acc.PrivateUse1Hooks):
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
_next_type = itertools.repeat(PRIVATE_USE_1).__next__


class DeviceGuard(torch._C._acc.DeviceGuard):
    """The device guard.

    C++ calls `type_` (noexcept) while it unwinds an exception raised by a Python hook of a
    backward, with Python's error indicator still set. CPython then turns any result into a
    SystemError, which ends the process. So the error is stashed here and `run_backward`
    raises it in the caller.
    """

    @staticmethod
    def type_():
        try:
            return _next_type()
        except SystemError as error:
            _stash.error = error.__cause__
            return PRIVATE_USE_1


def take_stashed_error() -> BaseException | None:
    error, _stash.error = _stash.error, None
    return error


_HOOKS, _GUARD = Hooks(), DeviceGuard()  # C++ holds plain pointers to them


def register_device(module: Any) -> None:
    """Make `ltc` a device type of torch whose Python module is `module`.  Once per process.

    One CPU backward must have run before: the autograd engine then finds no device to start
    threads for, and a later fork stays legal.
    """
    torch.ones(1, requires_grad=True).sum().backward()
    torch.utils.rename_privateuse1_backend(DEVICE_TYPE)
    torch.utils.generate_methods_for_privateuse1_backend()
    torch._register_device_module(DEVICE_TYPE, module)
    torch._C._acc.register_python_privateuseone_hook(_HOOKS)
    torch._C._acc.register_python_privateuseone_device_guard(_GUARD)


def self_test() -> None:
    """Check at import what everything else relies on; raises ImportError saying what broke."""
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
            f"torch {torch.__version__} no longer gives ltc {' and '.join(failures)}. "
            f"Use a torch from {OLDEST[0]}.{OLDEST[1]} up to (without) {NEWEST[0]}.{NEWEST[1]}."
        )
