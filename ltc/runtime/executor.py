"""Runs programs in the order given: short ones at once, long ones on one thread per device.

A program that took long the last time runs behind the caller, which records the next step
meanwhile; at most LTC_MAX_IN_FLIGHT wait or run.  A hand-over costs about 60 us, so a program
that is over sooner runs in the calling thread, and so does one that this thread will wait for at once,
as core_reservation.py expects.  So does one that calls small kernels from Python:
two threads would pass the interpreter's lock to each other at every call, and where one keeps it,
the other waits for Python's switch interval of 5 ms.

The thread stays in the backend's queue, without Python, where it has one: it then needs no
interpreter's lock between programs.  It comes back for what cannot be queued, and where a launch
has failed.
"""

from __future__ import annotations

import collections
import threading
import time

from ltc import config
from ltc.profiling import spans
from ltc.runtime import core_reservation
from ltc.runtime.buffer import Failure
from ltc.runtime.queued_launches import QueueableWork, QueuedWorks
from ltc.support.process.daemon import started_daemon

SHORT_SECONDS = 0.00025  # below this, waiting costs less than handing over
SHORT_CALL_SECONDS = 0.0001  # likewise, for each kernel called from Python
LONG_WAIT = 20_000  # nanoseconds, from which on waiting for room is shown


class Executor:
    """The launches of one device, first come first run."""

    def __init__(self, device: int) -> None:
        self.device = device
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.RLock()  # what goes away meanwhile may read a tensor
        self._changed = threading.Condition(self._lock)
        self._waiting: collections.deque[QueueableWork] = collections.deque()
        self._running: QueueableWork | None = None
        self._queued = QueuedWorks(self._lock)
        self._without_room = 0  # threads that wait for room
        self._waited = 0  # nanoseconds, since `take_waited`
        self._thread: threading.Thread | None = None
        self._failed: Failure | None = None
        self._inline = threading.RLock()

    def run(self, work: QueueableWork, long: bool) -> None:
        """Do `work` after everything given before; `long` work runs behind the caller."""
        if self._queued.works:
            self._queued.settle()
        with self._lock:  # is_idle is true only between two holders of it
            inline = (not long and self.is_idle) or not self._has_thread()
        if inline:
            core_reservation.use_all()
            with self._inline:
                work()
            return
        with self._changed:
            overtakes = self._waiting or self._running is not None
            if overtakes or not self._queued.takes(work):
                self._waiting.append(work)
                self._queued.call_back()
            self._changed.notify_all()
        core_reservation.recording_goes_on(work.execution, work.usual_seconds, work.waits)

    def wait_for_room(self) -> None:
        """Block while LTC_MAX_IN_FLIGHT programs wait or run."""
        core_reservation.recording_is_over()
        if self.is_idle:
            return
        self._queued.settle()
        if self._has_room():
            return
        began = time.perf_counter_ns()
        core_reservation.use_all()
        with self._changed:
            self._without_room += 1
        try:
            while not self._has_room():
                self._wait_for_one()
        finally:
            with self._changed:
                self._without_room -= 1
            self._note_wait(time.perf_counter_ns() - began)

    def _note_wait(self, nanoseconds: int) -> None:
        self._waited += nanoseconds
        if spans.timeline is not None and nanoseconds > LONG_WAIT:
            end = spans.now()
            spans.timeline.add(
                "wait", "wait for room", end - nanoseconds, end, {"for": "programs under way"}
            )

    def take_waited(self) -> int:
        """For how many nanoseconds there was no room since this was last asked."""
        waited, self._waited = self._waited, 0
        return waited

    def _wait_for_one(self) -> None:
        """Block until the next work is over, or earlier."""
        self._queued.come_to_first()
        with self._changed:
            self._changed.wait_for(
                lambda: self._has_room() or (self._queued and not self._queued.have_stopped)
            )

    def _has_room(self) -> bool:
        most: int = config.value("LTC_MAX_IN_FLIGHT")
        return self._in_flight() < most

    # --- the thread

    @property
    def thread(self) -> int:
        """Identity of the thread; 0 where there is none."""
        return 0 if self._thread is None else self._thread.ident or 0

    def _has_thread(self) -> bool:
        """Whether the thread is there; it is started where it is not, and where Python starts one."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = started_daemon(self._loop, f"ltc:{self.device} executor")
        return self._thread is not None

    def _loop(self) -> None:
        while True:
            work = self._next()
            if work is not None:
                with self._inline:
                    work()
                del work  # it holds the buffers of its step
                self._note_end()
            elif self._queued.queue is not None and self._queued.queue.serve():
                self._take_back()

    def _take_back(self) -> None:
        """A launch has failed: those behind it are works of this thread's now."""
        self._queued.settle()
        with self._lock:
            failed, reason, others = self._queued.take_back()
            self._running = failed
            self._waiting.extendleft(reversed(others))
            if self._waiting:
                self._queued.call_back()
        failed.end_badly(reason)
        with self._lock:
            self._queued.rest()
        self._note_end()

    def _next(self) -> QueueableWork | None:
        """The next work for Python; None where there may be something in the queue before."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._queued.queue is not None)
            if not self._waiting or not self._queued.all_are_done:
                return None
            self._running = self._waiting.popleft()
            if not self._waiting:
                self._queued.go_on()
        self._queued.settle()  # whether they failed decides what becomes of this one
        return self._running

    def _note_end(self) -> None:
        with self._changed:
            self._running = None
            if self._without_room:
                core_reservation.leave_one()  # before the thread that now goes on needs it
            self._changed.notify_all()

    # --- what is under way

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, and nothing runs."""
        return self._running is None and not self._waiting and not self._queued.works

    def _in_flight(self) -> int:
        return len(self._waiting) + len(self._queued) + (self._running is not None)

    def wait(self) -> None:
        """Block until everything given so far is over; errors stay with their launches."""
        began, timeline = spans.now(), spans.timeline
        waits = self._in_flight() > 0
        if waits:
            core_reservation.waits_for(None)
        while self._in_flight():
            self._queued.come_to_last()
            with self._changed:
                self._changed.wait_for(self._is_not_at_work)
        if timeline is not None and waits:
            timeline.add("wait", "wait for the device", began, spans.now())

    def _is_not_at_work(self) -> bool:
        """Whether Python has nothing to do for the thread, at once or after a failure."""
        return not self._waiting and self._running is None and not self._queued.have_stopped

    def note_failure(self, failure: Failure) -> None:
        """Remember a failure nobody has seen yet; the first one is the cause of the others."""
        if self.unreported() is None and not failure.reported:
            self._failed = failure

    def unreported(self) -> Failure | None:
        """The failure that no caller has heard of, if any."""
        failed = self._failed
        if failed is not None and failed.reported:
            failed = self._failed = None
        return failed

    def after_fork_in_child(self) -> None:
        """The thread is gone: what it had not done fails, and a new one starts when needed."""
        lost = list(self._waiting)
        if self._running is not None:
            self._running.lose_outputs()
            lost.append(self._running)
        lost += self._queued.lost()
        self._forget()
        for work in lost:
            work.execution.finish(
                Failure(
                    RuntimeError(
                        f"This value was being computed on ltc:{self.device} when the process was "
                        f"forked, and its thread is not part of the child. Read it, or call "
                        f"ltm.wait_device_ops(), before the fork."
                    )
                )
            )


_executors: dict[int, Executor] = {}


def executor_of(device: int) -> Executor:
    return _executors.get(device) or _executors.setdefault(device, Executor(device))


def all_executors() -> list[Executor]:
    return list(_executors.values())
