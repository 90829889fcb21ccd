"""Launches that a thread takes one after another without Python, in LLVM's text form.

A thread that waits for the interpreter's lock between two programs leaves its processor idle, and
makes whoever holds the lock wake it up at every call. So the thread that runs programs stays in
native code: others write what is to be launched into a ring of entries and wait for their turns'
ends there, and Python comes in where a launch fails, or where it has something to run itself.
"""

from __future__ import annotations

import ctypes
import functools
import platform

import numpy as np

from ltc.llvm.compiler import llvm_binding
from ltc.llvm.emit.builder import ATTRIBUTES
from ltc.llvm.native import futex, runner

ENTRIES = 64
SPINS = 1500  # of the thread without work before it sleeps: about 20 us

# Words of a ring, those of one writer in one line of 64 bytes. A launch is known by its number,
# counted from 1: as many have been given, or are done.
_WORDS = {
    "GIVEN": 0, "CALLED": 1, "LEAVE_FROM": 2, "LEAVE_FOR": 3,  # for so many nanoseconds, or 0
    "DONE": 8, "STOPPED": 9, "EVENTS": 10,  # grows with either
    "ASLEEP": 16, "WAITERS": 24,
    "RUN_CODE": 32, "LEAVE_CODE": 33,  # addresses of native functions
    "FIRST": 40,
}  # fmt: skip
_ENTRY = {"FRAME": 1, "THREADS": 2, "FAILED": 3, "TIME": 4}  # after the run; words of an entry
_ENTRY_WORDS = 8

