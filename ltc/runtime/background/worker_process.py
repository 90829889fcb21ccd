"""The process that compiles behind: a copy of this one, or a new one.

A copy has torch at once, where a new process imports it for a second or two.  But it may wait for ever
for a lock that another thread had when it was made, and memory that either of them writes to is there
twice.  So this process is copied where it is small and no thread of the user's is at work.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # ltc has its own signal.signal
import gc
import os
import select
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import IO, NoReturn

import torch

from ltc import config
from ltc.runtime.background.compile_worker import serve
from ltc.runtime.executor import all_executors
from ltc.support.process.thread_frames import thread_frames

MOST_BYTES = 512 << 20  # of this process's own memory: what it writes to later is copied first
PATIENCE_SECONDS = 0.2  # for launches under way
_WAITS = frozenset({"wait", "join", "_wait_for_tstate_lock"})  # of Python's threading
PACKAGE = str(Path(__file__).parents[2])
_OPEN_FILES, _PAGES = Path("/proc/self/fd"), Path("/proc/self/statm")

# Who has asked may be killed at any moment: while the new process imports torch, too.
# A compiler is no device: of ltc it imports what it needs, without what the package begins with.
# Nothing that is there when it begins will be garbage.
START = """
import gc, os, select, sys, threading, types
gc.disable()
def end_with_input():
    hangup = select.poll()
    hangup.register(0, 0)
    hangup.poll()
    os._exit(0)
if hasattr(select, "poll"):
    threading.Thread(target=end_with_input, daemon=True).start()
sys.path[:] = {paths!r}
sys.modules["ltc"] = types.ModuleType("ltc")
sys.modules["ltc"].__path__ = [{package!r}]
from ltc.runtime.background.compile_worker import serve
gc.freeze()
gc.enable()
answers = os.fdopen(os.dup(1), "w", buffering=1)
sys.stdout = sys.stderr  # whatever prints
serve(sys.stdin, answers)
"""


def start(first: Callable[[], object]) -> Copy | subprocess.Popen[str]:
    """A process that answers requests; its `stdin` and `stdout` take and give lines of text.

    Args:
        first: The first call of a fork; a new process does not make it.
    """
    if config.value("LTC_COPY_PROCESS") and _may_copy():
        return Copy(first)
    paths = [path or os.getcwd() for path in sys.path]
    with config.override(LTC_PROFILE=None):  # what it does is told here
        return subprocess.Popen(
            [sys.executable, "-c", START.format(paths=paths, package=PACKAGE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if config.value("LTC_DEBUG") else subprocess.DEVNULL,
            start_new_session=True,  # an interrupt from the keyboard is not meant for it
            text=True,
        )


# --- a copy ---------------------------------------------------------------------------------------


def _may_copy() -> bool:
    return sys.platform == "linux" and _is_small() and _is_alone() and _comes_to_rest()


def _is_small() -> bool:
    """Return True if the process is small enough to copy; libraries and shared memory are not
    copied.
    """
    resident, of_files = map(int, _PAGES.read_text().split()[1:3])
    return (resident - of_files) * os.sysconf("SC_PAGE_SIZE") <= MOST_BYTES


def _is_alone() -> bool:
    """Return True if no thread is at work but the executors', which begin anew in a copy.

    JAX's, which are not Python's, hold locks at any time.
    """
    if "jaxlib" in sys.modules:
        return False
    others = set(thread_frames()) - {threading.get_ident(), *[e.thread for e in all_executors()]}
    return all(map(_waits, others))


def _waits(thread: int) -> bool:
    """Return True if it waits for another thread or for an event, as that of tqdm does."""
    frame = thread_frames().get(thread)
    if frame is None:  # over
        return True
    return frame.f_code.co_filename == threading.__file__ and frame.f_code.co_name in _WAITS


def _comes_to_rest() -> bool:
    """Return True if the launched programs are over before long."""
    begun = time.monotonic()
    while not all(one.is_idle for one in all_executors()):
        if time.monotonic() - begun > PATIENCE_SECONDS:
            return False
        time.sleep(0.0002)
    return True


class Copy:
    """A copy of this process that answers requests; its parts are called as those of Popen."""

    def __init__(self, first: Callable[[], object]) -> None:
        requests, to_requests = os.pipe()
        from_answers, answers = os.pipe()
        try:
            self.pid = _forked()
        except BaseException:
            for end in (requests, to_requests, from_answers, answers):
                os.close(end)
            raise
        if self.pid == 0:
            _answer(requests, answers, first)
        os.close(requests)
        os.close(answers)
        self.stdin: IO[str] = os.fdopen(to_requests, "w")
        self.stdout: IO[str] = os.fdopen(from_answers)
        self._status: int | None = None

    def poll(self) -> int | None:
        """Return how it ended; None while it runs."""
        return self._await(os.WNOHANG)

    def wait(self) -> int | None:
        return self._await(0)

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _await(self, options: int) -> int | None:
        if self._status is None:
            try:
                ended, status = os.waitpid(self.pid, options)
            except ChildProcessError:  # the user's program has waited for any child
                ended, status = self.pid, 0
            if ended:
                self._status = os.waitstatus_to_exitcode(status)
        return self._status


def _forked() -> int:
    if sys.version_info < (3, 12):
        return os.fork()
    with warnings.catch_warnings():  # which it gives wherever there are threads, OpenMP's too
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _answer(requests: int, answers: int, first: Callable[[], object]) -> NoReturn:
    """Answer requests in the copy, and run nothing of the user's: no handler, no file, no
    finalizer.
    """
    try:
        for tools in (sys, threading):  # of who looks at the user's program
            tools.settrace(None)
            tools.setprofile(None)
        gc.freeze()
        os.setsid()  # an interrupt from the keyboard is not meant for it
        for number in signal.valid_signals():
            if callable(_signal.getsignal(number)):
                _signal.signal(number, _signal.SIG_DFL)
        _close_all_but(requests, answers)
        torch.set_num_threads(1)
        threading.Thread(target=_end_with, args=(requests,), daemon=True).start()
        # Torch's modes are a thread's: a new one is in none.
        server = threading.Thread(target=_serve, args=(requests, answers, first))
        server.start()
        server.join()
    finally:
        os._exit(0)


def _serve(requests: int, answers: int, first: Callable[[], object]) -> None:
    with config.override(LTC_PROFILE=None):
        serve(os.fdopen(requests), os.fdopen(answers, "w", buffering=1), first)


def _end_with(requests: int) -> None:
    """End this process when the process that sends requests has ended, which may be killed."""
    hangup = select.poll()
    hangup.register(requests, 0)
    hangup.poll()
    os._exit(0)


def _close_all_but(*kept: int) -> None:
    """The parent's sockets and pipes end with the parent, and nothing is printed."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1) if config.value("LTC_DEBUG") else (0, 1, 2):
        os.dup2(nothing, standard)
    for number in map(int, os.listdir(_OPEN_FILES)):
        if number > 2 and number not in kept:
            _close(number)


def _close(number: int) -> None:
    try:
        os.close(number)
    except OSError:  # what listed them
        pass
