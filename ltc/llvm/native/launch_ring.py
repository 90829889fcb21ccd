"""Launches that a thread takes one after another without Python.

A thread that waits for the interpreter's lock between two programs leaves its processor idle, and
makes whoever holds the lock wake it up at every call. So the thread that runs programs stays in
native code: others write what is to be launched into a ring of entries and wait for their turns'
ends there, and Python comes in where a launch fails, or where it has something to run itself.
"""

from __future__ import annotations

import ctypes
import functools

import numpy as np

from ltc.llvm.compiler import llvm_binding
from ltc.llvm.emit.builder import ATTRIBUTES
from ltc.llvm.native import futex, runner
from ltc.llvm.native.named_blocks import NamedBlocks

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
    declared = f"{futex.DECLARED}{futex.pause_text()[0]}\n"
    functions = (
        _entry_function, _wake_thread, _wake_waiters, _push, _call, _serve, _await,
    )  # fmt: skip
    return futex.CLOCK + declared + "\n".join(function() for function in functions)


def _entry_function() -> str:
    f = NamedBlocks("internal ptr @entry(ptr %ring, i64 %before)")
    slot = f.let("slot", f"urem i64 %before, {ENTRIES}")
    words = f.let("words", f"mul i64 {slot}, {_ENTRY_WORDS}")
    place = f.let("place", f"add i64 {words}, {_WORDS['FIRST']}")
    f.give(f"ptr {f.word('entry', '%ring', place)}")
    return f.text()


def _wake_thread() -> str:
    f = NamedBlocks("internal void @wake.thread(ptr %ring)")
    f.block("start")
    asleep = _word(f, "asleep")
    sleeps = f.change("sleeps", "xchg", asleep, 0)
    f.choose(f"ne i64 {sleeps}, 0", "wake", "end")
    f.block("wake")
    futex.wake(f, asleep, 1)
    f.go("end")
    f.block("end")
    f.give()
    return f.text()


def _wake_waiters() -> str:
    f = NamedBlocks("internal void @wake.waiters(ptr %ring)")
    f.block("start")
    events = _word(f, "events")
    f.change("event", "add", events, 1)
    waiters = f.load("waiting", _word(f, "waiters"), "seq_cst")
    f.choose(f"ne i64 {waiters}, 0", "wake", "end")
    f.block("wake")
    futex.wake(f, events, futex.ALL)
    f.go("end")
    f.block("end")
    f.give()
    return f.text()


def _push() -> str:
    """The number of a new launch, or 0 where the ring is full or has stopped."""
    f = NamedBlocks("i64 @ring.push(ptr %ring, i64 %run, i64 %frame, i64 %threads)")
    f.block("start")
    stopped = f.load("has.stopped", _word(f, "stopped"), "seq_cst")
    given = f.load("given", "%ring")
    done = f.load("done.before", _word(f, "done"), "acquire")
    there = f.let("there", f"sub i64 {given}, {done}")
    full = f.let("full", f"icmp sge i64 {there}, {ENTRIES}")
    ended = f.let("ended", f"icmp ne i64 {stopped}, 0")
    f.choose(f.let("refused", f"or i1 {full}, {ended}"), "no", "put")
    f.block("put")
    entry = f.let("entry", f"call ptr @entry(ptr %ring, i64 {given})")
    f.store("%run", entry)
    f.store("%frame", f.word("p.frame", entry, _ENTRY["FRAME"]))
    f.store("%threads", f.word("p.threads", entry, _ENTRY["THREADS"]))
    number = f.let("number", f"add i64 {given}, 1")
    f.store(number, "%ring", "seq_cst")
    f.emit("call void @wake.thread(ptr %ring)")
    f.give(f"i64 {number}")
    f.block("no")
    f.give("i64 0")
    return f.text()


def _call() -> str:
    """The thread is to come back to Python once everything given is done."""
    f = NamedBlocks("void @ring.call(ptr %ring)")
    f.store(1, _word(f, "called"), "seq_cst")
    f.emit("call void @wake.thread(ptr %ring)")
    f.give()
    return f.text()


def _serve() -> str:
    """Runs what is given, until it is called back (0) or a launch has failed (1)."""
    f = NamedBlocks("i64 @ring.serve(ptr %ring)")
    f.block("start")
    for name in ("called", "done", "stopped", "asleep", "leave.from", "leave.for"):
        _word(f, name)
    f.load("run", _word(f, "run.code"), type="ptr")
    f.load("leave.now", _word(f, "leave.code"), type="ptr")
    f.go("look")
    _look_for_a_launch(f)
    _lie_down(f)
    _run_one(f)
    _say_how_it_ended(f)
    return f.text()


def _look_for_a_launch(f: NamedBlocks) -> None:
    f.block("look")
    again = ", ".join(f"[ 0, %{block} ]" for block in ("start", "over", "slept", "called.back"))
    spins = f.let("spins", f"phi i64 {again}, [ %spins.more, %pause ]")
    done = f.load("done", "%p.done")
    f.choose(f"eq i64 {f.load('given', '%ring', 'acquire')}, {done}", "idle", "take")
    f.block("idle")
    f.choose(f"ne i64 {f.load('called', '%p.called', 'seq_cst')}, 0", "called.back", "pause")
    f.block("called.back")
    f.choose(f"eq i64 {f.load('given.before', '%ring', 'seq_cst')}, {done}", "back", "look")
    f.block("back")
    f.give("i64 0")
    f.block("pause")
    f.emit(futex.pause_text()[1])
    more = f.let("spins.more", f"add i64 {spins}, 1")
    f.choose(f"ugt i64 {more}, {SPINS}", "lie.down", "look")


