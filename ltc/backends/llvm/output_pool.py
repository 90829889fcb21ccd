"""Memory of large outputs, used again when their tensors are gone.

The system hands out large blocks of memory as pages that are cleared when they are first touched:
for an output that is made at every step this takes longer than computing it. A block here comes
back when the last tensor that lies in it is freed.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
import weakref
from collections.abc import Callable, Sequence
from math import prod

import torch

from ltc.backends.host_memory import HUGE_PAGE
from ltc.errors import OutOfMemory
from ltc.passes.memory_planner import aligned
from ltc.support.process import machine_memory
from ltc.support.torch_private import empty_strided_cpu

LARGE_BYTES = HUGE_PAGE  # of a tensor: most smaller ones the allocator keeps itself
MOST_FREE_BYTES = 512 << 20  # kept for outputs to come; what is more goes back to the system
_HAS_HUGE_PAGES = sys.platform == "linux" and hasattr(mmap, "MADV_HUGEPAGE")


class OutputBlock:
    """Private memory that begins at a huge page and is as long as so many of them."""

    def __init__(self, nbytes: int) -> None:
        """`nbytes`: at least; the rest of the last huge page belongs to it too."""
        self.nbytes = nbytes = _whole_pages(nbytes)
        machine_memory.require(nbytes)
        # One page more than needed: the system aligns to small pages only.
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # after a fork, each has its own
        try:
            self._map = mmap.mmap(-1, nbytes + HUGE_PAGE, flags=private)
        except OSError as error:
            raise OutOfMemory("out of memory", nbytes) from error
        try:
            self._map.madvise(mmap.MADV_HUGEPAGE)
        except OSError:
            pass  # advice only: where the system refuses it, the memory is the same
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._first = -address % HUGE_PAGE
        self.address = address + self._first

    def view(self) -> memoryview:
        return memoryview(self._map)[self._first : self._first + self.nbytes]


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // HUGE_PAGE) * HUGE_PAGE


class OutputPool:
    """Blocks that no tensor lies in at the moment, those that were freed last at the end.

    Tensors are freed in any thread at any time, and processes fork: there is no lock, and what
    changes the list does so in one atomic step.

    Attributes:
        is_used: True if it has ever been asked for memory.
    """

    def __init__(self, most_free_bytes: int = MOST_FREE_BYTES) -> None:
        self._most = most_free_bytes
        self._free: list[OutputBlock] = []
        self._views: dict[int, weakref.ref[memoryview]] = {}
        self.is_used = False

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor whose elements are anything."""
        self.is_used = True
        count = prod(shape)
        nbytes = _whole_pages(count * dtype.itemsize)
        block = self._taken(nbytes) or OutputBlock(nbytes)
        view = block.view()
        self._views[id(block)] = weakref.ref(view, lambda _: self._give_back(block))
        # The tensor's storage holds the view until the last tensor of it is gone.
        return torch.frombuffer(view, dtype=dtype, count=count).view(shape)

    def add(self, block: OutputBlock) -> None:
        """One that no tensor lies in."""
        self._free.append(block)
        if self.free_bytes > self._most:
            self._removed(self._free[0])

    @property
    def free_bytes(self) -> int:
        return sum(block.nbytes for block in list(self._free))

    def _taken(self, nbytes: int) -> OutputBlock | None:
        for block in reversed(list(self._free)):
            if block.nbytes == nbytes and self._removed(block):
                return block
        return None

    def _removed(self, block: OutputBlock) -> bool:
        try:
            self._free.remove(block)
        except ValueError:  # another thread has it
            return False
        return True

    def _give_back(self, block: OutputBlock) -> None:
        del self._views[id(block)]
        self.add(block)


pool = OutputPool()


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor whose elements are anything: an output of a program."""
    if _HAS_HUGE_PAGES and prod(shape) * dtype.itemsize >= LARGE_BYTES:
        return pool.empty(shape, dtype)
    return torch.empty(shape, dtype=dtype, device="cpu")


def copied(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy, as an output of a program."""
    return empty(x.shape, x.dtype).copy_(x)


def guarded(shape: Sequence[int], dtype: torch.dtype, guard: int) -> torch.Tensor:
    """An output that has so many bytes, whole cache lines, of its memory before and behind it."""
    count = prod(shape)
    around = empty((aligned(count * dtype.itemsize) + 2 * guard,), torch.uint8)
    own = torch.frombuffer(around.numpy(), dtype=dtype, count=count, offset=guard)
    return own.view(shape)


def maker_of(
    shape: Sequence[int], dtype: torch.dtype, guard: int = 0
) -> tuple[Callable[[], torch.Tensor], bool]:
    """Return a maker of outputs of a type, and whether it bypasses torch's dispatcher.

    Args:
        guard: Bytes, whole cache lines, that they have before and behind them.
    """
    if guard:
        return functools.partial(guarded, shape, dtype, guard), True
    if empty_strided_cpu is None or prod(shape) * dtype.itemsize >= LARGE_BYTES:
        return functools.partial(empty, shape, dtype), True
    dims = range(len(shape))
    strides = tuple([prod([max(extent, 1) for extent in shape[dim + 1 :]]) for dim in dims])
    return functools.partial(empty_strided_cpu, tuple(shape), strides, dtype), False
