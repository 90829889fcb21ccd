"""Sizes that are expressions, as arguments of a kernel: one text for all of them.

A writer puts an Extent into its text as it puts a number there, and the text has a mark.  Where a
register may stand in the mark's place, it becomes an argument; what is left (the length of an array,
a constant vector) is settled to a number later, under a guard.  Which arguments these are says the
first line of the text, a comment, until `taken` reads it.
"""

from __future__ import annotations

import re

from ltc.support.extent import Extent, mark_of

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

    numbers  how many i64 arguments it has without
    """
    if "⟦" not in body:
        return body, []
    sizes: dict[str, str] = {}

    def argument(found: re.Match[str]) -> str:
        name = sizes.setdefault(found[2], f"%n{numbers + len(sizes)}")
        return found[1] + name

    lines = []
    for line in body.split("\n"):
        if "⟦" in line and "x i64> <" not in line:
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
