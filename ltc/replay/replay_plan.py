"""One call, replayed: check the guard, give the program its inputs, hand out the results."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ltc import config
from ltc.backends.collective_runner import current_replica
from ltc.backends.plain_dispatch import is_plain_now
from ltc.device.recording.state import State
from ltc.device.recording.sync import flush
from ltc.device.recording.tensors import state_of, uploaded, wrap_buffer
from ltc.device.torch_device import storage_of
from ltc.replay.aliases import places_of, same_memory, same_objects
from ltc.replay.counters import Counters
from ltc.replay.guard import NOT_THERE, Changed, checks, generated
from ltc.replay.handed_over import HandedOver
from ltc.replay.observation import Observation, modes
from ltc.replay.reachable import Reachable
from ltc.runtime.buffer import Buffer, input_key
from ltc.runtime.compile import known_program
from ltc.runtime.executor import executor_of
from ltc.support.observation import metrics
from ltc.support.process.held_signals import held
from ltc.support.shallow_copy import elements_at
from ltc.support.torch_private import increment_version, is_forward_mode, saved_tensors_hooks
from ltc.training_loop import steps


class Prepared(NamedTuple):
    """The inputs of one call.

    Attributes:
        tensors: The tensors that it can reach on the device.
        bases: The bases of these.
        scalars: The program's numbers.
        counts: The new values of step counts.
    """

    tensors: list[torch.Tensor]
    bases: list[State]
    scalars: list[Any]
    counts: list[float]
    inputs: list[Buffer]
    program: Any


def replays_now() -> bool:
    """Return True if no mode of the calling thread has to see each call of torch."""
    is_seen = is_forward_mode() or saved_tensors_hooks(False) is not None
    return is_plain_now() and not is_seen and not config.value("LTC_SAVE_TENSORS_FILE")


class ReplayPlan:
    """The guard, the program and the results of calls of one kind.

    Attributes:
        calls: The observations that it is made of.
        recorder: The recorder of their device and thread.
        replayed: Number of replayed calls.
    """

    def __init__(self, calls: Sequence[Observation]) -> None:
        """Make a plan of at least two calls that are alike; raise ChangesByItself if their numbers do."""
        self.calls, self._last, self.replayed = list(calls), calls[-1], 0
        self.recorder, self._device = self._last.recorder, self._last.recorder.device
        self._ended, reachable = self._last.ended, self._last.reachable
        self._modes = modes()
        self._numbers_of = HandedOver(calls).function()
        counters = [one.value for one in reachable.counters]
        self._counters = Counters(counters) if counters else None
        self._find = generated("find", _lines(reachable), reachable.names_of_lines())
        self._fixed = [found.tensor for found in reachable.lazy if found.is_fixed]
        self._fixed_states = [state_of(tensor) for tensor in self._fixed]
        self._known, _ = places_of(self._fixed, {})
        self._places = reachable.layout.places[len(self._fixed) :]
        self._has_twins = reachable.layout.has_twins(len(self._fixed))
        self._take_inputs()
        self._take_results()

    def _take_inputs(self) -> None:
        """Find the origins of the inputs, and the types of bases that are none."""
        reachable, origins = self._last.reachable, self._last.origins
        self._keys = self._last.keys
        self._roots = [number for kind, number in origins.inputs if kind == "root"]
        self._others = [
            (position, kind, number)
            for position, (kind, number) in enumerate(origins.inputs)
            if kind != "root"
        ]
        self._constants = {
            position: uploaded(tensor, self._device)
            for position, tensor in origins.constants.items()
        }
        for buffer in self._constants.values():
            buffer.shared = True  # each call reads it
        read = set(self._roots)
        self._unread = [root for root in dict.fromkeys(reachable.layout.roots) if root not in read]
        self._unread_keys = [input_key(*reachable.base_types[root]) for root in self._unread]

    def _take_results(self) -> None:
        """Find the holders of the buffers that are made, and of inputs that are shared from now on."""
        seen = self._last
        expressions = {one.expression for one in seen.reachable.lazy}
        held = [*self._ended.holders, *(holders for _, holders in self._ended.shared)]
        outputs = enumerate(self._ended.holders)
        self._held_twice = [output for output, holders in outputs if len(holders) > 1]
        holders = [
            (seen.holders[n], buffer) for buffer, numbers in enumerate(held) for n in numbers
        ]
        self._written = [(base, buffer) for (kind, base), buffer in holders if kind == "root"]
        self._made = [(holder, buffer) for holder, buffer in holders if holder[0] != "root"]
        self._gradients = [holder for holder, _ in self._made if holder[0] == "gradient"]
        self._no_gradient = [
            place
            for place in seen.no_gradient
            if f"{seen.reachable.lazy[place].expression}.grad" in expressions
        ]
        written = (base for base, _ in self._written)
        bases = list(dict.fromkeys([*self._roots, *self._unread, *written]))
        self._bases_at = elements_at(bases)
        self._moving_at = elements_at([base for base in bases if base >= len(self._known)])

    # --- a call

    def changed_itself(self, args: tuple, kwargs: dict) -> str:
        """Return an obstacle if the last call has changed a constant of the next one.

        Gradients come and go: a replayed call gives them as well.
        """
        reachable = self._last.reachable
        try:
            numbers = [value for _, value in reachable.numbers()]
            if repr(self._find(args, kwargs, is_over=True)) == repr(numbers):
                return ""
        except (Changed, *NOT_THERE):
            pass
        return (
            f"it changes a constant that it uses, and a replayed call would not; before: "
            f"{reachable.first_that_fails(args, kwargs)}"
        )

    def prepare(self, args: tuple, kwargs: dict) -> Prepared:
        """Check the guard, and find the call's inputs.

        Nothing is pending in the calling thread. Raises Changed where the call is another.
        """
        if modes() != self._modes:
            raise Changed
        try:
            moving, host, known = self._find(args, kwargs)
            tensors = [*self._fixed, *moving]
            bases = self._bases_of(tensors, moving)
            if host and same_memory(host) != self._last.reachable.uploads:
                raise Changed
            if self._counters is not None:
                known += self._counters.values()
            scalars, counts = self._numbers_of(known)
            inputs = self._inputs(bases, host)
        except NOT_THERE as error:
            raise Changed from error
        binding: Any = self._ended.binding
        program = known_program(binding)
        if program is None or not self._is_alone():
            raise Changed
        return Prepared(tensors, bases, scalars, counts, inputs, program)

    def _bases_of(self, tensors: list[torch.Tensor], moving: list[torch.Tensor]) -> list[State]:
        """Return the bases of all tensors, if these lie in memory as they did."""
        fixed = self._fixed
        if fixed and [storage_of(tensor).lazy for tensor in fixed] != self._fixed_states:
            raise Changed
        numbers, places = places_of(moving, self._known)
        if places != self._places:
            raise Changed
        if self._has_twins and same_objects(tensors) != self._last.reachable.layout.objects:
            raise Changed
        return [*numbers]

    def _inputs(self, bases: list[State], host: list[torch.Tensor]) -> list[Buffer]:
        used = self._bases_at(bases)
        if [state.value for state in used].count(None) != len(used):
            raise Changed  # something is pending in another thread
        buffers: list[Any] = [state.buffer for state in used]
        for execution in {buffer.execution for buffer in buffers}:
            if execution is not None and execution.failure is not None:
                raise Changed
        inputs, behind = buffers[: len(self._roots)], buffers[len(self._roots) :]
        if [buffer.key for buffer in behind[: len(self._unread)]] != self._unread_keys:
            raise Changed
        for position, kind, place in self._others:
            given = (
                uploaded(host[place], self._device) if kind == "upload" else self._constants[place]
            )
            inputs.insert(position, given)
        if [buffer.key for buffer in inputs] != self._keys:
            raise Changed
        moving = [state.device for state in self._moving_at(bases)]
        if moving.count(self._device) != len(moving):
            raise Changed
        return inputs

    def _is_alone(self) -> bool:
        """Return True if no other thread has anything pending, for which it may have read an input.

        Recordings that ended threads have left would stay pending for ever: they are run first.
        """
        if self._nobody_else_records():
            return True
        for recorder in self._device.left_by_ended_threads():
            if recorder.token is None:  # else other replicas wait for it, and it for them
                flush(recorder)
        return self._nobody_else_records()

    def _nobody_else_records(self) -> bool:
        others = self._device.all_recorders()
        return len(others) == 1 or all(
            [r.nothing_pending for r in others if r is not self.recorder]
        )

    def run(self, prepared: Prepared) -> Any:
        """Run the call that was prepared, and return its result."""
        executor_of(self._device.index).wait_for_room()  # while it can be interrupted
        with held:
            result = self._run_uninterrupted(prepared)
        if self._last.mark is not None:
            steps.mark(self._device, self._last.mark)
        return result

    def _run_uninterrupted(self, prepared: Prepared) -> Any:
        for slot in self._last.seeds:
            prepared.scalars[slot] = self.recorder.draw()
        buffers = self._launch(prepared)
        if self._counters is not None:
            self._counters.give(prepared.counts)
        result = self._hand_out(prepared, buffers)
        self.replayed += 1
        metrics.count("ReplayedCalls")
        return result

    def _launch(self, prepared: Prepared) -> list[Buffer]:
        """Start the program; returns its outputs, then the inputs that are shared from now on."""
        ended, inputs, program = self._ended, prepared.inputs, prepared.program
        binding: Any = ended.binding
        shared = [inputs[position] for position, _ in ended.shared]
        for buffer in shared:
            buffer.shared = True
        made = program.launch(
            self._device.index,
            binding.given_inputs(inputs),
            binding.given_scalars(prepared.scalars),
            {output: inputs[position] for output, position in ended.elsewhere.items()},
            current_replica() if program.exchanges else None,
        )
        outputs: list[Buffer] = binding.recorded_outputs(made)
        for output in self._held_twice:
            outputs[output].shared = True
        return outputs + shared if shared else outputs

    def _hand_out(self, prepared: Prepared, buffers: list[Buffer]) -> Any:
        """Give each state its buffer, each tensor its gradient, and make the result."""
        tensors, bases, made = prepared.tensors, prepared.bases, {}
        if self._last.written:  # autograd refuses a graph that had saved one of these
            increment_version([tensors[place] for place in self._last.written])
        for base, buffer in self._written:
            bases[base].buffer = buffers[buffer]
        for holder, buffer in self._made:
            made[holder] = wrap_buffer(buffers[buffer], self._device)
        form = self._last.form
        result = made[form] if form[0] == "result" else _result(form, tensors, made)
        for holder in self._gradients:
            tensors[holder[1]].grad = made[holder]
        for place in self._no_gradient:
            tensors[place].grad = None
        return result


def _result(form: Any, tensors: list[torch.Tensor], made: dict[Any, torch.Tensor]) -> Any:
    """Return a result of that form; `made` has the new tensors by their holders."""
    kind, value, *rest = form
    if kind in ("result", "gradient"):
        return made[form]
    if kind == "plain":
        return value
    if kind == "tensor":
        return tensors[value] if rest[0] else tensors[value].detach()
    parts = [_result(part, tensors, made) for part in value]
    if kind == "dict":
        return dict(zip(rest[0], parts))
    return parts if kind == "list" else tuple(parts)


def _lines(reachable: Reachable) -> Iterator[str]:
    """Yield code that checks the guard, and returns the tensors and numbers of this call."""
    moving = [found for found in reachable.lazy if not found.is_fixed]
    yield "def find(args, kwargs, is_over=False):"
    yield from reachable.lines()
    yield f"    known = [{', '.join(expression for expression, _ in reachable.numbers())}]"
    yield "    if is_over: return known"
    names = {
        one.expression: f"g{place}"  # reading a gradient takes longer than all that is asked of it
        for place, one in enumerate(moving)
        if one.expression.endswith(".grad")
    }
    yield from (f"    {name} = {expression}" for expression, name in names.items())
    yield from checks([_by_name(condition, names) for condition in reachable.gradients])
    given = [names.get(one.expression, one.expression) for one in moving]
    host = [one.expression for one in reachable.host]
    yield f"    return [{', '.join(given)}], [{', '.join(host)}], known"


_OF_GRADIENT = re.compile(r"(.+\.grad)(\.(?:__class__|requires_grad) is \w+)")


def _by_name(condition: str, names: dict[str, str]) -> str:
    """Return a condition with the name of its gradient."""
    found = _OF_GRADIENT.fullmatch(condition)
    return condition if found is None else f"{names.get(found[1], found[1])}{found[2]}"
