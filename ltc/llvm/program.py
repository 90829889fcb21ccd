"""Kernels made ready to run in a row: one table of addresses, one native call."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ltc.llvm import jit, threads
from ltc.llvm.code import KernelCode


@functools.cache
def entry_address(text: str, name: str) -> int:
    """The entry of a kernel: equal texts are compiled once in a process."""
    entry = f"{name}.entry"
    return jit.compile_kernels(text, entry)[entry]


class KernelRun:
    """Kernels that run one after another without anything else between them.

    Which buffers they work on is filled in at each launch; a launch has its own `Frame`.
    """

    def __init__(self, codes: Sequence[KernelCode], slots: Mapping[Any, int]):
        """`slots`: where the address of a node's buffer stands in the launch's table."""
        self.used = np.array([slots[n] for code in codes for n in code.nodes], dtype=np.int64)
        self.shifts = np.array([s for code in codes for s in _shifts(code)], dtype=np.int64)
        self.entries = [entry_address(code.text, code.name) for code in codes]
        self.tasks = [code.tasks for code in codes]
        self.operands = [_words(code) for code in codes]
        words = [k < len(code.nodes) for code in codes for k in range(_words(code))]
        self.pointers = np.flatnonzero(words)
        self.numbers = np.array([n for code in codes for n in code.numbers], dtype=np.int64)

    def frame(self) -> Frame:
        return Frame(self)

    def launch(self, frame: Frame, addresses: np.ndarray) -> None:
        """Run all kernels.

        addresses  of every buffer, by slot
        """
        frame.arguments[self.pointers] = addresses[self.used] + self.shifts
        threads.run(frame.records_address, len(self.entries))


def _words(code: KernelCode) -> int:
    return len(code.nodes) + len(code.numbers)


def _shifts(code: KernelCode) -> tuple[int, ...]:
    return code.shifts + (0,) * (len(code.nodes) - len(code.shifts))


class Frame:
    """The memory in which one launch of a run finds its records and arguments."""

    def __init__(self, run: KernelRun):
        self.arguments = np.zeros(sum(run.operands), dtype=np.int64)
        is_number = np.ones(len(self.arguments), dtype=bool)
        is_number[run.pointers] = False
        self.arguments[is_number] = run.numbers
        self.records = np.zeros((len(run.entries), threads.RECORD_WORDS), dtype=np.int64)
        first = self.arguments.ctypes.data
        for row, entry, tasks, operands in zip(
            self.records, run.entries, run.tasks, run.operands, strict=True
        ):
            row[:] = entry, first, tasks
            first += 8 * operands
        self.records_address = self.records.ctypes.data
