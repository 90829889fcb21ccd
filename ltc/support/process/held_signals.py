"""Signals come out between two steps of ltc's work, so that Ctrl-C leaves none of them half done.

Python calls the handler of a signal in the main thread wherever it looks for signals, and what the
handler raises comes out there: in the middle of a recorded call, of an optimizer's step, or in C++
that takes no exception and ends the process (torch asks a device written in Python for its type,
and Python looks for signals meanwhile).

So a handler of the program's is called later: by a *pending call* of CPython's, which runs between
two instructions and never inside C++, and only where the program's own code is at work.  Where it
is not, a trace function, as debuggers use, tells when it is again.  Where the main thread waits for
something, the handler is called after PATIENCE_SECONDS, and interrupts the wait.

Where an error would be lost, no handler is called: while an object goes, while the process forks
(Python prints what a hook of `os.register_at_fork` raises, and goes on), and while torch or ltc
imports, since modules try one thing after another and take any error for "it is not there".
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # those of `signal` make enums: ten times the time
import _thread  # starts a thread without locks, which the main thread might be holding
import ctypes
import functools
import gc
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
PATIENCE_SECONDS = 0.05  # without any work: then the main thread waits for something
INSISTS_SECONDS = 1.0  # who sends a signal again after so long does not want to wait

# What works for whoever calls it, and may take an error of a handler's for one of its own.
_WORKERS = {__name__.partition(".")[0], "torch", "numpy", "llvmlite", "tqdm"}
# Its locks are let go of by whoever takes for granted to have them: an error in between is another.
_LOCKING = "threading"
_OPTIMIZER = torch.optim.Optimizer.profile_hook_step.__globals__
_OF_NAMED_TUPLES = "namedtuple_"  # begins the name of the module that `collections` makes for each

_add_pending_call = ctypes.pythonapi.Py_AddPendingCall
_add_pending_call.argtypes = [ctypes.c_void_p, ctypes.py_object]
# Calls `__bool__`; a pending call is a C function that returns 0, or -1 where it raises.
_IS_TRUE = ctypes.cast(ctypes.pythonapi.PyObject_IsTrue, ctypes.c_void_p)

Handler = Callable[[int, FrameType | None], Any]


class Later:
    """Takes the place of a handler of the program's, which it calls later."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        held.came(number, self.handler, frame)


