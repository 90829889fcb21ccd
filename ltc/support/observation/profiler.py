"""Named regions of a program, and the region that is one training step.

The names appear in torch's own profiler, and their times among the metrics as `trace.<name>`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from torch.profiler import record_function

from ltc.support.observation import metrics

__all__ = [
    "StepTrace",
    "Trace",
    "get_tracer_marked_step",
    "install",
    "set_tracer_marked_step",
]


class _TraceOfThread(threading.local):
    step_is_marked_by_trace = False


_thread = _TraceOfThread()
_mark_step: Callable[[], None] | None = None


def install(mark_step: Callable[[], None]) -> None:
    """Say how a step is ended; the layer that can end one calls this."""
    global _mark_step
    _mark_step = mark_step


def set_tracer_marked_step(marked: bool) -> None:
    """Say whether an open StepTrace ends this thread's step, so that a loader need not."""
    _thread.step_is_marked_by_trace = marked


def get_tracer_marked_step() -> bool:
    """Return True if an open StepTrace of this thread ends the step."""
    return _thread.step_is_marked_by_trace


class Trace:
    """`with Trace(name):` names what happens in the block; keywords are shown beside the name."""

    def __init__(self, name: str, **keywords: object):
        details = ", ".join(f"{key}={value}" for key, value in keywords.items())
        self._region = record_function(name, details or None)
        self._timer = metrics.timed(f"trace.{name}")

    def __enter__(self) -> Trace:
        self._timer.__enter__()
        self._region.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._region.__exit__(*error)
        self._timer.__exit__(*error)


class StepTrace(Trace):
    """`with StepTrace(name, step_num=i):` is one step: it is marked at the end, and only there.

    It is marked, too, if the block raises. A device loader that is asked for a batch inside marks
    none.
    """

    def __enter__(self) -> StepTrace:
        set_tracer_marked_step(True)
        super().__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        set_tracer_marked_step(False)
        super().__exit__(*error)
        if _mark_step is None:
            raise RuntimeError(
                "StepTrace has no step to mark: no lazy device is loaded. Run `import ltc` first."
            )
        _mark_step()
