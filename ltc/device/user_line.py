"""The line of the user's program that made a call."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType
from typing import Any

from ltc import config
from ltc.support.user_frame import innermost_user_frame, warn_user
from ltc.tracebacks import shown_of_torch


def user_line() -> str:
    """ "file.py:12 in function" of the user's innermost frame; "" where there is none."""
    frame = innermost_user_frame()
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


class told_of_lack:
    """A block that writes to a file: a failed write warns the user and ends no training.

    Args:
        variable: The environment variable that names the file.
    """

    def __init__(self, variable: str) -> None:
        self.variable = variable

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> bool:
        if not isinstance(error, OSError):
            return False
        warn_user(f"{self.variable}={config.value(self.variable)}: a step was not written: {error}")
        return True
