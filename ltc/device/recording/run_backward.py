"""A backward, with what has to be done behind it: see gradient_views.py."""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import Any

from ltc.device.recording.gradient_views import FUNCTION, Backward, running
from ltc.device.recording.state import State
from ltc.device.recording.sync import exclusively, value_of
from ltc.native.core import CORE


def call_engine(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """run(*args, **kwargs), after which the views that autograd's formulas made are independent."""
    thread = get_ident()
    outer, running[thread] = running.get(thread), Backward(run.__code__, [])
    engine = None
    if CORE is not None:
        engine = CORE.begin_backward(CORE.session(), id(run.__code__), id(FUNCTION))
    try:
        return run(*args, **kwargs)
    finally:
        made = running.pop(thread).views
        if CORE is not None:
            CORE.end_backward(CORE.session(), engine)
        if outer is not None:  # of the backward whose hook or checkpoint began this one
            running[thread] = outer
        for view in made:
            state = view()
            if state is not None and state.base is not None:
                _make_independent(state, state.base)


def _make_independent(view: State, base: State) -> None:
    if view.value is None:
        if not _is_settled(base):
            return  # its base was written to or freed since: what a formula has used and left
        exclusively(view.device.recorder(), value_of, view)  # a step was cut off since
    view.leave_base()


def _is_settled(base: State) -> bool:
    """Return True if its memory holds all writes to it, or will."""
    execution = None if base.buffer is None else base.buffer.execution
    return base.value is None and (execution is None or execution.failure is None)
