"""What a step's time went into: recording, compiling, waiting, running programs."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import Any

Span = tuple[str, int, int]  # category, begin, end
_PARTS = {
    "compile": frozenset({"compile"}),
    "wait": frozenset({"wait", "collective"}),
    "execute": frozenset({"launch"}),
}
_NOT_RECORDING = frozenset({"compile", "wait", "collective", "launch", "upload", "fallback", "gc"})


class InOrder:
    """Rows by their moments, to be asked for a part."""

    def __init__(self, rows: Iterable[Any], moment: Callable[[Any], int]) -> None:
        self._rows = sorted(rows, key=moment)
        self._moments = [moment(row) for row in self._rows]

    def between(self, begin: int, end: int) -> list[Any]:
        first, last = bisect_left(self._moments, begin), bisect_right(self._moments, end)
        return self._rows[first:last]


def _covered(spans: Iterable[Span], categories: frozenset[str], begin: int, end: int) -> float:
    """Microseconds between `begin` and `end` in which one of the spans was open."""
    total, until = 0, begin
    for _, first, last in sorted(
        [one for one in spans if one[0] in categories and one[2] > begin and one[1] < end],
        key=lambda one: one[1],
    ):
        first, last = max(first, until), min(last, end)
        if last > first:
            total, until = total + last - first, last
    return round(total / 1e3, 3)


def parts_of_step(spans: Sequence[Span], begin: int, mark: int, end: int) -> dict[str, float]:
    """Microseconds of each part.

    spans  of the thread that marks, which may be inside one another
    """
    parts = {f"{name}_us": _covered(spans, kinds, begin, end) for name, kinds in _PARTS.items()}
    others = _covered(spans, _NOT_RECORDING, begin, mark)
    return {**parts, "record_us": round((mark - begin) / 1e3 - others, 3)}
