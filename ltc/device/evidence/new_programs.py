"""The reasons why a recording needed a new program: a new path, or other living tensors."""

from __future__ import annotations

import inspect
import sys
from collections import deque
from collections.abc import Collection, Iterator
from types import FrameType, ModuleType
from typing import Any

import torch

from ltc.aten.call import CallResult
from ltc.device.evidence.forks_explained import (
    CURES,
    Fork,
    Reason,
    line_of,
    value_text,
)
from ltc.device.evidence.reads_explained import BEFORE_THE_MARK
from ltc.device.torch_device import state_if_any
from ltc.explaining import faults
from ltc.explaining.explanation import COMPILES, RECOMPILES, Explanation
from ltc.explaining.history import note
from ltc.explaining.user_stack import UserFrame, user_stack
from ltc.runtime.compile import ProgramBinding
from ltc.runtime.graph_compiler import SETTINGS
from ltc.runtime.program import Program
from ltc.support.bounded_table import BoundedTable
from ltc.support.torch_private import DEVICE_TYPE, is_view
from ltc.tracebacks import is_of_the_program

_MOST_VALUES = 3  # named values that are alive now and were not before
_MOST_NAMED = 16  # new programs of one place: what holds their tensors is known by then
# the lines where programs ended, and how many were new there
_places: BoundedTable[tuple[UserFrame, ...], int] = BoundedTable("CompiledPlaces", 4096)

_CURES = CURES | {
    "alive": "release it before the mark (del, detach, no growing list), or keep it in each step",
    "settings": "set it before the first step",
    "forgotten": "raise LTC_CACHE_PROGRAMS, or alternate between fewer kinds of steps",
    "shorter": CURES["longer"],
    "cut": "the calls after a cut are a program of their own; " + BEFORE_THE_MARK,
}


def explain_new(
    recorder: Any, ended: Any, before: ProgramBinding | None, key: tuple[Any, ...], program: Program
) -> None:
    """Keep why the program that this recording ended with is new.

    Args:
        before: The binding by which the same end was run the last time.
        key: The key of the program.
    """
    stack = user_stack()
    earlier = _count_at(stack)
    if earlier < _MOST_NAMED:  # objects of the user's are looked through, thousands of them
        name_holders([value for n, value in enumerate(ended.outputs) if n not in ended.replaced])
    found, where = _found(recorder, ended, before, key, stack)
    is_first = not earlier and found.reason not in ("settings", "forgotten")
    runs = (
        "compiled" if program.first_runs is None else "new; it is compiled when its path comes back"
    )
    what = f"a program of {program.calls} calls is {runs}"
    kind = COMPILES if is_first or found.reason == "first" else RECOMPILES
    explanation = Explanation(
        kind, where, what, found.text, _CURES.get(found.reason, ""), found.reason
    )
    _keep(program, note(explanation))


def explain_returned(program: Program) -> None:
    """Keep the reason for the program of a path that came back; it is noted after compilation."""
    what = f"a program of {program.calls} calls is compiled"
    why = "its path is hot: its calls ran one by one before, and the path came back"
    stack = user_stack()
    _count_at(stack)
    _keep(program, Explanation(COMPILES, stack, what, why, "", "returned"))


def _count_at(stack: tuple[UserFrame, ...]) -> int:
    """Count one more new program at the user's line; return how many there were."""
    place = stack[:1]
    earlier = _places.keep(place, 0)
    _places[place] = earlier + 1
    return earlier


def _keep(program: Program, why: Explanation) -> None:
    program.why = why
    if program.first_runs is not None:
        program.first_runs.why = why


def _found(
    recorder: Any,
    ended: Any,
    before: ProgramBinding | None,
    key: tuple[Any, ...],
    stack: tuple[UserFrame, ...],
) -> tuple[Reason, tuple[UserFrame, ...]]:
    """Return the reason, and the user's lines to show for it."""
    fork: Fork | None = recorder.fork_evidence
    if recorder.cut_by is not None:
        text = f"it begins after a cut: {recorder.cut_by.difference}"
        return Reason("cut", text), recorder.cut_by.stack
    if fork is not None:
        return fork.difference, fork.stack
    if before is not None:
        return _of_the_same_end(before, key), stack
    if recorder.cut_here is not None:
        text = f"it ends at a cut: {recorder.cut_here.difference}"
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
    return Reason("forgotten", "the same step; newer programs evicted its program from the cache")


def _of_living(outputs: tuple[CallResult, ...], others: list[Any]) -> Reason:
    """Compare the live tensors with the most similar earlier end of the same calls."""
    now = set(outputs)
    nearest = min(others, key=lambda known: len(now.symmetric_difference(known)))
    new, gone = [v for v in outputs if v not in set(nearest)], [v for v in nearest if v not in now]
    parts = _shown("also alive at its end", new) + _shown("no longer alive", gone)
    if not parts:
        text = "the same calls; a tensor that the step updates has, or had, another holder"
        return Reason("alive", text)
    return Reason("alive", f"the same calls, other live tensors: {'; '.join(parts)}")


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
        return Reason("first", "no path was recorded here before")
    at = line_of(following)
    return Reason(
        "shorter",
        f"expected {following.call.name}"
        + (f" at {at}" if at else "")
        + ", got the end of the step",
    )


