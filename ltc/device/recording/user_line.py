"""Where in the user's program something was asked for."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType
from typing import Any

from ltc import config
from ltc.tracebacks import is_users, shown_of_torch

_is_users = functools.lru_cache(4096)(is_users)  # asked for a dozen frames of each new call


def user_line() -> str:
    """ "file.py:12 in function" of the user's innermost frame; "" where there is none."""
    frame = _user_frame()
    if frame is None:
        return ""
    code = frame.f_code
    # interned: a loop records the same line many times
    return sys.intern(f"{code.co_filename}:{frame.f_lineno} in {code.co_name}")


def torchs_line() -> str:
    """ "torch/file.py:12 in function" of torch's innermost frame, where the user has called
    torch; "" elsewhere."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        shown = shown_of_torch(frame.f_code.co_filename)
        if shown is None:
            return ""
        if shown:
            return f"{shown}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


def called_from(frame: FrameType, function: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
    """function(*args, **kwargs), of whose warnings from C++ the line is that of a frame."""
    line = frame.f_lineno or 0  # code that was generated may have none
    call = FunctionType(_call_at(frame.f_code, line), frame.f_globals)
    try:
        return call(function, args, kwargs)
    except BaseException as error:
        inner = error.__traceback__ and error.__traceback__.tb_next
        if inner is not None and inner.tb_next is None:  # the line would be shown twice
            error.__traceback__ = None
        raise


_CALL = compile("lambda function, args, kwargs: function(*args, **kwargs)", "<ltc>", "eval")


@functools.lru_cache(1024)
def _call_at(code: CodeType, line: int) -> CodeType:
    (plain,) = (one for one in _CALL.co_consts if isinstance(one, CodeType))
    return plain.replace(co_filename=code.co_filename, co_name=code.co_name, co_firstlineno=line)


def warn_user(text: str) -> None:
    """A UserWarning located at the user's line: told once of each, unless filters say otherwise."""
    frame = _user_frame()
    if frame is None:
        warnings.warn(text, stacklevel=2)
        return
    told = frame.f_globals.setdefault("__warningregistry__", {})  # as `warnings.warn` has it
    file, line = frame.f_code.co_filename, frame.f_lineno
    warnings.warn_explicit(text, UserWarning, file, line, frame.f_globals.get("__name__"), told)


def _user_frame():
    """The innermost frame outside ltc and torch, or None."""
    frame = sys._getframe(2)
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            return frame
        frame = frame.f_back
    return None


class told_of_lack:
    """A file that cannot be written ends no training: the user is told what it lacks.

    variable  that names the file
    """

    def __init__(self, variable: str) -> None:
        self.variable = variable

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        if not isinstance(error, OSError):
            return False
        warn_user(f"{self.variable}={config.value(self.variable)} lacks a step: {error}")
        return True
