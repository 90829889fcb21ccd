"""Runs a list of kernels by one native call, the tasks of each spread over threads.

A kernel's tasks are fixed when it is made, and each is the same work whichever thread takes it, so
that results do not depend on the number of threads.
"""

from __future__ import annotations

import ctypes
import functools
import os

import torch

from ltc import config
from ltc.errors import Unsupported
from ltc.llvm.compiler import llvm_binding, symbols
from ltc.llvm.emit.builder import ATTRIBUTES
from ltc.llvm.native import futex, system, thread_pool
from ltc.support.process import processors

# A run is nine words: how many kernels and their records, how many arguments and for each a
# place of the frame and a number to add, where in the frame the arguments begin, how many faults
# and where they are, and where in the frame it is noted when it began and when each kernel was
# over, or 0 where nobody wants to know.

# A record is four words: the address of the kernel's entry, its tasks, and where in the frame its
# arguments and its fault are; places are in words, and the fault of a kernel without one is 0.
RECORD_WORDS = 4

# What one team runs is three words: entry, arguments, tasks.
_SERIAL = """
define internal void @tasks(ptr %entry, ptr %arguments, i64 %tasks, i64 %first, i64 %limit) #0 {
start:
  %any = icmp slt i64 %first, %limit
  br i1 %any, label %next, label %end
next:
  %task = phi i64 [ %first, %start ], [ %after, %next ]
  call void %entry(ptr %arguments, i64 %task, i64 %tasks)
  %after = add i64 %task, 1
  %more = icmp slt i64 %after, %limit
  br i1 %more, label %next, label %end
end:
  ret void
}
"""

_TEAM = """
declare void @GOMP_parallel(ptr, ptr, i32, i32)
declare i32 @omp_get_thread_num()
declare i32 @omp_get_num_threads()
define internal void @team(ptr %work) #0 {
  %entry = load ptr, ptr %work
  %pa = getelementptr i64, ptr %work, i64 1
  %arguments = load ptr, ptr %pa
  %pt = getelementptr i64, ptr %work, i64 2
  %tasks = load i64, ptr %pt
  %t = call i32 @omp_get_thread_num()
  %n = call i32 @omp_get_num_threads()
  %t64 = zext i32 %t to i64
  %n64 = zext i32 %n to i64
  %a = mul i64 %tasks, %t64
  %first = udiv i64 %a, %n64
  %u = add i64 %t64, 1
  %b = mul i64 %tasks, %u
  %limit = udiv i64 %b, %n64
  call void @tasks(ptr %entry, ptr %arguments, i64 %tasks, i64 %first, i64 %limit)
  ret void
}
"""

_RUN = """
define i64 @run(ptr %run, ptr %frame, i64 %threads) #0 {
start:
  %work = alloca [3 x i64], align 8
  %count = load i64, ptr %run
  %p1 = getelementptr i64, ptr %run, i64 1
  %records = load ptr, ptr %p1
  %p2 = getelementptr i64, ptr %run, i64 2
  %words = load i64, ptr %p2
  %p3 = getelementptr i64, ptr %run, i64 3
  %places = load ptr, ptr %p3
  %p4 = getelementptr i64, ptr %run, i64 4
  %added = load ptr, ptr %p4
  %p5 = getelementptr i64, ptr %run, i64 5
  %first = load i64, ptr %p5
  %arguments = getelementptr i64, ptr %frame, i64 %first
  %p6 = getelementptr i64, ptr %run, i64 6
  %faults = load i64, ptr %p6
  %p7 = getelementptr i64, ptr %run, i64 7
  %first.fault = load i64, ptr %p7
  %fault.words = getelementptr i64, ptr %frame, i64 %first.fault
  %fault.bytes = mul i64 %faults, 8
  call void @llvm.memset.p0.i64(ptr %fault.words, i8 0, i64 %fault.bytes, i1 false)
  %binds = icmp sgt i64 %words, 0
  br i1 %binds, label %bind, label %bound
bind:
  %w = phi i64 [ 0, %start ], [ %w.after, %bind ]
  %pp = getelementptr i64, ptr %places, i64 %w
  %place = load i64, ptr %pp
  %ps = getelementptr i64, ptr %frame, i64 %place
  %source = load i64, ptr %ps
  %pd = getelementptr i64, ptr %added, i64 %w
  %more.bytes = load i64, ptr %pd
  %word = add i64 %source, %more.bytes
  %pw = getelementptr i64, ptr %arguments, i64 %w
  store i64 %word, ptr %pw
  %w.after = add i64 %w, 1
  %w.more = icmp slt i64 %w.after, %words
  br i1 %w.more, label %bind, label %bound
bound:
  %p8 = getelementptr i64, ptr %run, i64 8
  %stamp.place = load i64, ptr %p8
  %stamped = icmp ne i64 %stamp.place, 0
  %stamps = getelementptr i64, ptr %frame, i64 %stamp.place
  br i1 %stamped, label %begun, label %begin
begun:
  %at.first = call i64 @now()
  store i64 %at.first, ptr %stamps
  br label %begin
begin:
  %any = icmp sgt i64 %count, 0
  br i1 %any, label %next, label %end
next:
  %i = phi i64 [ 0, %begin ], [ %after, %went.on ]
  %offset = mul i64 %i, 4
  %record = getelementptr i64, ptr %records, i64 %offset
  %entry = load ptr, ptr %record
  %pt = getelementptr i64, ptr %record, i64 1
  %tasks = load i64, ptr %pt
  %pa = getelementptr i64, ptr %record, i64 2
  %own = load i64, ptr %pa
  %kernel.arguments = getelementptr i64, ptr %frame, i64 %own
  %c = icmp slt i64 %tasks, %threads
  %wanted = select i1 %c, i64 %tasks, i64 %threads
  %alone = icmp sle i64 %wanted, 1
  br i1 %alone, label %serial, label %parallel
serial:
  call void @tasks(ptr %entry, ptr %kernel.arguments, i64 %tasks, i64 0, i64 %tasks)
  br label %done
parallel:
  LAUNCH
  br label %done
done:
  %pf = getelementptr i64, ptr %record, i64 3
  %fault = load i64, ptr %pf
  %checked = icmp ne i64 %fault, 0
  br i1 %checked, label %check, label %went.well
check:
  %pc = getelementptr i64, ptr %frame, i64 %fault
  %code = load i64, ptr %pc
  %failed = icmp ne i64 %code, 0
  br i1 %failed, label %stop, label %went.well
went.well:
  br i1 %stamped, label %stamp, label %went.on
stamp:
  %number = add i64 %i, 1
  %p.stamp = getelementptr i64, ptr %stamps, i64 %number
  %at = call i64 @now()
  store i64 %at, ptr %p.stamp
  br label %went.on
went.on:
  %after = add i64 %i, 1
  %more = icmp slt i64 %after, %count
  br i1 %more, label %next, label %end
stop:
  ret i64 %i
end:
  ret i64 -1
}
declare void @llvm.memset.p0.i64(ptr, i8, i64, i1)
"""

