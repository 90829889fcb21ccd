"""Where every thread of a process is, printed when it gets SIGUSR1; `python -m ltc dump PID` sends it.

For a program that seems to stand still: which line of yours each thread is at, what it does there,
what it has recorded, and which collectives the replicas of this host are in.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType

from ltc import config
from ltc.debug import metrics
from ltc.device.recording.recorder import devices_in_use
from ltc.distributed import world
from ltc.distributed.transport import session
from ltc.distributed.transport.status_board import HEAD
from ltc.explaining.user_stack import stack_of
from ltc.support.process.thread_frames import thread_frames

SIGNAL = signal.SIGUSR1
_STDERR = 2
# A file in memory by whose name another process knows that this one answers: it is handed on to
# children of fork, as the answer is, and closed where another program takes the process's place.
_SIGN = "ltc-answers-SIGUSR1"


def describe_threads() -> str:
    """Where this process's threads are, and its replicas where it has any.

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
            calls = recorder.op_by_op.calls if recorder.op_by_op else recorder.last.depth
            yield f"{calls} calls {'run' if recorder.op_by_op else 'recorded'} on {device}"


def _replicas() -> Iterator[str]:
    """The status board of the replicas of this host, where this process has met them."""
    found = session.known(world.place())
    if found is not None:
        for lane, communicator in (("programs", found.programs), ("host", found.host)):
            yield f"collectives of {lane}:\n{HEAD}\n{communicator.board.rows()}"


# --- the signal -----------------------------------------------------------------------------------


def answer_signal() -> None:
    """Print that on SIGUSR1 from now on, where nobody else has asked for that signal."""
    is_main = threading.current_thread() is threading.main_thread()
    if config.value("LTC_ANSWER_SIGNAL") and is_main and signal.getsignal(SIGNAL) is signal.SIG_DFL:
        os.memfd_create(_SIGN)  # kept open as long as the process lives
        signal.signal(SIGNAL, _answer)


def _answer(*_: object) -> None:
    # not by sys.stderr, in the midst of whose writing the signal may have come
    os.write(_STDERR, f"{describe_threads()}\n".encode(errors="replace"))


def ask(process: int) -> list[int]:
    """Have a process, and those it has started, print where they are; the numbers of these.

    Raises ProcessLookupError where there is no such process, RuntimeError where none listens: the
    signal ends a process that does not.
    """
    _status(process)  # raises where there is none
    listening = [one for one in [process, *_descendants(process)] if _listens(one)]
    if not listening:
        raise RuntimeError(
            f"Process {process} was asked where it is, and does not listen: it has not imported "
            f"ltc, or set LTC_ANSWER_SIGNAL=0, or uses SIGUSR1 itself. Nothing was sent."
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


def _listens(process: int) -> bool:
    """Whether it is a process of this module, and the signal is caught there."""
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
