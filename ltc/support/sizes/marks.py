"""Sizes in text: an Extent stands there as a mark, ⟦64*s0⟧."""

from __future__ import annotations

import re
from typing import Any

from ltc.support.sizes.choices import current
from ltc.support.sizes.extent import FUNCTIONS, Extent

_MARK = re.compile("⟦([^⟦⟧]*)⟧")


def is_symbolic(x: Any) -> bool:
    """Return True if it is an Extent, or a tuple or text with one in it."""
    if isinstance(x, (tuple, list)):
        return any(map(is_symbolic, x))
    return isinstance(x, Extent) or (isinstance(x, str) and "⟦" in x)


def settled(text: str) -> str:
    """Text with numbers in place of marks; guards say that they are these."""
    if "⟦" not in text:
        return text
    trace = current()
    assert trace is not None, "marks are made under a trace"

    def number(found: re.Match[str]) -> str:
        value = trace.value_of(found[1])
        trace.note(f"{found[1]} == {value}", True)
        return str(value)

    return _MARK.sub(number, text)


def in_turns(text: str) -> list[str]:
    """Return what is between the marks and the expressions in them, in turns."""
    return _MARK.split(text)


def mark_of(text: str) -> Extent | None:
    """The Extent that a text is the mark of, and nothing else."""
    found, trace = _MARK.fullmatch(text), current()
    if found is None or trace is None:
        return None
    return trace.atom(found[1], trace.value_of(found[1]), (None, None))


def bits_of(number: Extent, double: bool) -> Extent:
    """The bits of a float of that value, as an integer."""
    name = "double_bits" if double else "float_bits"
    source = f"{name}({number.source})"
    return number.trace.atom(source, FUNCTIONS[name](number.value), (None, None))
