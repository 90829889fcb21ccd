"""Faults of ltc's own that a program survives, since ltc can fall back.

Where ltc catches an unexpected exception and falls back, it notes the exception here. Otherwise a bug
would show as slowness alone.
"""

from __future__ import annotations

import traceback

from ltc import config
from ltc.explaining import history
from ltc.explaining.explanation import FAULTS, Explanation
from ltc.explaining.user_stack import user_stack
from ltc.support.observation import metrics
from ltc.tracebacks import is_users, raised_in

_MOST_FRAMES = 3  # of the traceback, in the short text
_CURE = (
    "no action is needed: ltc fell back to another way of computing it. Please report the fault with "
    "the explanation's `traceback`; LTC_CHECK=1 raises it"
)


def is_own(error: BaseException) -> bool:
    """Return True if ltc, or a library that it calls, raised the error; False if the program's code did.

    A handler of a signal, or an object that is looked at, may raise anything.
    """
    return not is_users(raised_in(error))


def note(error: Exception, what: str) -> None:
    """Count an unexpected error of ltc's own and keep it for `ltc.explain`; raise it under LTC_CHECK.

    An error that a caller expects, such as `Unsupported`, is no fault: catch it before.

    Args:
        error: The exception that was caught.
        what: The work that failed, as a noun phrase: "the rule of aten::sin".

    Raises:
        Exception: The error itself, if LTC_CHECK is on.
    """
    if config.value("LTC_CHECK"):
        error.add_note(
            f"A fault of ltc's own. Without LTC_CHECK, ltc falls back where {what} fails."
        )
        raise error
    keep(error, what)


def keep(error: Exception, what: str) -> None:
    """Count an error and keep it, without raising it, also under LTC_CHECK.

    For threads where a raised error would reach no caller.

    Args:
        error: The exception that was caught.
        what: The work that failed, as a noun phrase.
    """
    metrics.count("InternalFaults")
    message = " ".join(str(error).split())
    difference = f"{type(error).__name__}: {message}{_place_of(error)}"
    text = "".join(traceback.format_exception(error))
    told = Explanation(FAULTS, user_stack(), f"{what} failed", difference, _CURE, "fault")
    history.note(told).traceback = text


def _place_of(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)[-_MOST_FRAMES:]
    places = [f"{frame.filename}:{frame.lineno} in {frame.name}" for frame in reversed(frames)]
    return f"; raised at {', called from '.join(places)}" if places else ""
