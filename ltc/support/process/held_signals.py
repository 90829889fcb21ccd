"""Signals are delivered between two steps of ltc's work, so that Ctrl-C leaves none of them half done.

Python calls the handler of a signal in the main thread wherever it looks for signals, and the handler's
error comes out there: in the middle of a recorded call, of an optimizer's step, or in C++ that takes no
exception and ends the process (torch asks a device written in Python for its type, and Python looks for
signals meanwhile).

So an object of ltc's takes the place of each handler. Where the program's own code is at work it calls
the handler at once. Elsewhere, and in a section that must not be interrupted (`with held`), it notes the
signal. The handler is then called at the beginning of the next mark or read, or when the signal is sent
again: a thread does so now and then until the program's own code is at work. If the main thread waits,
the thread lets it wait, and after PATIENCE_SECONDS the handler is called there and interrupts the wait.

No handler is called where its error would be lost: in a `__del__`, in a callback of weakref, while the
process forks (Python prints an error of a hook of `os.register_at_fork` and goes on), and while torch or
ltc imports, since modules try one thing after another and take any error for "it is not there".
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # those of `signal` make enums: ten times the time
import _thread  # starts a thread without locks, which the main thread might be holding
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from operator import is_
from pathlib import Path
from threading import get_ident
from types import FrameType
from typing import Any

import torch

from ltc import config
from ltc.support.process.thread_frames import thread_frames

# Those whose handlers raise, where a program has any. SIGUSR1 asks where the threads are.
_NUMBERS = tuple(
    int(getattr(signal, name))
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR2", "SIGVTALRM")
    if hasattr(signal, name)
)
POLL_SECONDS = 0.001
LONGEST_POLL_SECONDS = 0.032  # between two signals: each may disturb a system call of a library's
PATIENCE_SECONDS = 0.05  # without any work: then the main thread waits for something
INSISTS_SECONDS = 1.0  # a signal that is sent again after so long is delivered at once

# Packages that work for their caller, and may take an error of a handler's for one of their own.
_WORKERS = {__name__.partition(".")[0], "torch", "numpy", "llvmlite", "tqdm"}
_LOCKING = "threading"  # an error between two of its instructions releases a lock that nobody holds
_LOSING_ERRORS = ("weakref", "_weakrefset")
_OPTIMIZER = torch.optim.Optimizer.profile_hook_step.__globals__
_OF_NAMED_TUPLES = "namedtuple_"  # begins the name of the module that `collections` makes for each

Handler = Callable[[int, FrameType | None], Any]


class Later:
    """Takes the place of a handler of the program's, which it calls at once or later."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        held.came(number, self.handler, frame)


