"""What one call can use that an earlier one could not, or that it changes itself, in words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from ltc.device.recording.recorder import Entry
from ltc.replay.conditions import Number
from ltc.replay.objects import attribute
from ltc.replay.origins import recorded_path
from ltc.replay.reachable import Reachable
from ltc.replay.traced_float import Operation

_TOGETHER = 40  # conditions that are looked at at once
_OF_A_GRADIENT = re.compile(r"\.grad\b")


def changed_use(now: Reachable, before: Reachable | None) -> str:
    """The first thing that is new, or not as it was then."""
    known = set(dict(_told(before))) if before is not None else set()
    found = (tell() for thing, tell in _told(now) if thing not in known)
    return next(found, "modes")


def changed_itself(reachable: Reachable, args: tuple, kwargs: dict) -> str:
    """An obstacle where the call, which is over, has changed what the next one finds; else "".

    Gradients come and go: a replayed call gives them as well.
    """
    for number in reachable.numbers:
        if repr(_value_now(number)) != repr(number.value):
            return _changes(reachable, number.expression)
    pinned = {f"v{n}": value for n, (_, value) in enumerate(reachable.pinned)}
    texts = [one for one in reachable.conditions if not _OF_A_GRADIENT.search(one)]
    found = [
        f"[{one}, {one}.__class__] == [{name}, {name}.__class__]"
        for name, (one, _) in zip(pinned, reachable.pinned)
    ]
    place = _first_that_fails([*texts, *found], {**reachable.constants, **pinned}, args, kwargs)
    if place is None:
        return ""
    return _changes(reachable, [*texts, *(one for one, _ in reachable.pinned)][place])


def _changes(reachable: Reachable, text: str) -> str:
    return (
        f"it changes what it uses, and a replayed call does not; before: "
        f"{_readable(reachable, text)}"
    )


def _value_now(number: Number) -> Any:
    """Of one in a table, such as a learning rate, which a schedule may have changed."""
    if not isinstance(number.holder, dict):
        return number.value
    found = number.holder.get(number.key)
    return found if number.part is None or not isinstance(found, tuple) else found[number.part]


def _first_that_fails(
    conditions: list[str], names: dict[str, Any], args: tuple, kwargs: dict
) -> int | None:
    """The place of the first that is not true, or cannot be looked at."""
    names |= {"args": args, "kwargs": kwargs}
    for start in range(0, len(conditions), _TOGETHER):
        together = conditions[start : start + _TOGETHER]
        if not _holds(" and ".join(f"({one})" for one in together), names):
            return next(
                (start + n for n, one in enumerate(together) if not _holds(one, names)), start
            )
    return None


def _holds(condition: str, names: dict[str, Any]) -> bool:
    try:
        return bool(eval(compile(condition, "<ltc replay>", "eval"), names))
    except (AttributeError, LookupError, TypeError, ValueError):
        return False


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


# --- two recordings of one call -----------------------------------------------------------------


def where_paths_part(mine: Entry, other: Entry) -> str:
    """Name the first call that only one of two recordings has."""
    calls, others = recorded_path(mine), recorded_path(other)
    for one, another in zip(calls, others):
        if one is not another:
            return f"{another.name} at {another.line} where {one.name} at {one.line} was recorded"
    longer = (calls, others)[len(others) > len(calls)]
    if len(calls) == len(others):
        return "its path was forgotten"
    last = longer[min(len(calls), len(others))]
    return f"{last.name} at {last.line} is recorded in one of two calls"


def same_operations(mine: list[Operation], others: list[Operation]) -> bool:
    """True if two calls have computed the same from their numbers."""
    return len(mine) == len(others) and all(
        one.name == other.name
        and [x.__class__ for x in one.operands] == [x.__class__ for x in other.operands]
        and _same_places(one, other)
        and (isinstance(one.result, float) or one.result == other.result)
        for one, other in zip(mine, others)
    )


def _same_places(one: Operation, other: Operation) -> bool:
    return all(
        x == y for x, y in zip(one.operands, other.operands) if not isinstance(x, (float, int))
    )
