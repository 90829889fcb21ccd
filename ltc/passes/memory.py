"""Places in one block of scratch memory for values that live only inside a program."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

ALIGNMENT = 64  # bytes: a cache line, and the widest vector


@dataclass(frozen=True)
class Lifetime:
    """One value in scratch memory.

    first  the step that writes it
    last   the last step that reads it
    """

    name: Hashable
    nbytes: int
    first: int
    last: int


def plan(lifetimes: Sequence[Lifetime]) -> tuple[dict[Hashable, int], int]:
    """(offset of each value, bytes of the block): values that live at one time do not overlap.

    The largest take their place first, each at the lowest offset that is free all its life.
    """
    placed: list[tuple[int, int, Lifetime]] = []  # (offset, end, whose)
    offsets: dict[Hashable, int] = {}
    for value in sorted(lifetimes, key=lambda v: (-v.nbytes, v.first)):
        size = -(-value.nbytes // ALIGNMENT) * ALIGNMENT
        offset = 0
        for low, high, other in sorted(placed, key=lambda p: p[0]):
            if other.last < value.first or value.last < other.first:
                continue
            if offset + size <= low:
                break
            offset = max(offset, high)
        offsets[value.name] = offset
        placed.append((offset, offset + size, value))
    return offsets, max((end for _, end, _ in placed), default=0)
