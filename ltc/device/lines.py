"""Where in the user's program something was asked for."""

from __future__ import annotations

import os
import sys

import torch

_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep


def user_line() -> str:
    """"file.py:12 in function" of the innermost frame outside ltc and torch; "" where there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_OWN, _TORCH, "<ltc", "<frozen", "<eval_with_key>")):
            # interned: a loop records the same line many times
            return sys.intern(f"{name}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return ""
