"""The pool's protocol: how tasks are shared, and how members are woken and lie down.

What each function does at which block is said once more in ltc/llvm/native/thread_pool.py; a test
compares the two. A range is here a pair: number of the launch, tasks that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from tests.models.actions import Actions, Thread
from tests.models.interleavings import Broken, Machine, State

LOCK, ENTRY = ("lock",), ("entry",)  # with it go its arguments, and how many tasks there are
MEMBERS, DONE, LAUNCHES = ("members",), ("done",), ("launches",)
UNTIL, FROM = ("away.until",), ("away.from",)
AWAKE, ASLEEP, DOZING = 0, 1, 2
LATER = 1  # a time that only comes to who dozes until then


def line(member: int) -> tuple:
    return "range", member


def sleep(member: int) -> tuple:
    return "asleep", member


class Pool:
    """The functions of the text that threads run."""

    def __init__(
        self,
        actions: Actions,
        members: int,
        has_results: bool = True,
        counts_launches: bool = True,
    ):
        """
        has_results      whether tasks write something that the caller reads
        counts_launches  whether a range says of which launch it is
        """
        self.a, self.members = actions, members
        self.has_results, self.counts_launches = has_results, counts_launches

    def caller(self, launches: tuple[tuple[str, int], ...]) -> Thread:
        """A thread that launches one after another: (name, tasks) of each."""
        for name, tasks in launches:
            yield from self.launch(name, tasks)

    def launch(self, name: str, tasks: int) -> Thread:
        a, block = self.a, "pool.launch."
        was = yield from a.change(block + "start", "cmpxchg", LOCK, (0, 1), "acquire")
        if was:
            for task in range(tasks):
                yield from self.run(name, task)
            yield from a.note("over", name, tasks)
            return
        yield from self.describe(name, tasks)
        yield from a.fence(block + "published")
        if self.members > 1:
            yield from self.wake(1, self.members)
        yield from a.note("woken", name)
        yield from self.work(0)
        while (yield from a.load(block + "wait", DONE, "acquire")) != tasks:
            pass
        yield from self.look_at_results(name, tasks)
        yield from a.note("over", name, tasks)
        yield from a.store(block + "end", LOCK, 0, "release")

    def describe(self, name: str, tasks: int) -> Thread:
        a, block = self.a, "pool.launch.count"
        yield from a.store(block, ENTRY, (name, tasks), "monotonic")
        yield from a.store(block, MEMBERS, self.members, "monotonic")
        yield from a.store(block, DONE, 0, "monotonic")
        number = 1 + (yield from a.load(block, LAUNCHES, "plain"))
        yield from a.store(block, LAUNCHES, number, "plain")
        for j in range(self.members):
            length = tasks * (j + 1) // self.members - tasks * j // self.members
            word = (number if self.counts_launches else 0, length)
            yield from a.store("pool.launch.publish", line(j), word, "release")

    def work(self, self_number: int) -> Thread:
        passed, members = 0, 1
        while passed < members:
            members = yield from self.a.load("pool.work.range", MEMBERS, "monotonic")
            if not (yield from self.work_on(self_number, (self_number + passed) % members)):
                return
            passed += 1

    def work_on(self, self_number: int, whose: int) -> Thread:
        """Every task of one range; False where the member is to stay away."""
        while not (yield from self.is_away(self_number)):
            if not (yield from self.take(whose)):
                return True
        return False

    def take(self, whose: int) -> Thread:
        """One task; False where none is left."""
        a, block = self.a, "pool.work.try"
        while True:
            word = yield from a.load("pool.work.look", line(whose), "acquire")
            number, left = word
            if not left:
                return False
            name, tasks = yield from a.load(block, ENTRY, "monotonic")
            members = yield from a.load(block, MEMBERS, "monotonic")
            change = word, (number, left - 1)
            if (yield from a.change(block, "cmpxchg", line(whose), change, "acq_rel")) == word:
                break
        task = tasks * (whose + 1) // members - left
        if not 0 <= task < tasks:
            raise Broken(f"task {task} of {name!r}, which has {tasks}")
        yield from self.run(name, task)
        yield from a.change("pool.work.run", "add", DONE, 1, "acq_rel")
        return True

    def run(self, name: str, task: int) -> Thread:
        if self.has_results:
            yield from self.a.store("kernel", ("result", name, task), 1, "monotonic")
        yield from self.a.note("run", name, task)

    def look_at_results(self, name: str, tasks: int) -> Thread:
        for task in range(tasks if self.has_results else 0):
            if not (yield from self.a.load("kernel", ("result", name, task), "monotonic")):
                raise Broken(f"{name} is over, and its caller does not see what task {task} wrote")

    def is_away(self, member: int) -> Thread:
        until = yield from self.a.load("pool.is.away.start", UNTIL, "monotonic")
        first = yield from self.a.load("pool.is.away.start", FROM, "monotonic")
        return bool(until) and 0 < member >= first

    def member(self, k: int) -> Thread:
        while True:
            if (yield from self.is_away(k)):
                yield from self.leave(k)
            elif not (yield from self.finds("stay", k, "acquire")):
                if not (yield from self.rests(k)):
                    continue
            yield from self.work(k)

    def finds(self, block: str, k: int, order: str) -> Thread:
        """Whether a task is left in the member's own range; then it does not sleep."""
        _, left = yield from self.a.load("pool.member." + block, line(k), order)
        if left:
            yield from self.a.store("pool.member.work", sleep(k), AWAKE, "seq_cst")
        return left > 0

    def rests(self, k: int) -> Thread:
        """Spins, or lies down; True where it finds a task at the last moment."""
        a = self.a
        if not (yield from a.choose("pool.member.pause", 2)):
            return False
        yield from a.change("pool.member.lie.down", "xchg", sleep(k), ASLEEP, "seq_cst")
        if (yield from self.finds("lie.down", k, "seq_cst")):
            return True
        yield from a.wait("pool.member.sleep", sleep(k), ASLEEP)
        return False

    def leave(self, k: int) -> Thread:
        a = self.a
        yield from a.change("pool.member.leave", "xchg", sleep(k), DOZING, "seq_cst")
        yield from a.fence("pool.member.leave")
        if (yield from self.is_away(k)):
            yield from a.load("pool.member.doze", UNTIL, "monotonic")
            yield from a.wait_until("pool.member.doze", sleep(k), DOZING)
        yield from a.store("pool.member.return", sleep(k), AWAKE, "seq_cst")

    def wake(self, first: int, limit: int) -> Thread:
        for k in range(first, limit):
            state = yield from self.a.load("pool.wake.next", sleep(k), "seq_cst")
            if state == ASLEEP or (state == DOZING and not (yield from self.is_away(k))):
                yield from self.a.store("pool.wake.call", sleep(k), AWAKE, "seq_cst")
                yield from self.a.wake("pool.wake.call", sleep(k))

    def stay_away(self, first: int, until: int) -> Thread:
        a, block = self.a, "pool.stay.away."
        yield from a.store(block + "start", FROM, first, "monotonic")
        yield from a.store(block + "start", UNTIL, until, "monotonic")
        yield from a.fence(block + "start")
        is_busy = yield from a.load(block + "start", LOCK, "monotonic")
        if not until and is_busy:
            members = yield from a.load(block + "wake", MEMBERS, "monotonic")
            yield from self.wake(first, members)

    def recorder(self) -> Thread:
        """A thread that gives a processor back, which it was left."""
        yield from self.stay_away(1, 0)
        yield from self.a.note("given back")


