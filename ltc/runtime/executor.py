"""Runs programs in the order given: short ones at once, long ones on one thread per device.

A program that took long the last time runs behind the caller, which records the next step
meanwhile; at most LTC_MAX_IN_FLIGHT wait or run.  A hand-over costs about 60 us, so a program
that is over sooner runs in the calling thread.
"""

from __future__ import annotations

import collections
import threading
from typing import Protocol

from ltc import config
from ltc.runtime.buffer import Execution, Failure

SHORT_SECONDS = 0.001  # below this, waiting costs less than handing over


class Work(Protocol):
    """One launch.

    execution  ends with the work, with an error if need be
    """

    execution: Execution

    def __call__(self) -> None:
        """Do it; never raises."""

    def lose_outputs(self) -> None:
        """It was under way and will not go on: what it may have written half is no value."""


class Executor:
    """The launches of one device, first come first run."""

    def __init__(self, device: int) -> None:
        self.device = device
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._waiting: collections.deque = collections.deque()
        self._running: Work | None = None
        self._thread: threading.Thread | None = None
        self._failed: Failure | None = None
        self._inline = threading.RLock()

    def run(self, work: Work, long: bool) -> None:
        """Do `work` after everything given before; `long` work runs behind the caller."""
        with self._lock:  # _idle is true only between two holders of it
            inline = not long and self._idle()
        if inline:
            with self._inline:
                work()
            return
        with self._changed:
            self._waiting.append(work)
            self._start_thread()
            self._changed.notify_all()

    def wait_for_room(self) -> None:
        """Block while LTC_MAX_IN_FLIGHT programs wait or run."""
        if self._in_flight() and self._in_flight() >= config.value("LTC_MAX_IN_FLIGHT"):
            with self._changed:
                self._changed.wait_for(
                    lambda: self._in_flight() < config.value("LTC_MAX_IN_FLIGHT")
                )

    def _idle(self) -> bool:
        return not self._waiting and self._running is None

    def _in_flight(self) -> int:
        return len(self._waiting) + (self._running is not None)

    def _start_thread(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(
                target=self._loop, name=f"ltc:{self.device} executor", daemon=True
            )
            self._thread.start()

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                work = self._running = self._waiting.popleft()
            with self._inline:
                work()
            del work  # it holds the buffers of its step
            with self._changed:
                self._running = None
                self._changed.notify_all()

    def note_failure(self, failure: Failure) -> None:
        """Remember a failure nobody has seen yet; the first one is the cause of the others."""
        if self.unreported() is None:
            self._failed = failure

    def unreported(self) -> Failure | None:
        """The failure that no caller has heard of, if any."""
        failed = self._failed
        if failed is not None and failed.reported:
            failed = self._failed = None
        return failed

    def wait(self) -> None:
        """Block until everything given so far is over; errors stay with their launches."""
        with self._changed:
            self._changed.wait_for(self._idle)

    def after_fork_in_child(self) -> None:
        """The thread is gone: what it had not done fails, and a new one starts when needed."""
        lost = list(self._waiting)
        if self._running is not None:
            self._running.lose_outputs()
            lost.append(self._running)
        self._forget()
        for work in lost:
            work.execution.finish(Failure(RuntimeError(
                f"This value was being computed on ltc:{self.device} when the process was "
                f"forked, and its thread is not part of the child. Read it, or call "
                f"ltm.wait_device_ops(), before the fork."
            )))


_executors: dict[int, Executor] = {}


def executor_of(device: int) -> Executor:
    return _executors.get(device) or _executors.setdefault(device, Executor(device))


def all_executors() -> list[Executor]:
    return list(_executors.values())
