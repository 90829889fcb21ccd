"""One line on stderr, once, where a number that the program reads is NaN: the setting that finds its origin."""

from __future__ import annotations

import sys
from typing import Any

from ltc import config
from ltc.device.evidence.hints import is_on
from ltc.device.user_line import user_line

_has_said = False


def number_read(number: Any) -> Any:
    """Return a number that the program reads; say so the first time that it is NaN."""
    if number != number and not _has_said:
        _say()
    return number


def _say() -> None:
    global _has_said
    if not is_on() or config.value("LTC_DEBUG_NANS"):
        return
    _has_said = True
    print(
        f"ltc hint: a number that was read is NaN, at {user_line()}. Run again with LTC_DEBUG_NANS=1: an "
        f"error then names the operation that makes the first NaN. LTC_HINTS=0 turns hints off.",
        file=sys.stderr,
        flush=True,
    )