_LAUNCH = """store ptr %entry, ptr %work
  %wa = getelementptr i64, ptr %work, i64 1
  store ptr %kernel.arguments, ptr %wa
  %wt = getelementptr i64, ptr %work, i64 2
  store i64 %tasks, ptr %wt
  %w32 = trunc i64 %wanted to i32
  call void @GOMP_parallel(ptr @team, ptr %work, i32 %w32, i32 0)"""
_POOLED = "call void @pool.launch(ptr %entry, ptr %kernel.arguments, i64 %tasks, i64 %wanted)"
_ALONE = "call void @tasks(ptr %entry, ptr %kernel.arguments, i64 %tasks, i64 0, i64 %tasks)"

_forget: list = []  # what makes the child of a fork begin with no thread but its own
_stay_away: list = []  # tells the members of the pool, once there is one, to stay away


def _after_fork_in_child() -> None:
    for forget in _forget:
        forget()


os.register_at_fork(after_in_child=_after_fork_in_child)


def runner_source() -> tuple[str, tuple[str, ...]]:
    """The text that `runner` is compiled from, and its functions."""
    names: tuple[str, ...] = ("run",)
    text, threads = _SERIAL, _threads()
    if threads == "pool":
        names += ("pool.forget", "pool.stay.away")
        text += thread_pool.text() + _RUN.replace("LAUNCH", _POOLED)
    elif threads == "openmp":
        text += futex.CLOCK + _TEAM + _RUN.replace("LAUNCH", _LAUNCH)
    else:
        text += futex.CLOCK + _RUN.replace("LAUNCH", _ALONE)
    return text + ATTRIBUTES, names


def _threads() -> str:
    """Return the choice of LTC_THREADS; for a pool that is not possible, the next best."""
    asked, has_openmp = config.value("LTC_THREADS"), symbols.has_symbol("GOMP_parallel")
    if asked == "openmp" and not has_openmp:
        raise Unsupported(
            "LTC_THREADS=openmp needs OpenMP's threads, but this process has loaded no library with "
            "GOMP_parallel. Set LTC_THREADS to pool or to one."
        )
    if asked == "pool" and not system.has_threads():
        return "openmp" if has_openmp else "one"
    return asked


def has_runner() -> bool:
    """Return True if this process has compiled `runner`, or loaded it."""
    return runner.cache_info().currsize > 0


@functools.cache
def runner():
    """run(run, frame, threads): all kernels in order, each over before the next begins.

    The number of the kernel that failed comes back, and none after it has run; -1 where none did.
    """
    text, names = runner_source()
    addresses = llvm_binding.compile_kernels(text, *names)
    if "pool.forget" in addresses:
        # So short that letting other Python threads run meanwhile would cost more.
        away = ctypes.PYFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)
        _stay_away.append(away(addresses["pool.stay.away"]))
        _forget.append(ctypes.CFUNCTYPE(None)(addresses["pool.forget"]))
    # ctypes lets other Python threads run during the call.
    words = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
    return ctypes.CFUNCTYPE(ctypes.c_int64, *words)(addresses["run"])


def address() -> int:
    """Return the address of `runner`'s function."""
    return ctypes.cast(runner(), ctypes.c_void_p).value or 0


def leave_processor(until: int) -> None:
    """Kernels leave one of this process's processors to others until then; 0: from now on, none.

    The results stay the same: the tasks of a thread that stays away are taken by the others.

    Args:
        until: Nanoseconds, as time.monotonic_ns() counts them.
    """
    first = max(processors.count() - 1, 1)  # the member of the pool that stays away, with all above
    for stay_away in _stay_away:
        stay_away(first, until)


def thread_count() -> int:
    """Return how many threads the kernels of a run may use."""
    # An OpenMP team that only the parent has would be waited for.
    return 1 if system.is_forked() and not _forget else torch.get_num_threads()
