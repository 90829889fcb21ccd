"""One thing that happened and its reason, in at most three lines."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from functools import cached_property

from ltc.explaining.notebook import html_table
from ltc.explaining.user_stack import UserFrame

COMPILES, RECOMPILES, CUTS = "compiles", "recompiles", "cuts"
FALLBACKS, TIERS = "fallbacks", "tiers"
KINDS = (COMPILES, RECOMPILES, CUTS, FALLBACKS, TIERS)


@dataclass(eq=False)
class Explanation:
    """What happened, and why.

    kind        one of KINDS
    stack       the user's frames that led to it, the innermost first
    what        what happened
    difference  what was expected and what came
    cure        what to do about it; "" where there is nothing to do
    reason      a word for the kind of difference: "shape", "dtype", "operation", ...
    times       how often the same has happened
    thread      the name of the thread in which it happened last
    moment      when that was, in seconds since the epoch
    """

    kind: str
    stack: tuple[UserFrame, ...]
    what: str
    difference: str
    cure: str = ""
    reason: str = ""
    times: int = 1
    thread: str = field(default_factory=lambda: threading.current_thread().name)
    moment: float = field(default_factory=time.time)

    @property
    def line(self) -> str:
        """ "file.py:12 in function" of the user's; "" where nobody of theirs has called."""
        return str(self.stack[0]) if self.stack else ""

    @cached_property
    def identity(self) -> tuple[object, ...]:
        """What two of the same have in common."""
        return self.kind, self.stack, self.what, self.difference

    def __str__(self) -> str:
        often = f" ({self.times} times)" if self.times > 1 else ""
        rows = [f"[{self.kind}]{often} {self.what}, {_place(self.stack)}", f"  {self.difference}"]
        return "\n".join(rows + ([f"  cure: {self.cure}"] if self.cure else []))

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return html_table([self])


def _place(stack: tuple[UserFrame, ...]) -> str:
    if not stack:
        return "from no line of the program"
    source = f": {stack[0].source}" if stack[0].source else ""
    callers = "".join(f", called from {frame.file}:{frame.line}" for frame in stack[1:4])
    return f"at {stack[0]}{callers}{source}"