_TEXT = """
declare i64 @syscall(i64, ...)
PAUSE_DECLARED

define internal ptr @entry(ptr %ring, i64 %before) #0 {
  %slot = urem i64 %before, ENTRIES
  %words = mul i64 %slot, ENTRY_WORDS
  %place = add i64 %words, FIRST
  %entry = getelementptr i64, ptr %ring, i64 %place
  ret ptr %entry
}

define internal void @wake.thread(ptr %ring) #0 {
start:
  %asleep = getelementptr i64, ptr %ring, i64 ASLEEP
  %sleeps = atomicrmw xchg ptr %asleep, i64 0 seq_cst, align 8
  %is.asleep = icmp ne i64 %sleeps, 0
  br i1 %is.asleep, label %wake, label %end
wake:
  %woken = call i64 (i64, ...) @syscall(i64 FUTEX, ptr %asleep, i64 WAKE, i64 1, ptr null, ptr null, i64 0)
  br label %end
end:
  ret void
}

define internal void @wake.waiters(ptr %ring) #0 {
start:
  %events = getelementptr i64, ptr %ring, i64 EVENTS
  %event = atomicrmw add ptr %events, i64 1 seq_cst, align 8
  %p.waiters = getelementptr i64, ptr %ring, i64 WAITERS
  %waiters = load atomic i64, ptr %p.waiters seq_cst, align 8
  %any = icmp ne i64 %waiters, 0
  br i1 %any, label %wake, label %end
wake:
  %woken = call i64 (i64, ...) @syscall(i64 FUTEX, ptr %events, i64 WAKE, i64 2147483647, ptr null, ptr null, i64 0)
  br label %end
end:
  ret void
}

; The number of a new launch, or 0 where the ring is full or has stopped.
define i64 @ring.push(ptr %ring, i64 %run, i64 %frame, i64 %threads) #0 {
start:
  %p.stopped = getelementptr i64, ptr %ring, i64 STOPPED
  %stopped = load atomic i64, ptr %p.stopped seq_cst, align 8
  %given = load i64, ptr %ring, align 8
  %p.done = getelementptr i64, ptr %ring, i64 DONE
  %done = load atomic i64, ptr %p.done acquire, align 8
  %there = sub i64 %given, %done
  %full = icmp sge i64 %there, ENTRIES
  %has.stopped = icmp ne i64 %stopped, 0
  %refused = or i1 %full, %has.stopped
  br i1 %refused, label %no, label %put
put:
  %entry = call ptr @entry(ptr %ring, i64 %given)
  store i64 %run, ptr %entry, align 8
  %p.frame = getelementptr i64, ptr %entry, i64 FRAME
  store i64 %frame, ptr %p.frame, align 8
  %p.threads = getelementptr i64, ptr %entry, i64 THREADS
  store i64 %threads, ptr %p.threads, align 8
  %number = add i64 %given, 1
  store atomic i64 %number, ptr %ring seq_cst, align 8
  call void @wake.thread(ptr %ring)
  ret i64 %number
no:
  ret i64 0
}

; The thread is to come back to Python once everything given is done.
define void @ring.call(ptr %ring) #0 {
  %p.called = getelementptr i64, ptr %ring, i64 CALLED
  store atomic i64 1, ptr %p.called seq_cst, align 8
  call void @wake.thread(ptr %ring)
  ret void
}

; Runs what is given, until it is called back (0) or a launch has failed (1).
define i64 @ring.serve(ptr %ring) #0 {
start:
  %p.called = getelementptr i64, ptr %ring, i64 CALLED
  %p.done = getelementptr i64, ptr %ring, i64 DONE
  %p.stopped = getelementptr i64, ptr %ring, i64 STOPPED
  %p.asleep = getelementptr i64, ptr %ring, i64 ASLEEP
  %p.leave.from = getelementptr i64, ptr %ring, i64 LEAVE_FROM
  %p.leave.for = getelementptr i64, ptr %ring, i64 LEAVE_FOR
  %p.run.code = getelementptr i64, ptr %ring, i64 RUN_CODE
  %run.code = load ptr, ptr %p.run.code, align 8
  %p.leave.code = getelementptr i64, ptr %ring, i64 LEAVE_CODE
  %leave.code = load ptr, ptr %p.leave.code, align 8
  br label %look
look:
  %spins = phi i64 [ 0, %start ], [ %spins.more, %pause ], [ 0, %over ], [ 0, %slept ], [ 0, %called.back ]
  %done = load i64, ptr %p.done, align 8
  %given = load atomic i64, ptr %ring acquire, align 8
  %none = icmp eq i64 %given, %done
  br i1 %none, label %idle, label %take
idle:
  %called = load atomic i64, ptr %p.called seq_cst, align 8
  %is.called = icmp ne i64 %called, 0
  br i1 %is.called, label %called.back, label %pause
called.back:
  %given.before = load atomic i64, ptr %ring seq_cst, align 8
  %still.none = icmp eq i64 %given.before, %done
  br i1 %still.none, label %back, label %look
back:
  ret i64 0
pause:
  PAUSE
  %spins.more = add i64 %spins, 1
  %tired = icmp ugt i64 %spins.more, SPINS
  br i1 %tired, label %lie.down, label %look
lie.down:
  %was = atomicrmw xchg ptr %p.asleep, i64 1 seq_cst, align 8
  %given.again = load atomic i64, ptr %ring seq_cst, align 8
  %called.again = load atomic i64, ptr %p.called seq_cst, align 8
  %none.again = icmp eq i64 %given.again, %done
  %not.called = icmp eq i64 %called.again, 0
  %sleeps = and i1 %none.again, %not.called
  br i1 %sleeps, label %sleep, label %slept
sleep:
  %ignored = call i64 (i64, ...) @syscall(i64 FUTEX, ptr %p.asleep, i64 WAIT, i64 1, ptr null, ptr null, i64 0)
  br label %slept
slept:
  store atomic i64 0, ptr %p.asleep seq_cst, align 8
  br label %look
take:
  %entry = call ptr @entry(ptr %ring, i64 %done)
  %run = load ptr, ptr %entry, align 8
  %p.frame = getelementptr i64, ptr %entry, i64 FRAME
  %frame = load ptr, ptr %p.frame, align 8
  %p.threads = getelementptr i64, ptr %entry, i64 THREADS
  %threads = load i64, ptr %p.threads, align 8
  %began = call i64 @now()
  %failed = call i64 %run.code(ptr %run, ptr %frame, i64 %threads)
  %ended = call i64 @now()
  %time = sub i64 %ended, %began
  %p.time = getelementptr i64, ptr %entry, i64 TIME
  store i64 %time, ptr %p.time, align 8
  %p.failed = getelementptr i64, ptr %entry, i64 FAILED
  store i64 %failed, ptr %p.failed, align 8
  %well = icmp slt i64 %failed, 0
  br i1 %well, label %went.well, label %stop
went.well:
  %for = atomicrmw xchg ptr %p.leave.for, i64 0 seq_cst, align 8
  %leaves = icmp ne i64 %for, 0
  br i1 %leaves, label %leave, label %over
leave:
  %from = load i64, ptr %p.leave.from, align 8
  %until = add i64 %ended, %for
  call void %leave.code(i64 %from, i64 %until)
  br label %over
over:
  %done.now = add i64 %done, 1
  store atomic i64 %done.now, ptr %p.done seq_cst, align 8
  call void @wake.waiters(ptr %ring)
  br label %look
stop:
  store atomic i64 1, ptr %p.stopped seq_cst, align 8
  call void @wake.waiters(ptr %ring)
  ret i64 1
}

; Sleeps while fewer than %number are done, at most until somebody is done or a signal comes.
define void @ring.await(ptr %ring, i64 %number) #0 {
start:
  %p.done = getelementptr i64, ptr %ring, i64 DONE
  %p.stopped = getelementptr i64, ptr %ring, i64 STOPPED
  %p.waiters = getelementptr i64, ptr %ring, i64 WAITERS
  %p.events = getelementptr i64, ptr %ring, i64 EVENTS
  %before = atomicrmw add ptr %p.waiters, i64 1 seq_cst, align 8
  %events = load atomic i64, ptr %p.events seq_cst, align 8
  %done = load atomic i64, ptr %p.done seq_cst, align 8
  %stopped = load atomic i64, ptr %p.stopped seq_cst, align 8
  %early = icmp slt i64 %done, %number
  %goes.on = icmp eq i64 %stopped, 0
  %waits = and i1 %early, %goes.on
  br i1 %waits, label %sleep, label %end
sleep:
  %low = trunc i64 %events to i32
  %ignored = call i64 (i64, ...) @syscall(i64 FUTEX, ptr %p.events, i64 WAIT, i32 %low, ptr null, ptr null, i64 0)
  br label %end
end:
  %after = atomicrmw sub ptr %p.waiters, i64 1 seq_cst, align 8
  ret void
}
"""


