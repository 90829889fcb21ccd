"""Scalars on their way into a program: each in a word of its launch's frame, or in two."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import torch

from ltc.backends.plain_dispatch import PlainDispatch
from ltc.llvm.native.kernel_run import WORD
from ltc.support.shallow_copy import elements_at

# How `struct` writes a number of that type into eight bytes.  Half floats are not among them: it
# rounds once where torch, whose numbers kernels are compared with, rounds through a float.
_FORMATS = {
    torch.float64: "d", torch.float32: "f4x", torch.int64: "q", torch.int32: "i4x",
    torch.int16: "h6x", torch.int8: "b7x", torch.uint8: "B7x", torch.bool: "?7x",
}  # fmt: skip


def word_places(dtypes: Sequence[torch.dtype], first: int) -> list[int]:
    """The word of the frame in which each begins, and last the word behind them.

    Args:
        first: The word from which on they lie; one that takes two words lies where torch's kernels
            can load both at once.
    """
    places, word = [], first
    for dtype in dtypes:
        size = max(dtype.itemsize // WORD, 1)
        word += -word % size
        places.append(word)
        word += size
    return [*places, word]


class Cells:
    """The writers of one program's scalars."""

    def __init__(self, cells: Sequence[tuple[int, torch.dtype]], first: int) -> None:
        """Prepare the writers.

        Args:
            cells: (slot, dtype) of each.
            first: The word of the frame from which on they lie.
        """
        self._cells, self._first = cells, first
        self._numbers = elements_at([slot for slot, _ in cells])
        self._words = word_places([dtype for _, dtype in cells], first)
        formats = [_FORMATS.get(dtype) for _, dtype in cells]
        known = [text for text in formats if text is not None]
        is_known = len(known) == len(formats)
        self._together = struct.Struct(f"={''.join(known)}") if is_known else None

    @property
    def formats(self) -> tuple[tuple[int, str, int], ...] | None:
        """(slot, format, word) of each; None where torch has to write one."""
        if self._cells and self._together is None:
            return None
        words = zip(self._cells, self._words)
        return tuple([(slot, _FORMATS[dtype][0], word) for (slot, dtype), word in words])

    def write(self, memory: memoryview, scalars: Sequence[Any]) -> None:
        """`scalars`: Python numbers or 0-dim CPU tensors, by slot."""
        if not self._cells:
            return None
        if self._together is not None:
            try:
                numbers = self._numbers(scalars)
                return self._together.pack_into(memory, WORD * self._first, *numbers)
            except (struct.error, OverflowError, TypeError, ValueError, RuntimeError):
                pass  # torch decides what becomes of such a number
        with PlainDispatch():
            for word, (slot, dtype) in zip(self._words, self._cells):
                place = memory[WORD * word :][: dtype.itemsize]
                cell = torch.frombuffer(place, dtype=dtype, count=1)
                cell[0] = torch.as_tensor(scalars[slot], dtype=dtype)
