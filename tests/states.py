"""The states of a step, by the counters that tell them.

Only this file knows these counters, and how a test waits for the compiler.
"""

from __future__ import annotations

from collections.abc import Mapping

import ltc.core.lazy_model as ltm
from ltc.runtime.background import compile_behind

IMMEDIATE = "immediate"  # calls ran when they were made
HOT = "hot"  # a path came back, and its program was asked for
RECORDED = "recorded"  # a call was new on its path
COMPILED = "compiled"  # a compiled program ran
FOLLOWED = "followed"  # every call was known, and only compiled programs ran
SIDE_EXIT = "left by a side exit"  # a call came that was not on the path that was followed


def states_of(grown: Mapping[str, int]) -> frozenset[str]:
    """The states that a run passed through.

    Args:
        grown: What was counted from the beginning of the run to the end of its last step.
    """
    by_calls = grown["CallByCallRuns"]
    has_passed = {
        IMMEDIATE: grown["ImmediateCalls"] or by_calls,
        HOT: grown["CompileBehind"] or grown["TierUp"],
        RECORDED: grown["RecordedEntries"],
        COMPILED: grown["ExecuteTime"] > by_calls,
        SIDE_EXIT: grown["SideExits"],
    }
    passed = {state for state, count in has_passed.items() if count}
    if COMPILED in passed and not passed & {IMMEDIATE, RECORDED, SIDE_EXIT}:
        passed.add(FOLLOWED)
    return frozenset(passed)


def wait_for_the_compiler() -> None:
    """Wait until the process that compiles behind has done all it was asked for."""
    compile_behind.wait()


def end_step() -> None:
    """End the step, and wait until it has run."""
    ltm.mark_step(wait=True)
