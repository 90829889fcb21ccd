"""The addresses of library functions that kernels call."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Mapping

from ltc.support.observation import metrics
from ltc.support.process import torch_libraries

THREAD_NAMES = (
    "GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads", "omp_get_max_threads",
    "omp_set_num_threads",
)  # fmt: skip
SHIM_NAMES = (
    "torch_call_dispatcher", "aoti_torch_create_tensor_from_blob", "aoti_torch_copy_",
    "aoti_torch_delete_tensor_object", "aoti_torch_get_numel", "torch_new_string_handle",
)  # fmt: skip
PRODUCT_NAMES = ("aoti_torch_cpu_mm_out", "MKL_Set_Num_Threads_Local")  # the latter is MKL's
FAILED_CALLS = "ltc_failed_calls"  # where kernels count calls of PyTorch's that failed
_CHOSEN = frozenset((*THREAD_NAMES, *SHIM_NAMES, *PRODUCT_NAMES, FAILED_CALLS))
_failed_calls = ctypes.c_int64()
_failed_calls_noted = 0


def has_symbol(name: str) -> bool:
    return name in chosen()


def address_of(name: str) -> int | None:
    """The address of a function in this process; None where it has none of that name."""
    if name in _CHOSEN:
        return chosen().get(name)
    return _addresses(ctypes.CDLL(None), (name,)).get(name)


@functools.cache
def chosen() -> Mapping[str, int]:
    """Addresses by name, of the functions that are taken from one library and no other."""
    found: dict[str, int] = {FAILED_CALLS: ctypes.addressof(_failed_calls)}
    # The pool that torch itself uses: a second one would fight with it for the cores.
    for library in torch_libraries.loaded("libgomp"):
        found.update(_addresses(library, THREAD_NAMES))
    for library in torch_libraries.loaded("libtorch_cpu."):
        found.update(_addresses(library, (*SHIM_NAMES, *PRODUCT_NAMES)))
    return found


def _note_failed_calls() -> None:
    global _failed_calls_noted
    new = _failed_calls.value - _failed_calls_noted
    if new:
        _failed_calls_noted += new
        metrics.count("FailedKernelCalls", new)


metrics.before_reading(_note_failed_calls)


def _addresses(library: ctypes.CDLL, names: tuple[str, ...]) -> dict[str, int]:
    return {
        name: ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0
        for name in names
        if hasattr(library, name)
    }
