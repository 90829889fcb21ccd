"""What one recorded call came to: its program, what that was given, and who has what it made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ltc.aten.call import Call
from ltc.device.call_observer import CallObserver
from ltc.device.random_state import RandomState
from ltc.device.recording.exit_liveness import Ended
from ltc.device.recording.recorder import Entry, Recorder, devices
from ltc.device.recording.state import State
from ltc.device.recording.sync import flush
from ltc.device.recording.tensors import current_device, is_lazy
from ltc.device.torch_device import state_if_any
from ltc.replay.changed_use import same_operations, where_paths_part
from ltc.replay.counters import multipliers
from ltc.replay.origins import Origins, origins_of, recorded_path, slots_of, unknown_input
from ltc.replay.reachable import Reachable, is_leaf
from ltc.replay.returned import (
    Unfit,
    form_of,
    graph_obstacle,
    tensors_in,
    untraced,
    watched_graphs,
)
from ltc.replay.traced_float import Operation, Tape, put, restore
from ltc.support.torch_private import DEVICE_TYPE


@dataclass(slots=True, eq=False)
class Observation:
    """One call of a function that was recorded.

    reachable   what it could use, as that was before
    situation   equal for calls that nothing but numbers tells apart
    recorder, last, ended   where it was recorded, the last entry, and what the end came to
    origins     of its inputs
    scalars     of the recording
    seeds       the slots of those that were drawn from the device's running seed, in order
    numbers     the values of `reachable.numbers`, then of the counters, before the call
    operations  what was computed from these numbers
    counts      the values of the counters after the call
    written     places of the tensors that it has written to, as autograd counts it
    holders     the number of a state that lives on -> who has it: ("root", number of a base),
                ("gradient", place of the tensor it is the gradient of), or ("result", number)
    no_gradient places of the tensors whose gradient is gone
    form        of what the function has returned: see `form_of`
    mark        whether the step mark at its end was to wait; None where it has none
    obstacle    why such a call cannot be replayed; "" where it can
    """

    reachable: Reachable
    situation: int
    obstacle: str = ""
    recorder: Recorder = field(default=None)  # type: ignore[assignment]  # there without an obstacle
    last: Entry = field(default=None)  # type: ignore[assignment]
    ended: Ended = field(default=None)  # type: ignore[assignment]
    origins: Origins = field(default=None)  # type: ignore[assignment]
    scalars: list[Any] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    counts: list[float] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    holders: dict[int, tuple[str, Any]] = field(default_factory=dict)
    no_gradient: list[int] = field(default_factory=list)
    form: Any = None
    mark: bool | None = None

    @property
    def root(self) -> Entry:
        """Where its path begins."""
        entry = self.last
        while entry.parent is not None:
            entry = entry.parent
        return entry

    def difference(self, other: Observation) -> str:
        """What the other has done that this one has not; "" where they are alike."""
        if self.last is not other.last:
            return where_paths_part(self.last, other.last)
        mine, others = self.ended, other.ended
        if (mine.outputs, mine.holders, mine.shared, mine.replaced) != (
            others.outputs,
            others.holders,
            others.shared,
            others.replaced,
        ) or self.holders != other.holders:
            return "what it leaves behind is held by something else"
        if (self.origins.inputs, self.reachable.aliases.places) != (
            other.origins.inputs,
            other.reachable.aliases.places,
        ):
            return "it has worked on other tensors"
        if constant := self.other_constant(other):
            return constant
        if (self.mark, self.seeds, self.no_gradient) != (
            other.mark,
            other.seeds,
            other.no_gradient,
        ):
            return "its random draws or its step mark are others"
        if not same_operations(self.operations, other.operations):
            return "it has computed other numbers"
        if None in alike_growth([self, other]):
            return "its step counts have grown otherwise"
        return "" if repr(self.form) == repr(other.form) else "it has returned something else"

    def growth(self) -> list[float]:
        """By how much each counter has grown."""
        return [now - was for now, was in zip(self.counts, _counters_of(self))]

    def multiplied_by(self, counter: int) -> frozenset[int]:
        """The places of the operations by whose results a counter may have been multiplied."""
        results = [operation.result for operation in self.operations]
        dtype = self.reachable.counters[counter].tensor.dtype
        return multipliers(dtype, _counters_of(self)[counter], self.counts[counter], results)

    def other_constant(self, other: Observation) -> str:
        """Where both have made a tensor on the CPU that is not the same; "" where all are."""
        position = self.origins.other_constant(other.origins)
        return "" if position is None else unknown_input(self.last, position, is_upload=True)

    def line_of(self, slot: int) -> str:
        """Where the number of that slot is used."""
        return next((c.line for c in recorded_path(self.last) if slot in slots_of(c)), "")

    def other_number(self, expected: list[Any]) -> str:
        """Where a number of the recording is not the expected one; "" where all are."""
        for slot, (mine, other) in enumerate(zip(self.scalars, expected)):
            if slot not in self.seeds and repr(mine) != repr(other):
                return f"the number at {self.line_of(slot)} is {mine!r} where {other!r} would have been given"
        return ""


def modes() -> tuple[Any, ...]:
    """What decides, besides what a function can reach, what its calls do."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(DEVICE_TYPE),
        torch.get_autocast_dtype(DEVICE_TYPE),
        torch.get_default_dtype(),
        current_device().index,
    )


