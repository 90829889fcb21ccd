"""Threads of our own, in LLVM's text form: one pool in a process, whoever launches.

OpenMP gives every thread that launches a team of its own. Programs run from the caller's thread
and from an executor's, and libgomp, once it has more threads than there are processors, puts them
to sleep between any two kernels: 40 us each instead of half of one.

The tasks of a kernel are cut into one range for each member, the caller being member 0, so that a
member finds in its cache what it wrote before; who is done takes from the others. A range is a
word: the number of the launch above, below it how many tasks are left. Taking one is a compare and
exchange of the word, which fails where the launch is over, so that nobody waits for a member that
is asleep or kept off its processor. A second launch at the same time runs in its caller alone.

For a time that the caller names, the members from some number on stay away: whoever needs their
processor would otherwise take it in the midst of a task, and the launch would wait for that task.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys

from ltc.llvm.native import futex, thread_affinity
from ltc.llvm.native.futex import filled

MOST_MEMBERS = 128
SPINS = 4000  # of a member without work before it sleeps: about 60 us
SPINS_BEFORE_YIELD = 2000  # of the caller, whose last tasks are under way elsewhere

# A member's line of 64 bytes: its range; how it sleeps, 0 being awake; its thread.
_SLEEP = {"ASLEEP": 1, "DOZING": 2}  # until it is woken; at most until a time
_TEXT = """
@pool.lock = internal global i32 0, align 64
@pool.started = internal global i64 0, align 8
@pool.launches = internal global i64 0, align 8
@pool.entry = internal global i64 0, align 64
@pool.arguments = internal global i64 0, align 8
@pool.tasks = internal global i64 0, align 8
@pool.members = internal global i64 1, align 8
@pool.away.until = internal global i64 0, align 64
@pool.away.from = internal global i64 0, align 8
@pool.done = internal global i64 0, align 64
@pool.lines = internal global [MOST x [8 x i64]] zeroinitializer, align 64
declare i32 @pthread_create(ptr, ptr, ptr, ptr)
declare i32 @pthread_detach(i64)
declare i32 @sched_yield()
declare i64 @syscall(i64, ...)
PAUSE_DECLARED

; Members %from and above take no task until %until, nanoseconds of the monotonic clock; with 0
; they come back, to a launch that is under way at once.
define void @pool.stay.away(i64 %from, i64 %until) #0 {
start:
  store atomic i64 %from, ptr @pool.away.from monotonic, align 8
  store atomic i64 %until, ptr @pool.away.until monotonic, align 8
  fence seq_cst
  %over = icmp eq i64 %until, 0
  %lock = load atomic i32, ptr @pool.lock monotonic, align 4
  %busy = icmp ne i32 %lock, 0
  %back = and i1 %over, %busy
  br i1 %back, label %wake, label %end
wake:
  %members = load atomic i64, ptr @pool.members monotonic, align 8
  call void @pool.wake(i64 %from, i64 %members)
  br label %end
end:
  ret void
}

; Those of the members %first up to %limit that sleep are woken. Who stays away and dozes wakes up
; in time by itself; who is away and fast asleep has to learn of the time.
define internal void @pool.wake(i64 %first, i64 %limit) #0 {
start:
  SET_OF_PROCESSORS
  %any = icmp slt i64 %first, %limit
  br i1 %any, label %next, label %end
next:
  %k = phi i64 [ %first, %start ], [ %after, %woken ]
  %line = getelementptr [8 x i64], ptr @pool.lines, i64 %k
  %asleep = getelementptr i64, ptr %line, i64 1
  %sleeps = load atomic i64, ptr %asleep seq_cst, align 8
  switch i64 %sleeps, label %woken [ i64 ASLEEP, label %call
                                     i64 DOZING, label %ask ]
ask:
  %away = call i1 @pool.is.away(i64 %k)
  br i1 %away, label %woken, label %call
