"""What one call can use that an earlier one could not, in words for whoever asks why it was recorded."""

from __future__ import annotations

import re
from typing import Any

from ltc.replay.objects import attribute
from ltc.replay.reachable import Reachable


def changed_use(now: Reachable, before: Reachable | None) -> str:
    """The first thing that is new, or not as it was then."""
    known = _told(before) if before is not None else {}
    found = (text for thing, text in _told(now).items() if thing not in known)
    return next(found, "shapes or modes")


def _told(reachable: Reachable) -> dict[Any, str]:
    """A text for each thing that tells calls apart."""
    told: dict[Any, str] = {}
    for one in reachable.lazy:
        kind = (one.tensor.shape, one.tensor.dtype) if one.tensor is not None else ()
        told[one.expression, kind] = f"a tensor of {kind}"
    for expression, value in reachable.pinned:
        told[expression, repr(value)] = f"{_readable(reachable, expression)} is {value!r:.80}"
    for condition in reachable.conditions:
        told[condition] = _readable(reachable, condition)
    return told


def _readable(reachable: Reachable, text: str) -> str:
    """With the kinds of objects in place of the names that the expressions have for them."""

    def kind(name: re.Match) -> str:
        if name[0] not in reachable.constants:
            return name[0]
        value = reachable.constants[name[0]]
        return f"<{attribute(value, '__qualname__') or type(value).__name__}>"

    return re.sub(r"\bc\d+\b", kind, text)
