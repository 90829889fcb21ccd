"""When a recording goes on along a path of symbols: where its path has gone on at other sizes.

Several programs may begin alike.  A place has a path for each; a recording that leaves one goes over to
another that begins as it has begun, or, while there is none, to a path of its own that is recorded at
these sizes alone: two such recordings make the next path of symbols.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from ltc import config
from ltc.debug import metrics
from ltc.device.symbolic.derive import WRITE_VIEW
from ltc.device.symbolic.path import SymbolicPath
from ltc.device.symbolic.pattern import Differs, pattern_of
from ltc.device.symbolic.taking_over import is_recorded_alone, record_alone, take_over
from ltc.explaining.explanation import TIERS, Explanation
from ltc.explaining.history import note
from ltc.explaining.user_stack import user_stack

MOST_TRIES = 8  # of one place: each time with other recordings
MOST_PATHS = 16  # of one place
COMPARED = 4  # of the latest recordings that went on from a place
MOST_ALONE = 4  # recordings that left a path at one position and were recorded alone
_CURE = "pad sizes to a few; or let the sizes that change be the leading ones"


class PathsFrom:
    """The paths of symbols that go on from a place.

    paths  the one that was taken last first
    tries  how often one was looked for in vain
    ways   that had been recorded by then
    """

    def __init__(self) -> None:
        self.paths: list[SymbolicPath] = []
        self.tries = self.ways = 0


def entry_for(recorder: Any, last: Any, key: Any) -> Any:
    """The entry of a path of symbols for a call after `last`, at the call's sizes; None without."""
    if not config.value("LTC_SYMBOLIC"):
        return None
    if last.of is not None:
        path, position = last.of
        return path.entry_at(position + 1, key, _most_bytes(path.place))
    if last.symbolic is None:
        last.symbolic = PathsFrom()
    known, most_bytes = last.symbolic, _most_bytes(last)
    found = _accepting(known, key, most_bytes)
    if found is None and _looks_again(last) and _made_from_latest(recorder, last):
        found = _accepting(known, key, most_bytes)
    return found


def _most_bytes(place: Any) -> int:
    most: int = config.value("LTC_MAX_PENDING_BYTES")
    return most - int(place.size)


def _accepting(known: PathsFrom, key: Any, most_bytes: int) -> Any:
    for path in known.paths:
        entry = path.entry_at(0, key, most_bytes)
        if entry is not None:
            return entry
    return None


def wants_another(place: Any) -> bool:
    """Whether what goes on from a place is to be recorded once more, to be compared with the latest.

    A first step is seldom like those that follow.
    """
    known = place.symbolic
    return (
        known is not None
        and known.tries < MOST_TRIES
        and known.ways == len(place.branches)
        and bool(config.value("LTC_SYMBOLIC"))
    )


def other_way(recorder: Any, last: Any, key: Any) -> Callable[[], object] | None:
    """What lets a recording that leaves a path of symbols go on; None where it goes op by op."""
    path, position = last.of
    if not config.value("LTC_SYMBOLIC") or key[0] == WRITE_VIEW:  # its call is recorded already
        return None
    place, count = path.place, position + 1
    if is_recorded_alone(path, count, key):
        return lambda: record_alone(recorder, path, count)
    found = _other_path(path, count, key)
    alone = path.left.setdefault(count, {})
    latest = list(reversed(alone))[:2]
    if found is None and len(latest) == 2 and _made_of(recorder, place, *latest):
        alone.clear()
        found = _other_path(path, count, key)
    if found is not None:
        return lambda: take_over(recorder, path, count, found)
    if len(alone) >= MOST_ALONE:
        return None
    return lambda: alone.setdefault(record_alone(recorder, path, count))


def _other_path(path: SymbolicPath, count: int, key: Any) -> SymbolicPath | None:
    """A path from the same place that begins with the first entries of this one, and goes on with the key."""
    others = [other for other in path.place.symbolic.paths if other is not path]
    most_bytes = _most_bytes(path.place)
    return next((one for one in others if one.begins_as(path, count, key, most_bytes)), None)


def _looks_again(place: Any) -> bool:
    known = place.symbolic
    return known.tries < MOST_TRIES and known.ways != len(place.branches)


def _made_from_latest(recorder: Any, place: Any) -> bool:
    """Whether the latest recording and one before it have a path in common, which is made."""
    known = place.symbolic
    known.ways = len(place.branches)
    latest, *others = islice(reversed(place.branches.values()), COMPARED)
    if any(_made_of(recorder, place, latest, other) for other in others):
        return True
    known.tries += 1
    return False


def _made_of(recorder: Any, place: Any, latest: Any, other: Any) -> bool:
    """Whether two recordings are one path of symbols, which is made."""
    known = place.symbolic
    try:
        pattern, sizes = pattern_of(list(_recorded(other)), list(_recorded(latest)))
        made = SymbolicPath(recorder, place, pattern, sizes, place.__class__)
    except (Differs, AssertionError) as error:
        metrics.count("SymbolicPathsRefused")
        if known.tries == MOST_TRIES - 1:  # before, another recording may do
            _explain("no path of symbols is made for it", str(error), _CURE)
        return False
    known.paths.insert(0, made)
    del known.paths[MOST_PATHS:]
    metrics.count("SymbolicPaths")
    recorder.entries += len(made.entries)
    shown = ", ".join(f"s{k} was {a} and {b}" for k, (a, b) in enumerate(made.sizes.pairs))
    _explain(f"its {len(made.entries)} calls are one path of symbols", f"sizes differ: {shown}", "")
    return True


def _recorded(entry: Any) -> Iterator[Any]:
    """The entries of the recording that went this way last, to its end."""
    while entry.call is not None:
        if entry.of is not None:
            raise Differs("it goes on along another path of symbols")
        yield entry
        last, entry = entry, entry.next
    if last.ended is None:
        raise Differs("a recording has not come to its end yet")


def give_up(path: SymbolicPath, why: str) -> None:
    """Recordings go on along the path no more: it has no program.

    why  an error's text, of which the first line is told: a kernel's text may follow
    """
    place = path.place
    if path in place.symbolic.paths:
        place.symbolic.paths.remove(path)
        place.symbolic.tries = MOST_TRIES
        place.next = next(iter(place.branches.values()))
        metrics.count("SymbolicProgramsRefused")
        reason = why.partition("\n")[0]
        _explain("its path of symbols is left again, since it has no program", reason, _CURE)


def _explain(what: str, difference: str, cure: str) -> None:
    what = f"a recording comes back at other sizes: {what}"
    note(Explanation(TIERS, user_stack(), what, difference, cure, "symbolic"))