def observed(
    function: Callable, args: tuple, kwargs: dict, recorders: Callable[[], list[Recorder]]
) -> tuple[Any, Observation]:
    """What the call returns, and what it came to.

    recorders  gives those of the calling thread; what is pending in them is started before
    """
    for recorder in recorders():
        flush(recorder)
    reachable = Reachable(function, args, kwargs)
    seen = Observation(reachable, hash((reachable.situation(), modes())), reachable.obstacle)
    if seen.obstacle:
        return function(*args, **kwargs), seen
    roots = reachable.aliases.numbers()
    seen.numbers = [n.value for n in reachable.numbers] + _values(reachable)
    running = {device: device.random.running for device in devices()}
    before, versions = modes(), _versions(reachable)
    with CallObserver(lambda state: roots.get(id(state))) as observer:
        with watched_graphs([found.tensor for found in reachable.lazy], observer):
            result = _traced_call(function, args, kwargs, seen)
        for recorder in recorders():
            flush(recorder)
    seen.counts = _values(reachable)
    versions_now = _versions(reachable)
    seen.written = [place for place, was in enumerate(versions) if versions_now[place] != was]
    if modes() != before:
        seen.obstacle = (
            "the call leaves a mode of torch behind, such as no_grad or the default dtype"
        )
    else:
        seen.obstacle = (
            observer.obstacle
            or reachable.changed_layout()
            or _take(seen, result, observer, running)
        )
    reachable.let_go()
    return result, seen


def _values(reachable: Reachable) -> list[float]:
    return [found.tensor.item() for found in reachable.counters if found.tensor.dim() == 0]


def _versions(reachable: Reachable) -> list[int | None]:
    """How often autograd has seen each tensor written to; None where it does not count."""
    tensors = [found.tensor for found in reachable.lazy]
    return [None if tensor.is_inference() else tensor._version for tensor in tensors]


def _counters_of(seen: Observation) -> list[float]:
    return seen.numbers[len(seen.reachable.numbers) :]


# --- the call -----------------------------------------------------------------------------------


def _traced_call(function: Callable, args: tuple, kwargs: dict, seen: Observation) -> Any:
    """The call with traced floats in place of the known numbers, which are put back."""
    tape, numbers = Tape(), seen.reachable.numbers
    given, named, swapped = list(args), dict(kwargs), []
    for place, number in enumerate(numbers):
        traced = tape.known(place, number.value)
        if number.holder is None:
            given[number.key] = traced
        elif number.holder == "kwargs":
            named[number.key] = traced
        else:
            swapped.append((number, traced))
            put(number, traced)
    try:
        result: Any = untraced(function(*given, **named))
    finally:
        tape.is_on = False
        for number, traced in swapped:
            restore(number, traced)
    seen.operations = tape.operations
    return result


# --- what it came to ----------------------------------------------------------------------------