def machine(
    callers: tuple[tuple[tuple[str, int], ...], ...],
    members: int,
    pool: Pool,
    has_recorder: bool = False,
    weak: Sequence[str] | None = None,
) -> Machine:
    """The threads of callers, of members but the first, who is a caller, and perhaps of a recorder.

    callers  of each what it launches, (name, tasks)
    """
    threads: list[Callable[[], Thread]] = [lambda k=k: pool.member(k) for k in range(1, members)]
    threads += [lambda launches=launches: pool.caller(launches) for launches in callers]
    if has_recorder:
        threads.append(pool.recorder)
    initial: dict[tuple, Any] = {
        LOCK: 0,
        ENTRY: ("", 0),
        MEMBERS: 1,
        DONE: 0,
        LAUNCHES: 0,
        UNTIL: LATER if has_recorder else 0,
        FROM: 1,
    }
    initial |= {line(k): (0, 0) for k in range(members)}
    initial |= {sleep(k): AWAKE for k in range(members)}
    if pool.has_results:
        initial |= {
            ("result", name, task): 0
            for launches in callers
            for name, tasks in launches
            for task in range(tasks)
        }
    private = [] if has_recorder else [UNTIL, FROM]
    if len(callers) == 1:
        private += [LAUNCHES] if has_recorder else [LOCK, LAUNCHES]
    described = [ENTRY, MEMBERS, FROM, UNTIL, *(name for name in initial if name[0] == "result")]
    return Machine(
        threads, initial, watched, nobody_sleeps_in_vain, is_quiet, private, described, weak
    )


def watched(noted: Collection, note: tuple) -> frozenset:
    """A task runs once, while its launch is under way, and a launch is over when all have run."""
    kind, *about = note
    if kind == "run":
        if note in noted:
            raise Broken(f"task {about[1]} of {about[0]} runs twice")
        if any(other[:2] == ("over", about[0]) for other in noted):
            raise Broken(f"task {about[1]} of {about[0]} runs when the launch is over")
    if kind == "over":
        name, tasks = about
        for task in range(tasks):
            if ("run", name, task) not in noted:
                raise Broken(f"{name} is over, and its task {task} never ran")
    return frozenset({*noted, note})


def nobody_sleeps_in_vain(machine: Machine, state: State) -> str:
    """Once a launch has woken its members, none sleeps as long as its own range has a task.

    But for one who is being woken right now.
    """
    under_way = [
        note[1]
        for note in state.noted
        if note[0] == "woken" and not any(n[:2] == ("over", note[1]) for n in state.noted)
    ]
    if not under_way:
        return ""
    for thread, asleep in enumerate(state.asleep):
        if asleep is None or not machine.latest(state, *line(asleep[1]))[1]:
            continue
        if machine.is_next(state, "WAKE", asleep):
            continue
        if machine.action(state, thread).kind == "WAIT":
            return f"a lost wake-up: member {asleep[1]} sleeps beside a task of {under_way[0]}"
        if ("given back",) in state.noted:
            return f"a lost wake-up: member {asleep[1]} dozes though its processor was given back"
    return ""


def is_quiet(machine: Machine, state: State) -> bool:
    """All who launch have come to their end, and the others sleep."""
    return all(
        at is not None or machine.action(state, thread) is None
        for thread, at in enumerate(state.asleep)
    )