def _lie_down(f: NamedBlocks) -> None:
    f.block("lie.down")
    f.change("was", "xchg", "%p.asleep", 1)
    given = f.load("given.again", "%ring", "seq_cst")
    called = f.load("called.again", "%p.called", "seq_cst")
    none = f.let("none.again", f"icmp eq i64 {given}, %done")
    stays = f.let("not.called", f"icmp eq i64 {called}, 0")
    f.choose(f.let("sleeps", f"and i1 {none}, {stays}"), "sleep", "slept")
    f.block("sleep")
    futex.wait(f, "%p.asleep", "i64 1")
    f.go("slept")
    f.block("slept")
    f.store(0, "%p.asleep", "seq_cst")
    f.go("look")


def _run_one(f: NamedBlocks) -> None:
    f.block("take")
    entry = f.let("entry", "call ptr @entry(ptr %ring, i64 %done)")
    run = f.load("what", entry, type="ptr")
    frame = f.load("frame", f.word("p.frame", entry, _ENTRY["FRAME"]), type="ptr")
    threads = f.load("threads", f.word("p.threads", entry, _ENTRY["THREADS"]))
    began = f.let("began", "call i64 @now()")
    failed = f.let("failed", f"call i64 %run(ptr {run}, ptr {frame}, i64 {threads})")
    ended = f.let("ended", "call i64 @now()")
    time = f.let("time", f"sub i64 {ended}, {began}")
    f.store(time, f.word("p.time", entry, _ENTRY["TIME"]))
    f.store(failed, f.word("p.failed", entry, _ENTRY["FAILED"]))
    f.choose(f"slt i64 {failed}, 0", "went.well", "stop")


def _say_how_it_ended(f: NamedBlocks) -> None:
    f.block("went.well")
    time = f.change("for", "xchg", "%p.leave.for", 0)
    f.choose(f"ne i64 {time}, 0", "leave", "over")
    f.block("leave")
    first = f.load("from", "%p.leave.from")
    until = f.let("until", f"add i64 %ended, {time}")
    f.emit(f"call void %leave.now(i64 {first}, i64 {until})")
    f.go("over")
    f.block("over")
    f.store(f.let("done.now", "add i64 %done, 1"), "%p.done", "seq_cst")
    f.emit("call void @wake.waiters(ptr %ring)")
    f.go("look")
    f.block("stop")
    f.store(1, "%p.stopped", "seq_cst")
    f.emit("call void @wake.waiters(ptr %ring)")
    f.give("i64 1")


def _await() -> str:
    """Sleeps while fewer than %number are done, at most until somebody is done or a signal comes."""
    f = NamedBlocks("void @ring.await(ptr %ring, i64 %number)")
    f.block("start")
    p_done, p_stopped = _word(f, "done"), _word(f, "stopped")
    p_waiters, p_events = _word(f, "waiters"), _word(f, "events")
    f.change("before", "add", p_waiters, 1)
    events = f.load("seen", p_events, "seq_cst")
    done = f.load("done.now", p_done, "seq_cst")
    stopped = f.load("has.stopped", p_stopped, "seq_cst")
    early = f.let("early", f"icmp slt i64 {done}, %number")
    goes_on = f.let("goes.on", f"icmp eq i64 {stopped}, 0")
    f.choose(f.let("waits", f"and i1 {early}, {goes_on}"), "sleep", "end")
    f.block("sleep")
    low = f.let("low", f"trunc i64 {events} to i32")
    futex.wait(f, p_events, f"i32 {low}")
    f.go("end")
    f.block("end")
    f.change("after", "sub", p_waiters, 1)
    f.give()
    return f.text()


def _word(f: NamedBlocks, name: str) -> str:
    """The address of a word of the ring."""
    return f.word(f"p.{name}", "%ring", _WORDS[name.upper().replace(".", "_")])


def ring_source() -> tuple[str, tuple[str, ...]]:
    """The text that a ring's functions are compiled from, and their names."""
    return text() + ATTRIBUTES, ("ring.push", "ring.call", "ring.serve", "ring.await")


@functools.cache
def _functions() -> tuple:
    source, names = ring_source()
    code = llvm_binding.compile_kernels(source, *names)
    word, number = ctypes.c_void_p, ctypes.c_int64
    # The first two are so short that letting other Python threads run meanwhile would cost more.
    return (
        ctypes.PYFUNCTYPE(number, word, word, word, number)(code["ring.push"]),
        ctypes.PYFUNCTYPE(None, word)(code["ring.call"]),
        ctypes.CFUNCTYPE(number, word)(code["ring.serve"]),
        ctypes.CFUNCTYPE(None, word, number)(code["ring.await"]),
    )
