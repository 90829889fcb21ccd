"""The frames of every thread of this process."""

from __future__ import annotations

import gc
import sys
from pathlib import Path
from types import FrameType

from ltc.support.process.fork_safe_lock import renewed_lock

_pause = renewed_lock(globals(), "_pause")


def thread_frames() -> dict[int, FrameType]:
    """The innermost frame of every running thread, by the thread's number.

    Python makes the frames while no thread may begin or end.  A garbage collection meanwhile could
    come to a finaliser that lets others run, torch's of a tensor say, and one of them would wait
    for ever for what this thread holds: so none begins.
    """
    with _pause:
        collects = gc.isenabled()
        try:
            gc.disable()
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()


def processor_use(native_id: int | None) -> tuple[bool, int]:
    """Return whether a thread of this process runs, or would, and the clock ticks it has run so far.

    One that waits for a disk would run.  (False, 0) where the system does not say.  Source: proc(5).
    """
    try:
        stat = Path(f"/proc/self/task/{native_id}/stat").read_text()
    except OSError:
        return False, 0
    fields = stat.rpartition(")")[2].split()
    return fields[0] in "RD", int(fields[11]) + int(fields[12])
