"""Runs a list of kernels by one native call, the tasks of each spread over torch's threads.

A kernel's tasks are fixed when it is made, and each is the same work whichever thread takes it, so
that results do not depend on the number of threads.
"""

from __future__ import annotations

import ctypes
import functools
import os

import torch

from ltc.llvm import jit
from ltc.llvm.builder import ATTRIBUTES

# A record is three words: the address of the kernel's entry, of its arguments, its tasks.
RECORD_WORDS = 3

_SERIAL = """
define internal void @tasks(ptr %record, i64 %first, i64 %limit) #0 {
start:
  %entry = load ptr, ptr %record
  %pa = getelementptr i64, ptr %record, i64 1
  %arguments = load ptr, ptr %pa
  %pt = getelementptr i64, ptr %record, i64 2
  %tasks = load i64, ptr %pt
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
define internal void @team(ptr %record) #0 {
  %pt = getelementptr i64, ptr %record, i64 2
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
  call void @tasks(ptr %record, i64 %first, i64 %limit)
  ret void
}
"""

_RUN = """
define void @run(ptr %records, i64 %count, i64 %threads) #0 {
start:
  %any = icmp sgt i64 %count, 0
  br i1 %any, label %next, label %end
next:
  %i = phi i64 [ 0, %start ], [ %after, %done ]
  %word = mul i64 %i, 3
  %record = getelementptr i64, ptr %records, i64 %word
  %pt = getelementptr i64, ptr %record, i64 2
  %tasks = load i64, ptr %pt
  %c = icmp slt i64 %tasks, %threads
  %wanted = select i1 %c, i64 %tasks, i64 %threads
  %alone = icmp sle i64 %wanted, PARALLEL_FROM
  br i1 %alone, label %serial, label %parallel
serial:
  call void @tasks(ptr %record, i64 0, i64 %tasks)
  br label %done
parallel:
  LAUNCH
  br label %done
done:
  %after = add i64 %i, 1
  %more = icmp slt i64 %after, %count
  br i1 %more, label %next, label %end
end:
  ret void
}
"""

_LAUNCH = """%w32 = trunc i64 %wanted to i32
  call void @GOMP_parallel(ptr @team, ptr %record, i32 %w32, i32 0)"""

_forked = [False]


def _after_fork_in_child() -> None:
    _forked[0] = True  # the parent's team does not exist here, and libgomp would wait for it


os.register_at_fork(after_in_child=_after_fork_in_child)


@functools.cache
def _runner():
    parallel = jit.has_symbol("GOMP_parallel")
    launch = _LAUNCH if parallel else "call void @tasks(ptr %record, i64 0, i64 %tasks)"
    text = _SERIAL + (_TEAM if parallel else "") + _RUN.replace("LAUNCH", launch)
    text = text.replace("PARALLEL_FROM", "1") + ATTRIBUTES
    address = jit.compile_kernels(text, "run")["run"]
    # ctypes lets other Python threads run during the call.
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)(address)


def run(records: int, count: int) -> None:
    """Run `count` kernels in order; each is over before the next begins.

    records  address of their records
    """
    _runner()(records, count, 1 if _forked[0] else torch.get_num_threads())