call:
  KEEP_OFF
  store atomic i64 0, ptr %asleep seq_cst, align 8
  %ignored = call i64 (i64, ...) @syscall(i64 FUTEX, ptr %asleep, i64 WAKE, i64 1, ptr null, ptr null, i64 0)
  LET_BACK
  br label %woken
woken:
  %after = add i64 %k, 1
  %more = icmp slt i64 %after, %limit
  br i1 %more, label %next, label %end
end:
  ret void
}

; Whether this member, not the caller, is to stay away now.
define internal i1 @pool.is.away(i64 %self) #0 {
start:
  %until = load atomic i64, ptr @pool.away.until monotonic, align 8
  %set = icmp ne i64 %until, 0
  %from = load atomic i64, ptr @pool.away.from monotonic, align 8
  %above = icmp sge i64 %self, %from
  %not.caller = icmp sgt i64 %self, 0
  %concerned = and i1 %above, %not.caller
  %asks = and i1 %set, %concerned
  br i1 %asks, label %time, label %no
time:
  %now = call i64 @now()
  %early = icmp slt i64 %now, %until
  ret i1 %early
no:
  ret i1 false
}

; Every task that is left, those of the member's own range first.
define internal void @pool.work(i64 %self) #0 {
start:
  br label %range
range:
  %passed = phi i64 [ 0, %start ], [ %passed.more, %exhausted ]
  %members = load atomic i64, ptr @pool.members monotonic, align 8
  %sum = add i64 %self, %passed
  %whose = urem i64 %sum, %members
  %line = getelementptr [8 x i64], ptr @pool.lines, i64 %whose
  br label %take
take:
  %away = call i1 @pool.is.away(i64 %self)
  br i1 %away, label %end, label %look
look:
  %word = load atomic i64, ptr %line acquire, align 8
  %left = and i64 %word, 4294967295
  %none = icmp eq i64 %left, 0
  br i1 %none, label %exhausted, label %try
try:
  %entry.word = load atomic i64, ptr @pool.entry monotonic, align 8
  %arguments.word = load atomic i64, ptr @pool.arguments monotonic, align 8
  %tasks = load atomic i64, ptr @pool.tasks monotonic, align 8
  %of = load atomic i64, ptr @pool.members monotonic, align 8
  %less = sub i64 %word, 1
  %pair = cmpxchg ptr %line, i64 %word, i64 %less acq_rel acquire, align 8
  %taken = extractvalue { i64, i1 } %pair, 1
  br i1 %taken, label %run, label %look
run:
  %next = add i64 %whose, 1
  %scaled = mul i64 %tasks, %next
  %limit = udiv i64 %scaled, %of
  %task = sub i64 %limit, %left
  %entry = inttoptr i64 %entry.word to ptr
  %arguments = inttoptr i64 %arguments.word to ptr
  call void %entry(ptr %arguments, i64 %task, i64 %tasks)
  %before = atomicrmw add ptr @pool.done, i64 1 acq_rel, align 8
  br label %take
exhausted:
  %passed.more = add i64 %passed, 1
  %more = icmp ult i64 %passed.more, %members
  br i1 %more, label %range, label %end
end:
  ret void
}

define internal ptr @pool.member(ptr %number) #0 {
start:
  %time = alloca [2 x i64], align 8
  SET_OF_PROCESSORS
  %self = ptrtoint ptr %number to i64
  %line = getelementptr [8 x i64], ptr @pool.lines, i64 %self
  %asleep = getelementptr i64, ptr %line, i64 1
  NOTE_MEMBER
  br label %look
look:
  %spins = phi i64 [ 0, %start ], [ 0, %apart ], [ %spins.more, %pause ], [ 0, %sleep ], [ 0, %return ]
  %away = call i1 @pool.is.away(i64 %self)
  br i1 %away, label %leave, label %stay
stay:
  %word = load atomic i64, ptr %line acquire, align 8
  %left = and i64 %word, 4294967295
  %none = icmp eq i64 %left, 0
  br i1 %none, label %pause, label %work
