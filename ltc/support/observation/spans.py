"""Events of a profile, kept as they come; `trace_file.py` makes a file of them.

`timeline` is None nearly always: code with an event to report checks it first, and that is all that
profiling costs then. Times are nanoseconds as time.monotonic_ns() counts them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import get_ident
from typing import Any

MOST_EVENTS = 1_000_000  # about 200 MB; what comes after is counted
MOST_NAMINGS = 8  # of what holds a peak: each takes about a millisecond
timeline: Timeline | None = None  # of whoever profiles this process now
now = time.monotonic_ns


class LaunchRecord:
    """One run of a program.

    Attributes:
        program: The launched program.
        computation: The TimedLaunches of backends/capabilities.py that ran it, which can read
            `stamps` and describe the kernels; None where the backend has none.
            thread: The thread that ran it; None until it has run.
            step: The step of the thread that asked for it.
        tier: "native" or "interpreted".
        inline: True if it ran in the thread that asked for it.
        stamps: The times of timed kernels, as 64-bit words that the backend writes: see `timed` in
        backends/capabilities.py; empty without times.
    """

    __slots__ = (
        "timeline", "program", "computation", "asked_by", "step", "tier", "begin", "end", "thread",
        "stamps",
    )  # fmt: skip

    def __init__(self, timeline: Timeline, program: Any, computation: Any, step: int) -> None:
        self.timeline, self.program, self.step = timeline, program, step
        self.computation = computation
        self.asked_by = get_ident()
        self.tier, self.stamps = "native", b""
        self.begin = self.end = 0
        self.thread: int | None = None

    @property
    def inline(self) -> bool:
        return self.thread == self.asked_by

    def told(self, stamps: bytes) -> None:
        """Take the kernels' times from the backend."""
        self.stamps = stamps

    def ran(self, begin: int, end: int, thread: int) -> None:
        """Note the end of the run."""
        self.begin, self.end, self.thread = begin, end, thread
        self.timeline.keep_launch(self)


@dataclass(frozen=True)
class Peak:
    """The most memory that a device's buffers held, and these buffers.

    Attributes:
        at, step: The time, and the step.
        program: The program that was about to run, by `computation`, in its own block of memory.
        inputs: (identity, type) of the buffers that it reads.
        outputs: (identity, type) of the buffers that it makes.
    """

    nbytes: int
    at: int
    step: int
    program: Any
    computation: Any
    inputs: tuple[tuple[int, Any], ...]
    outputs: tuple[tuple[int, Any], ...]


class Span:
    """`with timeline.span("upload", "upload", bytes=12):` keeps the duration of the block."""

    __slots__ = ("_timeline", "_category", "_name", "_args", "_begin")

    def __init__(self, timeline: Timeline, category: str, name: str, args: dict[str, Any]) -> None:
        self._timeline, self._category, self._name, self._args = timeline, category, name, args

    def __enter__(self) -> Span:
        self._begin = now()
        return self

    def __exit__(self, *error: object) -> None:
        self._timeline.add(self._category, self._name, self._begin, now(), self._args)


class CallSpan(Span):
    """The span of one call of a function that ltc.compile made: a step, in a thread that marks
    none.
    """

    __slots__ = ()

    def __exit__(self, *error: object) -> None:
        self._timeline.end_unmarked(now())
        super().__exit__(*error)


