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


def wants_processor(native_id: int) -> bool:
    """Return True if a thread of this process runs, or would; False if the system does not say."""
    try:
        stat = Path(f"/proc/self/task/{native_id}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] == "R"
