"""New CPU memory for large tensors, without a page fault every 4 KiB.

A fault costs about a microsecond, which for large tensors is longer than writing them.
"""

from __future__ import annotations

import ctypes
import errno
import re
import sys
from collections.abc import Sequence

import torch

from ltc.errors import OutOfMemory
from ltc.support.process import machine_memory

HUGE_PAGE = 2 << 20
_LARGE_BYTES = 2 * HUGE_PAGE  # below this, little of it would be whole huge pages
_MADV_HUGEPAGE = 14  # Linux: asm-generic/mman-common.h
# None where advice has other numbers. Unlike mmap's, it lets other threads run Python meanwhile.
madvise = getattr(ctypes.CDLL(None), "madvise", None) if sys.platform == "linux" else None
if madvise is not None:
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def empty(shape: Sequence[int], dtype: torch.dtype, huge_from: int = _LARGE_BYTES) -> torch.Tensor:
    """A contiguous tensor whose elements are anything; from `huge_from` bytes on in huge pages."""
    result = torch.empty(shape, dtype=dtype, device="cpu")
    if result.nbytes < huge_from:
        return result
    machine_memory.require(result.nbytes)
    if madvise is not None:
        start = -(-result.data_ptr() // HUGE_PAGE) * HUGE_PAGE
        stop = (result.data_ptr() + result.nbytes) // HUGE_PAGE * HUGE_PAGE
        # advice only: where the system refuses it, the memory is the same
        madvise(start, stop - start, _MADV_HUGEPAGE)
    return result


def new_empty(x: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor of `x`'s shape and dtype whose elements are anything."""
    return empty(x.shape, x.dtype)


def new_copy(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy of `x`."""
    return new_empty(x).copy_(x)


_REFUSED = re.compile(r"DefaultCPUAllocator: .*you tried to allocate (\d+) bytes", re.DOTALL)


def as_out_of_memory(error: BaseException) -> OutOfMemory | None:
    """OutOfMemory for an error of torch's allocator or the system that says so; None for others."""
    if isinstance(error, OutOfMemory):
        return error
    if isinstance(error, torch.OutOfMemoryError):  # of a backend that raises what PyTorch's do
        return OutOfMemory("out of memory", getattr(error, "nbytes", 0))
    refused = _REFUSED.search(str(error)) if isinstance(error, RuntimeError) else None
    if refused is not None:
        return OutOfMemory("out of memory", int(refused[1]))
    is_refusal = isinstance(error, MemoryError) or (
        isinstance(error, OSError) and error.errno == errno.ENOMEM
    )
    return OutOfMemory("out of memory") if is_refusal else None
