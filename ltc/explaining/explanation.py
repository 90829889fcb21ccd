"""One event and its reason, in at most three lines."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from functools import cached_property

from ltc.explaining.notebook import html_table
from ltc.explaining.user_stack import UserFrame

COMPILES, RECOMPILES, CUTS = "compiles", "recompiles", "cuts"
FALLBACKS, TIERS, FAULTS = "fallbacks", "tiers", "faults"
KINDS = (COMPILES, RECOMPILES, CUTS, FALLBACKS, TIERS, FAULTS)


@dataclass(eq=False)
class Explanation:
    """An event and its reason.

    Attributes:
        kind: One of KINDS.
        stack: The user's frames that led to it, the innermost first.
        what: The event, as text.
        difference: The expected and the actual state.
        cure: The way to avoid it; "" where there is none.
        reason: A word for the kind of difference: "shape", "dtype", "operation", ...
        times: The number of such events.
        thread: The name of the thread in which it happened last.
        moment: The time of the latest, in seconds since the epoch.
        traceback: The traceback of a fault of ltc's own, as text.
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
    traceback: str = ""

    @property
    def line(self) -> str:
        """Return "file.py:12 in function" of the user's innermost frame; "" without a frame of
        theirs.
        """
        return str(self.stack[0]) if self.stack else ""

    @cached_property
    def identity(self) -> tuple[object, ...]:
        """Return the fields in which two explanations of the same event agree."""
        return self.kind, self.stack, self.what, self.difference

    def __str__(self) -> str:
        often = f" ({self.times} times)" if self.times > 1 else ""
        rows = [f"[{self.kind}]{often} {self.what}, {_place(self.stack)}", f"  {self.difference}"]
        return "\n".join(rows + ([f"  cure: {self.cure}"] if self.cure else []))

    def _repr_html_(self) -> str:
        """Return HTML for a notebook."""
        return html_table([self])


def _place(stack: tuple[UserFrame, ...]) -> str:
    if not stack:
        return "from no line of the program"
    source = f": {stack[0].source}" if stack[0].source else ""
    callers = "".join(f", called from {frame.file}:{frame.line}" for frame in stack[1:4])
    return f"at {stack[0]}{callers}{source}"
