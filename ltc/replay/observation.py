"""The outcome of one recorded call: its program, the program's inputs, the holders of its results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ltc.aten.call import Call, Scalar
from ltc.device.call_observer import CallObserver
from ltc.device.random_state import RandomState
from ltc.device.recording.exit_liveness import Ended
from ltc.device.recording.recorder import Entry, Recorder, devices
from ltc.device.recording.state import State
from ltc.device.recording.sync import flush
from ltc.device.recording.tensors import current_device, is_lazy
from ltc.device.storage_sharing import as_bytes
from ltc.device.torch_device import state_if_any
from ltc.replay.aliases import address
from ltc.replay.counters import TracedCounter
from ltc.replay.guard import Handed
from ltc.replay.reachable import Reachable, has_graph, is_leaf
from ltc.replay.traced_float import Known, Operation, Tape, plain, traced
from ltc.runtime.buffer import BufferKey
from ltc.support.torch_private import DEVICE_TYPE, storage_identity


@dataclass(slots=True, eq=False)
class Observation:
    """One call of a function that was recorded.

    Attributes:
        no_gradient: Places of the tensors without a gradient after the call.
        reachable: Everything that it could use, in the state before the call.
        situation: A hash that is equal for calls that differ in numbers alone.
        recorder, last, ended: The recorder, the last entry, and the outcome of the end.
        origins, keys: The origins and keys of its inputs.
        scalars: The scalars of the recording.
        seeds: The slots of the scalars drawn from the device's running seed, in order.
        numbers: The floats that are handed over, then the step counts, before the call.
        operations: All operations on these numbers.
        counts: For each counter its place among these operations or numbers after the call.
        written: Places of the tensors that it has written to, as autograd counts writes.
        holders: The number of a state that lives on -> its holder: ("root", number of a base),
            ("gradient", place of the tensor it is the gradient of), or ("result", number).
        form: The form of the function's result: see `form_of`.
        mark: True if the step mark at its end was to wait; None where it has none.
        obstacle: The reason why such a call cannot be replayed; "" if it can.
    """

    reachable: Reachable
    situation: int
    obstacle: str = ""
    recorder: Recorder = field(default=None)  # type: ignore[assignment]  # there without an obstacle
    last: Entry = field(default=None)  # type: ignore[assignment]
    ended: Ended = field(default=None)  # type: ignore[assignment]
    origins: Origins = field(default=None)  # type: ignore[assignment]
    keys: list[BufferKey] = field(default_factory=list)
    scalars: list[Any] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    counts: list[Any] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    holders: dict[int, tuple[str, Any]] = field(default_factory=dict)
    no_gradient: list[int] = field(default_factory=list)
    form: Any = None
    mark: bool | None = None

    @property
    def root(self) -> Entry:
        """Return the entry where its path begins."""
        entry = self.last
        while entry.parent is not None:
            entry = entry.parent
        return entry

    def difference(self, other: Observation) -> str:
        """Return the first difference of another call from this one, in words; "" if they are alike."""
        if self.last is not other.last:
            return _where_paths_part(self.last, other.last)
        for (told, mine), (_, others) in zip(self._outcome(), other._outcome()):
            if mine != others:
                return told
        return self.origins.other_constant(other.origins)

    def _outcome(self) -> Iterator[tuple[str, Any]]:
        ended = self.ended
        kept = (ended.outputs, ended.holders, ended.shared, ended.replaced, self.holders)
        yield "other objects hold its results", kept
        yield "it has used other tensors", (self.origins.inputs, self.reachable.layout)
        drawn = (self.mark, self.seeds, self.no_gradient)
        yield "its random draws or its step mark differ", drawn
        computed = [operation.without_numbers() for operation in self.operations]
        yield "it has computed other numbers", (computed, self.counts)
        yield "it has returned something else", repr(self.form)

    def line_of(self, slot: int) -> str:
        """Return the line that uses the number of that slot."""
        return next((c.line for c in self.last.path_to() if slot in slots_of(c)), "")

    def other_number(self, expected: list[Any]) -> str:
        """Return in words the first number that is not the expected one; "" if all are."""
        for slot, (mine, other) in enumerate(zip(self.scalars, expected)):
            if slot not in self.seeds and repr(mine) != repr(other):
                return f"the number at {self.line_of(slot)} is {mine!r}, but a replay would pass {other!r}"
        return ""


def modes() -> tuple[Any, ...]:
    """Return the modes of torch that decide, besides tensors and values, how calls go."""
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
    """Record one call, which begins and ends a recording.

    Args:
        recorders: Gives the recorders of the calling thread.

    Returns:
        The call's result, and its outcome.
    """
    for recorder in recorders():
        flush(recorder)
        recorder.catch_up()  # the core tells nobody of its uploads
    reachable = Reachable(function, args, kwargs)
    seen = Observation(reachable, hash((reachable.situation(), modes())), reachable.obstacle)
    if seen.obstacle:
        return function(*args, **kwargs), seen
    roots = {id(base): number for base, number in reachable.bases.items()}
    running = {device: device.random.running for device in devices()}
    before, versions = modes(), _versions(reachable)
    with CallObserver(lambda state: roots.get(id(state))) as observer:
        with watched_graphs([found.tensor for found in reachable.lazy], observer):
            result = _traced_call(function, args, kwargs, seen)
        for recorder in recorders():
            flush(recorder)
    now = _versions(reachable)
    seen.written = [place for place, version in enumerate(versions) if now[place] != version]
    if modes() != before:
        seen.obstacle = "the call changes a mode of torch, such as no_grad or the default dtype"
    else:
        seen.obstacle = (
            observer.obstacle
            or reachable.changed_outside()
            or _take(seen, result, observer, running)
        )
    reachable.let_go()
    return result, seen


def _versions(reachable: Reachable) -> list[int | None]:
    """Return how often autograd has seen each tensor written to; None if it does not count."""
    tensors = [found.tensor for found in reachable.lazy]
    return [None if tensor.is_inference() else tensor._version for tensor in tensors]


# --- the call -----------------------------------------------------------------------------------


def _traced_call(function: Callable, args: tuple, kwargs: dict, seen: Observation) -> Any:
    """Call with traced stand-ins for the values that are handed over, which are put back."""
    tape, handed = Tape(), [*seen.reachable.handed, *seen.reachable.counters]
    arguments: dict[Any, Any] = {"args": list(args), "kwargs": dict(kwargs)}
    of_counters: dict[int, Any] = {}  # by the ids of counters, of which two may be one
    swapped: list[tuple[Handed, Any]] = []
    for one in handed:
        stand_in = _stand_in(one.value, tape, seen.numbers)
        if isinstance(one.value, torch.Tensor):
            stand_in = of_counters.setdefault(id(one.value), stand_in)
        if isinstance(one.holder, str):
            arguments[one.holder][one.key] = stand_in
        else:
            one.holder[one.key] = stand_in
            swapped.append((one, stand_in))
    try:
        result: Any = untraced(function(*arguments["args"], **arguments["kwargs"]))
    finally:
        tape.is_on = False
        for one, stand_in in swapped:
            if one.key in one.holder:  # the call may have put another there
                present = one.holder[one.key]
                one.holder[one.key] = one.value if present is stand_in else untraced(present)
    seen.operations = tape.operations
    seen.counts = [of_counters[id(one.value)].operand for one in seen.reachable.counters]
    return result


def _stand_in(value: Any, tape: Tape, numbers: list[float]) -> Any:
    """Return the traced form of a value; its numbers are known by their places from here on."""
    if isinstance(value, tuple):
        return tuple(_stand_in(part, tape, numbers) for part in value)
    operand = Known(len(numbers))
    if isinstance(value, torch.Tensor):
        numbers.append(value.item())
        return TracedCounter.of(value, tape, operand)
    numbers.append(value)
    return traced(tape, operand, value)


# --- its outcome --------------------------------------------------------------------------------


def _take(seen: Observation, result: Any, observer: CallObserver, running: dict[Any, int]) -> str:
    """Fill in the outcome; return the first obstacle, or ""."""
    if not observer.recorded:
        return "nothing was recorded"
    seen.recorder, seen.last, seen.ended, alive = observer.recorded[0]
    seen.scalars, seen.keys = observer.scalars[0], [one.key for one in observer.inputs[0]]
    if not seen.ended.outputs:
        return "it computes no value that is still held"
    if len(observer.marks) > 1:
        return "it marks more than one step"
    seen.mark = observer.marks[0] if observer.marks else None
    seen.seeds = [call.seed.slot for call in seen.last.path_to() if call.seed is not None]
    drawn = RandomState(running[seen.recorder.device])
    if [seen.scalars[slot] for slot in seen.seeds] != [drawn.draw() for _ in seen.seeds]:
        return "it draws from a generator of its own, or sets the seed"
    origins = origins_of(seen.reachable, observer, seen.last)
    if isinstance(origins, str):
        return origins
    seen.origins = origins
    return graph_obstacle(result) or _take_holders(seen, result, alive)


def _take_holders(seen: Observation, result: Any, alive: list[State]) -> str:
    """Find the holder of each state that the end gave something, and the parts of the result."""
    gradients = _gradients(seen)
    known: dict[int, tuple[str, Any]] = {
        id(base): ("root", number) for base, number in seen.reachable.bases.items()
    }
    for place, gradient in gradients.items():
        known.setdefault(id(gradient), ("gradient", place))
    returned = {id(state_if_any(leaf)) for leaf in tensors_in(result)}
    held = [*seen.ended.holders, *(holders for _, holders in seen.ended.shared)]
    for number in [number for holders in held for number in holders]:
        state = id(alive[number])
        if state not in known and state in returned:
            known[state] = ("result", number)
        if state not in known:
            line = _line_of(seen, number)
            return f"a tensor that is made at {line} is kept by more than its result and gradients"
        seen.holders[number] = known[state]
    if shared := _shared_gradient(seen, gradients):
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


def _gradients(seen: Observation) -> dict[int, State]:
    """Return the states of all gradients now, by the places of their tensors."""
    found: dict[int, State] = {}
    for place, one in enumerate(seen.reachable.lazy):
        if one.tensor.requires_grad and is_leaf(one.tensor):
            if one.tensor.grad is None:
                seen.no_gradient.append(place)
            elif is_lazy(one.tensor.grad):
                found[place] = state_if_any(one.tensor.grad)
    return found


def _shared_gradient(seen: Observation, gradients: dict[int, State]) -> str:
    """Return an obstacle if a gradient is neither the one before nor made by the program."""
    reachable = seen.reachable
    before = {one.expression: place for place, one in enumerate(reachable.lazy)}
    for place, state in gradients.items():
        earlier = before.get(f"{reachable.lazy[place].expression}.grad")
        if state is None or (earlier is not None and state is reachable.state_at(earlier)):
            continue
        if ("gradient", reachable.layout.objects[place]) not in seen.holders.values():
            name = reachable.name_at(place)
            return f"it gives {name} a gradient that is a part of other memory"
    return ""


def _where_paths_part(mine: Entry, other: Entry) -> str:
    """Name the first call that only one of two recordings has."""
    calls, others = mine.path_to(), other.path_to()
    for one, another in zip(calls, others):
        if one is not another:
            return f"{another.name} at {another.line} where {one.name} at {one.line} was recorded"
    if len(calls) == len(others):
        return "its path was forgotten"
    last: Call = max(calls, others, key=len)[min(len(calls), len(others))]
    return f"{last.name} at {last.line} is recorded in one of two calls"


# The origin of each input of a recorded call: a tensor that it can reach, an upload, or a
# constant.

_ON_THE_CPU = "it uses a CPU tensor among its arguments on the CPU"
_MOST_BYTES = 1 << 16  # of a tensor that is made on the CPU, the same in each call


class Origins(NamedTuple):
    """The origins of one recording's inputs, in recorded order.

    Attributes:
        inputs: ("root", number among the bases of the reachable ones on a device), ("upload", place
            among those on the CPU), or ("constant", its position).
        constants: By their position, small tensors that were made on the CPU and uploaded.
        last: Entry of the recording.
    """

    inputs: list[tuple[str, int]]
    constants: dict[int, torch.Tensor]
    last: Entry

    def other_constant(self, others: Origins) -> str:
        """Return the words for a constant of which the calls made two; "" if there is none."""
        for position, mine in self.constants.items():
            other = others.constants.get(position)
            if other is not None and not _same_bits(mine, other):
                return _unknown_input(self.last, position, is_upload=True)
        return ""


def origins_of(reachable: Reachable, observer: CallObserver, last: Entry) -> Origins | str:
    """Return the origins of the one recording that was watched, or the obstacle."""
    found = Origins([], {}, last)
    uploads = {id(buffer): tensor for tensor, buffer in observer.uploads}
    places = {address(one.tensor): n for n, one in reversed([*enumerate(reachable.host)])}
    for position, (root, buffer) in enumerate(zip(observer.origins[0], observer.inputs[0])):
        source = uploads.get(id(buffer))
        place = None if source is None or not source.numel() else places.get(address(source))
        if root is not None:
            found.inputs.append(("root", root))
        elif place is not None:
            found.inputs.append(("upload", place))
        elif source is None or source.nbytes > _MOST_BYTES:
            return _unknown_input(last, position, source is not None)
        elif _is_of_an_argument(reachable, source):
            return _ON_THE_CPU
        else:
            found.constants[position] = source.detach().clone()
            found.inputs.append(("constant", position))
    return _use_on_the_cpu(reachable, found) or found


def _use_on_the_cpu(reachable: Reachable, found: Origins) -> str:
    """Return an obstacle if a CPU tensor is more than moved to the device."""
    moved = {place for kind, place in found.inputs if kind == "upload"}
    for one, first in zip(reachable.host, reachable.uploads):
        if not one.is_fixed and first not in moved:
            return _ON_THE_CPU
    if reachable.has_written_to_host():
        return "it writes to a CPU tensor that existed before"
    return ""


def _is_of_an_argument(reachable: Reachable, source: torch.Tensor) -> bool:
    """Return True if it shows memory of a CPU tensor of which the next call has another."""
    memory = storage_identity(source.untyped_storage())
    return any(
        not found.is_fixed
        and found.tensor.layout is torch.strided
        and storage_identity(found.tensor.untyped_storage()) == memory
        for found in reachable.host
    )


def _same_bits(mine: torch.Tensor, other: torch.Tensor) -> bool:
    if (mine.shape, mine.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(as_bytes(mine), as_bytes(other))


def _unknown_input(last: Entry, position: int, is_upload: bool) -> str:
    """Return the words for an input that no later call can be given."""
    path = last.path_to()
    inputs = (c for c in path if c.overload == "ltc::input" and c.args[0] == position)
    made = next(inputs, None)
    users = (c.line for c in path if made is not None and made.results[0] in _operands(c))
    line = next(users, "")
    if is_upload:
        return f"it moves another tensor that it has made on the CPU to the device, for {line}"
    return f"{line} uses a tensor that is neither an argument nor found in what it closes over"


def _operands(call: Call) -> Iterator[Any]:
    for operand in (*call.args, *call.kwargs.values()):
        if isinstance(operand, (list, tuple)):
            yield from operand
        else:
            yield operand


def slots_of(call: Call) -> list[int]:
    """Return the slots of the recording's numbers that a call is given."""
    return [operand.slot for operand in _operands(call) if isinstance(operand, Scalar)]