class _Held:
    """The signals that have come and whose handlers are still to be called.

    As a context manager: within it none is, however long it takes.
    """

    def __init__(self) -> None:
        self._main = threading.main_thread().ident
        self._is_on = config.value("LTC_HOLD_SIGNALS")
        self._depth = 0
        # number -> its handler, since when, the process it was sent to
        self._waiting: dict[int, tuple[Handler, float, int]] = {}
        self._wait: tuple[int, int] | None = None  # the instruction that is to be interrupted
        self._known: list[Any] = [None] * len(_NUMBERS)  # the handlers as they were left
        self._may_ask = True  # taken by `_ask`, given back by `__bool__` or where it is at work

    def __enter__(self) -> None:
        if get_ident() == self._main:  # no other thread is interrupted
            if not self._depth:
                self.watch()
            self._depth += 1

    def __exit__(self, *error: Any) -> None:
        if get_ident() == self._main:
            self._depth -= 1
            if self._waiting and not self._depth:
                self._ask()

    def begin(self) -> None:
        """Take the place of all handlers, and of each that the program sets from now on."""
        self.watch()
        if self._is_on:
            signal.signal = _set_handler

    def watch(self) -> None:
        """Take the place of the handlers that the program has by now; in the main thread alone."""
        as_left = map(is_, map(_signal.getsignal, _NUMBERS), self._known)
        if get_ident() != self._main or all(as_left):
            return
        for number in _NUMBERS:
            handler = _signal.getsignal(number)
            if (later := self.later(number, handler)) is not handler:
                _signal.signal(number, later)
        self._known = [_signal.getsignal(number) for number in _NUMBERS]

    def later(self, number: int, handler: Any) -> Any:
        """What takes the place of a handler; the handler itself where nothing does."""
        is_ours = self._is_on and number in _NUMBERS and callable(handler)
        return Later(handler) if is_ours and handler.__class__ is not Later else handler

    def came(self, number: int, handler: Handler, frame: FrameType | None) -> None:
        """A signal is here; `frame`: what the main thread is in."""
        now = time.monotonic()
        waiting = self._waiting.get(number)
        insists = waiting is not None and now - waiting[1] > INSISTS_SECONDS
        wait, self._wait = self._wait, None
        if insists or (wait is not None and wait == _instruction_of(frame)):
            self._waiting.pop(number, None)
            handler(number, frame)
        elif waiting is None:  # else it was sent by `_ask_again`, or twice
            self._waiting[number] = handler, now, os.getpid()
            self._ask()
            _thread.start_new_thread(self._ask_again, (number,))

    def _ask(self) -> None:
        """Have Python call `__bool__` in the main thread, unless it is about to or is at it.

        Python 3.11 with a trace function, whether ours or a debugger's, never comes out of a pending
        call that calls a function while another pending call is there.
        """
        if not self.__dict__.pop("_may_ask", False):
            return
        # `__bool__` is at work until Python has told a trace function that it returns
        if self._is_at_work() or _add_pending_call(_IS_TRUE, self) != 0:  # or there was no room
            self._may_ask = True

    def _is_at_work(self) -> bool:
        """Whether the main thread is within `__bool__`; none comes to be while `_may_ask` is taken."""
        is_main = get_ident() == self._main
        frame = sys._getframe() if is_main else thread_frames().get(self._main or 0)
        while frame is not None and frame.f_code is not _Held.__bool__.__code__:
            frame = frame.f_back
        return frame is not None

    def __bool__(self) -> bool:
        """Call a handler that waits, if this is the place; False. See `_IS_TRUE`."""
        try:
            if self._waiting and not self._depth:
                self._call_or_trace(sys._getframe(1))
        finally:
            self._may_ask = True
        return False

    def _call_or_trace(self, frame: FrameType) -> None:
        place, is_here = _place_of_program(frame)
        if is_here:
            self._call_handler(frame)
        elif place is not None and sys.gettrace() is None:  # no debugger is at work
            place.f_trace, place.f_trace_opcodes = self._traced, True
            sys.settrace(self._traced)

    def _traced(self, frame: FrameType, event: str, argument: Any) -> Any:
        """What Python calls at each instruction of the place, and at the start of functions."""
        if not self._waiting:
            sys.settrace(None)
        elif not self._depth and _place_of_program(frame)[1]:
            sys.settrace(None)
            self._call_handler(frame)
        else:
            return self._traced if frame.f_trace is not None else None
        frame.f_trace_opcodes = False
        return None

    def _call_handler(self, frame: FrameType) -> None:
        number = next(iter(self._waiting))
        handler, *_ = self._waiting.pop(number)
        if self._waiting:
            self._ask()
        handler(number, frame)

    def _ask_again(self, number: int) -> None:
        """In a thread, until the handler was called."""
        place, since = _place_of_main_thread(), time.monotonic()
        while number in self._waiting:
            time.sleep(POLL_SECONDS)
            now = _place_of_main_thread()
            if now is None or now != place:
                place, since = now, time.monotonic()
            elif not self._depth and time.monotonic() - since > PATIENCE_SECONDS:
                self._wait = _instruction_of(thread_frames().get(self._main or 0))
                since = time.monotonic()
                signal.pthread_kill(self._main or 0, number)
            if not self._depth:
                self._ask()

    def after_fork_in_child(self) -> None:
        """The thread that forked is the main one, and no other is there."""
        self._depth = self._depth - 1 if get_ident() == self._main else 0
        self._main = get_ident()
        for number, (*_, process) in list(self._waiting.items()):
            if process != os.getpid():  # else it came to the child, in a hook before this one
                del self._waiting[number]
        if self._waiting:
            self._ask()


def _place_of_program(frame: FrameType | None) -> tuple[FrameType | None, bool]:
    """The frame in which the program's own code goes on next, and whether it is at work now.

    frame  the innermost one

    At work are neither ltc and torch, nor an optimizer's step, nor Python's locks, nor what they
    import, or what is called when an object goes or garbage is collected, whose errors get lost.
    """
    place, is_here, importing = None, True, False
    of_collections = [getattr(call, "__code__", None) for call in gc.callbacks]
    while frame is not None:
        name, globals_ = frame.f_code.co_name, frame.f_globals
        package = globals_.get("__name__", "ltc").partition(".")[0]  # only kernels have none
        loses_errors = name == "__del__" or package in ("weakref", "_weakrefset")
        loses_errors |= importing and package in _WORKERS
        loses_errors |= frame.f_code in of_collections
        importing = package == "importlib"
        if loses_errors or (name == "wrapper" and globals_ is _OPTIMIZER):
            place, is_here = None, False
        elif place is None and (package in _WORKERS or package == _LOCKING):
            is_here = False
        elif place is None and not _is_of_python(package):
            place = frame
        frame = frame.f_back
    return place, is_here


def _is_of_python(package: str) -> bool:
    return package in sys.stdlib_module_names or package.startswith(_OF_NAMED_TUPLES)


def _instruction_of(frame: FrameType | None) -> tuple[int, int] | None:
    return None if frame is None else (id(frame), frame.f_lasti)


def _place_of_main_thread() -> tuple[float, str] | None:
    """What stays the same while the main thread waits, for anything but a processor; else None."""
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
_signal_of_python = signal.signal


@functools.wraps(_signal_of_python)
def _set_handler(signalnum: Any, handler: Any) -> Any:
    return _signal_of_python(signalnum, held.later(signalnum, handler))


# Of the hooks before a fork the last registered runs first, of those behind it the first: the hooks
# of modules that were imported before run within.
os.register_at_fork(
    before=held.__enter__,
    after_in_parent=held.__exit__,
    after_in_child=held.after_fork_in_child,
)
