"""A kernel as text, and what it is called with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

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
        """With numbers for sizes that are expressions, where they stand in the text."""
        text = settled(self.text)
        return self if text is self.text else replace(self, text=text)

    @property
    def name(self) -> str:
        """Of the function that the text defines."""
        return self.text.partition("define void @")[2].partition("(")[0]
