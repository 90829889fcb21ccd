"""What a thread of a model does at one time, and how a model says it: `word = yield from load(...)`.

An action can be left out or weakened, by its name, to see what it was there for.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from typing import Any, NamedTuple


class Action(NamedTuple):
    """One action.

    block     function and block of the text
    kind      the instruction's name, or what the futex is asked for; "note" tells the monitor
              something, "choose" gives any number below the operand
    variable  name, and index where there are several
    """

    block: str
    kind: str
    variable: tuple = ()
    order: str = ""
    operand: Any = None

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.block, self.kind, *self.variable[:1], self.order)))


Thread = Generator[Action, Any, Any]
HALVES = {
    "acquire": ("acquire", "monotonic"), "acq_rel": ("acquire", "release"),
    "seq_cst": ("seq_cst", "seq_cst"), "monotonic": ("monotonic", "monotonic"),
}  # fmt: skip


class Actions:
    """The actions of a protocol, but for some.

    without    names of fences and wake-ups that are left out, and of read-modify-writes that are a
               load and then a store
    unordered  names of actions that are monotonic
    """

    def __init__(self, without: Collection[str] = (), unordered: Collection[str] = ()):
        self._without, self._unordered = without, unordered

    def load(self, block: str, variable: tuple, order: str) -> Thread:
        return (yield from self._done(Action(block, "load", variable, order)))

    def store(self, block: str, variable: tuple, value: Any, order: str) -> Thread:
        yield from self._done(Action(block, "store", variable, order, value))

    def change(self, block: str, kind: str, variable: tuple, operand: Any, order: str) -> Thread:
        """The value before it; of a cmpxchg, the operand is (expected, new)."""
        return (yield from self._done(Action(block, kind, variable, order, operand)))

    def fence(self, block: str) -> Thread:
        yield from self._done(Action(block, "fence", (), "seq_cst"))

    def wait(self, block: str, variable: tuple, expected: Any, kind: str = "WAIT") -> Thread:
        yield Action(block, kind, variable, "", expected)

    def wait_until(self, block: str, variable: tuple, expected: Any) -> Thread:
        """Or until a time, which may come whenever it likes."""
        yield Action(block, "WAIT_UNTIL", variable, "", expected)

    def wake(self, block: str, variable: tuple, kind: str = "WAKE") -> Thread:
        yield from self._done(Action(block, kind, variable))

    def releases(self, block: str, variable: tuple) -> bool:
        """Whether a store there comes after all that its thread has read and written before."""
        return Action(block, "store", variable, "release").name not in self._unordered

    def choose(self, block: str, count: int) -> Thread:
        return (yield Action(block, "choose", operand=count))

    def note(self, *what: Any) -> Thread:
        yield Action("", "note", operand=what)

    def _done(self, action: Action) -> Thread:
        if action.name in self._unordered:
            action = action._replace(order="monotonic")
        if action.name not in self._without:
            return (yield action)
        if action.kind not in ("fence", "WAKE", "WAKE_SHARED"):
            return (yield from self._in_two(action))
        return None

    def _in_two(self, action: Action) -> Thread:
        reads, writes = HALVES[action.order]
        before = yield action._replace(kind="load", order=reads)
        new = action.operand
        if action.kind == "cmpxchg":
            expected, new = action.operand
            if before != expected:
                return before
        elif action.kind == "add":
            new = before + action.operand
        elif action.kind == "sub":
            new = before - action.operand
        yield action._replace(kind="store", order=writes, operand=new)
        return before
