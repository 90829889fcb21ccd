"""Places in memory for values that live only inside a program.

They share one block of scratch memory, and a long-lived value may lie in the buffer of an output as
long as nothing has been written there.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ltc.support.sizes.choices import most
from ltc.support.sizes.extent import Extent, number_now

ALIGNMENT = 64  # bytes: a cache line, and the widest vector
BLOCK = None  # the name of the block among the places

Place = tuple[Hashable, int]  # the name of a host, or BLOCK, and an offset in bytes


@dataclass(frozen=True)
class Lifetime:
    """One value in scratch memory.

    Attributes:
        first: The step that writes it.
        last: The last step that reads it.
        in_block: True if it must lie in the block.
    """

    name: Hashable
    nbytes: int
    first: int
    last: int
    in_block: bool = False


@dataclass(frozen=True)
class OutputBuffer:
    """The buffer of an output, free for others before the step `first`, which writes it."""

    name: Hashable
    nbytes: int
    first: int


class _Region:
    """A stretch of memory, and the values that lie in it at each time."""

    def __init__(self, guard: int) -> None:
        self._guard = guard
        self._placed: list[tuple[int, int, Lifetime]] = []  # (offset, end, whose)

    def size_of(self, value: Lifetime) -> int:
        """Bytes that it takes, its guards included."""
        return aligned(value.nbytes) + 2 * self._guard

    def offset_for(self, value: Lifetime) -> int:
        """The lowest offset that is free all its life."""
        size, offset = self.size_of(value), 0
        for low, high, other in sorted(self._placed, key=lambda p: p[0]):
            if other.last < value.first or value.last < other.first:
                continue
            if offset + size <= low:
                break
            offset = max(offset, high)
        return offset

    def place(self, value: Lifetime, offset: int) -> int:
        """Place the value in the memory from `offset` on and return where the value itself begins."""
        self._placed.append((offset, offset + self.size_of(value), value))
        return offset + self._guard

    def fits(self, value: Lifetime, offset: int, nbytes: int) -> bool:
        """Return True if the memory ends behind the value, whose last cache line need not be whole."""
        needed = self.size_of(value) if self._guard else value.nbytes
        return offset + needed <= nbytes

    @property
    def nbytes(self) -> int:
        return max((end for _, end, _ in self._placed), default=0)


def plan(
    lifetimes: Sequence[Lifetime], hosts: Sequence[OutputBuffer] = (), long: int = 0, guard: int = 0
) -> tuple[dict[Hashable, Place], int]:
    """(place of each value, bytes of the block): values that live at one time do not overlap.

    The largest take their place first, each at the lowest offset that is free all its life.

    Args:
        hosts: Buffers of outputs; those that are written first are taken first.
        long: Steps from which on a life is long: what lives shorter is still in the caches when it
            is read, and when its place in the block is used again.
        guard: Bytes, whole cache lines, that stay unused before and behind each value.
    """
    if any(isinstance(value.nbytes, Extent) for value in lifetimes):
        return _at_any_sizes(lifetimes, guard)
    block = _Region(guard)
    houses = {host: _Region(guard) for host in sorted(hosts, key=lambda h: h.first)}
    places: dict[Hashable, Place] = {}
    for value in sorted(lifetimes, key=lambda v: (-v.nbytes, v.first)):
        place = None
        if not value.in_block and value.last - value.first >= long:
            place = _hosted(value, houses)
        if place is None:
            place = (BLOCK, block.place(value, block.offset_for(value)))
        places[value.name] = place
    return places, block.nbytes


def _hosted(value: Lifetime, houses: dict[OutputBuffer, _Region]) -> Place | None:
    """A place in the buffer of an output that is written after the value's life."""
    for host, region in houses.items():
        if value.last < host.first and value.nbytes <= host.nbytes:
            offset = region.offset_for(value)
            if region.fits(value, offset, host.nbytes):
                return host.name, region.place(value, offset)
    return None


def aligned(nbytes: int) -> int:
    """Return the bytes of the whole cache lines that hold `nbytes`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _at_any_sizes(lifetimes: Sequence[Lifetime], guard: int) -> tuple[dict[Hashable, Place], int]:
    """The same where sizes are expressions: all in the block, in the order that suits these sizes.

    What lives at one time lies one above the other at any sizes, in that order.
    """
    numbers = [replace(value, nbytes=number_now(value.nbytes)) for value in lifetimes]
    now, _ = plan(numbers, (), 0, guard)
    order = sorted(range(len(numbers)), key=lambda k: (now[numbers[k].name][1], k))
    ends: dict[int, Any] = {}
    places: dict[Hashable, Place] = {}
    below: dict[int, list[int]] = {}
    for k in order:
        value = lifetimes[k]
        met = [j for j in ends if _meet(lifetimes[j], value)]
        covered = {i for j in met for i in below[j]}
        below[k] = met
        offset = most(0, *[ends[j] for j in met if j not in covered])
        ends[k] = offset + aligned(value.nbytes) + 2 * guard
        places[value.name] = (BLOCK, offset + guard)
    return places, most(0, *ends.values())


def _meet(one: Lifetime, other: Lifetime) -> bool:
    return one.first <= other.last and other.first <= one.last
