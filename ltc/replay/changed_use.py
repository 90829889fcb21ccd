"""What one call can use that an earlier one could not, in words for whoever asks why it was recorded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ltc.replay.objects import attribute
from ltc.replay.reachable import Reachable


def changed_use(now: Reachable, before: Reachable | None) -> str:
    """The first thing that is new, or not as it was then."""
    known = set(dict(_told(before))) if before is not None else set()
    found = (tell() for thing, tell in _told(now) if thing not in known)
    return next(found, "modes")


def _told(reachable: Reachable) -> Iterator[tuple[Any, Callable[[], str]]]:
    """Each thing that tells calls apart, and what gives a text for it."""
    aliases = reachable.aliases
    for place, one in enumerate(reachable.lazy):
        yield (one.expression, *aliases.types[place]), partial(_type, reachable, place)
    for one, (place, (root, chain, first)) in zip(reachable.lazy, enumerate(aliases.places)):
        key = (one.expression, root, repr(chain), first)
        yield key, partial(aliases.told, place, reachable.name_at)
    for expression, value in reachable.pinned:
        yield (expression, repr(value)), partial(_value, reachable, expression, value)
    for condition in reachable.conditions:
        yield condition, partial(_readable, reachable, condition)


def _type(reachable: Reachable, place: int) -> str:
    shape, dtype, device = reachable.aliases.types[place]
    return f"{reachable.name_at(place)} is a tensor of {shape}, {dtype}, on ltc:{device}"


def _value(reachable: Reachable, expression: str, value: Any) -> str:
    return f"{_readable(reachable, expression)} is {value!r:.80}"


def _readable(reachable: Reachable, text: str) -> str:
    """With the kinds of objects in place of the names that the expressions have for them."""

    def kind(name: re.Match) -> str:
        if name[0] not in reachable.constants:
            return name[0]
        value = reachable.constants[name[0]]
        return f"<{attribute(value, '__qualname__') or type(value).__name__}>"

    return re.sub(r"\bc\d+\b", kind, text)
