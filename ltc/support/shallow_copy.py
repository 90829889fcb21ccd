"""Copies that are made anew at each launch, or at each size: of an object, or of parts of a list."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, TypeVar

T = TypeVar("T")


def copied_with(one: T, **changed: Any) -> T:
    """Return an object like `one` with other attributes, in a tenth of `copy`'s and `replace`'s
    time.

    It has no slots, and its constructor is not called.
    """
    other = object.__new__(one.__class__)
    other.__dict__.update(one.__dict__, **changed)
    return other


def elements_at(positions: Sequence[int]) -> Callable[[Any], Sequence[Any]]:
    """Return a function that picks a list's elements at these positions, in order, without a loop."""
    count = len(positions)
    if all(position == place for place, position in enumerate(positions)):
        return itemgetter(slice(count))
    if count == 1:  # of one key `itemgetter` gives no sequence
        return itemgetter(slice(positions[0], positions[0] + 1))
    return itemgetter(*positions)
