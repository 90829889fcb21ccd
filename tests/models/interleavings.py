"""Every interleaving of a few threads, on a memory that may show a thread old values.

A thread is a generator: it yields the atomic action that it does next, and is sent the result.

The memory is the one of LLVM's `atomic` instructions, as a machine. A variable keeps its latest
`KEPT` writes in order. A thread has a *view*: for each variable the oldest write that it may still
read, which is any since the last one that it knows of. A write carries the writer's view where its
ordering is a release, and an acquire takes over the view of the write it reads. A fence that is
seq_cst makes the thread's view and the fences' common one the same; a seq_cst load reads no write
older than what is in the common view, and a seq_cst write is in it. Read-modify-writes and futex
calls see the latest write. So what a barrier is there for can go wrong where it is missing.

Left out: a write that is ordered before one that is already there, and loads that run ahead of
their thread.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

from tests.models.actions import Action, Thread

KEPT = 2  # writes of a variable that may still be read
ACQUIRES = {"acquire", "acq_rel", "seq_cst"}
RELEASES = {"release", "acq_rel", "seq_cst"}
END = -1  # where a thread is that has returned


class Broken(Exception):
    """The protocol has done what it must not: the message says what, and how it came to it."""


class State(NamedTuple):
    """Of all threads together.

    places   of each thread, where it is
    asleep   of each thread the variable whose futex it sleeps at, or None
    views    of each thread, of each variable the oldest write that it may read
    common   the same for what is seq_cst
    memory   of each variable its writes, oldest first: (value, view that it carries)
    noted    what the monitor remembers
    """

    places: tuple[int, ...]
    asleep: tuple[tuple | None, ...]
    views: tuple[tuple[int, ...], ...]
    common: tuple[int, ...]
    memory: tuple[tuple[tuple[Any, tuple[int, ...]], ...], ...]
    noted: Hashable


class Places:
    """Where a thread can be, found as it gets there.

    Two generators that stand at the same instruction with the same local variables go on alike.
    """

    def __init__(self, make: Callable[[], Thread]):
        self._make = make
        self._number: dict[Hashable, int] = {}
        self._results: list[tuple] = []  # that lead to each place
        self._next: dict[tuple[int, Any], int] = {}
        self.actions: list[Action] = []
        self.first = self._reached(())

    def after(self, place: int, result: Any) -> int:
        key = place, result
        if key not in self._next:
            self._next[key] = self._reached((*self._results[place], result))
        return self._next[key]

    def _reached(self, results: tuple) -> int:
        thread = self._make()
        try:
            action = next(thread)
            for result in results:
                action = thread.send(result)
        except StopIteration:
            return END
        position = _position(thread)
        if position not in self._number:
            self._number[position] = len(self.actions)
            self.actions.append(action)
            self._results.append(results)
        return self._number[position]


def _position(thread: Any) -> Hashable:
    frames = []
    while thread is not None:
        frame = thread.gi_frame
        frames.append((frame.f_code, frame.f_lasti, tuple(sorted(frame.f_locals.items()))))
        thread = thread.gi_yieldfrom
    return tuple(frames)


class Machine:
    """Threads, and what is to hold.

    initial    the first value of each variable
    monitor    (noted, what a thread notes) -> noted; raises Broken
    invariant  of a state: what is wrong with it, or ""
    may_end    whether threads may stay where they are for ever
    private    variables that one thread alone writes and reads, if any: that is done at once
    described  variables whose plain and monotonic writes are done at once as well: nobody can tell,
               as others may still read the old value, and no two threads write one together
    """

    def __init__(
        self,
        threads: Sequence[Callable[[], Thread]],
        initial: dict[tuple, Any],
        monitor: Callable[[Any, Any], Hashable],
        invariant: Callable[[Machine, State], str],
        may_end: Callable[[Machine, State], bool],
        private: Sequence[tuple] = (),
        described: Sequence[tuple] = (),
        weak: Sequence[str] | None = None,
    ):
        self.threads = [Places(make) for make in threads]
        self.index = {variable: k for k, variable in enumerate(initial)}
        self._initial, self._monitor = initial, monitor
        self._invariant, self._may_end = invariant, may_end
        self._private, self._described = frozenset(private), frozenset(described)
        self._kept = [KEPT if weak is None or variable[0] in weak else 1 for variable in initial]
        self._oldest = (0,) * len(initial)
        self.done: set[str] = set()  # the names of all actions that were done

    def first(self) -> State:
        count = len(self.threads)
        memory = tuple(((value, self._oldest),) for value in self._initial.values())
        places = tuple(thread.first for thread in self.threads)
        state = State(places, (None,) * count, (self._oldest,) * count, self._oldest, memory, ())
        return self._settled(state)

    def latest(self, state: State, *variable: Any) -> Any:
        """The newest value of a variable."""
        return state.memory[self.index[variable]][-1][0]

    def action(self, state: State, thread: int) -> Action | None:
        """What a thread does next; None where it has returned."""
        place = state.places[thread]
        return None if place == END else self.threads[thread].actions[place]

    def is_next(self, state: State, kind: str, variable: tuple) -> bool:
        """Whether some thread does that next."""
        actions = [self.action(state, thread) for thread in range(len(self.threads))]
        return any(a is not None and (a.kind, a.variable) == (kind, variable) for a in actions)

    def successors(self, state: State) -> Iterator[State]:
        for thread in range(len(self.threads)):
            action = self.action(state, thread)
            if action is not None:
                yield from map(self._settled, self._moves(state, thread, action))

    def _settled(self, state: State) -> State:
        """When all is done that takes no time."""
        thread = 0
        while thread < len(self.threads):
            action = self.action(state, thread)
            if action is None or not self._takes_no_time(action):
                thread += 1
            else:
                (state,) = self._moves(state, thread, action)
        return state

    def _takes_no_time(self, action: Action) -> bool:
        if action.variable in self._private:
            return True
        is_told = action.kind == "store" and action.order in ("plain", "monotonic")
        return is_told and action.variable in self._described

    def _moves(self, state: State, thread: int, action: Action) -> Iterator[State]:
        if state.asleep[thread] is None:
            self.done.add(action.name)
            yield from _DO[action.kind](self, state, thread, action)
        elif action.kind == "WAIT_UNTIL":  # the time comes
            yield self._gone_on(_woken(state, thread), thread, 0)

    # --- what actions do

    def _gone_on(self, state: State, thread: int, result: Any) -> State:
        """The thread's action has given a result; what it notes behind it takes no time."""
        places, noted = self.threads[thread], state.noted
        place = places.after(state.places[thread], result)
        while place != END:
            action = places.actions[place]
            if action.kind != "note":
                break
            noted = self._monitor(noted, action.operand)
            place = places.after(place, None)
        return state._replace(places=_put(state.places, thread, place), noted=noted)

    def _load(self, state: State, thread: int, action: Action) -> Iterator[State]:
        k = self.index[action.variable]
        oldest = state.views[thread][k]
        if action.order == "seq_cst":
            oldest = max(oldest, state.common[k])
        for number in range(oldest, len(state.memory[k])):
            yield self._read(state, thread, action, number)

    def _read(self, state: State, thread: int, action: Action, number: int) -> State:
        k = self.index[action.variable]
        value, carried = state.memory[k][number]
        view = _put(state.views[thread], k, number)
        if action.order in ACQUIRES:
            view = _newer(view, carried)
        state = state._replace(views=_put(state.views, thread, view))
        return self._gone_on(self._forgotten(state, k), thread, value)

    def _store(self, state: State, thread: int, action: Action) -> Iterator[State]:
        state = self._written(state, thread, action, action.operand, self._oldest)
        yield self._gone_on(state, thread, None)

    def _change(self, state: State, thread: int, action: Action) -> Iterator[State]:
        """A read-modify-write: it reads the latest, and what that carried is passed on."""
        k = self.index[action.variable]
        value, carried = state.memory[k][-1]
        new = _CHANGED[action.kind](value, action.operand)
        view = _put(state.views[thread], k, len(state.memory[k]) - 1)
        if action.order in ACQUIRES:
            view = _newer(view, carried)
        state = state._replace(views=_put(state.views, thread, view))
        if action.kind != "cmpxchg" or value == action.operand[0]:
            state = self._written(state, thread, action, new, carried)
        yield self._gone_on(self._forgotten(state, k), thread, value)

    def _written(self, state: State, thread: int, action: Action, value, passed_on) -> State:
        k = self.index[action.variable]
        number = len(state.memory[k])
        view = _put(state.views[thread], k, number)
        carried = _newer(view, passed_on) if action.order in RELEASES else passed_on
        common = state.common
        if action.order == "seq_cst":
            common = _put(common, k, number)
        writes = (*state.memory[k], (value, carried))
        memory, views = _put(state.memory, k, writes), _put(state.views, thread, view)
        return self._forgotten(state._replace(memory=memory, views=views, common=common), k)

    def _fence(self, state: State, thread: int, action: Action) -> Iterator[State]:
        view = _newer(state.views[thread], state.common)
        state = state._replace(views=_put(state.views, thread, view), common=view)
        for k in range(len(view)):
            state = self._forgotten(state, k)
        yield self._gone_on(state, thread, None)

    def _wait(self, state: State, thread: int, action: Action) -> Iterator[State]:
        if self.latest(state, *action.variable) == action.operand:
            yield state._replace(asleep=_put(state.asleep, thread, action.variable))
        else:
            yield self._gone_on(state, thread, 1)

    def _wake(self, state: State, thread: int, action: Action) -> Iterator[State]:
        for other, asleep in enumerate(state.asleep):
            if asleep == action.variable:
                state = self._gone_on(_woken(state, other), other, 0)
        yield self._gone_on(state, thread, None)

    def _choose(self, state: State, thread: int, action: Action) -> Iterator[State]:
        for number in range(action.operand):
            yield self._gone_on(state, thread, number)

    def _forgotten(self, state: State, k: int) -> State:
        """Without the writes of a variable that nobody can read any more."""
        writes = state.memory[k]
        gone = max(len(writes) - self._kept[k], min(view[k] for view in state.views))
        if gone <= 0:
            return state

        def shifted(view: tuple[int, ...]) -> tuple[int, ...]:
            return _put(view, k, max(view[k] - gone, 0)) if view[k] else view

        memory = tuple(
            tuple((value, shifted(view)) for value, view in (w[gone:] if j == k else w))
            for j, w in enumerate(state.memory)
        )
        return state._replace(
            memory=memory, views=tuple(map(shifted, state.views)), common=shifted(state.common)
        )

    # --- the search

    def explore(self, most: int = 1_000_000) -> int:
        """How many states there are; raises Broken where one is wrong, or cannot come to an end."""
        states = [self.first()]
        number = {states[0]: 0}
        before, after, ends = [0], [[]], []  # of each state, which led to it first, and which can
        for k in _growing(states):
            try:
                found = self._looked_at(states[k])
            except Broken as error:
                raise Broken(f"{error}\n{self._story(states, before, k)}") from None
            if self._may_end(self, states[k]):
                ends.append(k)
            for new in found:
                if number.setdefault(new, len(states)) == len(states):
                    states.append(new)
                    before.append(k)
                    after.append([])
                after[number[new]].append(k)
            assert len(states) < most, "too many states: a smaller case will do"
        stuck = set(range(len(states))) - _leading_to(ends, after)
        if stuck:
            story = self._story(states, before, min(stuck))
            raise Broken(f"from here, no way leads to the end\n{story}")
        return len(states)

    def _looked_at(self, state: State) -> list[State]:
        """Those that follow."""
        found = list(self.successors(state))
        if wrong := self._invariant(self, state):
            raise Broken(wrong)
        return found

    def _story(self, states: list[State], before: list[int], k: int) -> str:
        """What every thread did, in order."""
        lines = [f"then {self._now(states[k])}"]
        while k:
            state, previous = states[k], states[before[k]]
            moved = [t for t, place in enumerate(previous.places) if place != state.places[t]]
            slept = [t for t, at in enumerate(previous.asleep) if at != state.asleep[t]]
            for thread in moved or slept:
                action = self.action(previous, thread)
                lines.append(f"thread {thread}: {action.name} {action.variable[1:]}")
            k = before[k]
        return "\n".join(reversed(lines))

    def _now(self, state: State) -> str:
        values = {name: self.latest(state, *name) for name in self.index}
        return f"asleep at {state.asleep}, noted {state.noted}, memory {values}"