class Ring:
    """What a thread is to launch, and how far it is.

    One thread at a time gives, wakes and restarts; any number wait.
    """

    def __init__(self) -> None:
        count = _WORDS["FIRST"] + ENTRIES * _ENTRY_WORDS
        memory = np.zeros(count + 8, dtype=np.int64)
        first = -memory.ctypes.data % 64 // 8
        self._memory = memory[first : first + count]
        self._words = memoryview(self._memory)
        self._address = self._memory.ctypes.data
        self._words[_WORDS["RUN_CODE"]], self._words[_WORDS["LEAVE_CODE"]] = runner.addresses()
        self._push, self._call, self._serve, self._await = _functions()

    def give(self, run: int, frame: int, thread_count: int) -> int:
        """Have a run launched after all before; its number, or 0 where the ring takes none now.

        run, frame  addresses: see llvm/native/kernel_run.py
        """
        return self._push(self._address, run, frame, thread_count)

    def call_back(self) -> None:
        """Let `serve` return once everything given is done."""
        self._call(self._address)

    def go_on(self) -> None:
        """`serve` may stay again."""
        self._words[_WORDS["CALLED"]] = 0

    def serve(self) -> bool:
        """Launch what is given until called back, or until a launch fails: then True."""
        return bool(self._serve(self._address))

    @property
    def given(self) -> int:
        """The number of the last launch that was given."""
        return self._words[_WORDS["GIVEN"]]

    @property
    def done(self) -> int:
        """The number of the last launch that ended well."""
        return self._words[_WORDS["DONE"]]

    @property
    def has_stopped(self) -> bool:
        """Whether a launch has failed; no other is taken before `restart`."""
        return bool(self._words[_WORDS["STOPPED"]])

    def sleep_until_done(self, number: int) -> None:
        """Sleep while that launch is not done; may return early, after a signal say."""
        self._await(self._address, number)

    def nanoseconds(self, number: int) -> int:
        """How long a launch took; of the latest ENTRIES."""
        return self._words[_entry(number) + _ENTRY["TIME"]]

    def failed_call(self, number: int) -> int:
        """Which call of its run failed."""
        return self._words[_entry(number) + _ENTRY["FAILED"]]

    def restart(self) -> None:
        """After a failure: what was given counts as done, whatever became of it."""
        self._words[_WORDS["DONE"]] = self._words[_WORDS["GIVEN"]]
        self._words[_WORDS["STOPPED"]] = 0

    def leave_processor_after_next(self, first: int, nanoseconds: int) -> None:
        """Once the next launch is over, members of the pool from `first` on stay away so long."""
        self._words[_WORDS["LEAVE_FROM"]] = first
        self._words[_WORDS["LEAVE_FOR"]] = nanoseconds


def _entry(number: int) -> int:
    return _WORDS["FIRST"] + (number - 1) % ENTRIES * _ENTRY_WORDS


def text() -> str:
    """@ring.push, @ring.call, @ring.serve and @ring.await; see `Ring`."""
    declared, pause = futex.pause_text()
    return futex.filled(futex.CLOCK + _TEXT, {
        "ENTRY_WORDS": _ENTRY_WORDS, "ENTRIES": ENTRIES, "SPINS": SPINS,
        "PAUSE_DECLARED": declared, "PAUSE": pause, "FUTEX": futex.NUMBERS[platform.machine()],
        **futex.CALLS, **_WORDS, **_ENTRY,
    })  # fmt: skip


@functools.cache
def _functions() -> tuple:
    names = ("ring.push", "ring.call", "ring.serve", "ring.await")
    code = llvm_binding.compile_kernels(text() + ATTRIBUTES, *names)
    word, number = ctypes.c_void_p, ctypes.c_int64
    # The first two are so short that letting other Python threads run meanwhile would cost more.
    return (
        ctypes.PYFUNCTYPE(number, word, word, word, number)(code["ring.push"]),
        ctypes.PYFUNCTYPE(None, word)(code["ring.call"]),
        ctypes.CFUNCTYPE(number, word)(code["ring.serve"]),
        ctypes.CFUNCTYPE(None, word, number)(code["ring.await"]),
    )
