"""Closures that run after a step: in the caller's thread, or behind it in one of their own."""

from __future__ import annotations

import atexit
import functools
import os
import threading
import traceback
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from ltc import config
from ltc.device.call_observer import note_obstacle
from ltc.support.observation import spans
from ltc.support.process.daemon import started_daemon
from ltc.tracebacks import shorten

Closure = Callable[[], Any]

IDLE_SECONDS = 3.0  # how long the thread waits for more before it ends


class ClosureHandler(ABC):
    """Something that runs closures."""

    @abstractmethod
    def run(self, closure: Closure) -> None:
        """Run the closure, now or later."""

    def run_all(self, closures: Iterable[Closure]) -> None:
        """Run each of them, in order."""
        for closure in closures:
            self.run(closure)


class AsyncClosureHandler(ClosureHandler):
    """Runs closures in order in one thread, which starts when needed and ends when idle.

    The first exception stops the thread. It is raised, once, to the next caller of `run` or
    `wait`; closures queued behind the one that raised stay queued and go on after that. A program
    that ends waits for its closures; a child of fork has none of its parent's.
    """

    def __init__(self, max_queue_size: int | None = None):
        """max_queue_size: closures that may wait before `run` has to; None: LTC_MAX_ASYNC_QUEUE."""
        self._max_queue_size = max_queue_size
        self._reset()
        _handlers.add(self)

    def _reset(self) -> None:
        self._closures: deque[Closure] = deque()
        self._changed = threading.Condition()
        self._worker: threading.Thread | None = None
        self._running = False  # whether the worker is inside a closure
        self._error: BaseException | None = None

    def run(self, closure: Closure) -> None:
        """Queue the closure, waiting for room.

        Raises:
            RuntimeError: Caused by the exception of an earlier closure, if that stopped the thread;
                then this closure is not queued.
        """
        with self._changed:
            self._raise_error()
            # A closure that queues another must not wait for itself.
            if threading.current_thread() is not self._worker:
                self._wait_while(lambda: len(self._closures) >= self._capacity())
            self._closures.append(closure)
            self._start_worker()
            self._changed.notify_all()

    def _capacity(self) -> int:
        most: int = self._max_queue_size or config.value("LTC_MAX_ASYNC_QUEUE")
        return most

    def wait(self) -> None:
        """Wait until every queued closure has run; raises like `run`."""
        with self._changed:
            self._raise_error()
            # A closure that waits for all must not wait for itself.
            if threading.current_thread() is not self._worker:
                self._wait_while(lambda: self._closures or self._running)

    def is_idle(self) -> bool:
        """Return True if nothing is queued, nothing runs, and no error waits for a caller."""
        with self._changed:
            return not (self._closures or self._running or self._error)

    def _wait_while(self, condition: Callable[[], Any]) -> None:
        while condition():
            self._start_worker()  # an error, raised to another caller, may have stopped it
            if self._worker is not None:
                self._changed.wait()
            self._raise_error()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            self._changed.notify_all()  # others who wait see that the thread has to go on
            message = "Cannot run asynchronous closure due to previously raised exception"
            raise RuntimeError(message) from error

    def _start_worker(self) -> None:
        """Start the worker thread; if Python starts none, the calling thread runs the queue."""
        if self._worker is not None:
            return
        # A daemon, because Python would otherwise wait until it is idle for long enough;
        # _wait_for_all waits for the closures alone.
        self._worker = started_daemon(self._work, "ltc closures")
        if self._worker is None:
            self._worker = threading.current_thread()
            self._work(idle_seconds=0.0)

    def _work(self, idle_seconds: float | None = None) -> None:
        while (closure := self._next(idle_seconds)) is not None:
            try:
                _run(closure)
            except BaseException as error:  # whoever waits next gets it
                self._finish(error)
                return
            self._finish(None)

    def _next(self, idle_seconds: float | None) -> Closure | None:
        seconds = IDLE_SECONDS if idle_seconds is None else idle_seconds
        with self._changed:
            self._changed.wait_for(lambda: self._closures, timeout=seconds)
            if not self._closures:
                self._worker = None
                return None
            self._running = True
            self._changed.notify_all()
            return self._closures.popleft()

    def _finish(self, error: BaseException | None) -> None:
        with self._changed:
            self._running, self._error = False, error
            if error is not None:
                self._worker = None
            self._changed.notify_all()


_handlers: weakref.WeakSet[AsyncClosureHandler] = weakref.WeakSet()


def _wait_for_all() -> None:
    for handler in list(_handlers):
        while not handler.is_idle():
            try:
                handler.wait()
            except RuntimeError as error:  # nobody is left to raise it to
                shorten(error)
                traceback.print_exception(error)


def _reset_all() -> None:
    for handler in list(_handlers):
        handler._reset()


atexit.register(_wait_for_all)
os.register_at_fork(after_in_child=_reset_all)


def _run(closure: Closure) -> None:
    if spans.timeline is None:
        closure()
        return
    function = closure.func if isinstance(closure, functools.partial) else closure
    with spans.timeline.span("closure", getattr(function, "__qualname__", repr(function))):
        closure()


class StepClosures:
    """The closures that wait for the end of one device's step."""

    def __init__(self, handler: ClosureHandler | None = None):
        self._handler = handler or AsyncClosureHandler()
        self._closures: deque[Closure] = deque()
        self._async_closures: deque[Closure] = deque()

    def add(self, closure: Callable, args: tuple = (), run_async: bool = False) -> None:
        """Have `closure(*args)` run at the end of the step; `args` stay alive until then."""
        note_obstacle("adds a step closure")
        queue = self._async_closures if run_async else self._closures
        queue.append(functools.partial(closure, *args))

    def run(self) -> None:
        """Run what was added before this call: hand the asynchronous ones over, then the others.

        They run in the order of their adding; one added by a closure waits for the next step.
        Where one raises, those behind it wait for the next step too.
        """
        if not self._async_closures and not self._closures:
            return
        asynchronous, synchronous = len(self._async_closures), len(self._closures)
        for _ in range(asynchronous):
            self._handler.run(self._async_closures[0])
            self._async_closures.popleft()  # only now: a handler that raises has not taken it
        for _ in range(synchronous):
            _run(self._closures.popleft())

    def wait(self) -> None:
        """Wait until the asynchronous closures handed over have run; raises their error."""
        if isinstance(self._handler, AsyncClosureHandler):
            self._handler.wait()
