"""How processes exchange in memory that they share: messages, sums made of them, one-shot sums.

A test compares the counters with the text of ltc/llvm/native/shared_counters.py and of the kernels of
ltc/llvm/ops/one_shot_sync.py.  What is between them says once more what ltc/distributed/transport does:
`Messages` wire.py, `two_hops` the schedule direct_all_reduce, `one_shot` symmetric_memory.py.  There is
room for one piece and one message, so that each has to wait until the one before is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tests.models.actions import Actions, Thread
from tests.models.interleavings import Broken, Machine, State

PAIR = (0, 1)


def counter(*which: object) -> tuple:
    return "counter", *which


class Memory:
    """What two processes share: counters, and what they announce."""

    def __init__(self, actions: Actions) -> None:
        self.a = actions

    def store(self, which: tuple) -> Callable[[int], Thread]:
        def stored(value: int) -> Thread:
            yield from self.a.store("counter.store.start", which, value, "release")
            yield from self.a.wake("counter.store.start", which, "WAKE_SHARED")

        return stored

    def wait(self, which: tuple, value: int) -> Thread:
        """Region.wait_at_least"""
        a = self.a
        if (yield from a.load("counter.load.start", which, "acquire")) >= value:
            return
        while True:
            seen = yield from a.load("counter.wait.look", which, "acquire")
            if seen >= value:
                return
            yield from a.wait("counter.wait.sleep", which, seen, "WAIT_SHARED")
            if (yield from a.load("counter.wait.sleep", which, "acquire")) >= value:
                return

    def write(self, which: tuple, value: object) -> Thread:
        yield from self.a.store("python", which, value, "plain")

    def read(self, which: tuple, expected: object) -> Thread:
        found = yield from self.a.load("python", which, "plain")
        if found != expected:
            raise Broken(f"{which} is {found} where {expected} was announced")

    def read_and_store(self, which: tuple, expected: object, done: tuple, value: int) -> Thread:
        """Read, then say so; a processor may do it the other way round where it is let."""
        is_late = False
        if not self.a.releases("counter.store.start", done):
            is_late = bool((yield from self.a.choose("python", 2)))
        if not is_late:
            yield from self.read(which, expected)
        yield from self.store(done)(value)
        if is_late:
            yield from self.read(which, expected)


class Messages(Memory):
    """From each process to the other: a mailbox of one slot."""

    def send(self, sender: int, number: int, content: object) -> Thread:
        """The message says where something lies: here, what has to be there."""
        yield from self.wait(counter("taken", sender), number - 1)
        yield from self.write(("slot", sender), content)
        yield from self.store(counter("sent", sender))(number)

    def take(self, sender: int, number: int, content: object) -> Thread:
        yield from self.wait(counter("sent", sender), number)
        yield from self.read(("slot", sender), content)

    # --- what processes do

    def sender(self, messages: int) -> Thread:
        for number in range(1, messages + 1):
            yield from self.wait(counter("taken", 0), number - 1)  # the memory is free
            yield from self.write(("place", 0), number)
            yield from self.send(0, number, number)

    def receiver(self, messages: int) -> Thread:
        for number in range(1, messages + 1):
            yield from self.take(0, number, number)
            yield from self.read_and_store(("place", 0), number, counter("taken", 0), number)

    def two_hops(self, own: int, sums: int) -> Thread:
        """Sums of two: each reduces one half, where the operands of both lie."""
        peer = 1 - own
        for number in range(1, sums + 1):
            first, second = 2 * number - 1, 2 * number
            yield from self.wait(counter("taken", own), first - 1)
            yield from self.write(("half", own, peer), ("operand", number))
            yield from self.send(own, first, "operand")
            yield from self.take(peer, first, "operand")
            operand = "half", peer, own
            yield from self.read_and_store(
                operand, ("operand", number), counter("taken", peer), first
            )
            yield from self.write(("half", own, own), ("sum", number))
            yield from self.send(own, second, "sum")
            yield from self.take(peer, second, "sum")
            result = "half", peer, peer
            yield from self.read_and_store(result, ("sum", number), counter("taken", peer), second)

    def one_shot(self, own: int, sums: int) -> Thread:
        """One-shot sums of two in a slot of one turn, by the kernels that publish and wait."""
        a, peer = self.a, 1 - own
        for number in range(1, sums + 1):
            yield from self.wait(counter("released", peer), number - 1)
            yield from self.write(("turn", own), number)
            yield from a.store("kernel.entry", counter("published", own), number, "release")
            yield from a.wake("kernel.entry", counter("published", own), "WAKE_SHARED")
            seen = yield from a.load("kernel.look", counter("published", peer), "acquire")
            if seen < number:  # the kernel is tired of looking, and Python goes on
                yield from self.wait(counter("published", peer), number)
            yield from self.read_and_store(("turn", peer), number, counter("released", own), number)


def all_are_over(machine: Machine, state: State) -> bool:
    return all(machine.action(state, thread) is None for thread in range(len(machine.threads)))


def machine(threads: Sequence[Callable[[], Thread]]) -> Machine:
    """Two processes; counters and what they announce are 0 and nothing in the beginning."""
    counters = [
        counter(name, k) for name in ("sent", "taken", "published", "released") for k in PAIR
    ]
    places = [(name, k) for name in ("slot", "place", "turn") for k in PAIR]
    places += [("half", k, half) for k in PAIR for half in PAIR]
    initial = dict.fromkeys(counters, 0) | dict.fromkeys(places)
    return Machine(
        threads, initial, lambda noted, _: noted, lambda *_: "", all_are_over, described=places
    )


def messages(count: int) -> Callable[[Actions], Machine]:
    def made(actions: Actions) -> Machine:
        told = Messages(actions)
        return machine([lambda: told.sender(count), lambda: told.receiver(count)])

    return made


def sums(how: str, count: int) -> Callable[[Actions], Machine]:
    """`how`: two_hops or one_shot"""

    def made(actions: Actions) -> Machine:
        member = getattr(Messages(actions), how)
        return machine([lambda k=k: member(k, count) for k in PAIR])

    return made