class Timeline:
    """The events of one process from `begin` on.

    Attributes:
        events: (category, name, thread, begin, end, args); the end of an instant is None.
        launches: The launches that have ended.
        calls: (KernelFacts, thread, begin, end, step) of calls that ran one by one.
        memory: (time, device, bytes that its buffers hold).
        peaks: The peak of each device.
        steps: (number, thread, begin, begin of its mark, end).
        threads: The name of each thread with an event.
        dropped: Events beyond MOST_EVENTS.
    """

    def __init__(
        self,
        device_bytes: Callable[[], Sequence[tuple[int, int]]] = tuple,
        name_buffers: Callable[[], None] = lambda: None,
    ) -> None:
        """Begin the timeline.

        Args:
            device_bytes: Returns (device, bytes that its buffers hold) at a step's end.
            name_buffers: Called at the end of a step with a new peak, a few times.
        """
        self.begin, self.epoch, self.process = now(), time.time_ns(), os.getpid()
        self.end = 0
        self.events: list[tuple[str, str, int, int, int | None, dict[str, Any] | None]] = []
        self.launches: list[LaunchRecord] = []
        self.calls: list[tuple[Any, int, int, int, int]] = []
        self.memory: list[tuple[int, int, int]] = []
        self.peaks: dict[int, Peak] = {}
        self.steps: list[tuple[int, int, int, int, int]] = []
        self.threads: dict[int, str] = {}
        self.dropped = 0
        self._device_bytes, self._name_buffers = device_bytes, name_buffers
        self._peaks_named, self._times_named = 0, 0
        self._marks: set[int] = set()  # threads that mark steps
        self._number_of_step: dict[int, int] = {}
        self._begin_of_step: dict[int, int] = {}

    def _has_room(self) -> bool:
        if len(self.events) + len(self.launches) + len(self.calls) < MOST_EVENTS:
            return True
        self.dropped += 1
        return False

    def name_thread(self, thread: int) -> None:
        if thread not in self.threads:
            names = {one.ident: one.name for one in threading.enumerate()}
            self.threads[thread] = names.get(thread, f"thread {thread}")

    # --- events

    def add(
        self, category: str, name: str, begin: int, end: int | None,
        args: dict[str, Any] | None = None, thread: int | None = None,
    ) -> None:  # fmt: skip
        """Something of the calling thread, or of another one; an instant where `end` is None."""
        if self._has_room():
            thread = get_ident() if thread is None else thread
            if thread not in self.threads:
                self.name_thread(thread)
            self.events.append((category, name, thread, begin, end, args))

    def span(self, category: str, name: str, **args: Any) -> Span:
        return Span(self, category, name, args)

    def called(self, facts: Any, begin: int, end: int) -> None:
        """A call has run by itself, in the calling thread; `facts`: its KernelFacts."""
        if self._has_room():
            thread = get_ident()
            if thread not in self.threads:
                self.name_thread(thread)
            step = self._number_of_step.get(thread, 0)
            self.calls.append((facts, thread, begin, end, step))

    def call(self, name: str) -> CallSpan:
        """`with` this around a call that may be replayed."""
        return CallSpan(self, "call", name, {})

    # --- steps

    def end_step(self, mark: int) -> None:
        """End the calling thread's step; its mark began at `mark`."""
        self._marks.add(get_ident())
        self._end_step(mark)

    def end_unmarked(self, mark: int) -> None:
        """End a step in a thread that marks none, such as a call of a function of ltc.compile."""
        if get_ident() not in self._marks:
            self._end_step(mark)

    def _end_step(self, mark: int) -> None:
        thread, end = get_ident(), now()
        number = self._number_of_step.get(thread, 0)
        begin = self._begin_of_step.get(thread, self.begin)
        self._number_of_step[thread], self._begin_of_step[thread] = number + 1, end
        if self._has_room():
            self.name_thread(thread)
            self.steps.append((number, thread, begin, mark, end))
            self.memory += [(end, *held) for held in self._device_bytes()]
            self._name_holders()

    def _name_holders(self) -> None:
        highest = sum(peak.nbytes for peak in self.peaks.values())
        if highest > self._peaks_named and self._times_named < MOST_NAMINGS:
            self._peaks_named, self._times_named = highest, self._times_named + 1
            self._name_buffers()

    @property
    def step(self) -> int:
        """The number of the calling thread's step, counted from 0."""
        return self._number_of_step.get(get_ident(), 0)

    # --- launches

    def ask(
        self,
        program: Any,
        computation: Any,
        device: int,
        nbytes: int,
        inputs: Sequence[Any],
        outputs: Sequence[Any],
    ) -> LaunchRecord:
        """Note that a program is about to be launched; return the record of the launch.

        Args:
            computation: A TimedLaunches of it, or None.
            nbytes: The bytes that the device's buffers hold, with the program's block.
        """
        step, moment = self._number_of_step.get(get_ident(), 0), now()
        if self.is_peak(device, nbytes):
            held = [tuple([(id(one), one.key) for one in buffers]) for buffers in (inputs, outputs)]
            self.peaks[device] = Peak(nbytes, moment, step, program, computation, *held)
        if len(self.memory) < MOST_EVENTS:
            self.memory.append((moment, device, nbytes))
        return LaunchRecord(self, program, computation, step)

    def is_peak(self, device: int, nbytes: int) -> bool:
        """Return True if a device's buffers have never held so many bytes before."""
        peak = self.peaks.get(device)
        return peak is None or nbytes > peak.nbytes

    def keep_launch(self, launch: LaunchRecord) -> None:
        if self._has_room():
            assert launch.thread is not None
            self.name_thread(launch.thread)
            self.launches.append(launch)


_called_before_profiles: list[Callable[[], object]] = []


def call_before_profiles(function: Callable[[], object]) -> None:
    """Call `function` whenever a timeline begins to get all events."""
    _called_before_profiles.append(function)


def watch(one: Timeline | None) -> None:
    """Report all events to this timeline from now on; None: to none."""
    global timeline
    timeline = one
    for function in _called_before_profiles if one is not None else ():
        function()


os.register_at_fork(after_in_child=lambda: watch(None))
