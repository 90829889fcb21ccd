"""Threads of our own: one pool in a process, for all that launch.

OpenMP gives every thread that launches a team of its own. Programs run from the caller's thread and
from an executor's, and libgomp, once it has more threads than there are processors, puts them to
sleep between any two kernels: 40 us each instead of half of one.

The tasks of a kernel are cut into one range for each member, the caller being member 0, so that a
member finds its earlier writes in its cache. A member without tasks takes some from the others. A
range is a word: in the upper half the number of the launch, in the lower half the number of tasks
left. Taking a task is a compare and exchange of the word, which fails after the end of the launch. So
no thread waits for a member that sleeps or has no processor. A second launch at the same time runs in
its caller alone.

For a time that the caller sets, the members from some number on stay away. Otherwise the thread that
needs their processor would take it amid a task, and the launch would wait for that task.
"""

from __future__ import annotations

from ltc.llvm.native import futex
from ltc.llvm.native.futex import filled
from ltc.llvm.native.named_blocks import NamedBlocks

MOST_MEMBERS = 128
MOST_TASKS = (1 << 32) - 1  # what a range has room for, and the mask of it
SPINS = 4000  # of a member without work before it sleeps: about 60 us
SPINS_BEFORE_YIELD = 2000  # of the caller, whose last tasks are under way elsewhere

# A member's line of 64 bytes: its range; how it sleeps, 0 being awake; its thread.
ASLEEP, DOZING = 1, 2  # until it is woken; at most until a time

_GLOBALS = """
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
declare i64 @llvm.smin.i64(i64, i64)
"""


# --- the functions, one after another -----------------------------------------------------------


def _stay_away() -> str:
    """Members %from and above take no task until %until, nanoseconds of the monotonic clock; with
    0 they come back, to a launch that is under way at once."""
    f = NamedBlocks("void @pool.stay.away(i64 %from, i64 %until)")
    f.block("start")
    f.store("%from", "@pool.away.from", "monotonic")
    f.store("%until", "@pool.away.until", "monotonic")
    f.fence()
    over = f.let("over", "icmp eq i64 %until, 0")
    lock = f.load("lock", "@pool.lock", "monotonic", "i32")
    busy = f.let("busy", f"icmp ne i32 {lock}, 0")
    f.choose(f.let("back", f"and i1 {over}, {busy}"), "wake", "end")
    f.block("wake")
    members = f.load("members", "@pool.members", "monotonic")
    f.emit(f"call void @pool.wake(i64 %from, i64 {members})")
    f.go("end")
    f.block("end")
    f.give()
    return f.text()


def _wake() -> str:
    """Wake the sleeping members from %first up to %limit.

    A member that stays away and dozes wakes up in time by itself. One that is away and fast asleep
    has to learn of the time.
    """
    f = NamedBlocks("internal void @pool.wake(i64 %first, i64 %limit)")
    f.block("start")
    f.choose("slt i64 %first, %limit", "next", "end")
    f.block("next")
    k = f.let("k", "phi i64 [ %first, %start ], [ %after, %woken ]")
    asleep = f.word("asleep", _line(f, k), 1)
    sleeps = f.load("sleeps", asleep, "seq_cst")
    f.emit(
        f"switch i64 {sleeps}, label %woken [ i64 {ASLEEP}, label %call i64 {DOZING}, label %ask ]"
    )
    f.block("ask")
    f.choose(f.let("away", f"call i1 @pool.is.away(i64 {k})"), "woken", "call")
    f.block("call")
    f.store(0, asleep, "seq_cst")
    futex.wake(f, asleep, 1)
    f.go("woken")
    f.block("woken")
    after = f.let("after", f"add i64 {k}, 1")
    f.choose(f"slt i64 {after}, %limit", "next", "end")
    f.block("end")
    f.give()
    return f.text()


