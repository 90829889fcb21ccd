"""Printing: one read of computed values; pending ones are described where a read is unwanted.

That is under `ltc.no_sync()`, with LTC_DEBUG=1, and for a debugger that stands still in the calling
thread: looking at variables must not change what the program does. There, the value of a call that has
run when it was made is shown from its memory, which is no read.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch

from ltc import config
from ltc.aten.call import CallResult
from ltc.device.evidence.forks_explained import value_text
from ltc.device.recording.state import State
from ltc.device.recording.tensors import host_tensor, is_lazy
from ltc.device.torch_device import storage_of
from ltc.explaining.no_sync import reads_are_forbidden
from ltc.support.torch_private import TENSOR_REPR, TENSOR_TEXT
from ltc.tracebacks import clear_frames, entrance

# What asks a user for the next command: file and function, of pdb and its kin, and of IDEs.
_PROMPTS = frozenset({("pdb.py", "interaction"), ("pydevd.py", "do_wait_suspend")})
_NO_STATE = (AttributeError, TypeError, NotImplementedError, RuntimeError)  # of tensors in tensors


def install() -> None:
    _print_after_one_read()
    _print_without_a_trace()
    _format_what_is_pending()


def _print_after_one_read() -> None:
    """torch reads a tensor that it prints element by element, most of them twice."""
    original = TENSOR_TEXT.current

    def _tensor_str(self: torch.Tensor, indent: int):
        if is_lazy(self):
            seen = _seen(self)
            self = host_tensor(self) if seen is None else seen
        return original(self, indent)

    TENSOR_TEXT.replace(_tensor_str)


def _print_without_a_trace() -> None:
    """Print pending tensors without leaving a traceback that keeps torch.func's transforms off.

    A local variable of torch's function turns the transforms off until it is gone, and an error's
    traceback holds the variables of each frame as long as the error is held.
    """
    original = TENSOR_REPR.current

    def _str(self: torch.Tensor, **contents: Any):
        told = text_of_pending(self)
        if told is not None:
            return told
        try:
            return original(self, **contents)
        except BaseException as error:
            clear_frames(error, original)
            raise

    TENSOR_REPR.replace(entrance(_str))


def _format_what_is_pending() -> None:
    """torch formats a tensor without dimensions as the number in it."""
    original = torch.Tensor.__format__

    def __format__(self: torch.Tensor, format_spec: str) -> str:
        told = text_of_pending(self)
        if told is not None:
            return told
        seen = _seen(self)
        return original(self if seen is None else seen, format_spec)

    torch.Tensor.__format__ = entrance(__format__)


def text_of_pending(tensor: torch.Tensor) -> str | None:
    """Describe a pending tensor; return None if it may be read."""
    if not is_lazy(tensor) or not _reads_are_unwanted():
        return None
    try:
        state = storage_of(tensor).lazy
    except _NO_STATE:
        return None
    value = _pending_value(state)
    if value is None or _seen(tensor) is not None:
        return None
    return f"<pending {state.device} tensor {value_text(value)}>"


def _seen(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the value of a call that has run, where a read is unwanted; None if there is no such value."""
    if not is_lazy(tensor) or reads_are_forbidden() or not _reads_are_unwanted():
        return None
    try:
        state = storage_of(tensor).lazy
    except _NO_STATE:
        return None
    if state.base is not None or state.buffer is not None:
        return None
    return getattr(state.value, "tensor", None)


def _reads_are_unwanted() -> bool:
    return reads_are_forbidden() or bool(config.value("LTC_DEBUG")) or _is_at_a_prompt()


def _pending_value(state: State) -> CallResult | None:
    """The value that a read would have to compute; of a view, its own or its base's."""
    holder = state if state.base is None or state.buffer is not None else state.base
    value = (state.value or holder.value) if holder.buffer is None else None
    return None if value is None or _is_of_an_ended_step(value) else value


def _is_of_an_ended_step(value: CallResult) -> bool:
    """Return True if it may be read: its call has run in a step that a mark has ended."""
    session = value.recorder.immediate
    return session is not None and session.has_passed_mark and not reads_are_forbidden()


def _is_at_a_prompt() -> bool:
    frame = sys._getframe()
    while frame is not None:
        code = frame.f_code
        if (os.path.basename(code.co_filename), code.co_name) in _PROMPTS:
            return True
        frame = frame.f_back  # type: ignore[assignment]  # None at the outermost
    return False
