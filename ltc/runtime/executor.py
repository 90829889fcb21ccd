"""Runs programs in the order given: short ones at once, long ones on one thread per device.

A backend may begin a launch and return. It is on the device then, which is asked for its end where
a thread needs room or a value; no thread waits for that alone.

A program that took long the last time runs behind the caller, which records the next step
meanwhile; at most LTC_MAX_IN_FLIGHT wait or run.  A hand-over costs about 60 us, so a program
that is over sooner runs in the calling thread, and so does one that this thread will wait for at once,
as core_reservation.py expects.  So does one that calls small kernels from Python:
two threads would pass the interpreter's lock to each other at every call, and where one keeps it,
the other waits for Python's switch interval of 5 ms.
"""

from __future__ import annotations

import collections
import threading
import time
from typing import Protocol

from ltc import config
from ltc.backends.capabilities import LaunchToken
from ltc.runtime import core_reservation
from ltc.runtime.buffer import Execution, Failure
from ltc.support.observation import spans
from ltc.support.process.daemon import started_daemon

SHORT_SECONDS = 0.00025  # below this, waiting costs less than handing over
SHORT_CALL_SECONDS = 0.0001  # likewise, for each kernel called from Python
LONG_WAIT = 20_000  # nanoseconds, from which on waiting for room is shown


class Work(Protocol):
    """One launch.

    Attributes:
        execution: Ends with the work, with an error if need be.
        usual_seconds: The time that its program took the last time.
        waits: The waits for runs of that program.
    """

    execution: Execution

    @property
    def usual_seconds(self) -> float: ...

    @property
    def waits(self) -> core_reservation.Waits: ...

    def __call__(self) -> None:
        """Do it; never raises."""

    def lose_outputs(self) -> None:
        """Give up its outputs: it was under way and will not go on, so they may be half written."""

    def end_on_device(self, error: Exception | None) -> None:
        """End the execution of a launch that the device is done with; never raises."""


class Executor:
    """The launches of one device, first come first run.

    Attributes:
        marks: Number of step marks on the device so far.
    """

    def __init__(self, device: int) -> None:
        self.device, self.marks = device, 0
        self._forget()

    def _forget(self) -> None:
        self._lock = threading.RLock()  # what goes away meanwhile may read a tensor
        self._changed = threading.Condition(self._lock)
        self._waiting: collections.deque[Work] = collections.deque()
        self._running: Work | None = None
        self._without_room = 0  # threads that wait for room
        self._waited = 0  # nanoseconds, since `take_waited`
        self._thread: threading.Thread | None = None
        self._failed: Failure | None = None
        self._inline = threading.RLock()
        self._on_device: collections.deque[tuple[Work, LaunchToken]] = collections.deque()
        self._ending = threading.RLock()  # by which they end in their order

    def run(self, work: Work, long: bool) -> None:
        """Do `work` after everything given before; `long` work runs behind the caller."""
        with self._lock:  # is_idle is true only between two holders of it
            inline = (not long and self.is_idle) or not self._has_thread()
        if inline:
            core_reservation.use_all()
            with self._inline:
                work()
            return
        with self._changed:
            self._waiting.append(work)
            self._changed.notify_all()
        core_reservation.recording_goes_on(work.execution, work.usual_seconds, work.waits)

    def wait_for_room(self) -> None:
        """Block while LTC_MAX_IN_FLIGHT programs wait or run."""
        core_reservation.recording_is_over()
        if self._has_room():
            return
        began = time.perf_counter_ns()
        core_reservation.use_all()
        with self._changed:
            self._without_room += 1
        try:
            while not self._has_room():
                if self._on_device:
                    self._end_oldest()
                    continue
                with self._changed:
                    self._changed.wait_for(lambda: self._has_room() or self._on_device)
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

    def _has_room(self) -> bool:
        most: int = config.value("LTC_MAX_IN_FLIGHT")
        return self._in_flight() < most

    # --- the thread

    @property
    def thread(self) -> int:
        """Identity of the thread; 0 where there is none."""
        return 0 if self._thread is None else self._thread.ident or 0

    def _has_thread(self) -> bool:
        """Return True if the thread is alive; start it if it is not, and if Python can start one."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = started_daemon(self._loop, f"ltc:{self.device} executor")
        return self._thread is not None

    def _loop(self) -> None:
        while True:
            work = self._next()
            with self._inline:
                work()
            del work  # it holds the buffers of its step
            self._note_end()

    def _next(self) -> Work:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting)
            self._running = self._waiting.popleft()
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
        """True if nothing waits and nothing runs."""
        return self._running is None and not self._waiting

    @property
    def is_done(self) -> bool:
        """True if all that was given is over."""
        return self.is_idle and not self._on_device

    def _in_flight(self) -> int:
        while self._on_device and self._is_oldest_finished():
            self._end_oldest()
        return len(self._waiting) + (self._running is not None) + len(self._on_device)

    def wait(self) -> None:
        """Block until everything given so far is over; errors stay with their launches."""
        with self._lock:  # is_idle is true only between two holders of it
            if self.is_idle and not self._on_device:
                return
        began, timeline = spans.now(), spans.timeline
        core_reservation.waits_for(None)
        with self._changed:
            self._changed.wait_for(lambda: self.is_idle)
        while self._on_device:
            self._end_oldest()
        if timeline is not None:
            timeline.add("wait", "wait for the device", began, spans.now())

    def wait_within(self, seconds: float) -> None:
        """Block until everything given so far is over, if that usually takes at most so many seconds."""
        with self._lock:
            running = [] if self._running is None else [self._running]
            expected = sum(work.usual_seconds for work in [*running, *self._waiting])
        if 0 < expected <= seconds:
            self.wait()

    # --- what is on the device

    def begun(self, work: Work, token: LaunchToken) -> None:
        """Note a launch that the device has begun: it ends in its turn, when that is asked for."""
        self._on_device.append((work, token))
        work.execution.begun(self)

    def end_until(self, execution: Execution) -> None:
        """Block until a launch that the device has begun, and all before it, are over."""
        while not execution.done:
            self._end_oldest()

    def _is_oldest_finished(self) -> bool:
        with self._ending:
            return bool(self._on_device) and self._on_device[0][1].is_finished()

    def _end_oldest(self) -> None:
        with self._ending:
            if not self._on_device:
                return  # another thread was first
            work, token = self._on_device[0]
            error = None
            try:
                token.wait()
            except Exception as raised:
                error = raised
            self._on_device.popleft()
            work.end_on_device(error)

    # --- failures

    def note_failure(self, failure: Failure) -> None:
        """Remember a failure that was not reported yet; the first one is the cause of the others."""
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
        lost = [*(work for work, _ in self._on_device), *self._waiting]
        if self._running is not None:
            self._running.lose_outputs()
            lost.append(self._running)
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
