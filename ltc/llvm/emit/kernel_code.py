"""A kernel as text, and what it is called with.

A writer puts an Extent into its text as it puts a number there, and the text has a mark.  Where a
register may stand in the mark's place, it becomes an argument: one text serves all sizes.  What is
left (the length of an array, a constant vector) is settled to a number, under a guard.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from ltc.support.sizes.extent import Extent
from ltc.support.sizes.marks import mark_of, settled


@dataclass(frozen=True)
class KernelCode:
    """A kernel as text; equal texts are one kernel, in a process and on disk.

    Attributes:
        text: The text of the module; the function is called @kernel.
        nodes: The nodes with the buffers that are its pointers, in order; one may occur twice.
        tasks: Number of tasks.
        shifts: Bytes to add to the first pointers, where a kernel begins inside a buffer.
        numbers: Its i64 arguments, after the pointers: what one text leaves open, an outer extent.
        is_call: True if PyTorch's own kernel computes the product.
    """

    text: str
    nodes: tuple[Any, ...]
    tasks: int
    shifts: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()
    is_call: bool = False

    def settled(self) -> KernelCode:
        """With sizes that are expressions as arguments, and numbers where they can not be these."""
        text, sizes = taken(self.text)
        text = settled(text)
        if text is self.text:
            return self
        return replace(self, text=text, numbers=(*self.numbers, *sizes))

    @property
    def name(self) -> str:
        """Return the name of the function that the text defines."""
        return self.text.partition("define void @")[2].partition("(")[0]


# --- sizes as arguments ---------------------------------------------------------------------------

_MARK = "⟦[^⟦⟧]*⟧"
_OPERATIONS = "add|sub|mul|udiv|sdiv|urem|srem|shl|lshr|ashr|and|or|xor|icmp [a-z]+"
# (what stands before a mark that may be a register)
_PLACES = (
    re.compile(rf"(= (?:{_OPERATIONS})(?: nuw| nsw| exact)* i64 [^,]+, )({_MARK})"),
    re.compile(rf"((?<!<)(?<!splat \()i64 (?:\[ )?)({_MARK})"),
    re.compile(rf"(= phi i64 .*, \[ )({_MARK})"),
)
_HEAD = "; sizes "


def opened(body: str, numbers: int) -> tuple[str, list[str]]:
    """The body of a function with arguments in place of sizes, and their marks in order.

    Args:
        numbers: Number of its i64 arguments besides the sizes.
    """
    if "⟦" not in body:
        return body, []
    sizes: dict[str, str] = {}

    def argument(found: re.Match[str]) -> str:
        name = sizes.setdefault(found[2], f"%n{numbers + len(sizes)}")
        return found[1] + name

    lines = []
    for line in body.split("\n"):
        if "⟦" in line and "<i64 " not in line:  # of a constant vector no part is a register
            for place in _PLACES:
                line = place.sub(argument, line)
        lines.append(line)
    return "\n".join(lines), list(sizes)


def head_of(sizes: list[str]) -> str:
    """The line that says which arguments a text has for sizes."""
    return _HEAD + "".join(sizes) + "\n" if sizes else ""


def taken(text: str) -> tuple[str, tuple[Extent, ...]]:
    """The text without that line, and what it names."""
    if not text.startswith(_HEAD):
        return text, ()
    head, _, rest = text.partition("\n")
    found = [mark_of(mark) for mark in re.findall(_MARK, head)]
    return rest, tuple(size for size in found if size is not None)
