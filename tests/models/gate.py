"""The gate of a thread's calls in the native core: how another thread closes it, and waits for a call.

What each function does is said once more in ltc/native/csrc/gate.h; a test compares the two.
"""

from __future__ import annotations

from typing import Any

from tests.models.actions import Actions, Thread
from tests.models.interleavings import Broken, Machine, State

# The calls of the thread run, are followed, or are summed up.
FLAGS = RUNS, FOLLOWS, SUMS = ("runs_",), ("follows_",), ("sums_",)
INSIDE, VALUE = ("is_inside_",), ("value",)  # a call is under way; what calls write


class Gate:
    """The functions that threads call."""

    def __init__(self, actions: Actions, comes_back: bool = True):
        """`comes_back`: whether the end of a call within another leaves the thread inside that."""
        self.a, self.comes_back = actions, comes_back

    def calls(self, count: int) -> Thread:
        """The gate's thread, which makes so many calls, each of one kind."""
        for number in range(1, count + 1):
            kind = yield from self.a.choose("call", len(FLAGS))
            yield from self.call(number, FLAGS[kind])

    def call(self, number: int, flag: tuple) -> Thread:
        a = self.a
        before = yield from a.change("Inside", "xchg", INSIDE, 1, "seq_cst")
        if (yield from a.load(flag[0].rstrip("_"), flag, "seq_cst")):
            yield from self.call_within()
            yield from a.store("call", VALUE, number, "monotonic")
            yield from a.note("ran", number)
        yield from a.store("~Inside", INSIDE, before, "release")

    def call_within(self) -> Thread:
        """A call that is made by another one."""
        before = yield from self.a.change("Inside", "xchg", INSIDE, 1, "seq_cst")
        yield from self.a.store("~Inside", INSIDE, before if self.comes_back else 0, "release")

    def closer(self) -> Thread:
        """Another thread, which closes the gate and takes the values."""
        a = self.a
        yield from a.store("close", RUNS, 0, "seq_cst")
        yield from a.store("close", FOLLOWS, 0, "seq_cst")
        yield from a.store("stop_summing", SUMS, 0, "seq_cst")
        while (yield from a.load("wait", INSIDE, "seq_cst")):
            pass
        yield from a.note("closed")
        value = yield from a.load("closer", VALUE, "monotonic")
        yield from a.note("sees", value)


def machine(gate: Gate, calls: int = 2) -> Machine:
    """A thread that makes calls, and one that closes its gate."""
    initial: dict[tuple, Any] = {RUNS: 1, FOLLOWS: 1, SUMS: 1, INSIDE: 0, VALUE: 0}
    threads = [lambda: gate.calls(calls), gate.closer]
    return Machine(threads, initial, _noted, _nothing_is_wrong, _is_over)


def _noted(noted: Any, what: tuple) -> Any:
    """(number of the last call that ran, whether the gate is closed)."""
    ran, is_closed = noted or (0, False)
    if what[0] == "ran":
        if is_closed:
            raise Broken(f"call {what[1]} runs behind a gate that is closed")
        return what[1], is_closed
    if what[0] == "sees" and what[1] != ran:
        raise Broken(f"call {ran} has run, and who waited for it sees the value of call {what[1]}")
    return ran, True


def _nothing_is_wrong(machine: Machine, state: State) -> str:
    return ""


def _is_over(machine: Machine, state: State) -> bool:
    return all(machine.action(state, thread) is None for thread in range(len(state.places)))
