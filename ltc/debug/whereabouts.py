"""Print where every thread of a process is when it gets SIGUSR1; `python -m ltc dump PID` sends it.

For a program that seems to stand still: the line of yours at which each thread is, its recorded
calls, and the collectives that the replicas of this host are in.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

from ltc import config
from ltc.device.recording.recorder import devices_in_use
from ltc.distributed import world
from ltc.explaining.user_stack import stack_of
from ltc.support.lazy_module import LazyModule
from ltc.support.observation import metrics
from ltc.support.process.thread_frames import thread_frames

_session = LazyModule("ltc.distributed.transport.session")
_status_board = LazyModule("ltc.distributed.transport.status_board")

SIGNAL = signal.SIGUSR1
_STDERR = 2
# A file in memory by whose name another process knows that this one answers: it is handed on to
# children of fork, as the answer is, and closed where another program takes the process's place.
_SIGN = "ltc-answers-SIGUSR1"


def describe_threads() -> str:
    """Describe where this process's threads are, and its replicas where it has any.

    Example:
        >>> from ltc.debug import whereabouts
        >>> print(whereabouts.describe_threads())  # doctest: +SKIP
        ltc process 4711, replica 0 of 1, after 17 step marks, at 02:14:03
        thread MainThread at train.py:41 in step, called from train.py:77: loss = model(x)
          in wait (threading.py:327), 15 calls recorded on ltc:0
    """
    return "\n".join([_head(), *_threads(), *_replicas()])


def _head() -> str:
    place = world.place()
    marks = metrics.counter_value("MarkStep") or 0
    return (
        f"ltc process {os.getpid()}, replica {place.ordinal} of {place.replicas}, after {marks} "
        f"step marks, at {time.strftime('%H:%M:%S')}"
    )


def _threads() -> Iterator[str]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for number, frame in thread_frames().items():
        innermost = _outside_this_module(frame)
        code = innermost.f_code
        yield f"thread {names.get(number, number)} {_users_line(innermost)}"
        place = f"{os.path.basename(code.co_filename)}:{innermost.f_lineno}"
        yield ", ".join([f"  in {code.co_name} ({place})", *_recordings(number)])


def _outside_this_module(frame: FrameType) -> FrameType:
    """The innermost frame that was there before the signal."""
    while frame.f_code.co_filename in (__file__, thread_frames.__code__.co_filename):
        if frame.f_back is None:
            break
        frame = frame.f_back
    return frame


def _users_line(frame: FrameType) -> str:
    stack = stack_of(frame)
    if not stack:
        return "at no line of the program"
    callers = "".join(f", called from {one.file}:{one.line}" for one in stack[1:])
    return f"at {stack[0]}{callers}: {stack[0].source}"


def _recordings(thread: int) -> Iterator[str]:
    for device in devices_in_use():
        recorder = device.recorders.get(thread)
        if recorder is not None and not recorder.nothing_pending:
            session = recorder.immediate
            if session is None:
                yield f"{recorder.last.depth} calls recorded on {device}"
            elif session.calls_of_step:
                yield f"{session.calls_of_step} calls run on {device}"


def _replicas() -> Iterator[str]:
    """Yield the status boards of the replicas of this host if this process has met them."""
    found = _session.known(world.place()) if _session.is_imported else None
    if found is not None:
        for lane, communicator in (("programs", found.programs), ("host", found.host)):
            yield f"collectives of {lane}:\n{_status_board.HEAD}\n{communicator.board.rows()}"


# --- the signal -----------------------------------------------------------------------------------


def answer_signal() -> None:
    """Print that description on SIGUSR1 from now on, unless the signal has a handler already."""
    is_main = threading.current_thread() is threading.main_thread()
    if config.value("LTC_ANSWER_SIGNAL") and is_main and signal.getsignal(SIGNAL) is signal.SIG_DFL:
        os.memfd_create(_SIGN)  # kept open as long as the process lives
        signal.signal(SIGNAL, _answer)


def _answer(*_: object) -> None:
    # not by sys.stderr, in the midst of whose writing the signal may have come
    os.write(_STDERR, f"{describe_threads()}\n".encode(errors="replace"))


def ask(process: int) -> list[int]:
    """Have a process and its descendants print where they are; return the processes that were asked.

    A process that does not listen itself may be the launcher of others, which Python runs: torchrun,
    `python -m ltc run`. Of a shell or of process 1 the descendants are other people's programs.

    Raises:
        ProcessLookupError: If there is no such process.
        RuntimeError: If none listens: the signal would end a process that does not.
    """
    name = _status(process)["Name"].strip()  # raises where there is none
    if not _listens(process) and not _is_python(process):
        raise RuntimeError(
            f"Process {process} ({name}) is no program of ltc's and no launcher of such programs. "
            f"No signal was sent."
        )
    listening = [one for one in [process, *_descendants(process)] if _listens(one)]
    if not listening:
        raise RuntimeError(
            f"Process {process} cannot be asked where it is: it has not imported ltc, or set "
            f"LTC_ANSWER_SIGNAL=0, or uses SIGUSR1 itself. No signal was sent."
        )
    for one in listening:
        os.kill(one, SIGNAL)
    return listening


def _status(process: int) -> dict[str, str]:
    try:
        with open(f"/proc/{process}/status") as file:
            return dict(line.split(":", 1) for line in file.read().splitlines() if ":" in line)
    except FileNotFoundError:
        raise ProcessLookupError(f"There is no process {process} on this machine.") from None


def _is_python(process: int) -> bool:
    """Return True if the process runs a Python of this user's."""
    try:
        return "python" in os.path.basename(os.readlink(f"/proc/{process}/exe"))
    except OSError:  # ended, or another user's
        return False


def _listens(process: int) -> bool:
    """Return True if the process runs this module and catches the signal here."""
    try:
        caught = int(_status(process)["SigCgt"], 16) >> (SIGNAL - 1) & 1
        return bool(caught) and any(map(_is_sign, os.scandir(f"/proc/{process}/fd")))
    except (ProcessLookupError, FileNotFoundError, PermissionError):  # ended, or another user's
        return False


def _is_sign(descriptor: os.DirEntry[str]) -> bool:
    try:
        return os.readlink(descriptor.path).startswith(f"/memfd:{_SIGN}")
    except FileNotFoundError:  # closed meanwhile
        return False


def _descendants(process: int) -> list[int]:
    parents: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            parents.setdefault(int(_status(int(name))["PPid"]), []).append(int(name))
        except ProcessLookupError:  # it has just ended
            continue
    found, waiting = [], [process]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return found