class _Held:
    """The signals that have come and were not delivered yet.

    As a context manager: a section in which no handler is called, however long it takes.
    """

    def __init__(self) -> None:
        self._main = threading.main_thread().ident
        self._is_on = config.value("LTC_HOLD_SIGNALS")
        self._depth = 0  # sections that the main thread is in
        # number -> its handler, since when, the process it was sent to
        self._waiting: dict[int, tuple[Handler, float, int]] = {}
        self._sent_again: set[int] = set()  # the next signal of these comes from `_send_again`
        self._wait: tuple[int, int] | None = None  # the instruction that is to be interrupted
        self._known: list[Any] = [None] * len(_NUMBERS)  # the handlers as they were left

    def __enter__(self) -> None:
        if get_ident() == self._main:  # no other thread is interrupted
            if not self._depth:
                self.watch()
            self._depth += 1

    def __exit__(self, *error: Any) -> None:
        if get_ident() == self._main:
            self._depth -= 1

    def deliver(self) -> None:
        """Call the handlers of signals that wait, where their errors may come out of this call.

        The program has called ltc, which has not begun with anything: a handler may call ltc, too.
        """
        if self._waiting and get_ident() == self._main and not self._depth:
            frame = sys._getframe(1)
            for number in list(self._waiting) if _can_take_error(frame) else ():
                handler, *_ = self._waiting.pop(number)
                handler(number, frame)

    def watch(self) -> None:
        """Take the place of the handlers that the program has by now; in the main thread alone."""
        as_left = map(is_, map(_signal.getsignal, _NUMBERS), self._known)
        if get_ident() != self._main or all(as_left):
            return
        for number in _NUMBERS:
            handler = _signal.getsignal(number)
            if self._is_on and callable(handler) and handler.__class__ is not Later:
                _signal.signal(number, Later(handler))
        self._known = [_signal.getsignal(number) for number in _NUMBERS]

    def came(self, number: int, handler: Handler, frame: FrameType | None) -> None:
        """Deliver a signal, or note it; `frame`: where the main thread is."""
        now, waiting = time.monotonic(), self._waiting.get(number)
        is_sent_again = number in self._sent_again
        self._sent_again.discard(number)
        wait, self._wait = self._wait, None
        insists = waiting is not None and not is_sent_again and now - waiting[1] > INSISTS_SECONDS
        is_late = waiting is None and is_sent_again  # it was delivered meanwhile
        is_free = not self._depth and not is_late and _can_take_error(frame)
        is_waiting = wait is not None and wait == _instruction_of(frame)
        if insists or (is_free and (is_waiting or _is_of_program(frame))):
            self._waiting.pop(number, None)
            handler(number, frame)
        elif waiting is None and not is_late:
            self._waiting[number] = handler, now, os.getpid()
            _thread.start_new_thread(self._send_again, (number,))

    def _send_again(self, number: int) -> None:
        """In a thread, until the signal was delivered."""
        sent = self._waiting.get(number)
        place, since, poll = _place_of_main_thread(), time.monotonic(), POLL_SECONDS
        while sent is not None:
            time.sleep(poll)
            now = _place_of_main_thread()
            waits = now is not None and now == place
            instruction = _instruction_of(thread_frames().get(self._main or 0))
            if self._waiting.get(number) is not sent:  # looked at last: it is not sent once more
                return
            if self._depth or (waits and time.monotonic() - since < PATIENCE_SECONDS):
                continue
            self._wait = instruction if waits else None
            self._sent_again.add(number)
            signal.pthread_kill(self._main or 0, number)
            time.sleep(POLL_SECONDS)  # being sent a signal is work, too
            place, since = _place_of_main_thread(), time.monotonic()
            poll = min(2 * poll, LONGEST_POLL_SECONDS)

    def after_fork_in_child(self) -> None:
        """The thread that forked is the main one, and no other is there."""
        self._depth = self._depth - 1 if get_ident() == self._main else 0
        self._main = get_ident()
        for number, (*_, process) in list(self._waiting.items()):
            if process != os.getpid():  # else it came to the child, in a hook before this one
                del self._waiting[number]


def _can_take_error(frame: FrameType | None) -> bool:
    """True if no caller drops an error raised here, and no optimizer's step is under way.

    Args:
        frame: The innermost one.
    """
    is_importing = False
    while frame is not None:
        name, package = frame.f_code.co_name, _package_of(frame)
        if name == "__del__" or package in _LOSING_ERRORS or (is_importing and package in _WORKERS):
            return False
        if name == "wrapper" and frame.f_globals is _OPTIMIZER:
            return False
        is_importing = package == "importlib"
        frame = frame.f_back
    return True


def _is_of_program(frame: FrameType | None) -> bool:
    """True if the program's own code is at work, or Python's library for it."""
    while frame is not None:
        package = _package_of(frame)
        if package in _WORKERS or package == _LOCKING:
            return False
        if package not in sys.stdlib_module_names and not package.startswith(_OF_NAMED_TUPLES):
            return True
        frame = frame.f_back
    return True


def _package_of(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "ltc")  # only kernels have none
    return name.partition(".")[0]


def _instruction_of(frame: FrameType | None) -> tuple[int, int] | None:
    return None if frame is None else (id(frame), frame.f_lasti)


def _place_of_main_thread() -> tuple[float, str] | None:
    """Return a value that stays the same while the main thread waits, but not for a processor; else
    None.
    """
    main = threading.main_thread()
    if not hasattr(time, "pthread_getcpuclockid") or not os.path.exists("/proc/self/task"):
        return 0.0, str(_instruction_of(thread_frames().get(main.ident or 0)))
    try:
        # of a child of fork `native_id` may be that of its parent's thread; the first is the process
        stat = Path(f"/proc/self/task/{os.getpid()}/stat").read_text()
        seconds = time.clock_gettime(time.pthread_getcpuclockid(main.ident or 0))
    except OSError:
        return None
    state = stat.rpartition(")")[2].split()[0]
    return None if state == "R" else (seconds, state)


held = _Held()
# Of the hooks before a fork the last registered runs first, of those behind it the first: the hooks
# of modules that were imported before run within.
os.register_at_fork(
    before=held.__enter__,
    after_in_parent=held.__exit__,
    after_in_child=held.after_fork_in_child,
)
