"""Paths that the core follows in Python's place.

A track is learned while Python follows a path: the core notes what each call is, and Python which
entry it came to and which values its tensors then had. Along a track the core compares calls, and makes
tensors without values in Python. Python catches up where it has to know of them, at the latest at the
end of the recording: it is then in the state in which it would be after following the calls itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import thread_time_ns
from typing import Any

import torch

from ltc.aten.call import CallResult
from ltc.device.policy import is_power_of_two
from ltc.device.recording import gradient_views
from ltc.device.recording.core_links import link_of
from ltc.device.recording.entries import INPUT, Entry
from ltc.device.recording.state import State, is_second, new_state
from ltc.device.torch_device import storage_of
from ltc.native.core import CORE
from ltc.runtime.buffer import Buffer
from ltc.support.observation import metrics

REFUSED, PASSED, RECORDED, VIEWED, WATCHED = -1, 0, 1, 2, 3


class Track:
    """A path that the core follows, with the entry that each of its calls leads to.

    Attributes:
        entries: The first entry of the path, then the entry that each call came to.
        values: The values of the tensors, by the numbers that the core knows.
        inputs: The values of the inputs, in their order on the path.
        end: The end of its recordings in the core; None where they end in Python.
        tried: The end in Python from which `end` is, or else is not to be had.
    """

    def __init__(self, handle: int, entries: list[Entry], values: list[CallResult]) -> None:
        self.handle, self.entries, self.values = handle, entries, values
        behind = _between(entries[0], entries[-1])
        self.inputs = [entry.value for entry in behind if entry.call.overload == INPUT]
        self.end: Any = None  # a CoreEnd, whose module imports this one
        self.tried: Any = None

    def __del__(self) -> None:
        CORE.drop_track(self.handle)  # type: ignore[union-attr]

    def link(self, maker: int | str, arguments: Sequence[Any], index: int) -> Any:
        """Return a link of what the core has followed: that of a step, or one from before the recording."""
        if isinstance(maker, str):
            return link_of(maker, arguments, index)
        link = self.entries[maker + 1].link
        return link if index < 0 else link[index]


class Start:
    """A place where recordings begin, and what the core has learned of them.

    Attributes:
        track: The calls that came from here, as the core follows them.
        comes: Recordings that were followed from here in Python since a track was last given up.
        misses: Walks that have left a track from here.
        is_refused: True if the core could not learn the last one.
    """

    __slots__ = ("track", "comes", "misses", "is_refused")

    def __init__(self) -> None:
        self.track: Track | None = None
        self.comes = self.misses = 0
        self.is_refused = False

    def is_to_be_learned(self) -> bool:
        """Return True if the recording that comes here is to be learned: the second time, the fourth…"""
        self.comes += 1
        return self.comes > 1 and is_power_of_two(self.comes)

    def leave(self) -> None:
        """A walk has left the track: the first time, the second, the fourth… it is learned anew."""
        self.misses += 1
        if is_power_of_two(self.misses):
            self.track, self.comes = None, 1


class Walk:
    """One run of the core along a track.

    Attributes:
        is_left_early: True if calls of the track have not come. It is known, as all that follows is, once Python
            has caught up.
        names: The core's name of each state that is alive, by its id.
        values: By name the number of the value of each of these; -1 of one that keeps what it had.
        inputs: The names of the inputs, in their order.
        views: The names of those that are views; the core derives them anew.
        count: The number of names.
        caught_up: When Python began to catch up, in nanoseconds of time.thread_time_ns.
    """

    is_left_early = False
    names: dict[int, int]
    values: dict[int, int]
    inputs: list[int]
    views: set[int]
    count: int
    caught_up: int

    def __init__(self, track: Track) -> None:
        self.track = track
        self._opened: dict[State, Buffer] = {}  # the states whose values the core was given

    def open(self, tensors: Sequence[torch.Tensor], numbers: Sequence[int]) -> bool:
        """Let go of the values of tensors that are written to; return False where one has none."""
        states = [storage_of(tensor).lazy for tensor in tensors]
        if any([state.buffer is None or state.value is not None for state in states]):
            return False
        for state, number in zip(states, numbers):
            self._opened[state] = state.buffer
            state.number_in_core = number
            del state.value, state.buffer
        return True

    def lend(self, tensor: torch.Tensor, number: int) -> torch.Tensor | None:
        """Return the value of an input, which the core keeps; None where it is to stay in Python."""
        state: State = storage_of(tensor).lazy
        if state.base is not None or (state.views and state.living_views()):
            return None
        buffer = self._opened.get(state) or state.buffer
        host = host_of(buffer)
        if buffer is None or host is None:
            return None
        if self._opened.pop(state, None) is None:
            state.number_in_core = number
            del state.value, state.buffer
        state.views = None
        return host.clone() if buffer.shared else host

    def catch_up(self, recorder: Any, told: Any) -> None:
        """Bring the recorder to where it would be, had it followed the calls itself.

        Args:
            told: The core's record of the walk: see `Walk::caught_up` in tracks.cpp.
        """
        self.caught_up = thread_time_ns()
        position, made, scalars, inputs, old_views, tensors, names, values, views, self.count = told
        for state, buffer in self._opened.items():
            state.value, state.buffer = None, buffer
        are_there = {*inputs, *old_views}  # the core may have their values
        states = {
            name: storage_of(tensor).lazy if name in are_there else _state_of(tensor, recorder)
            for name, tensor in zip(names, tensors)
        }
        for name, value in zip(inputs, self.track.inputs):
            state = states[name]
            recorder.inputs.append(_settled(state))
            recorder.bound.append(state)
            state.value = value
        recorder.live.extend(states[name] for name in states.keys() - set(inputs))
        for name, number in zip(names, values):
            if number >= 0:
                state = states[name]
                state.value, state.buffer = self.track.values[number], None
        for name, base, links, is_watched in views:
            states[name].chain = tuple([self.track.link(*link) for link in links])
            states[name].base = states[base]
            states[base].add_view(states[name])
            if is_watched:
                gradient_views.watch_again(states[name])
        self.names = {id(state): name for name, state in states.items()}
        self.values, self.inputs = dict(zip(names, values)), inputs
        self.views = {*old_views, *[name for name, *_ in views]}
        recorder.scalars += scalars
        dead = made - (len(names) - len(inputs) - len(old_views))
        metrics.note((("CreateLtcTensor", dead), ("DestroyLtcTensor", dead)))
        entry = self.track.entries[position]
        recorder.last = entry
        recorder.cursor = entry.next if position else recorder.expected_entry()
        recorder.interrupted = False
        self.is_left_early = position + 1 < len(self.track.entries)


class Learner:
    """The notes of what Python follows, while the core notes the calls."""

    def __init__(self, recorder: Any) -> None:
        self._recorder, self._recording = recorder, recorder.recordings
        self._entries: list[Entry] = [recorder.root]
        self._values: list[CallResult] = []
        self._numbers: dict[CallResult, int] = {}
        self._scalars = 0

    def may_learn(self) -> bool:
        """Return True if nothing but calls that were learned is recorded."""
        recorder = self._recorder
        return (
            self._goes_on()
            and recorder.last is self._entries[-1]
            and len(recorder.scalars) == self._scalars
        )

    def _goes_on(self) -> bool:
        recorder = self._recorder
        return (
            recorder.learner is self
            and recorder.immediate is None
            and recorder.token is None
            and recorder.recordings == self._recording
        )

    def learned_values(
        self,
        tensors: Sequence[torch.Tensor],
        numbers: Sequence[Any],
        operands: int,
        made: int,
        inputs: int,
        is_view: bool,
    ) -> list[int]:
        """Note the entry that a call came to; return the outcome, then a number for each tensor.

        Args:
            tensors: Its operands, what it has made, and others that it may have changed.
            numbers: The numbers that the core expects the call to add to the recording's; None for a
            seed.
            operands, made: The number of operands, and of results, among the tensors.
            inputs: The number of operands that no call before has had.
            is_view: True if what is made may be views of the first operand.
        """
        recorder = self._recorder
        if not self._goes_on():
            return [REFUSED]
        new = recorder.scalars[self._scalars :]
        values = [_pending(tensor) for tensor in tensors]
        entry = recorder.last
        if entry is self._entries[-1]:
            changes = [value is not None and value not in self._numbers for value in values]
            self._entries.append(entry)
            if new or numbers or any(changes):
                return [REFUSED]
            return [PASSED, *[-1 if value is None else self._number(value) for value in values]]
        outcome = _outcome(tensors[:operands], tensors[operands : operands + made], is_view, entry)
        shown = _shown_by(_between(self._entries[-1], entry))
        bound = [value for value, base in shown.items() if value is base]
        are_known = len(bound) == inputs and bound == _in_order_of_operands(shown, entry)
        if outcome == REFUSED or entry.of is not None or not are_known:
            return [REFUSED]
        if not _are_alike(new, numbers):
            return [REFUSED]
        self._scalars += len(new)
        self._entries.append(entry)
        return [outcome, *[-1 if value is None else self._number(value) for value in values]]

    def _number(self, value: CallResult) -> int:
        number = self._numbers.get(value)
        if number is None:
            number = self._numbers[value] = len(self._values)
            self._values.append(value)
        return number

    def track(self) -> Track | None:
        """Return what was learned; None where the core has refused a call."""
        core: Any = CORE
        handle = core.learned(self._recorder.session, len(self._entries) - 1)
        return Track(handle, self._entries, self._values) if handle else None


def host_of(buffer: Buffer | None) -> torch.Tensor | None:
    """Return the value of a buffer that the core may have; None where it is lost, or there is none."""
    if buffer is None or buffer.settled() is not buffer or buffer.is_lost():
        return None
    host: torch.Tensor = buffer.ready()
    return host if may_be_lent(host) else None


def may_be_lent(host: torch.Tensor) -> bool:
    """Return True if the core holds such values: none that is complex, or negated where it is read."""
    return not (host.is_neg() or host.dtype.is_complex)


def _pending(tensor: torch.Tensor) -> CallResult | None:
    """The value of a tensor that is to be computed; None where it has a buffer, or is a stale view."""
    try:
        state: State = storage_of(tensor).lazy
    except AttributeError:
        return None
    return state.value if state.buffer is None else None


def _are_alike(recorded: Sequence[Any], noted: Sequence[Any]) -> bool:
    """Return True if the core has noted the numbers that were recorded; it knows no seed (None)."""
    return len(recorded) == len(noted) and all(
        [
            one.__class__ is (int if other is None else other.__class__)
            and (other is None or one == other)
            for one, other in zip(recorded, noted)
        ]
    )


def _outcome(
    operands: Sequence[torch.Tensor], made: Sequence[torch.Tensor], is_view: bool, entry: Entry
) -> int:
    """Return RECORDED where a call has made no views, and of views of its first operand WATCHED or VIEWED.

    WATCHED are those that the backward under way makes independent when it ends.
    """
    if any([tensor.device.type == "cpu" for tensor in made]):  # a factory's, asked for there
        return REFUSED
    given = [storage_of(tensor).lazy for tensor in operands]
    states = [state for state in (storage_of(tensor).lazy for tensor in made) if state not in given]
    if any([state.buffer is not None for state in states]):
        return REFUSED
    if all([state.base is None for state in states]):
        return RECORDED
    of, links = given[0], entry.link if isinstance(entry.link, list) else [entry.link]
    before = of.chain if of.base is not None else ()
    chains = [(*before, link) for link in links]
    are_so = is_view and chains == [state.chain for state in states]
    if not are_so or {state.base for state in states} != {of.base or of}:
        return REFUSED
    return WATCHED if gradient_views.is_watched(states[-1]) else VIEWED


def _shown_by(entries: Sequence[Entry]) -> dict[CallResult, CallResult]:
    """Return the inputs that a call has bound, and what was derived of each before the call: a view of it."""
    shown: dict[CallResult, CallResult] = {}
    for entry in entries:
        call = entry.call
        of = call.args[0] if call.args else None
        if call.overload == INPUT:
            shown[entry.value] = entry.value
        elif entry is not entries[-1] and of.__class__ is CallResult and of in shown:
            shown.update(dict.fromkeys(call.results, shown[of]))
    return shown


def _in_order_of_operands(shown: dict[CallResult, CallResult], entry: Entry) -> list[CallResult]:
    """Return those of the inputs that the call of an entry reads, as it takes them.

    The core names inputs in the order of operands, whether their values are read or only written over.

    Args:
        shown: as of `_shown_by`.
    """
    if entry.call.overload == INPUT:  # a copy, which is no call: the target has that value
        return [entry.value]
    found: dict[CallResult, None] = {}

    def note(argument: Any) -> Any:
        if argument.__class__ is CallResult and argument in shown:
            found[shown[argument]] = None
        return argument

    entry.call.filled(note)
    return list(found)


def _between(first: Entry, last: Entry) -> list[Entry]:
    """Return the entries behind the first, up to the last."""
    found = []
    while last is not first:
        found.append(last)
        last = last.parent
    return found[::-1]


def is_plain(tensor: torch.Tensor) -> bool:
    """Return True if a tensor is no view, and has a buffer and nothing else."""
    try:
        state: State = storage_of(tensor).lazy
    except AttributeError:
        return False
    if state.value is not None or is_second(tensor):
        return False
    return state.base is None and state.buffer is not None


def _state_of(tensor: torch.Tensor, recorder: Any) -> State:
    storage = storage_of(tensor)
    state: State | None = vars(storage).get("lazy")
    if state is None:
        state = storage.lazy = new_state(None, recorder.device)
    return state


def _settled(state: State) -> Buffer:
    """The buffer of an input; the one before it where the step that was to make it has failed."""
    buffer: Buffer | None = state.buffer
    assert buffer is not None
    execution = buffer.execution
    if execution is not None and execution.failure is not None:
        buffer = state.buffer = buffer.settled()
    return buffer
