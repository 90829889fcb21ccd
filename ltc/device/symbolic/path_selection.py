"""The choice of a path of symbols for a recording: one that its path has taken at other sizes.

Several programs may begin alike. A place has a path for each; a recording that leaves one goes over
to another that begins as it has begun, or is noted at its sizes alone: two such recordings make the
next path of symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ltc import config
from ltc.aten.call import Call, CallResult
from ltc.device.policy import MAX_VARIANTS
from ltc.device.symbolic.derive import INPUT, WRITE_VIEW
from ltc.device.symbolic.path import REFUSED, SymbolicPath
from ltc.device.symbolic.pattern import Differs, filled, pattern_of
from ltc.explaining.explanation import TIERS, Explanation
from ltc.explaining.history import note
from ltc.explaining.user_stack import user_stack_from
from ltc.runtime.compile import ProgramBinding, program_for
from ltc.runtime.program import Program
from ltc.runtime.program_of_sizes import ProgramOfSizes
from ltc.runtime.transfers import capabilities
from ltc.support.observation import metrics

MAX_PATHS = 1024  # of one place
_CURE = "pad to a few sizes, or make the leading dimensions the ones that change"


def entry_for(recorder: Any, last: Any, key: Any) -> Any:
    """Return the entry of a path of symbols for a call after `last`, at the call's sizes, or None."""
    if last.of is not None:
        path, position = last.of
        return path.entry_at(position + 1, key, _most_bytes(path.place))
    if last.symbolic is None or not _is_possible():
        return None
    most_bytes = _most_bytes(last)
    for path in last.symbolic:
        entry = path.entry_at(0, key, most_bytes)
        is_alone = recorder.immediate is not None and path.stays  # it gets a program of its sizes
        if entry is not None and not is_alone:
            return entry
    return None


def other_way(recorder: Any, last: Any, key: Any) -> Callable[[], object] | None:
    """Return how a recording that leaves a path of symbols goes on; None where it cannot."""
    path, position = last.of
    if not _is_possible() or key[0] == WRITE_VIEW:  # its call is recorded already
        return None
    count = position + 1
    found = _other_path(path, count, key)
    if found is not None:
        return lambda: take_over(recorder, path, count, found)
    if recorder.immediate is None:  # what is followed runs first
        return None
    return lambda: note_alone(recorder, path, count)


def _is_possible() -> bool:
    """Return True if paths of symbols are wanted, and the backend compiles programs for them."""
    return bool(config.value("LTC_SYMBOLIC")) and capabilities().resizable is not None


def _most_bytes(place: Any) -> int:
    most: int = config.value("LTC_MAX_PENDING_BYTES")
    return most - int(place.size)


def _other_path(path: SymbolicPath, count: int, key: Any) -> SymbolicPath | None:
    """A path from the same place that begins with the first entries of this one, and goes on with the key."""
    most_bytes = _most_bytes(path.place)
    for other in path.place.symbolic:
        if other is not path and other.begins_as(path, count, key, most_bytes):
            return other
    return None


def note_path(recorder: Any, leaf: Any) -> SymbolicPath | None:
    """Return the path of symbols that a new path makes with an earlier one, or None.

    Args:
        leaf: The last entry of the new path, which has ended.
    """
    earlier = recorder.by_shape.get(leaf.shape_hash)
    if earlier is REFUSED:
        return None
    recorder.by_shape.pop(leaf.shape_hash, None)
    recorder.by_shape.keep(leaf.shape_hash, leaf)
    if earlier is None or leaf.of is not None or not _is_possible():
        return None
    place, first, second = _beside(earlier, leaf)
    if place is None or any(path.stays for path in place.symbolic or ()):
        return None
    try:
        pattern, sizes = pattern_of(first, second)
        made = SymbolicPath(recorder, place, pattern, sizes, place.__class__)
    except (Differs, AssertionError) as error:
        metrics.count("SymbolicPathsRefused")
        _explain("it gets no path of symbols", str(error), _CURE, second)
        return None
    place.symbolic = [made, *(place.symbolic or ())][:MAX_PATHS]
    metrics.count("SymbolicPaths")
    recorder.entries += len(made.entries)
    shown = ", ".join(f"s{k} was {a} and {b}" for k, (a, b) in enumerate(made.sizes.pairs))
    _explain(
        f"its {len(made.entries)} calls are one path of symbols",
        f"sizes differ: {shown}",
        "",
        second,
    )
    return made


def _beside(one: Any, other: Any) -> tuple[Any, list[Any], list[Any]]:
    """Return where two paths of one length part, and the entries of each from there."""
    first, second = [], []
    while one is not other:
        if one.call is None or other.call is None or one.of is not None:
            return None, [], []
        first.append(one)
        second.append(other)
        one, other = one.parent, other.parent
    return one, first[::-1], second[::-1]


def give_up(path: SymbolicPath, why: str) -> None:
    """Drop a path that has no program: recordings no longer follow it.

    Args:
        why: An error's text; its first line is explained, since a kernel's text may follow.
    """
    place = path.place
    if place.symbolic and path in place.symbolic:
        place.symbolic = [other for other in place.symbolic if other is not path]
        place.prefer_others()
        path.refuse()
        metrics.count("SymbolicProgramsRefused")
        reason = why.partition("\n")[0]
        _explain("its path of symbols is dropped, since it has no program", reason, _CURE)


