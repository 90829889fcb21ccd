"""The memory that running programs work in, kept for those to come."""

from __future__ import annotations

import numpy as np
import torch

from ltc.backends.eager import LOWERING
from ltc.backends.host_memory import empty
from ltc.backends.llvm.program_plan import InBlock, ProgramPlan
from ltc.backends.plain_dispatch import PlainDispatch
from ltc.passes.memory_planner import ALIGNMENT
from ltc.support.process import machine_memory

# From here on, in huge pages. Below, the faults of small pages cost a process some 20 ms once; a
# huge page that a virtual machine has to get from its host takes 5 ms, and small ones lie ready.
HUGE_BYTES = 64 << 20


class WorkBlock:
    """A stretch of memory, as a tensor and as bytes that Python writes to."""

    def __init__(self, nbytes: int) -> None:
        machine_memory.require(nbytes)
        with PlainDispatch():
            self.tensor = empty((nbytes,), torch.uint8, HUGE_BYTES)
        self.nbytes = nbytes
        self.address = self.tensor.data_ptr()
        self.memory = memoryview(self.tensor.numpy())  # type: ignore[arg-type]  # numpy before Python 3.12


class Blocks:
    """Blocks that nothing uses at the moment; programs share them.

    As many are kept as ran at one time, each as large as the largest program that took it has needed.
    """

    def __init__(self) -> None:
        self._free: list[WorkBlock] = []  # append and pop are atomic: no lock to fork with

    def take(self, nbytes: int) -> WorkBlock:
        try:
            block = self._free.pop()
        except IndexError:
            return WorkBlock(nbytes)
        if block.nbytes < nbytes:
            del block  # before its successor is made: both together would be the peak
            block = WorkBlock(nbytes)
        return block

    def give_back(self, block: WorkBlock) -> None:
        self._free.append(block)

    def release(self) -> None:
        """Give the memory back to the system."""
        self._free.clear()


def constants_of(plan: ProgramPlan) -> torch.Tensor:
    """The memory of the constants that kernels read, and of the rows of the checks."""
    rows = b"" if plan.memory is None else plan.memory.rows
    end = ALIGNMENT * len(plan.constants)
    with PlainDispatch():
        memory = torch.zeros(max(ALIGNMENT, end + len(rows)), dtype=torch.uint8)
        memory.numpy()[end : end + len(rows)] = np.frombuffer(rows, np.uint8)
        for node, offset in plan.constants:
            value = LOWERING.lower(node)().reshape(1)
            memory[offset : offset + value.nbytes] = value.view(torch.uint8)
        return memory


def in_block(block: WorkBlock, where: InBlock) -> torch.Tensor:
    # A storage of its own: as_strided counts from where the storage begins.
    count = torch.Size(where.shape).numel()
    flat = torch.frombuffer(block.memory, dtype=where.dtype, count=count, offset=where.offset)
    return flat.view(where.shape)
