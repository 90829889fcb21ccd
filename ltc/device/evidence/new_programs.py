"""Why a recording needed a program that did not exist: where its path was new, or what was alive."""

from __future__ import annotations

from typing import Any

from ltc.aten.call import CallResult
from ltc.device.evidence.cuts_explained import AFTER_THE_MARK
from ltc.device.evidence.forks_explained import (
    CURES,
    Fork,
    Reason,
    line_of,
    value_text,
)
from ltc.device.evidence.named_holders import name_holders
from ltc.explaining.explanation import COMPILES, RECOMPILES, Explanation
from ltc.explaining.history import note
from ltc.explaining.user_stack import UserFrame, user_stack
from ltc.runtime.compile import ProgramBinding
from ltc.runtime.graph_compiler import SETTINGS
from ltc.runtime.program import Program
from ltc.support.bounded_table import BoundedTable

_MOST_VALUES = 3  # of those that live on now and did not before
_MOST_NAMED = 16  # new programs of one place: what holds their tensors is known by then
# the lines where programs ended, and how many were new there
_places: BoundedTable[tuple[UserFrame, ...], int] = BoundedTable("CompiledPlaces", 4096)

_CURES = CURES | {
    "alive": "let go of it before the mark (del, detach, a list that grows), or hold it always",
    "settings": "set it before the first step",
    "forgotten": "raise LTC_CACHE_PROGRAMS; or let fewer kinds of steps come in turns",
    "shorter": "mark the step at the same place each time; do what is rare in a step of its own",
    "cut": "what is behind a cut is a program of its own; " + AFTER_THE_MARK,
}


def explain_new(
    recorder: Any, ended: Any, before: ProgramBinding | None, key: tuple[Any, ...], program: Program
) -> None:
    """Keep why the program that this recording ended with is new.

    before  how the same end was run the last time
    key     of the program
    """
    stack = user_stack()
    place = stack[:1]
    earlier = _places.get(place) or 0
    if earlier < _MOST_NAMED:  # objects of the user's are looked through, thousands of them
        name_holders([value for n, value in enumerate(ended.outputs) if n not in ended.replaced])
    found, where = _found(recorder, ended, before, key, stack)
    is_first = not earlier and found.reason not in ("settings", "forgotten")
    _places.keep(place, 0)
    _places[place] = earlier + 1
    runs = "compiled" if program.tiers is None else "new, and runs call by call until it comes back"
    what = f"a program of {program.calls} calls is {runs}"
    kind = COMPILES if is_first or found.reason == "first" else RECOMPILES
    explanation = Explanation(
        kind, where, what, found.text, _CURES.get(found.reason, ""), found.reason
    )
    program.why = note(explanation)
    if program.tiers is not None:
        program.tiers.why = explanation


def _found(
    recorder: Any,
    ended: Any,
    before: ProgramBinding | None,
    key: tuple[Any, ...],
    stack: tuple[UserFrame, ...],
) -> tuple[Reason, tuple[UserFrame, ...]]:
    """The reason, and the lines that it is to be looked for at."""
    fork: Fork | None = recorder.fork_evidence
    if recorder.cut_by is not None:
        text = f"it begins where a cut came: {recorder.cut_by.difference}"
        return Reason("cut", text), recorder.cut_by.stack
    if fork is not None:
        return fork.difference, fork.stack
    if before is not None:
        return _of_the_same_end(before, key), stack
    if recorder.cut_here is not None:
        text = f"it ends where a cut came: {recorder.cut_here.difference}"
        return Reason("cut", text), recorder.cut_here.stack
    others = [outputs for outputs, _ in recorder.last.bindings]
    if others:
        return _of_living(ended.outputs, others), stack
    return _of_the_end(recorder), stack


def _of_the_same_end(before: ProgramBinding, key: tuple[Any, ...]) -> Reason:
    changed = [
        f"{name} is {new}, was {old}"
        for name, old, new in zip(SETTINGS, before.key[1], key[1])
        if old != new
    ]
    if changed:
        return Reason("settings", f"the same step under other settings: {', '.join(changed)}")
    return Reason("forgotten", "the same step, whose program was dropped for newer ones")


def _of_living(outputs: tuple[CallResult, ...], others: list[Any]) -> Reason:
    """The same calls; other tensors are alive than in the most similar of the earlier ends."""
    now = set(outputs)
    nearest = min(others, key=lambda known: len(now.symmetric_difference(known)))
    new, gone = [v for v in outputs if v not in set(nearest)], [v for v in nearest if v not in now]
    parts = _shown("also alive at its end", new) + _shown("not alive any more", gone)
    if not parts:
        text = "the same calls; what the step updates was held besides, or is now"
        return Reason("alive", text)
    return Reason("alive", f"the same calls, other tensors: {'; '.join(parts)}")


def _shown(words: str, values: list[CallResult]) -> list[str]:
    if not values:
        return []
    more = f" and {len(values) - _MOST_VALUES} more" if len(values) > _MOST_VALUES else ""
    return [f"{words}: {', '.join(map(_held, values[:_MOST_VALUES]))}{more}"]


def _held(value: CallResult) -> str:
    """`losses[3]`, float32[4] made by aten::sum at file.py:12 in step"""
    holder = getattr(value, "holder", "")
    return f"`{holder}`, {value_text(value)}" if holder else value_text(value)


def _of_the_end(recorder: Any) -> Reason:
    following = recorder.last.next
    if following.call is None:
        return Reason("first", "nothing like it was recorded here before")
    at = line_of(following)
    return Reason(
        "shorter",
        f"expected {following.call.name}" + (f" of {at}" if at else "") + "; the end came",
    )
