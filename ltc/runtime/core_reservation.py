"""Whose the processors are: the running program's, or also the thread's that records the next step.

A program has a thread for every processor. A thread that goes on recording beside it would be
given the processor of one of them in the midst of a task, and the whole kernel would wait for that
task. So for as long as recording usually takes, the program leaves one processor alone.
"""

from __future__ import annotations

import threading
import time

from ltc import config
from ltc.backends.interface import LaunchQueue
from ltc.runtime.transfers import capabilities
from ltc.support.process import processors

LONGEST = 40_000_000  # nanoseconds that are left at once: a guess may be wrong, an LSTM takes 30 ms


class _Recording(threading.local):
    since: int | None = None  # CPU time of this thread when it went on recording


_this_thread = _Recording()
_usual = 0  # nanoseconds of CPU that a thread took the last time, from one launch to the next
_is_left = False  # whether programs may have been told to leave one


def recording_goes_on() -> None:
    """The calling thread has handed a program over, and records the next one beside it."""
    _this_thread.since = time.thread_time_ns()
    leave_one()


def recording_is_over() -> None:
    """The calling thread has recorded: how long it computed is what it usually takes.

    Time that it slept or waited does not count, nor does recording with nothing beside it.
    """
    global _usual
    since = _this_thread.since
    if since is not None:
        _this_thread.since = None
        _usual = min(time.thread_time_ns() - since, LONGEST)


def leave_one() -> None:
    """A thread is about to record beside the programs that run."""
    global _is_left
    if _is_wanted():
        _is_left = True
        _leave(time.monotonic_ns() + _usual)


def leave_one_after(queue: LaunchQueue) -> None:
    """The thread that waits for the queue's next launch records beside the one after it."""
    global _is_left
    if _is_wanted():
        _is_left = True
        queue.leave_processor_after_next(_usual)


def _is_wanted() -> bool:
    """Of many processors one is free in any case."""
    return processors.are_few() and config.value("LTC_RESERVE_CORE")


def use_all() -> None:
    """The thread that recorded waits for a program, or runs it itself."""
    global _is_left
    if _is_left:
        _is_left = False
        _leave(0)


def _leave(until: int) -> None:
    leave = capabilities().leave_processor
    if leave is not None:
        leave(until)