def _growing(states: list) -> Iterator[int]:
    """The place of each state, of those that come later too."""
    k = 0
    while k < len(states):
        yield k
        k += 1


def _leading_to(ends: list[int], after: list[list[int]]) -> set[int]:
    good, waiting = set(ends), list(ends)
    while waiting:
        for k in after[waiting.pop()]:
            if k not in good:
                good.add(k)
                waiting.append(k)
    return good


def _put(values: tuple, k: int, value: Any) -> tuple:
    return values if values[k] == value else (*values[:k], value, *values[k + 1 :])


def _newer(x: tuple[int, ...], y: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(max, x, y))


def _woken(state: State, thread: int) -> State:
    return state._replace(asleep=_put(state.asleep, thread, None))


_CHANGED: dict[str, Callable[[Any, Any], Any]] = {
    "xchg": lambda _, operand: operand,
    "add": lambda value, operand: value + operand,
    "sub": lambda value, operand: value - operand,
    "cmpxchg": lambda _, operand: operand[1],
}
_DO: dict[str, Callable[..., Iterator[State]]] = {
    "load": Machine._load,
    "store": Machine._store,
    **dict.fromkeys(_CHANGED, Machine._change),
    "fence": Machine._fence,
    "WAIT": Machine._wait,
    "WAIT_UNTIL": Machine._wait,
    "WAKE": Machine._wake,
    "WAIT_SHARED": Machine._wait,
    "WAKE_SHARED": Machine._wake,
    "choose": Machine._choose,
}