# The user's variables and attributes that hold tensors: `losses[3]`, `self.last`.
# The search runs only for new programs, from the user's frames at their end, and is bounded: a
# holder that is not found within the bounds has no name.

MOST_OBJECTS = 2000  # that the search visits for one program
_MOST_PARTS = 200  # of one list or dictionary, the latest
_DEEPEST = 4  # attributes and items on the way to a tensor
_REFERENCES_OF_A_SNAPSHOT = 3  # the frame's, the variable's here, and getrefcount's own
_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, torch.dtype)
_OF_EVERY_MODULE = frozenset(torch.nn.Module().__dict__)


def name_holders(values: Collection[CallResult]) -> None:
    """Set `holder` of those values whose tensor a variable of the user's leads to."""
    wanted = set(values)
    if not wanted or sys.gettrace() is not None:  # a debugger has the frames in its hands
        return
    try:
        _look(wanted)
    except Exception as error:
        # The program's objects may do anything when they are looked at: then there is no name.
        if faults.is_own(error):
            faults.note(error, "the search for the variable that holds a tensor")


def _look(wanted: set[CallResult]) -> None:
    waiting = deque([("", _variables(sys._getframe(3)), 0)])
    seen: set[int] = set()
    left = MOST_OBJECTS
    while waiting and wanted:
        name, parts, depth = waiting.popleft()
        for part, held in parts:
            left -= 1
            if left < 0:
                return
            if isinstance(held, _LEAVES) or id(held) in seen:
                continue
            seen.add(id(held))
            if isinstance(held, torch.Tensor):
                _name(held, name + part, wanted)
            elif depth < _DEEPEST:
                waiting.append((name + part, _parts(held), depth + 1))


def _name(tensor: torch.Tensor, name: str, wanted: set[CallResult]) -> None:
    for held, words in ((tensor, name), (_gradient(tensor), f"{name}.grad")):
        value = _pending(held)
        if value in wanted:
            value.holder = words
            wanted.discard(value)


def _gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the gradient of a leaf: asking another tensor for it is a warning.

    A view is not asked whether it is one. Where its base was written to, autograd would make its
    history anew, here, inside of a kernel, where nothing has any: it would be lost.
    """
    return tensor.grad if not is_view(tensor) and tensor.is_leaf else None


def _pending(tensor: torch.Tensor | None) -> Any:
    """The value that a tensor waits for; None where it waits for nothing."""
    if tensor is None or tensor.device.type != DEVICE_TYPE:
        return None
    try:
        return getattr(state_if_any(tensor), "value", None)
    except NotImplementedError:  # torch.func's tensors of tensors have no storage
        return None


# --- where they may be --------------------------------------------------------------------------


def _variables(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """Give the variables of the program's functions, the innermost first, then those of its
    modules.
    """
    modules: dict[int, dict[str, Any]] = {}
    while frame is not None:
        if is_of_the_program(frame.f_code.co_filename):
            modules[id(frame.f_globals)] = frame.f_globals
            if frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                yield from _locals_of(frame).items()
        frame = frame.f_back
    for variables in modules.values():
        yield from list(variables.items())


def _locals_of(frame: FrameType) -> dict[str, Any]:
    """The variables of a function that runs.

    Before Python 3.13 the frame keeps the dictionary that it tells them by: a tensor that the
    function lets go of later would live on in there, so it is emptied again.
    """
    snapshot = frame.f_locals
    found = dict(snapshot)
    if sys.version_info < (3, 13) and sys.getrefcount(snapshot) <= _REFERENCES_OF_A_SNAPSHOT:
        snapshot.clear()
    return found


def _parts(object: Any) -> Iterator[tuple[str, Any]]:
    """Give an object's parts, each with the text behind its name that reads it."""
    if isinstance(object, dict):
        latest = list(dict.items(object))[-_MOST_PARTS:]
        yield from ((f"[{_key(key)}]", held) for key, held in latest)
    elif isinstance(object, list | tuple | deque):
        first = max(0, len(object) - _MOST_PARTS)
        yield from ((f"[{first + n}]", held) for n, held in enumerate(list(object)[first:]))
    elif isinstance(object, torch.nn.Module):
        for table in (object._parameters, object._buffers, object._modules):
            yield from ((f".{name}", held) for name, held in list(table.items()))
        yield from _attributes(object, _OF_EVERY_MODULE)
    else:
        yield from _attributes(object)


def _key(key: Any) -> str:
    return repr(key) if isinstance(key, str | int) else "..."


def _attributes(object: Any, but: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
    held = getattr(object, "__dict__", None)
    if held.__class__ is dict:
        yield from ((f".{name}", part) for name, part in list(held.items()) if name not in but)