def _explain(what: str, difference: str, cure: str, entries: Sequence[Any] = ()) -> None:
    """Note an explanation of a path; `entries`: its entries from the first differing size on."""
    line = next((entry.call.line for entry in entries if entry.call.line), "")
    what = f"a path comes back at other sizes: {what}"
    note(Explanation(TIERS, user_stack_from(line), what, difference, cure, "symbolic"))


# --- A recording leaves a path of symbols, and goes on along another one that begins alike -------

# What it has recorded so far are the first entries of the other path too: every tensor that holds
# a value of the one gets that of the other, and nothing else changes.


def take_over(recorder: Any, path: SymbolicPath, count: int, other: SymbolicPath) -> None:
    """The recording's last `count` entries, the first of a path, are those of another path."""
    values: dict[CallResult, CallResult] = {}
    for mine, theirs in zip(path.entries[:count], other.entries[:count]):
        _add(values, mine.call, theirs.call)
    place = path.place
    place.symbolic = [other, *[one for one in place.symbolic if one is not other]]
    place.next = other.entries[0]
    if place is recorder.root:
        recorder.ended.follow = other.entries[0]
    recorder.move_to(other.entries[count - 1], values)


def note_alone(recorder: Any, path: SymbolicPath, count: int) -> None:
    """The recording's last `count` entries, the first of a path, become entries of these sizes alone."""
    values: dict[CallResult, CallResult] = {}
    parent = path.place
    for old in path.entries[:count]:
        key = _key_alone(old, values)
        entry = _following(parent, key) or _copied(recorder, old, parent, key, values)
        if parent is not path.place:
            parent.next = entry
        _add(values, old.call, entry.call)
        parent = entry
    recorder.move_to(parent, values)


def _key_alone(old: Any, values: dict[CallResult, CallResult]) -> Any:
    if old.call.overload == INPUT:
        return old.key  # told by identity
    return filled(old.key, lambda part: values.get(part, part))


def _following(parent: Any, key: Any) -> Any:
    """Return the entry recorded behind `parent` under that key; None if there is none."""
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
    entry = recorder.add_entry(parent, key, call)
    entry.link, call.module, call.forward = old.link, made.module, made.forward
    return entry


def _add(values: dict[CallResult, CallResult], old: Call, new: Call) -> None:
    pairs = zip(old.results, new.results)
    values.update((a, b) for a, b in pairs if a is not None and b is not None)


# --- the end of a recording -------------------------------------------------------------------------


def program_of_sizes(
    leaf: Any, outputs: tuple[CallResult, ...], replaced: dict[int, int], device: int
) -> ProgramOfSizes:
    """Return what runs a path of symbols that ends at the entry `leaf`, whatever its sizes are."""
    path, position = leaf.of
    key = position, outputs, tuple(replaced.items())
    known: ProgramOfSizes | None = path.ends.get(key)
    if known is None:

        def derive(values: Any, symbolic: bool) -> Any:
            return path.calls_at(values, symbolic, position, outputs)

        known = path.ends[key] = ProgramOfSizes(derive, replaced, device, MAX_VARIANTS)
    return known


def ask_for_sizes(
    leaf: Any, outputs: tuple[CallResult, ...], replaced: dict[int, int], device: int
) -> ProgramOfSizes:
    """Have a program made for the path's present sizes and others; return what will have it."""
    path, _ = leaf.of
    known = program_of_sizes(leaf, outputs, replaced, device)
    known.ask(path.values)
    give_up_if_refused(path)
    return known


def program_at_sizes(recorder: Any, ended: Any) -> tuple[Program, ProgramBinding]:
    """Return the program of the recording's sizes; without one for all sizes, one for these alone.

    Args:
        ended: The result of its end.
    """
    path, position = recorder.last.of
    device = recorder.device.index
    known = program_of_sizes(recorder.last, ended.outputs, ended.replaced, device)
    program = known.at(path.values)
    if program is not None and known.binding is not None:
        return program, known.binding
    give_up_if_refused(path)
    _, calls, values = path.calls_at(path.values, False, position, ended.outputs)
    return program_for(None, lambda: calls, values, device, ended.replaced)


def give_up_if_refused(path: Any) -> None:
    """Give a path of symbols up of which no end has a program, nor will have one."""
    ends = path.ends.values()
    refusals = [end.refusal for end in ends if end.refusal]
    if refusals and not any(end.has_variants for end in ends):
        give_up(path, refusals[-1])


def leave_to_itself(recorder: Any, leaf: Any) -> None:
    """Sizes that have come several times in succession are noted for themselves the next time."""
    path, _ = leaf.of
    if path.note_end():
        path.place.prefer_others()
        for behind in (leaf, recorder.ended):
            if behind.follow is path.entries[0]:
                behind.follow = path.place.next
            recorder.policy.note_again(behind.ended_path)