def _take(
    seen: Observation,
    result: Any,
    observer: CallObserver,
    running: dict[Any, int],
) -> str:
    """Fill in what is known afterwards; returns the obstacle that is met on the way."""
    if not observer.recorded:
        return "nothing was recorded"
    recorder, seen.last, seen.ended, alive = observer.recorded[0]
    seen.recorder, seen.scalars = recorder, observer.scalars[0]
    if not seen.ended.outputs:
        return "it computes nothing that anybody holds"
    if len(observer.marks) > 1:
        return "it marks more than one step"
    seen.mark = observer.marks[0] if observer.marks else None
    seen.seeds = _seeds(recorded_path(seen.last))
    if _drawn(running[recorder.device], len(seen.seeds)) != [
        seen.scalars[slot] for slot in seen.seeds
    ]:
        return "it draws from a generator of its own, or sets the seed"
    origins = origins_of(seen.reachable, observer, seen.last)
    if isinstance(origins, str):
        return origins
    seen.origins = origins
    return graph_obstacle(result) or _take_holders(seen, result, alive)


def _seeds(path: list[Call]) -> list[int]:
    return [call.seed.slot for call in path if call.seed is not None]


def _drawn(running: int, count: int) -> list[int]:
    """The next seeds of a device whose running seed is that."""
    state = RandomState(running)
    return [state.draw() for _ in range(count)]


def _take_holders(seen: Observation, result: Any, alive: list[State]) -> str:
    """Who has each state that the end gave something; what the result is made of."""
    numbers = [n for holders in seen.ended.holders for n in holders]
    numbers += [n for _, holders in seen.ended.shared for n in holders]
    roots = seen.reachable.aliases.numbers()
    known: dict[int, tuple[str, Any]] = {state: ("root", root) for state, root in roots.items()}
    known |= {i: holder for i, holder in _gradients(seen).items() if i not in known}
    returned = {id(state_if_any(leaf)) for leaf in tensors_in(result)}
    for number in numbers:
        state = alive[number]
        if id(state) not in known and id(state) in returned:
            known[id(state)] = ("result", number)
        if id(state) not in known:
            line = _line_of(seen, number)
            return f"what is made at {line} is kept by more than its result and gradients"
        seen.holders[number] = known[id(state)]
    if shared := _shared_gradient(seen):
        return shared
    try:
        seen.form = form_of(result, known, seen.reachable)
    except Unfit as unfit:
        return f"it returns {unfit}"
    return ""


def _line_of(seen: Observation, number: int) -> str:
    for value, holders in zip(seen.ended.outputs, seen.ended.holders):
        if number in holders:
            return value.call.line
    return "a line that only passes it on"


def _gradients(seen: Observation) -> dict[int, tuple[str, Any]]:
    """By the state of each gradient there is now, the place of its tensor."""
    found: dict[int, tuple[str, Any]] = {}
    for place, one in enumerate(seen.reachable.lazy):
        tensor = one.tensor
        if not (tensor.requires_grad and is_leaf(tensor)):
            continue
        gradient = tensor.grad
        if gradient is None:
            seen.no_gradient.append(place)
        elif is_lazy(gradient):
            found.setdefault(id(state_if_any(gradient)), ("gradient", place))
    return found


def _shared_gradient(seen: Observation) -> str:
    """An obstacle where a gradient is neither the one before nor what the program has made for it."""
    reachable = seen.reachable
    aliases = reachable.aliases
    before = {one.expression: state for one, state in zip(reachable.lazy, aliases.states)}
    for place, one in enumerate(reachable.lazy):
        tensor = one.tensor
        gradient = tensor.grad if tensor.requires_grad and is_leaf(tensor) else None
        state = None if gradient is None else state_if_any(gradient)
        if state is None or state is before.get(f"{one.expression}.grad"):
            continue
        if ("gradient", aliases.places[place].object) not in seen.holders.values():
            return f"it gives {reachable.name_at(place)} a gradient that is a part of other memory"
    return ""


# --- differences --------------------------------------------------------------------------------


class Multiplied(NamedTuple):
    """A counter is multiplied by what an operation has given, by its place on the tape."""

    place: int


def alike_growth(calls: Sequence[Observation]) -> list[float | Multiplied | None]:
    """What each call adds to each counter, or multiplies it by; None where calls differ in that."""
    found: list[float | Multiplied | None] = []
    known: dict[tuple, Multiplied | None] = {}  # counters of equal values are looked at once
    for counter, added in enumerate(zip(*(call.growth() for call in calls))):
        if all(by == added[0] for by in added):
            found.append(added[0])
            continue
        histories = tuple((_counters_of(call)[counter], call.counts[counter]) for call in calls)
        if histories not in known:
            places = frozenset.intersection(*(call.multiplied_by(counter) for call in calls))
            known[histories] = Multiplied(min(places)) if places else None
        found.append(known[histories])
    return found
