"""Calls that have run, noted along the paths of a recorder: what comes back is told from what is new.

A note is an entry of the path, as a followed call moves along it.  Its types are those of what the call
gave, so nothing is inferred.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from typing import Any
from weakref import ref

from ltc.aten.call import Call, CallResult
from ltc.device.policy import PathsAlike
from ltc.device.symbolic.derive import INPUT, WRITE_VIEW
from ltc.device.symbolic.path_selection import entry_for, other_way
from ltc.support.bounded_table import BoundedTable
from ltc.support.reference_counts import IN_TWO_LISTS_AND_A_VIEW, reference_counts


def written_key(base: Any, new: Any, chain: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Return the key of a write of `new` through a chain of views of `base`."""
    links = [
        (overload, args, tuple(kwargs.items()), index) for overload, args, kwargs, index in chain
    ]
    return (WRITE_VIEW, base, new, *[part for link in links for part in link])


class _EqualsAll:
    """A key that equals every key."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = None  # type: ignore[assignment]


class _NoNumbers:
    """Takes the numbers of calls that are not noted."""

    def append(self, number: Any) -> None: ...

    def extend(self, numbers: Any) -> None: ...

    def __len__(self) -> int:
        return 0


class _Unnoted:
    """Stands for every entry of calls that are not noted."""

    key, value, link, of = _EqualsAll(), None, None, None
    next: Any = None
    call: Any = None
    results = repeat(None)


UNNOTED = _Unnoted()
UNNOTED.next = UNNOTED.call = UNNOTED
NO_NUMBERS = _NoNumbers()


class FollowedPart:
    """The part of a path that was followed up to a side exit; the notes behind it go on there.

    Attributes:
        entry: Its last entry.
        numbers: The numbers to which its scalars refer.
        inputs: Weak references to the states whose buffers are inputs, in order.
        given: The values of these inputs.
        calls: The number of its calls.
    """

    def __init__(self, recorder: Any) -> None:
        """Made before the part is started: no state is held."""
        self.entry, self.numbers = recorder.last, list(recorder.scalars)
        self.inputs = [ref(state) for state in recorder.bound]
        self.calls = self.entry.depth - len(self.inputs)
        self.given: list[CallResult] = []
        entry = self.entry
        while entry.call is not None:
            if entry.call.overload == INPUT:
                self.given.append(entry.value)
            entry = entry.parent
        self.given.reverse()
        self._held: dict[int, tuple[Any, CallResult, Any]] = {}
        for state in (*recorder.live, *recorder.bound):
            if state.value is not None and state.value.recorder is recorder:
                base = None if state.base is None else state.base.value
                self._held[id(state)] = ref(state), state.value, base

    def started(self) -> None:
        """The part has been started: its values are in buffers."""
        for number, (state, value, base) in list(self._held.items()):
            there = state()
            if there is None:
                del self._held[number]
            elif base is None:
                self._held[number] = state, value, there.buffer

    def value_of(self, state: Any, whole: CallResult | None = None) -> CallResult | None:
        """Return the value on the path that a state still has; None if it has another, or none.

        Args:
            whole: of a view, the noted value of its base.
        """
        there, value, basis = self._held.get(id(state), (None, None, None))
        if there is None or there() is not state or basis is None:
            return None
        return value if basis is (state.buffer if state.base is None else whole) else None

    def living(self) -> list[Any]:
        """Return the states that it has made and that are referenced, but for views."""
        states = [state() for state, _, _ in self._held.values()]
        return [state for state in states if state is not None and state.base is None]

    def move_to(self, values: dict[CallResult, CallResult]) -> None:
        """Other values stand for these on the path."""
        self._held = {
            number: (state, values.get(value, value), values.get(basis, basis))
            for number, (state, value, basis) in self._held.items()
        }


class Notes:
    """The notes of one recording.

    Attributes:
        last: The entry noted last.
        cursor: The entry that came behind it the last time.
        numbers: The numbers to which the entries' scalars refer, in order.
        inputs: Weak references to the states whose buffers are inputs, in order.
        part: The part that was followed before the notes began; None if they begin the path.
    """

    __slots__ = ("recorder", "last", "cursor", "numbers", "inputs", "part", "_given")

    def __init__(self, recorder: Any, part: FollowedPart | None = None) -> None:
        self.recorder, self.part = recorder, part
        self.last = recorder.last if part is None else part.entry
        self.cursor = recorder.expected_entry() if part is None else part.entry.next
        self.numbers: list[Any] = [] if part is None else part.numbers
        self.inputs: list[ref[Any]] = [] if part is None else part.inputs
        self._given: list[CallResult] = [] if part is None else part.given

    def note(self, make_key: Callable[[], Any], make_call: Callable[[], Call]) -> Any:
        """Return the entry of a call, made by `make_call` if it is new behind the last one.

        Both are called again if what was noted so far becomes the beginning of another path.
        """
        while True:
            key = make_key()  # first: it may note an input that the call is given
            last = self.last
            entry = self._known(last, key)
            if entry is not None:
                break
            way = None if last.of is None else other_way(self.recorder, last, key)
            if way is None:
                entry = self.recorder.add_entry(last, key, make_call())
                break
            way()
        last.next = entry
        if last is self.recorder.root:
            self.recorder.ended.follow = entry
        self.last, self.cursor = entry, entry.next
        return entry

    def _known(self, last: Any, key: Any) -> Any:
        entry = last.next
        if entry.key == key:
            return entry
        entry = last.branch(key)
        return entry_for(self.recorder, last, key) if entry is None else entry

    def note_input(self, state: Any, buffer: Any) -> CallResult:
        """Return the noted value of a state that is bound by its buffer."""
        if self.part is not None and (held := self.part.value_of(state)) is not None:
            return held
        number = len(self.inputs)
        entry = self.note(lambda: buffer.key, lambda: self._input(number, buffer))
        self.inputs.append(ref(state))
        self._given.append(entry.value)
        value: CallResult = entry.value
        return value

    def _input(self, number: int, buffer: Any) -> Call:
        call = Call(INPUT, (number,), {})
        self.recorder.values(call, [(buffer.shape, buffer.dtype)])
        return call

    def move_to(self, entry: Any, values: dict[CallResult, CallResult]) -> None:
        """Go on behind another entry, whose path has other values in place of these."""
        self.last, self.cursor = entry, entry.next
        self._given = [values.get(value, value) for value in self._given]
        if self.part is not None:
            self.part.move_to(values)
        for state in (*self.recorder.live, *self.recorder.bound):
            value = state.value
            noted = getattr(value, "noted", None)
            if noted is not None:
                value.noted = values.get(noted, noted)

    # --- the end

    def outcome(self) -> tuple[tuple[CallResult, ...], dict[int, int]]:
        """Return what a program of the path would have to give, and which inputs it replaces.

        Returns:
            (outputs, replaced): as the end of a followed recording has them. `replaced` maps the
            position of an output to that of the input whose place it takes.
        """
        found: dict[CallResult, None] = {}
        places: dict[CallResult, int] = {}
        followed = () if self.part is None else self.part.living()
        for state in reversed([*followed, *self.recorder.live]):
            value = self._left_in(state)
            if value is not None:
                found[value] = None
        for position in reversed(range(len(self.inputs))):
            state = self.inputs[position]()
            value = None if state is None or state.base is not None else self._left_in(state)
            if value is not None:
                found[value] = None
                if self._fits(value, position):
                    places[value] = position
        outputs = tuple(value for value in found if value.call.overload != INPUT)
        return outputs, {i: places[v] for i, v in enumerate(outputs) if v in places}

    def _left_in(self, state: Any) -> CallResult | None:
        """The noted value that the state is to get from a program; None where it has it already."""
        if self.part is not None and (held := self.part.value_of(state)) is not None:
            return held
        value = state.value
        noted: CallResult | None = getattr(value, "noted", None)
        if noted is None or value.recorder is not self.recorder or state.buffer is not None:
            return None
        if state.base is not None and not self._outlives_base(state):
            return None
        return noted

    def _outlives_base(self, view: Any) -> bool:
        base = view.base
        if base.buffer is not None or hasattr(base, "number") or not view.is_reordering:
            return False
        del base  # a variable's reference is not counted by every Python
        return reference_counts([view.base]) == [IN_TWO_LISTS_AND_A_VIEW]  # `outcome`'s is one

    def _fits(self, value: CallResult, position: int) -> bool:
        given = self._given[position]
        if (given.shape, given.dtype) != (value.shape, value.dtype):
            return False
        of = self.last.of
        return of is None or bool(of[0].has_size_of_input(value, position))


# --- paths that the core has summed up --------------------------------------------------------------


class Sketches:
    """Each known hash, with the entry that stands for its path.

    An entry stands for the path that ends there: one of the tree where the path was noted, else one
    that has no calls.
    """

    def __init__(self, make_entry: Callable[[], Any]) -> None:
        self._make_entry = make_entry
        self._exact: BoundedTable[int, Any] = BoundedTable("SketchesOfPaths", 4096)
        self._of_symbols: BoundedTable[int, Any] = BoundedTable("SketchesOfSymbols", 4096)
        self._like: BoundedTable[int, PathsAlike] = BoundedTable("SketchesBySizes", 4096)

    def entry_of(self, exact: int, shape: int) -> Any:
        """Return the entry that stands for a path: its own if it was noted, else one of any size."""
        known = self._exact.get(exact)
        if known is not None and known.call is not None:
            return known
        return self._of_symbols.get(shape) or known or self._exact.keep(exact, self._make_entry())

    def like(self, shape: int) -> PathsAlike | None:
        """Return the memory of the paths that differ in sizes alone; None of the first one."""
        known = self._like.get(shape)
        if known is None:
            self._like.keep(shape, PathsAlike())
        return known

    def noted(self, exact: int, shape: int, leaf: Any) -> None:
        """A path was noted, which ends at `leaf`: its sketch stands for it from now on."""
        self._exact.pop(exact, None)
        self._exact.keep(exact, leaf)
        if leaf.of is not None:
            self._of_symbols.pop(shape, None)
            self._of_symbols.keep(shape, leaf)
