"""The owner of the processors: the running program, or also the thread that records the next step.

A program has a thread for every processor. A thread that goes on recording beside it would be given
the processor of one of them in the midst of a task, and the whole kernel would wait for that task.
So for as long as recording usually takes, the program leaves one processor alone.

A loop that reads the loss of every step records nothing beside its program: handing it over would
only make three threads share two processors. It runs in the thread itself, but for one run now and
then, which tells whether that still waits at once.

The process that compiles behind has a processor too. A kernel with a thread for every processor
would wait for the one whose place the compiler has taken, at each of its parts: 20 ms became a
second.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ltc import config
from ltc.runtime.transfers import capabilities
from ltc.support.process import processors, torch_libraries
from ltc.support.process.fork_safe_lock import renewed_lock

# The number of threads that PyTorch's kernels may use in the calling thread, and in no other.
# torch.set_num_threads counts for threads to come as well: one that begins while it is lower
# keeps that.


def at_most(threads: int, run: Callable[..., Result], *arguments: object) -> Result:
    """Return the result of `run`, whose kernels use at most that many threads."""
    openmp, mkl = _setters()
    before = torch.get_num_threads()
    if openmp is None or before <= threads:
        return run(*arguments)
    openmp(threads)
    mkls = 0 if mkl is None else mkl(threads)
    try:
        return run(*arguments)
    finally:
        openmp(before)
        if mkl is not None:
            mkl(mkls)


@functools.cache
def _setters() -> tuple[Callable[[int], object] | None, Callable[[int], int] | None]:
    """Return the setters of OpenMP, and of Intel's library for products; None for a missing one."""
    return (
        _function("libgomp", "omp_set_num_threads"),
        _function("libtorch_cpu.", "MKL_Set_Num_Threads_Local"),
    )


def _function(library: str, name: str) -> Callable[[int], int] | None:
    for one in torch_libraries.loaded(library):
        found = getattr(one, name, None)
        if found is not None:
            found.argtypes, found.restype = [ctypes.c_int], ctypes.c_int
            called: Callable[[int], int] = found
            return called
    return None


Result = TypeVar("Result")

LONGEST = 40_000_000  # nanoseconds that are left at once: a guess may be wrong, an LSTM takes 30 ms
WAITS_IN_A_ROW = 4  # after which the next run of a program is expected to be waited for as well
LOOKS_EVERY = 32  # runs of such a program: one of them is behind its caller
SOON = 4  # to wait within this part of a program's time is to record nothing beside it


class Waits:
    """The record of waits for a program right after its launch.

    Attributes:
        in_a_row: Number of latest runs in a row with such a wait.
        here: Number of runs that ran in their caller for that reason.
    """

    __slots__ = ("here", "in_a_row")

    def __init__(self) -> None:
        self.in_a_row = self.here = 0

    def are_expected(self) -> bool:
        """Return True if the run that now starts is to be its caller's."""
        if self.in_a_row < WAITS_IN_A_ROW:
            return False
        self.here += 1
        return bool(self.here % LOOKS_EVERY)

    def note(self, is_soon: bool) -> None:
        self.in_a_row = self.in_a_row + 1 if is_soon else 0


class _Recording(threading.local):
    """The recording of the calling thread beside a launch.

    Attributes:
        since: CPU time of this thread when it continued to record.
        last: The launch that it handed over last.
        soon: The end of the time in which a wait counts as soon, in nanoseconds; None after a wait.
        waits: The waits of the first program that it handed over since then.
    """

    since: int | None = None
    last: Any = None
    soon: int | None = None
    waits: Waits


_this_thread = _Recording()
_usual = 0  # nanoseconds of CPU that a thread took the last time, from one launch to the next
_is_left = False  # whether programs may have been told to leave one


def recording_goes_on(launch: Any, seconds: float, waits: Waits) -> None:
    """Note that the calling thread has handed over a launch, and records the next one beside it.

    Args:
        seconds: The time that its program took the last time.
        waits: The waits for runs of that program.
    """
    caller = _this_thread
    caller.since, caller.last = time.thread_time_ns(), launch
    if caller.soon is None:
        caller.soon = time.monotonic_ns() + int(seconds * 1e9 / SOON)
        caller.waits = waits
    leave_one()


def records_beside() -> bool:
    """Return True if the calling thread has handed over its latest launch."""
    return _this_thread.since is not None


def waits_for(launch: Any) -> None:
    """The calling thread waits for a launch; for all, where none is given."""
    caller = _this_thread
    if caller.soon is not None:
        is_last = launch is None or launch is caller.last
        _note_wait(is_last and time.monotonic_ns() < caller.soon)
    use_all()


def _note_wait(is_soon: bool) -> None:
    caller = _this_thread
    caller.waits.note(is_soon)
    caller.soon = caller.last = None


def recording_is_over() -> None:
    """The calling thread has recorded: how long it computed is what it usually takes.

    Time that it slept or waited does not count, nor does recording with nothing beside it.
    """
    global _usual
    caller = _this_thread
    if caller.soon is not None and time.monotonic_ns() >= caller.soon:
        _note_wait(False)  # it may never wait again
    since = caller.since
    if since is not None:
        caller.since = None
        _usual = min(time.thread_time_ns() - since, LONGEST)


def leave_one() -> None:
    """A thread is about to record beside the programs that run."""
    global _is_left
    if _is_wanted():
        _leave(time.monotonic_ns() + (_EVER if _compiling else _usual))
        _is_left = True  # last: where a compiler ends meanwhile, the next wait gives it back


def _is_wanted() -> bool:
    """Return True if a processor is left free.

    Of many processors one is free for a thread in any case, and for another process seldom.
    """
    return bool(_compiling) or (processors.are_few() and config.value("LTC_RESERVE_CORE"))


def use_all() -> None:
    """The thread that recorded waits for a program, or runs it itself."""
    global _is_left
    if _is_left and not _compiling:
        _is_left = False
        _leave(0)


# --- beside a compiler ----------------------------------------------------------------------------

_EVER = 1 << 62  # nanoseconds
_compiling = 0  # programs, in another process
_counting = renewed_lock(globals(), "_counting")


def compiler_begins() -> None:
    """Another process compiles a program: kernels leave it a processor until `compiler_ends`."""
    global _compiling
    if config.value("LTC_RESERVE_CORE"):
        with _counting:
            _compiling += 1
            leave_one()


def compiler_ends() -> None:
    """Note the end of one compilation; the last one gives the processor back."""
    global _compiling
    with _counting:
        if _compiling:
            _compiling -= 1
            use_all()


def _has_no_compiler() -> None:
    """A child of fork waits for none."""
    global _compiling
    _compiling = 0


os.register_at_fork(after_in_child=_has_no_compiler)


def beside_compiler(run: Callable[..., Result], *arguments: Any) -> Result:
    """Return the result of `run`, which runs PyTorch's kernels: they too leave the compiler a
    processor.
    """
    if not _compiling:
        return run(*arguments)
    return at_most(max(processors.count() - 1, 1), run, *arguments)


def _leave(until: int) -> None:
    leave = capabilities().leave_processor
    if leave is not None:
        leave(until)