def _is_away() -> str:
    """Return whether this member, not the caller, is to stay away now."""
    f = NamedBlocks("internal i1 @pool.is.away(i64 %self)")
    f.block("start")
    until = f.load("until", "@pool.away.until", "monotonic")
    some = f.let("set", f"icmp ne i64 {until}, 0")
    first = f.load("from", "@pool.away.from", "monotonic")
    above = f.let("above", f"icmp sge i64 %self, {first}")
    f.let("not.caller", "icmp sgt i64 %self, 0")
    concerned = f.let("concerned", f"and i1 {above}, %not.caller")
    f.choose(f.let("asks", f"and i1 {some}, {concerned}"), "time", "no")
    f.block("time")
    now = f.let("now", "call i64 @now()")
    f.give(f"i1 {f.let('early', f'icmp slt i64 {now}, {until}')}")
    f.block("no")
    f.give("i1 false")
    return f.text()


def _work() -> str:
    """Every task that is left, those of the member's own range first."""
    f = NamedBlocks("internal void @pool.work(i64 %self)")
    f.block("start")
    f.go("range")
    f.block("range")
    passed = f.let("passed", "phi i64 [ 0, %start ], [ %passed.more, %exhausted ]")
    members = f.load("members", "@pool.members", "monotonic")
    whose = f.let("whose", f"urem i64 {f.let('sum', f'add i64 %self, {passed}')}, {members}")
    _line(f, whose)
    f.go("take")
    _take(f)
    f.block("exhausted")
    more = f.let("passed.more", f"add i64 {passed}, 1")
    f.choose(f"ult i64 {more}, {members}", "range", "end")
    f.block("end")
    f.give()
    return f.text()


def _take(f: NamedBlocks) -> None:
    """One task after another of the range in %line."""
    f.block("take")
    f.choose(f.let("away", "call i1 @pool.is.away(i64 %self)"), "end", "look")
    f.block("look")
    word = f.load("word", "%line", "acquire")
    left = f.let("left", f"and i64 {word}, {MOST_TASKS}")
    f.choose(f"eq i64 {left}, 0", "exhausted", "try")
    f.block("try")
    entry = f.load("entry.word", "@pool.entry", "monotonic")
    arguments = f.load("arguments.word", "@pool.arguments", "monotonic")
    tasks = f.load("tasks", "@pool.tasks", "monotonic")
    members = f.load("of", "@pool.members", "monotonic")
    less = f.let("less", f"sub i64 {word}, 1")
    f.choose(f.compare_and_swap("taken", "%line", word, less, "acq_rel acquire"), "run", "look")
    f.block("run")
    scaled = f.let("scaled", f"mul i64 {tasks}, {f.let('next', 'add i64 %whose, 1')}")
    task = f.let("task", f"sub i64 {f.let('limit', f'udiv i64 {scaled}, {members}')}, {left}")
    code = f.let("entry", f"inttoptr i64 {entry} to ptr")
    given = f.let("arguments", f"inttoptr i64 {arguments} to ptr")
    f.emit(f"call void {code}(ptr {given}, i64 {task}, i64 {tasks})")
    f.change("before", "add", "@pool.done", 1, "acq_rel")
    f.go("take")


def _member() -> str:
    """Run a thread of the pool for as long as the process lives."""
    f = NamedBlocks("internal ptr @pool.member(ptr %number)")
    f.block("start")
    f.let("time", "alloca [2 x i64], align 8")
    line = _line(f, f.let("self", "ptrtoint ptr %number to i64"))
    f.word("asleep", line, 1)
    f.go("look")
    _look_for_work(f)
    _lie_down(f)
    _leave(f)
    return f.text()


