"""Kernels made ready to run in a row by one native call.

What differs from launch to launch stands in a *frame*, words of memory that a launch has for
itself: addresses, then whatever the caller keeps there, the faults, and at the end the arguments,
which the native code fills in from the addresses.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ltc.ir.node import Node
from ltc.llvm.compiler import llvm_binding
from ltc.llvm.native import runner
from ltc.support.shallow_copy import copied_with

WORD = 8  # bytes
TASKS = 1  # where in the record of a kernel the number of its tasks is


@dataclass(frozen=True, eq=False)
class Fault:
    """A 64-bit word of a launch, 0 before it, among the nodes of a kernel that may fail.

    A kernel that stores another number there has failed: the kernels after it do not run, and the
    launch raises `error` naming the user's line. A kernel may have several faults in a row: it writes
    to the first word, and the word's low 8 bits count the faults from 1.

    Attributes:
        node: The node that the kernel computes: its line is named.
        error: The name of an exception, of ltc.errors or Python's own; "" for the error that the
        reference raises for `node`, whose operands are buffers of the kernel.
        message: Its text, where {value} stands for the word >> 8.
    """

    node: Node
    error: str = ""
    message: str = ""


@dataclass(frozen=True)
class EntryCall:
    """One kernel of a run.

    Attributes:
        entry: The address of the kernel.
        arguments: For each argument the place of a word in the frame, then the number to add to it.
        tasks: Number of tasks.
        fault: Place of its fault in the frame, or 0.
    """

    entry: int
    arguments: tuple[int, ...]
    tasks: int
    fault: int = 0


@functools.cache
def entry_address(text: str, name: str) -> int:
    """The address of a kernel: equal texts are compiled once in a process."""
    return llvm_binding.compile_kernels(text, name)[name]


class KernelRun:
    """Kernels that run one after another without anything else between them."""

    def __init__(
        self,
        calls: Sequence[EntryCall],
        arguments: int,
        faults: range = range(0),
        stamps: int = 0,
    ):
        """Prepare a run.

        Args:
            arguments: Place in the frame where the arguments of all kernels are written.
            faults: Places in the frame that are set to 0 at the start.
            stamps: Place in the frame of one more word than there are kernels: when the run began,
                and when each kernel was over, as time.monotonic_ns() counts; 0: nowhere.
        """
        pairs = np.array([n for call in calls for n in call.arguments], dtype=np.int64)
        places, added = pairs.reshape(-1, 2).T
        records, first = [], arguments
        for call in calls:
            records.append([call.entry, call.tasks, first, call.fault])
            first += len(call.arguments) // 2
        assert all(len(record) == runner.RECORD_WORDS for record in records)
        flat = np.array(records, dtype=np.int64).reshape(-1)
        # What the native code is told, then the three tables that it is told of.
        head = [len(calls), 0, len(places), 0, 0, arguments, len(faults), faults.start, stamps]
        self._first_record = len(head)
        self._first_place = self._first_record + len(flat)
        self._first_added = self._first_place + len(places)
        self._words = np.concatenate([np.array(head, dtype=np.int64), flat, places, added])
        self._point()
        self._call = runner.runner()

    def _point(self) -> None:
        """Say where the tables are."""
        self.address = address = self._words.__array_interface__["data"][0]
        self._words[1] = address + WORD * self._first_record
        self._words[3] = address + WORD * self._first_place
        self._words[4] = address + WORD * self._first_added

    def words_of(self, arguments: np.ndarray, calls: np.ndarray) -> np.ndarray:
        """Return the words that `with_words` changes: these arguments' addends, and these calls'
        tasks.
        """
        tasks = self._first_record + runner.RECORD_WORDS * calls + TASKS
        return np.concatenate([self._first_added + arguments, tasks])

    def with_words(self, places: np.ndarray, words: np.ndarray) -> KernelRun:
        """The same kernels with other numbers; `places`: what `words_of` gave."""
        other = copied_with(self, _words=self._words.copy())
        other._words[places] = words
        other._point()
        return other

    @property
    def numbers(self) -> tuple[list[int], list[int]]:
        """Return the addend of each argument in turn, and how many tasks each kernel has."""
        tasks = self._words[self._first_record + TASKS : self._first_place : runner.RECORD_WORDS]
        return self._words[self._first_added :].tolist(), tasks.tolist()

    def launch(self, frame: int) -> int:
        """Run all; the number of the call that failed, none after it having run, or -1.

        Args:
            frame: Address of the launch's words.
        """
        return self._call(self.address, frame, runner.thread_count())