work:
  store atomic i64 0, ptr %asleep seq_cst, align 8
  MOVE_AWAY
  br label %apart
apart:
  call void @pool.work(i64 %self)
  br label %look
pause:
  PAUSE
  %spins.more = add i64 %spins, 1
  %tired = icmp ugt i64 %spins.more, SPINS
  br i1 %tired, label %lie.down, label %look
lie.down:
  %before = atomicrmw xchg ptr %asleep, i64 ASLEEP seq_cst, align 8
  %again = load atomic i64, ptr %line seq_cst, align 8
  %left.again = and i64 %again, 4294967295
  %still.none = icmp eq i64 %left.again, 0
  br i1 %still.none, label %sleep, label %work
sleep:
  %woken = call i64 (i64, ...) @syscall(i64 FUTEX, ptr %asleep, i64 WAIT, i64 ASLEEP, ptr null, ptr null, i64 0)
  br label %look
leave:
  %present = atomicrmw xchg ptr %asleep, i64 DOZING seq_cst, align 8
  fence seq_cst
  %still.away = call i1 @pool.is.away(i64 %self)
  br i1 %still.away, label %doze, label %return
doze:
  %until = load atomic i64, ptr @pool.away.until monotonic, align 8
  %seconds = udiv i64 %until, 1000000000
  %part = urem i64 %until, 1000000000
  %rest = getelementptr i64, ptr %time, i64 1
  store i64 %seconds, ptr %time, align 8
  store i64 %part, ptr %rest, align 8
  %called = call i64 (i64, ...) @syscall(i64 FUTEX, ptr %asleep, i64 WAIT_UNTIL, i64 DOZING, ptr %time, ptr null, i64 4294967295)
  br label %return
return:
  store atomic i64 0, ptr %asleep seq_cst, align 8
  call void @pool.work(i64 %self)
  br label %look
}

; Members 1 to %wanted exist afterwards, or as many of them as the system allows.
define internal i64 @pool.grow(i64 %wanted) #0 {
start:
  %thread = alloca i64, align 8
  br label %look
look:
  %started = load i64, ptr @pool.started, align 8
  %enough = icmp sge i64 %started, %wanted
  br i1 %enough, label %end, label %one
one:
  %number = add i64 %started, 1
  %argument = inttoptr i64 %number to ptr
  %error = call i32 @pthread_create(ptr %thread, ptr null, ptr @pool.member, ptr %argument)
  %failed = icmp ne i32 %error, 0
  br i1 %failed, label %end, label %made
made:
  %handle = load i64, ptr %thread, align 8
  call i32 @pthread_detach(i64 %handle)
  store i64 %number, ptr @pool.started, align 8
  br label %look
end:
  %result = load i64, ptr @pool.started, align 8
  ret i64 %result
}

define internal void @pool.launch(ptr %entry, ptr %arguments, i64 %tasks, i64 %threads) #0 {
start:
  %pair = cmpxchg ptr @pool.lock, i32 0, i32 1 acquire monotonic, align 4
  %ours = extractvalue { i32, i1 } %pair, 1
  br i1 %ours, label %count, label %alone
alone:
  call void @tasks(ptr %entry, ptr %arguments, i64 %tasks, i64 0, i64 %tasks)
  ret void
count:
  %most = call i64 @llvm.smin.i64(i64 %threads, i64 MOST)
  %others.wanted = sub i64 %most, 1
  %started = call i64 @pool.grow(i64 %others.wanted)
  %there = add i64 %started, 1
  %members = call i64 @llvm.smin.i64(i64 %most, i64 %there)
  NOTE_CALLER
  %entry.word = ptrtoint ptr %entry to i64
  %arguments.word = ptrtoint ptr %arguments to i64
  store atomic i64 %entry.word, ptr @pool.entry monotonic, align 8
  store atomic i64 %arguments.word, ptr @pool.arguments monotonic, align 8
  store atomic i64 %tasks, ptr @pool.tasks monotonic, align 8
  store atomic i64 %members, ptr @pool.members monotonic, align 8
  store atomic i64 0, ptr @pool.done monotonic, align 8
  %launch.before = load i64, ptr @pool.launches, align 8
  %launch = add i64 %launch.before, 1
  store i64 %launch, ptr @pool.launches, align 8
  %high = shl i64 %launch, 32
  br label %publish