def _look_for_work(f: NamedBlocks) -> None:
    f.block("look")
    again = ", ".join(f"[ 0, %{block} ]" for block in ("start", "work", "sleep", "return"))
    spins = f.let("spins", f"phi i64 {again}, [ %spins.more, %pause ]")
    f.choose(f.let("away", "call i1 @pool.is.away(i64 %self)"), "leave", "stay")
    f.block("stay")
    left = f.let("left", f"and i64 {f.load('word', '%line', 'acquire')}, {MOST_TASKS}")
    f.choose(f"eq i64 {left}, 0", "pause", "work")
    f.block("work")
    f.store(0, "%asleep", "seq_cst")
    f.emit("call void @pool.work(i64 %self)")
    f.go("look")
    f.block("pause")
    f.emit(futex.pause_text()[1])
    more = f.let("spins.more", f"add i64 {spins}, 1")
    f.choose(f"ugt i64 {more}, {SPINS}", "lie.down", "look")


def _lie_down(f: NamedBlocks) -> None:
    f.block("lie.down")
    f.change("before", "xchg", "%asleep", ASLEEP)
    again = f.load("again", "%line", "seq_cst")
    left = f.let("left.again", f"and i64 {again}, {MOST_TASKS}")
    f.choose(f"eq i64 {left}, 0", "sleep", "work")
    f.block("sleep")
    futex.wait(f, "%asleep", f"i64 {ASLEEP}")
    f.go("look")


def _leave(f: NamedBlocks) -> None:
    """Write the block of a member that leaves its processor to another thread for some time."""
    f.block("leave")
    f.change("present", "xchg", "%asleep", DOZING)
    f.fence()
    f.choose(f.let("still.away", "call i1 @pool.is.away(i64 %self)"), "doze", "return")
    f.block("doze")
    until = f.load("until", "@pool.away.until", "monotonic")
    seconds = f.let("seconds", f"udiv i64 {until}, 1000000000")
    part = f.let("part", f"urem i64 {until}, 1000000000")
    rest = f.word("rest", "%time", 1)
    f.store(seconds, "%time")
    f.store(part, rest)
    futex.wait_until(f, "%asleep", f"i64 {DOZING}", "%time")
    f.go("return")
    f.block("return")
    f.store(0, "%asleep", "seq_cst")
    f.emit("call void @pool.work(i64 %self)")
    f.go("look")


def _grow() -> str:
    """Members 1 to %wanted exist afterwards, or as many of them as the system allows."""
    f = NamedBlocks("internal i64 @pool.grow(i64 %wanted)")
    f.block("start")
    thread = f.let("thread", "alloca i64, align 8")
    f.go("look")
    f.block("look")
    started = f.load("started", "@pool.started")
    f.choose(f"sge i64 {started}, %wanted", "end", "one")
    f.block("one")
    number = f.let("number", f"add i64 {started}, 1")
    argument = f.let("argument", f"inttoptr i64 {number} to ptr")
    made = f"ptr {thread}, ptr null, ptr @pool.member, ptr {argument}"
    error = f.let("error", f"call i32 @pthread_create({made})")
    f.choose(f"ne i32 {error}, 0", "end", "made")
    f.block("made")
    f.emit(f"call i32 @pthread_detach(i64 {f.load('handle', thread)})")
    f.store(number, "@pool.started")
    f.go("look")
    f.block("end")
    f.give(f"i64 {f.load('result', '@pool.started')}")
    return f.text()


def _launch() -> str:
    """Run all tasks of a kernel, on any threads, and return when the last is over."""
    head = "(ptr %entry, ptr %arguments, i64 %tasks, i64 %threads)"
    f = NamedBlocks(f"internal void @pool.launch{head}")
    f.block("start")
    ours = f.compare_and_swap("ours", "@pool.lock", "0", "1", "acquire monotonic", "i32")
    f.choose(ours, "count", "alone")
    f.block("alone")
    f.emit("call void @tasks(ptr %entry, ptr %arguments, i64 %tasks, i64 0, i64 %tasks)")
    f.give()
    _describe(f)
    _publish(f)
    f.block("published")
    f.fence()
    f.choose("sgt i64 %members, 1", "wake", "join")
    f.block("wake")
    f.emit("call void @pool.wake(i64 1, i64 %members)")
    f.go("join")
    f.block("join")
    f.emit("call void @pool.work(i64 0)")
    f.go("wait")
    _wait_for_others(f)
    f.block("end")
    f.store(0, "@pool.lock", "release", "i32")
    f.give()
    return f.text()