# --- The result of a function: how to make another like it, and the graphs that it needs ---------

_GRAPH_NODES = 10_000  # of autograd's, that are looked at to see whether a backward has used them


class Unfit(Exception):
    """A part of a result cannot be made again."""


def tensors_in(result: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors on a device in containers that a replay can make again."""
    if isinstance(result, (list, tuple, dict)):
        for part in result.values() if isinstance(result, dict) else result:
            yield from tensors_in(part)
    elif is_lazy(result):
        yield result


def untraced(result: Any) -> Any:
    """Return a result with plain numbers in place of traced ones; lists and dicts stay the objects that they are."""
    if isinstance(result, tuple):
        parts = [untraced(part) for part in result]
        if all(part is before for part, before in zip(parts, result)):
            return result
        return result._make(parts) if hasattr(result, "_make") else tuple(parts)
    if isinstance(result, (list, dict)):
        for key in result if isinstance(result, dict) else range(len(result)):
            part = untraced(result[key])
            if part is not result[key]:
                result[key] = part
        return result
    return plain(result)


def form_of(result: Any, known: dict[int, tuple[str, Any]], reachable: Reachable) -> Any:
    """Return the form of a result, from which another is made.

    Returns:
        ("list" or "tuple", parts), ("dict", parts, keys), ("plain", value), the holder of a tensor's
        state, or ("tensor", place, True if it is the same object as the tensor at that place).
    """
    if result.__class__ in (list, tuple):
        parts = [form_of(part, known, reachable) for part in result]
        return result.__class__.__name__, parts
    if result.__class__ is dict and all(isinstance(key, (str, int)) for key in result):
        parts = [form_of(part, known, reachable) for part in result.values()]
        return "dict", parts, list(result)
    if isinstance(result, (bool, int, float, str, type(None))):
        return "plain", plain(result)
    if not isinstance(result, torch.Tensor):
        raise Unfit(f"a {result.__class__.__name__}")
    if not is_lazy(result):
        raise Unfit("a CPU tensor")
    if result.layout is not torch.strided:
        raise Unfit("a sparse tensor")
    state: Any = state_if_any(result)
    found = [place for place in range(len(reachable.lazy)) if reachable.state_at(place) is state]
    if found:
        same = [place for place in found if reachable.lazy[place].tensor is result]
        return "tensor", (same or found)[0], bool(same)
    if state is None or state.base is not None:
        raise Unfit(f"a view of {_named(state, reachable)}: return a clone")
    if known.get(id(state), ("root",))[0] == "root":
        raise Unfit("a tensor that the call has not made")
    return known[id(state)]


def _named(view: Any, reachable: Reachable) -> str:
    """Return the base of a view, in words."""
    root = None if view is None else reachable.bases.get(view.base)
    return "another tensor" if root is None else reachable.told_root(root)


@contextlib.contextmanager
def watched_graphs(tensors: Sequence[torch.Tensor], observer: CallObserver) -> Iterator[None]:
    """Note an obstacle if a backward goes on into the graph of one of these, from before.

    Such a graph may compute another thing the next time, and nothing in the call says so.
    """
    nodes: list[Any] = [x.grad_fn for x in tensors if x.requires_grad and has_graph(x)]
    hooks = [node.register_prehook(lambda gradients: _hinder(observer)) for node in nodes]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _hinder(observer: CallObserver) -> None:
    observer.hinder(
        "its backward continues into the graph of a tensor that existed before: pass the tensor "
        "detached, or build the whole graph inside the function"
    )


def graph_obstacle(result: Any) -> str:
    """Return an obstacle if a result has a graph that no backward has used."""
    for leaf in tensors_in(result):
        if leaf.grad_fn is not None and not _is_used(leaf.grad_fn):
            return "its result needs a graph: call backward inside, or return result.detach()"
    return ""


def _is_used(node: Any) -> bool:
    """Return True if a backward has freed the tensors that the graph above this node had saved."""
    waiting, seen = [node], {node}
    while waiting and len(seen) < _GRAPH_NODES:
        one = waiting.pop()
        if _has_freed(one):
            return True
        for following, _ in one.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
    return False


def _has_freed(node: Any) -> bool:
    for name in dir(node):
        if name.startswith("_saved_") or name == "saved_tensors":
            try:
                getattr(node, name)
            except RuntimeError:
                return True
    return False