publish:
  %j = phi i64 [ 0, %count ], [ %j.after, %publish ]
  %j.after = add i64 %j, 1
  %a = mul i64 %tasks, %j
  %first = udiv i64 %a, %members
  %b = mul i64 %tasks, %j.after
  %limit = udiv i64 %b, %members
  %length = sub i64 %limit, %first
  %word = or i64 %high, %length
  %line = getelementptr [8 x i64], ptr @pool.lines, i64 %j
  store atomic i64 %word, ptr %line release, align 8
  %more = icmp slt i64 %j.after, %members
  br i1 %more, label %publish, label %published
published:
  fence seq_cst
  %any = icmp sgt i64 %members, 1
  br i1 %any, label %wake, label %join
wake:
  call void @pool.wake(i64 1, i64 %members)
  br label %join
join:
  call void @pool.work(i64 0)
  br label %wait
wait:
  %spins = phi i64 [ 0, %join ], [ %spins.after, %again ]
  %done = load atomic i64, ptr @pool.done acquire, align 8
  %over = icmp eq i64 %done, %tasks
  br i1 %over, label %end, label %pause
pause:
  PAUSE
  %spins.more = add i64 %spins, 1
  %long = icmp ugt i64 %spins.more, YIELD
  br i1 %long, label %yield, label %again
yield:
  call i32 @sched_yield()
  br label %again
again:
  %spins.after = phi i64 [ %spins.more, %pause ], [ 0, %yield ]
  br label %wait
end:
  store atomic i32 0, ptr @pool.lock release, align 4
  ret void
}
declare i64 @llvm.smin.i64(i64, i64)

; After a fork the child has no member left.
define void @pool.forget() #0 {
  store i32 0, ptr @pool.lock, align 4
  store i64 0, ptr @pool.started, align 8
  store i64 0, ptr @pool.away.until, align 8
  call void @llvm.memset.p0.i64(ptr @pool.lines, i8 0, i64 LINES_BYTES, i1 false)
  ret void
}
"""


@functools.cache
def is_possible() -> bool:
    """Whether this system has what the pool is made of."""
    if not sys.platform.startswith("linux") or platform.machine() not in futex.NUMBERS:
        return False
    names = (
        "pthread_create", "pthread_detach", "sched_yield", "syscall", "clock_gettime", "gettid",
        "sched_getcpu", "sched_getaffinity", "sched_setaffinity",
    )  # fmt: skip
    return all(hasattr(ctypes.CDLL(None), name) for name in names)


def text() -> str:
    """@pool.launch(entry, arguments, tasks, threads), @pool.stay.away(from, until) and @pool.forget;
    needs @tasks."""
    declared, pause = futex.pause_text()
    calls, affinity = dict.fromkeys(thread_affinity.CALLS, ""), ""
    if thread_affinity.is_wanted():
        calls, affinity = thread_affinity.CALLS, thread_affinity.TEXT
    words = {
        "LINES_BYTES": 64 * MOST_MEMBERS, "MOST": MOST_MEMBERS, "SPINS": SPINS,
        "YIELD": SPINS_BEFORE_YIELD, "FUTEX": futex.NUMBERS[platform.machine()],
        "PAUSE_DECLARED": declared, "PAUSE": pause, **futex.CALLS, **_SLEEP,
        **thread_affinity.WORDS,
    }  # fmt: skip
    return filled(futex.CLOCK + affinity + filled(_TEXT, calls), words)