def _describe(f: NamedBlocks) -> None:
    f.block("count")
    most = f.let("most", f"call i64 @llvm.smin.i64(i64 %threads, i64 {MOST_MEMBERS})")
    others = f.let("others.wanted", f"sub i64 {most}, 1")
    started = f.let("started", f"call i64 @pool.grow(i64 {others})")
    there = f.let("there", f"add i64 {started}, 1")
    members = f.let("members", f"call i64 @llvm.smin.i64(i64 {most}, i64 {there})")
    entry = f.let("entry.word", "ptrtoint ptr %entry to i64")
    arguments = f.let("arguments.word", "ptrtoint ptr %arguments to i64")
    f.store(entry, "@pool.entry", "monotonic")
    f.store(arguments, "@pool.arguments", "monotonic")
    f.store("%tasks", "@pool.tasks", "monotonic")
    f.store(members, "@pool.members", "monotonic")
    f.store(0, "@pool.done", "monotonic")
    launch = f.let("launch", f"add i64 {f.load('launch.before', '@pool.launches')}, 1")
    f.store(launch, "@pool.launches")
    f.let("high", f"shl i64 {launch}, 32")
    f.go("publish")


def _publish(f: NamedBlocks) -> None:
    """A range for each member."""
    f.block("publish")
    j = f.let("j", "phi i64 [ 0, %count ], [ %j.after, %publish ]")
    after = f.let("j.after", f"add i64 {j}, 1")
    first = f.let("first", f"udiv i64 {f.let('a', f'mul i64 %tasks, {j}')}, %members")
    limit = f.let("limit", f"udiv i64 {f.let('b', f'mul i64 %tasks, {after}')}, %members")
    word = f.let("word", f"or i64 %high, {f.let('length', f'sub i64 {limit}, {first}')}")
    f.store(word, _line(f, j), "release")
    f.choose(f"slt i64 {after}, %members", "publish", "published")


def _wait_for_others(f: NamedBlocks) -> None:
    f.block("wait")
    spins = f.let("spins", "phi i64 [ 0, %join ], [ %spins.after, %again ]")
    f.choose(f"eq i64 {f.load('done', '@pool.done', 'acquire')}, %tasks", "end", "pause")
    f.block("pause")
    f.emit(futex.pause_text()[1])
    more = f.let("spins.more", f"add i64 {spins}, 1")
    f.choose(f"ugt i64 {more}, {SPINS_BEFORE_YIELD}", "yield", "again")
    f.block("yield")
    f.emit("call i32 @sched_yield()")
    f.go("again")
    f.block("again")
    f.let("spins.after", f"phi i64 [ {more}, %pause ], [ 0, %yield ]")
    f.go("wait")


def _forget() -> str:
    """After a fork the child has no member left."""
    f = NamedBlocks("void @pool.forget()")
    f.store(0, "@pool.lock", type="i32")
    f.store(0, "@pool.started")
    f.store(0, "@pool.away.until")
    nothing = f"ptr @pool.lines, i8 0, i64 {64 * MOST_MEMBERS}, i1 false"
    f.emit(f"call void @llvm.memset.p0.i64({nothing})")
    f.give()
    return f.text()


def _line(f: NamedBlocks, member: str) -> str:
    return f.let("line", f"getelementptr [8 x i64], ptr @pool.lines, i64 {member}")


def text() -> str:
    """@pool.launch(entry, arguments, tasks, threads), @pool.stay.away(from, until) and @pool.forget;
    needs @tasks."""
    functions = (
        _stay_away(), _wake(), _is_away(), _work(), _member(), _grow(), _launch(), _forget(),
    )  # fmt: skip
    declared = f"{futex.DECLARED}{futex.pause_text()[0]}\n"
    return "".join((futex.CLOCK, filled(_GLOBALS, {"MOST": MOST_MEMBERS}), declared, *functions))
