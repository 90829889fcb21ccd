"""Works that a device's thread runs from the backend's queue, without Python.

Those that ended there are *settled* by whoever looks next: nobody tells Python by itself.
"""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Sequence
from typing import Any, Protocol

from ltc import config
from ltc.backends.interface import Launch, LaunchQueue
from ltc.runtime import core_reservation
from ltc.runtime.buffer import Execution
from ltc.runtime.transfers import capabilities


class QueueableWork(Protocol):
    """One launch.

    execution     ends with the work, with an error if need be
    usual_seconds  what its program took the last time
    waits          for the runs of that
    needs_python  whether no queue can run it, whatever its inputs
    """

    execution: Execution

    @property
    def usual_seconds(self) -> float: ...

    @property
    def waits(self) -> core_reservation.Waits: ...

    @property
    def needs_python(self) -> bool: ...

    def __call__(self) -> None:
        """Do it, outside of the queue; never raises."""

    def launch_for(self, queue: LaunchQueue, queued: Sequence[Any]) -> Launch | None:
        """What the queue is to run, or None where this work needs Python.

        queued  the works there, of the same kind as this one
        """

    def leave_queue(self) -> None:
        """It has not run there; those behind it have left."""

    def end_well(self, nanoseconds: int) -> None:
        """The queue has run it, in so long; said again where it was interrupted."""

    def end_badly(self, failed: int) -> None:
        """It has failed in the queue, which calls the reason by that number."""

    def lose_outputs(self) -> None:
        """It was under way and will not go on: what it may have written half is no value."""


class QueuedWorks:
    """The works of one device that are in its queue and not settled, oldest first.

    queue  there from the first work on that a backend with queues runs
    works  each with its number in the queue
    """

    def __init__(self, lock: threading.RLock) -> None:
        """`lock`: of the executor."""
        self._lock = lock
        # One thread ends a work, again where it was interrupted, or where what the work held
        # reads a tensor as it goes.
        self._settling = threading.RLock()
        self.queue: LaunchQueue | None = None
        self.works: collections.deque[tuple[int, QueueableWork]] = collections.deque()

    def __len__(self) -> int:
        return len(self.works)

    def takes(self, work: QueueableWork) -> bool:
        """Whether the work is in the queue now; the caller holds the lock."""
        if work.needs_python:
            return False  # first: where there is no queue yet, its code has to be compiled
        queue = self.queue or self._new_queue()
        if queue is None:
            return False
        launch = work.launch_for(queue, [queued for _, queued in self.works])
        return launch is not None and self._gives(work, launch)

    def _gives(self, work: QueueableWork, launch: Launch) -> bool:
        """An interrupt at any place leaves the work in the queue and here, or in neither."""
        queue = self.queue
        assert queue is not None
        number = queue.given + 1
        work.execution.come_to_end = functools.partial(self._come_to, number)
        self.works.append((number, work))
        try:
            queue.give(launch)
        finally:
            if queue.given < number:
                self.works.pop()
                work.execution.come_to_end = None
                work.leave_queue()
        return queue.given >= number

    def _new_queue(self) -> LaunchQueue | None:
        make = capabilities().queue if config.value("LTC_QUEUE") else None
        self.queue = make() if make is not None else None
        return self.queue

    def call_back(self) -> None:
        """The thread is to leave the queue once it is through."""
        if self.queue is not None:
            self.queue.call_back()

    def go_on(self) -> None:
        """The thread may stay in the queue again."""
        if self.queue is not None:
            self.queue.go_on()

    # --- how far they are

    @property
    def all_are_done(self) -> bool:
        queue = self.queue
        return not self.works or (queue is not None and self.works[-1][0] <= queue.done)

    @property
    def have_stopped(self) -> bool:
        """Whether one has failed that the thread has not taken back yet."""
        return self.queue is not None and self.queue.has_stopped

    def settle(self) -> None:
        """End the works whose launches are done."""
        queue = self.queue
        if not self.works or queue is None:
            return
        with self._settling:
            while self.works and self.works[0][0] <= queue.done:
                number, work = self.works[0]
                work.end_well(queue.nanoseconds(number))
                self._drop(work)

    def _drop(self, work: QueueableWork) -> None:
        with self._lock:
            if self.works and self.works[0][1] is work:
                self.works.popleft()
            if not self.works:
                self.rest()

    def come_to_first(self) -> None:
        """Block until the oldest work is over or has failed; a processor is left to the caller."""
        with self._lock:
            number = self.works[0][0] if self.works else 0
        queue = self.queue
        if number and queue is not None:
            core_reservation.leave_one_after(queue)
            self._come_to(number)

    def come_to_last(self) -> None:
        """Block until the newest work is over, or one has failed."""
        with self._lock:
            number = self.works[-1][0] if self.works else 0
        if number:
            self._come_to(number)

    def _come_to(self, number: int) -> None:
        queue = self.queue
        assert queue is not None
        while queue.done < number and not queue.has_stopped:
            queue.sleep_until_done(number)
        self.settle()

    # --- where they end otherwise

    def take_back(self) -> tuple[QueueableWork, int, list[QueueableWork]]:
        """One has failed, for the reason of that number; those after it are to be run elsewhere.

        The caller holds the lock, and has settled those before.
        """
        queue = self.queue
        assert queue is not None
        (number, failed), *others = self.works
        reason = queue.failed_call(number)
        for _, work in reversed(others):
            work.leave_queue()
        self.works.clear()
        queue.restart()
        return failed, reason, [work for _, work in others]

    def rest(self) -> None:
        """Nobody needs any more what a failure left behind; the caller holds the lock."""
        if self.queue is not None:
            self.queue.rest()

    def lost(self) -> list[QueueableWork]:
        """In the child of a fork, which has no such thread: the works that were not done."""
        done = 0 if self.queue is None else self.queue.done
        for number, work in self.works:
            if number <= done:
                work.execution.finish()
        lost = [work for number, work in self.works if number > done]
        for work in reversed(lost[1:]):
            work.leave_queue()
        for work in lost[:1]:
            work.lose_outputs()
        return lost
