"""The innermost frame of the user's program, and warnings located there."""

from __future__ import annotations

import functools
import sys
import warnings
from types import FrameType

from ltc.tracebacks import is_users

_is_users = functools.lru_cache(4096)(is_users)  # asked for a dozen frames of each new call


def innermost_user_frame() -> FrameType | None:
    """Return the innermost frame outside ltc and torch, or None."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            return frame
        frame = frame.f_back
    return None


def warn_user(text: str) -> None:
    """A UserWarning located at the user's line: told once of each, unless filters say otherwise."""
    frame = innermost_user_frame()
    if frame is None:
        warnings.warn(text, stacklevel=2)
        return
    told = frame.f_globals.setdefault("__warningregistry__", {})  # as `warnings.warn` has it
    file, line = frame.f_code.co_filename, frame.f_lineno
    warnings.warn_explicit(text, UserWarning, file, line, frame.f_globals.get("__name__"), told)
