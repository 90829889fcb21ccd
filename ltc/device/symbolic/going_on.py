"""When a recording goes on along a path of symbols: where its path has gone on at other sizes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from ltc import config
from ltc.debug import metrics
from ltc.device.symbolic.path import SymbolicPath
from ltc.device.symbolic.pattern import Differs, pattern_of
from ltc.explaining.explanation import TIERS, Explanation
from ltc.explaining.history import note
from ltc.explaining.user_stack import user_stack

MOST_TRIES = 4  # of one place: each time with other recordings
_CURE = "pad sizes to a few; or let the sizes that change be the leading ones"


class NotSymbolic:
    """That a place has no path of symbols so far.

    why    it has none
    tries  how often one was looked for
    ways   that had been recorded by then
    """

    def __init__(self, why: str, tries: int, ways: int) -> None:
        self.why, self.tries, self.ways = why, tries, ways


def entry_for(recorder: Any, last: Any, key: Any) -> Any:
    """The entry of a path of symbols for a call after `last`, at the call's sizes; None without."""
    if not config.value("LTC_SYMBOLIC"):
        return None
    most_bytes = config.value("LTC_MAX_PENDING_BYTES") - last.size
    if last.of is not None:
        path, position = last.of
        return path.entry_at(position + 1, key, most_bytes)
    path = path_from(recorder, last)
    return None if path is None else path.entry_at(0, key, most_bytes)


def wants_another(place: Any) -> bool:
    """Whether what goes on from a place is to be recorded once more, to be compared with the latest.

    A first step is seldom like those that follow.
    """
    known = place.symbolic
    return (
        known.__class__ is NotSymbolic
        and known.tries < MOST_TRIES
        and known.ways == len(place.branches)
    )


def path_from(recorder: Any, place: Any) -> SymbolicPath | None:
    """The path of symbols that goes on from a place, made where two recordings have it in common."""
    known = place.symbolic
    if known.__class__ is SymbolicPath:
        return known
    ways = len(place.branches)
    tries = 0 if known is None else known.tries
    if known is not None and (tries >= MOST_TRIES or known.ways == ways):
        return None
    try:
        place.symbolic = made = _made(recorder, place)
    except (Differs, AssertionError) as error:
        place.symbolic = NotSymbolic(str(error), tries + 1, ways)
        metrics.count("SymbolicPathsRefused")
        if tries + 1 == MOST_TRIES:  # before, another recording may do
            _explain("no path of symbols is made for it", str(error), _CURE)
        return None
    metrics.count("SymbolicPaths")
    recorder.entries += len(made.entries)
    shown = ", ".join(f"s{k} was {a} and {b}" for k, (a, b) in enumerate(made.sizes.pairs))
    _explain(f"its {len(made.entries)} calls are one path of symbols", f"sizes differ: {shown}", "")
    return made


def give_up(path: SymbolicPath, why: str) -> None:
    """Recordings go on along the path no more: it has no program."""
    place = path.place
    if place.symbolic is path:
        place.symbolic = NotSymbolic(why, MOST_TRIES, 0)
        place.next = next(iter(place.branches.values()))
        metrics.count("SymbolicProgramsRefused")
        _explain("its path of symbols is left again, since it has no program", why, _CURE)


def _explain(what: str, difference: str, cure: str) -> None:
    what = f"a recording comes back at other sizes: {what}"
    note(Explanation(TIERS, user_stack(), what, difference, cure, "symbolic"))


def _made(recorder: Any, place: Any) -> SymbolicPath:
    newest = islice(reversed(place.branches.values()), 2)
    second, first = (list(_recorded(entry)) for entry in newest)
    pattern, sizes = pattern_of(first, second)
    return SymbolicPath(recorder, place, pattern, sizes, place.__class__)


def _recorded(entry: Any) -> Iterator[Any]:
    """The entries of the recording that went this way last, to its end."""
    while entry.call is not None:
        if entry.of is not None:
            raise Differs("it goes on along another path of symbols")
        yield entry
        last, entry = entry, entry.next
    if last.ended is None:
        raise Differs("a recording has not come to its end yet")
