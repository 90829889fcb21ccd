"""The end of the program: its other threads wait for ever where they next use ltc.

Python ends a thread that asks for the interpreter while it goes down, and where C++ has called Python
for that thread, as torch has for a kernel, this ends the process; so do calls of kernels that torch
takes away by then.
"""

from __future__ import annotations

import os
import threading
import time

from ltc.device.recording import recorder as recording
from ltc.device.recording.entries import STOPPED
from ltc.device.recording.recorder import Device, Recorder, devices_in_use
from ltc.device.recording.sync import closed
from ltc.support.process.thread_frames import processor_use, thread_frames

_MOST_SECONDS = 5.0  # within which a thread that is at work comes to its next call
_REST_SECONDS = 0.2  # one that waits for something else, or works this long without ltc, may not
_WAITING = {closed.__code__, Device._add_recorder.__code__}  # for a lock that is held from here on


def stop_other_threads() -> None:
    """Return once every other thread waits, has rested, or has worked for long without ltc."""
    recording.beginnings.acquire()
    left = [_Left(one) for one in threading.enumerate() if one is not threading.current_thread()]
    while left := [one for one in left if one.is_awaited()]:
        time.sleep(0.001)


class _Left:
    """A thread that is left, and the recorders of it whose locks are held here."""

    def __init__(self, thread: threading.Thread) -> None:
        self.thread = thread
        self.held: list[Recorder] = []
        self.begun = self.rests_since = time.monotonic()
        self.first = self.last = processor_use(thread.native_id)[1]
        self.place: tuple[int, int] | None = None  # the frame and instruction where it may wait

    def is_awaited(self) -> bool:
        """Return True while it may come to a call; of a processor it may get little."""
        if not self.thread.is_alive():
            return False
        self._close_recorders()
        now = time.monotonic()
        runs, ticks = processor_use(self.thread.native_id)
        if runs or ticks > self.last:
            self.rests_since, self.last = now, ticks
        before, self.place = self.place, self._waiting_place()
        if self.place is not None and self.place == before and not runs:
            return (
                False  # with the interpreter free it went no further: it waits for a lock held here
            )
        has_run = (ticks - self.first) / os.sysconf("SC_CLK_TCK")
        most = _MOST_SECONDS if self.held else _REST_SECONDS
        is_at_work = now - self.rests_since < _REST_SECONDS and has_run < most
        return is_at_work and now - self.begun < _MOST_SECONDS

    def _close_recorders(self) -> None:
        """Have its calls take the slow path, and wait there."""
        for device in devices_in_use():
            recorder = device.recorders.get(self.thread.ident or 0)
            if recorder is not None and recorder not in self.held:
                if not recorder.lock.acquire(timeout=_MOST_SECONDS):
                    continue
                self.held.append(recorder)
        for recorder in self.held:
            recorder.cursor, recorder.now = STOPPED, None
            if recorder.immediate is not None:
                recorder.immediate.leave_core()
            recorder.stop_walk()

    def _waiting_place(self) -> tuple[int, int] | None:
        frame = thread_frames().get(self.thread.ident or 0)
        if frame is None or frame.f_code not in _WAITING:
            return None
        return id(frame), frame.f_lasti
