"""A kernel as text, and what it is called with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ltc.llvm.emit.open_sizes import taken
from ltc.support.extent import settled


@dataclass(frozen=True)
class KernelCode:
    """A kernel as text; equal texts are one kernel, in a process and on disk.

    text     of the module; the function is called @kernel, and @kernel.entry
    nodes    whose buffers are its pointers, in order; a node may stand there twice
    tasks    how many there are
    shifts   bytes to add to the first pointers, where a kernel begins inside a buffer
    numbers  its i64 arguments, after the pointers: what one text leaves open, an outer extent
    """

    text: str
    nodes: tuple[Any, ...]
    tasks: int
    shifts: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()

    def settled(self) -> KernelCode:
        """With sizes that are expressions as arguments, and numbers where they can not be these."""
        text, sizes = taken(self.text)
        text = settled(text)
        if text is self.text:
            return self
        return replace(self, text=text, numbers=(*self.numbers, *sizes))

    @property
    def name(self) -> str:
        """Of the function that the text defines."""
        return self.text.partition("define void @")[2].partition("(")[0]
