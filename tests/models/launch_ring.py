"""The ring's protocol: launches given to a thread that stays in native code, and waited for.

A test compares it with the text of ltc/llvm/native/launch_ring.py. A launch is known by its number,
which stands in its entry too; the ring of the model has one entry, so that it is soon full.
"""

from __future__ import annotations

from collections.abc import Sequence

from tests.models.actions import Actions, Thread
from tests.models.interleavings import Broken, Machine, State

GIVEN, CALLED, DONE, STOPPED = ("given",), ("called",), ("done",), ("stopped",)
EVENTS, SLEEPS, WAITERS, ENTRY = ("events",), ("asleep",), ("waiters",), ("entry",)
ENTRIES = 1


class Ring:
    """The functions of the text that threads run."""

    def __init__(self, actions: Actions, failing: int = 0):
        """`failing`: the number of the launch that fails, if any."""
        self.a, self.failing = actions, failing

    def wake_thread(self) -> Thread:
        a = self.a
        if (yield from a.change("wake.thread.start", "xchg", SLEEPS, 0, "seq_cst")):
            yield from a.wake("wake.thread.wake", SLEEPS)

    def wake_waiters(self) -> Thread:
        a = self.a
        yield from a.change("wake.waiters.start", "add", EVENTS, 1, "seq_cst")
        if (yield from a.load("wake.waiters.start", WAITERS, "seq_cst")):
            yield from a.wake("wake.waiters.wake", EVENTS)

    def push(self) -> Thread:
        """The number of a new launch, or 0."""
        a, block = self.a, "ring.push."
        stopped = yield from a.load(block + "start", STOPPED, "seq_cst")
        given = yield from a.load(block + "start", GIVEN, "plain")
        done = yield from a.load(block + "start", DONE, "acquire")
        if stopped or given - done >= ENTRIES:
            return 0
        yield from a.store(block + "put", ENTRY, given + 1, "plain")
        yield from a.store(block + "put", GIVEN, given + 1, "seq_cst")
        yield from self.wake_thread()
        return given + 1

    def call(self) -> Thread:
        yield from self.a.store("ring.call.start", CALLED, 1, "seq_cst")
        yield from self.wake_thread()

    def serve(self) -> Thread:
        a, block = self.a, "ring.serve."
        while True:
            done = yield from a.load(block + "look", DONE, "plain")
            if (yield from a.load(block + "look", GIVEN, "acquire")) != done:
                if not (yield from self.run(done)):
                    return
            elif (yield from a.load(block + "idle", CALLED, "seq_cst")):
                if (yield from a.load(block + "called.back", GIVEN, "seq_cst")) == done:
                    yield from a.note("called back", done)
                    return
            elif (yield from a.choose(block + "pause", 2)):
                yield from self.lie_down(done)

    def lie_down(self, done: int) -> Thread:
        a, block = self.a, "ring.serve."
        yield from a.change(block + "lie.down", "xchg", SLEEPS, 1, "seq_cst")
        given = yield from a.load(block + "lie.down", GIVEN, "seq_cst")
        called = yield from a.load(block + "lie.down", CALLED, "seq_cst")
        if given == done and not called:
            yield from a.wait(block + "sleep", SLEEPS, 1)
        yield from a.store(block + "slept", SLEEPS, 0, "seq_cst")

    def run(self, done: int) -> Thread:
        """The next launch; False where it fails."""
        a, block = self.a, "ring.serve."
        yield from a.note("run", (yield from a.load(block + "take", ENTRY, "plain")))
        if done + 1 == self.failing:
            yield from a.store(block + "stop", STOPPED, 1, "seq_cst")
            yield from self.wake_waiters()
            return False
        yield from a.store("kernel", ("result", done + 1), 1, "plain")
        yield from a.store(block + "over", DONE, done + 1, "seq_cst")
        yield from self.wake_waiters()
        return True

    def wait(self, number: int) -> Thread:
        """ring.await"""
        a, block = self.a, "ring.await."
        yield from a.change(block + "start", "add", WAITERS, 1, "seq_cst")
        events = yield from a.load(block + "start", EVENTS, "seq_cst")
        done = yield from a.load(block + "start", DONE, "seq_cst")
        stopped = yield from a.load(block + "start", STOPPED, "seq_cst")
        if done < number and not stopped:
            yield from a.wait(block + "sleep", EVENTS, events)
        yield from a.change(block + "end", "sub", WAITERS, 1, "seq_cst")

    def come_to(self, number: int) -> Thread:
        """What Python does: wait until a launch is done, or one has failed."""
        while (yield from self.a.load("python", DONE, "acquire")) < number:
            if (yield from self.a.load("python", STOPPED, "acquire")):
                return False
            yield from self.wait(number)
        if not (yield from self.a.load("kernel", ("result", number), "plain")):
            raise Broken(f"launch {number} is done, and who waited does not see what it wrote")
        return True

    def giver(self, launches: int) -> Thread:
        """Gives launches, waiting where there is no room, and calls the thread back."""
        for number in range(1, launches + 1):
            while not (yield from self.push()):
                if not (yield from self.come_to(number - 1)):
                    return
        yield from self.call()

    def waiter(self, number: int) -> Thread:
        yield from self.come_to(number)


def machine(ring: Ring, launches: int, waits: bool, weak: Sequence[str] | None = None) -> Machine:
    """The thread that serves, one that gives so many launches, and one that waits for the last."""
    threads = [ring.serve, lambda: ring.giver(launches)]
    if waits:
        threads.append(lambda: ring.waiter(launches))
    names = GIVEN, CALLED, DONE, STOPPED, EVENTS, SLEEPS, WAITERS, ENTRY
    initial = dict.fromkeys(names, 0)
    initial |= {("result", number): 0 for number in range(launches + 1)}
    initial["result", 0] = 1
    described = [name for name in initial if name[0] == "result"]

    def watched(noted: tuple, note: tuple) -> tuple:
        """One after another, each once."""
        runs = tuple(other for other in noted if other[0] == "run")
        if note[0] == "run" and note[1] != len(runs) + 1:
            raise Broken(f"launch {note[1]} runs after {len(runs)} others")
        if note[0] == "called back" and note[1] != launches:
            raise Broken(f"the thread comes back when {note[1]} of {launches} are done")
        return (*noted, note)

    return Machine(threads, initial, watched, lambda *_: "", all_are_over, (), described, weak)


def all_are_over(machine: Machine, state: State) -> bool:
    return all(machine.action(state, thread) is None for thread in range(len(machine.threads)))
