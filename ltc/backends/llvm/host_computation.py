"""The memory of programs on this machine's CPU: their buffers are contiguous CPU tensors."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import torch

from ltc import config
from ltc.backends.host_buffers import HostBuffers
from ltc.backends.host_memory import HUGE_PAGE, madvise
from ltc.backends.llvm.output_pool import LARGE_BYTES, OutputBlock, OutputPool, pool
from ltc.support.process import machine_memory
from ltc.support.process.daemon import started_daemon

# --- Memory for gradients, touched while a model is still being moved to a device ----------------

# The system clears a page when it is first touched, and on a virtual machine its host may have to
# find the page as well: up to five milliseconds for each huge page, at a time when the first step
# waits for it. Whoever moves a large tensor to a device will most likely want a gradient of its
# size. So a thread touches as much again, while Python goes on moving, and then records that
# step.

_MADV_POPULATE_WRITE = 23  # Linux 5.14: asm-generic/mman-common.h


class TouchedAhead:
    """Blocks of a pool that are touched before it is first asked for any.

    Processes fork: there is no lock. A size that is asked for just when the thread ends is left to
    the next one; the memory is then touched by its first writer.
    """

    def __init__(self, pool: OutputPool):
        self._pool, self._expected = pool, 0  # bytes
        self._sizes: deque[int] = deque()
        self._thread: threading.Thread | None = None

    def expect(self, nbytes: int) -> None:
        """A tensor of `nbytes` was moved to a device: an output of its size is to be expected."""
        if nbytes < LARGE_BYTES or self._pool.is_used or madvise is None:
            return
        # A guess must not cost much where it is wrong.
        if self._expected + nbytes > config.value("LTC_PREFAULT_MB") << 20:
            return
        self._expected += nbytes
        self._sizes.append(nbytes)
        if self._thread is None or not self._thread.is_alive():
            self._thread = started_daemon(self._touch, "ltc pages")

    def wait(self) -> None:
        """Block until all is touched that was expected."""
        if self._thread is not None:
            self._thread.join()

    def _touch(self) -> None:
        while not self._pool.is_used and madvise is not None:
            try:
                block = OutputBlock(self._sizes.popleft())
            except IndexError:
                return
            for offset in range(0, block.nbytes, HUGE_PAGE):
                if self._pool.is_used:  # others compute now, and touch what they need themselves
                    break
                # advice only: where the system is older, nothing happens
                madvise(block.address + offset, HUGE_PAGE, _MADV_POPULATE_WRITE)
            self._pool.add(block)


_touched_ahead = TouchedAhead(pool)


class HostComputation(HostBuffers):
    """The common part of all programs on this machine's CPU: the `Computation` of backends/interface.py."""

    @staticmethod
    def upload(tensor: torch.Tensor, device: int) -> torch.Tensor:
        if (nbytes := tensor.nbytes) >= LARGE_BYTES:
            machine_memory.require(nbytes)
            if tensor.is_floating_point():
                _touched_ahead.expect(nbytes)
        return tensor.detach().clone(memory_format=torch.contiguous_format)

    def launch(self, buffers: list[Any], scalars: list[Any]) -> list[Any]:
        raise NotImplementedError  # of a program
