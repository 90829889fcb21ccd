"""A recording leaves a path of symbols, and goes on along another one that begins alike.

What it has recorded so far are the first entries of the other path too: every tensor that holds a value
of the one gets that of the other, and nothing else changes.
"""

from __future__ import annotations

from typing import Any

from ltc.aten.call import Call, CallResult
from ltc.device.symbolic.derive import INPUT
from ltc.device.symbolic.path import SymbolicPath
from ltc.device.symbolic.pattern import filled


def take_over(recorder: Any, path: SymbolicPath, count: int, other: SymbolicPath) -> None:
    """The recording's last `count` entries, the first of a path, are those of another path."""
    values: dict[CallResult, CallResult] = {}
    for mine, theirs in zip(path.entries[:count], other.entries[:count]):
        _add(values, mine.call, theirs.call)
    place = path.place
    paths = place.symbolic.paths
    paths.remove(other)
    paths.insert(0, other)
    place.next = other.entries[0]
    if place is recorder.root:
        recorder.ended.follow = other.entries[0]
    _go_on(recorder, values, other.entries[count - 1])


def is_recorded_alone(path: SymbolicPath, count: int, key: Any) -> bool:
    """Whether entries of these sizes alone begin as the path and go on with a call of that key."""
    values: dict[CallResult, CallResult] = {}
    parent = path.place
    for old in path.entries[:count]:
        entry = _following(parent, _key_alone(old, values))
        if entry is None:
            return False
        _add(values, old.call, entry.call)
        parent = entry
    return _following(parent, filled(key, lambda part: values.get(part, part))) is not None


def record_alone(recorder: Any, path: SymbolicPath, count: int) -> Any:
    """The recording's last `count` entries, the first of a path, become entries of these sizes alone.

    Returns the first of these.
    """
    values: dict[CallResult, CallResult] = {}
    parent, first = path.place, None
    for old in path.entries[:count]:
        key = _key_alone(old, values)
        entry = _following(parent, key) or _copied(recorder, old, parent, key, values)
        if parent is not path.place:
            parent.next = entry
        _add(values, old.call, entry.call)
        first = first or entry
        parent = entry
    if path.place is recorder.root:
        recorder.ended.follow = first
    _go_on(recorder, values, parent)
    return first


def _key_alone(old: Any, values: dict[CallResult, CallResult]) -> Any:
    if old.call.overload == INPUT:
        return old.key  # told by identity
    return filled(old.key, lambda part: values.get(part, part))


def _following(parent: Any, key: Any) -> Any:
    """What has been recorded behind an entry under that key; None where nothing was."""
    entry = parent.next
    if entry.call is None or entry.of is not None or entry.key != key:
        entry = parent.branch(key)
    return entry


def _copied(
    recorder: Any, old: Any, parent: Any, key: Any, values: dict[CallResult, CallResult]
) -> Any:
    made = old.call

    def replaced(part: Any) -> Any:
        return values.get(part, part)

    args, kwargs = filled(tuple(made.args), replaced), filled(made.kwargs, replaced)
    call = Call(
        made.overload, args, kwargs, made.mutated, made.returned, made.line, made.seed
    )  # fmt: skip
    recorder.values(call, [None if v is None else (v.shape, v.dtype) for v in made.results])
    entry = old.__class__(key, parent, call)
    entry.link = old.link
    parent.add_branch(entry)
    recorder.entries += 1
    return entry


def _add(values: dict[CallResult, CallResult], old: Call, new: Call) -> None:
    pairs = zip(old.results, new.results)
    values.update((a, b) for a, b in pairs if a is not None and b is not None)


def _go_on(recorder: Any, values: dict[CallResult, CallResult], last: Any) -> None:
    for state in (*recorder.live, *recorder.bound):
        value = state.value
        if value is not None:
            state.value = values.get(value, value)
    for state, value in recorder.foreign.items():
        recorder.foreign[state] = values.get(value, value)
    recorder.last, recorder.cursor = last, last.next
