"""One call, replayed: see that nothing is different, give the program its inputs, hand out results.

What is looked at, the numbers and the results are generated functions: hundreds of conditions are
one function without a loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ltc import config
from ltc.backends.collective_runner import current_replica
from ltc.backends.plain_dispatch import is_plain_now
from ltc.debug import metrics
from ltc.device.recording.sync import flush
from ltc.device.recording.tensors import uploaded, wrap_buffer
from ltc.device.torch_device import storage_of
from ltc.replay.aliases import lines_of_roots
from ltc.replay.counters import Counters, single
from ltc.replay.handed_over import HandedOver
from ltc.replay.observation import Observation, modes
from ltc.replay.origins import recorded_path
from ltc.runtime.buffer import Buffer, BufferKey, input_key
from ltc.runtime.compile import known_program
from ltc.runtime.executor import executor_of
from ltc.support.process.held_signals import held
from ltc.support.torch_private import increment_version, is_forward_mode, saved_tensors_hooks
from ltc.utils import steps

_TOGETHER = 40  # conditions of one `if`


class Changed(Exception):
    """The call is not one that the plan is for; nothing was done."""


class Prepared(NamedTuple):
    """What one call is given.

    states   of the bases that it works on
    scalars  the program's numbers
    counts   the new values of counters that are multiplied
    """

    states: list[Any]
    scalars: list[Any]
    inputs: list[Buffer]
    program: Any
    counts: list[float]


def replays_now() -> bool:
    """Whether nothing in the calling thread has to see each call of torch, or what a graph saves."""
    is_seen = is_forward_mode() or saved_tensors_hooks(False) is not None
    return is_plain_now() and not is_seen and not config.value("LTC_SAVE_TENSORS_FILE")


class ReplayPlan:
    """How calls of one kind are replayed.

    calls     the observations that it is made of
    recorder  of the device and thread that they were recorded by
    replayed  how many calls were
    """

    def __init__(self, calls: Sequence[Observation]) -> None:
        """`calls`: at least two, alike. Raises ChangesByItself where their numbers do."""
        self.calls, self._last = list(calls), calls[-1]
        self.recorder, self._device = self._last.recorder, self._last.recorder.device
        self._ended, self.replayed = self._last.ended, 0
        numbers, counters = HandedOver(calls), self._last.reachable.counters
        self._counters: Counters | None = None
        if counters:
            self._counters = Counters([one.tensor for one in counters], numbers.growth)
        self._keys = _keys_of_inputs(self._last)
        self._names: dict[str, Any] = {
            **self._last.reachable.constants,
            **numbers.constants,
            "torch": torch,
            "storage_of": storage_of,
            "modes": modes,
            "as_they_were": modes(),
            "pinned": tuple(value for _, value in self._last.reachable.pinned),
            "kinds": [value.__class__ for _, value in self._last.reachable.pinned],
            "device": self._device,
            "uploaded": uploaded,
            "wrap_buffer": wrap_buffer,
            "counters": self._counters,
            "single": single,
            "increment_version": increment_version,
            "Changed": Changed,
        }
        self._roots = _roots_in_use(self._last)
        self._states_of = self._function("states_of", self._lines_of_states())
        self._inputs_of = self._function("inputs_of", self._lines_of_inputs())
        self._numbers_of = self._function("numbers_of", _lines_of_numbers(numbers, bool(counters)))
        self._hand_out = self._function("hand_out", self._lines_of_results())

    def _function(self, name: str, lines: Iterable[str]) -> Any:
        exec(compile("\n".join(lines), "<ltc replay>", "exec"), self._names)
        return self._names[name]

    # --- a call

    def prepare(self, args: tuple, kwargs: dict) -> Prepared:
        """What the call is given.

        Nothing is pending in the calling thread. Raises Changed where the call is another.
        """
        try:
            states = self._states_of(args, kwargs)
            scalars, counts = self._numbers_of(args, kwargs)
            inputs = self._inputs(states, args, kwargs)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise Changed from error
        binding: Any = self._ended.binding
        program = known_program(binding)
        if program is None or not self._is_alone():
            raise Changed
        return Prepared(states, scalars, inputs, program, counts)

    def _is_alone(self) -> bool:
        """Whether no other thread has anything pending, for which it may have read an input.

        What threads have left that are over would stay pending for ever: it is run first.
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

    def run(self, prepared: Prepared, args: tuple, kwargs: dict) -> Any:
        """What the call returns that was prepared."""
        executor_of(self._device.index).wait_for_room()  # while it can be interrupted
        with held:
            result = self._run_uninterrupted(prepared, args, kwargs)
        if self._last.mark is not None:
            steps.mark(self._device, self._last.mark)
        return result

    def _run_uninterrupted(self, prepared: Prepared, args: tuple, kwargs: dict) -> Any:
        states, scalars, inputs, program, counts = prepared
        for slot in self._last.seeds:
            scalars[slot] = self.recorder.draw()
        made = self._launch(program, inputs, scalars)
        if self._counters is not None:
            self._counters.grow(counts)
        result = self._hand_out(args, kwargs, states, made, inputs)
        self.replayed += 1
        metrics.count("ReplayedCalls")
        return result

    def _inputs(self, states: list[Any], args: tuple, kwargs: dict) -> list[Buffer]:
        if [state.value for state in states].count(None) != len(states):
            raise Changed  # something is pending in another thread
        buffers = [state.buffer for state in states]
        for execution in {buffer.execution for buffer in buffers}:
            if execution is not None and execution.failure is not None:
                raise Changed
        inputs: list[Buffer] = self._inputs_of(buffers, args, kwargs)
        if [buffer.key for buffer in inputs] != self._keys:
            raise Changed
        return inputs

    def _launch(self, program: Any, inputs: list[Buffer], scalars: list[Any]) -> list[Buffer]:
        ended = self._ended
        binding: Any = ended.binding
        for position, _ in ended.shared:
            inputs[position].shared = True
        made = program.launch(
            self._device.index,
            binding.given_inputs(inputs),
            binding.given_scalars(scalars),
            {output: inputs[position] for output, position in ended.elsewhere.items()},
            current_replica() if program.exchanges else None,
        )
        outputs: list[Buffer] = binding.recorded_outputs(made)
        for output, holders in zip(outputs, ended.holders):
            if len(holders) > 1:
                output.shared = True
        return outputs

    # --- the text of its functions

    def _lines_of_states(self) -> Iterator[str]:
        """The bases of the inputs, then of what is written and was not read."""
        reachable = self._last.reachable
        yield "def states_of(args, kwargs):"
        yield from _checks(["modes() == as_they_were", *reachable.conditions])
        if reachable.pinned:
            values = "".join(f"{expression}, " for expression, _ in reachable.pinned)
            yield f"    values = ({values})"
            yield "    if values != pinned or [*map(type, values)] != kinds: raise Changed"
        places = reachable.aliases.places
        yield from _checks(self._types_of_unread())
        yield from lines_of_roots(places, reachable.lazy, self._roots, self._names)
        yield f"    return [{', '.join(f'r{root}' for root in self._roots)}]"

    def _types_of_unread(self) -> list[str]:
        """What the function may know of tensors that the program is not given."""
        reachable, aliases = self._last.reachable, self._last.reachable.aliases
        inputs = {number for kind, number in self._last.origins.inputs if kind == "root"}
        return [
            f"({found.expression}.shape, {found.expression}.dtype, {found.expression}.get_device())"
            f" == {kind}"
            for found, place, kind in zip(reachable.lazy, aliases.places, aliases.types)
            if place.root not in inputs
        ]

    def _lines_of_inputs(self) -> Iterator[str]:
        given = [self._text_of_input(kind, place) for kind, place in self._last.origins.inputs]
        yield "def inputs_of(buffers, args, kwargs):"
        yield f"    return [{', '.join(given)}]"

    def _text_of_input(self, kind: str, place: int) -> str:
        if kind == "root":
            return f"buffers[{self._roots.index(place)}]"
        if kind == "upload":
            return f"uploaded({self._last.reachable.host[place].expression}, device)"
        constant = uploaded(self._last.origins.constants[place], self._device)
        constant.shared = True  # each call reads it
        self._names[f"constant{place}"] = constant
        return f"constant{place}"

    def _lines_of_results(self) -> Iterator[str]:
        seen, lazy = self._last, self._last.reachable.lazy
        yield "def hand_out(args, kwargs, states, made, inputs):"
        yield from self._lines_of_versions()
        for place in sorted(_tensors_of(seen.form)):  # before gradients take each other's place
            yield f"    tensor{place} = {lazy[place].expression}"
        for k, holders in enumerate(self._ended.holders):
            yield from self._lines_of_holders(f"made[{k}]", holders)
        for position, holders in self._ended.shared:
            yield from self._lines_of_holders(f"inputs[{position}]", holders)
        expressions = {found.expression for found in lazy}
        for place in seen.no_gradient:
            gradient = f"{lazy[place].expression}.grad"
            if gradient in expressions:
                yield f"    {gradient} = None"
        yield f"    return {self._text_of(seen.form)}"

    def _lines_of_versions(self) -> Iterator[str]:
        """Autograd is told what was written to, so that a graph which had saved it is refused."""
        found = [self._last.reachable.lazy[place] for place in self._last.written]
        written = tuple(one.tensor for one in found if one.is_fixed)
        if written:
            self._names["written"] = written
            yield "    increment_version(written)"
        others = [one.expression for one in found if not one.is_fixed]
        if others:
            yield f"    increment_version([{', '.join(others)}])"

    def _lines_of_holders(self, buffer: str, holders: Sequence[int]) -> Iterator[str]:
        for number in holders:
            kind, where = self._last.holders[number]
            if kind == "root":
                yield f"    states[{self._roots.index(where)}].buffer = {buffer}"
            elif kind == "result":
                yield f"    result{number} = wrap_buffer({buffer}, device)"
            else:
                yield f"    gradient{where} = wrap_buffer({buffer}, device)"
                expression = self._last.reachable.lazy[where].expression
                yield f"    {expression}.grad = gradient{where}"

    def _text_of(self, form: Any) -> str:
        """The expression of a result of that form."""
        kind, *rest = form
        if kind == "list":
            return f"[{', '.join(map(self._text_of, rest[0]))}]"
        if kind == "tuple":
            return f"({''.join(f'{self._text_of(part)}, ' for part in rest[0])})"
        if kind == "dict":
            parts = zip(rest[0], rest[1])
            return f"{{{', '.join(f'{key!r}: {self._text_of(part)}' for key, part in parts)}}}"
        if kind == "plain":
            name = f"plain{len(self._names)}"
            self._names[name] = rest[0]
            return name
        if kind == "tensor":
            place, is_the_tensor = rest
            return f"tensor{place}" if is_the_tensor else f"tensor{place}.detach()"
        return f"{kind}{rest[0]}"


def _roots_in_use(seen: Observation) -> list[int]:
    roots = [number for kind, number in seen.origins.inputs if kind == "root"]
    roots += [number for kind, number in seen.holders.values() if kind == "root"]
    return list(dict.fromkeys(roots))


def _tensors_of(form: Any) -> Iterator[int]:
    """The places of the tensors in a result that were there before."""
    kind, *rest = form
    if kind == "tensor":
        yield rest[0]
    elif kind in ("list", "tuple", "dict"):
        for part in rest[-1]:
            yield from _tensors_of(part)


def _keys_of_inputs(seen: Observation) -> list[BufferKey]:
    calls = [call for call in recorded_path(seen.last) if call.overload == "ltc::input"]
    keys: dict[int, BufferKey] = {}
    for call in calls:
        (value,) = call.results
        assert value is not None
        keys[call.args[0]] = input_key(value.shape, value.dtype)
    return [keys[position] for position in range(len(seen.origins.inputs))]


def _lines_of_numbers(numbers: HandedOver, has_counters: bool) -> Iterator[str]:
    yield "def numbers_of(args, kwargs):"
    if has_counters:
        yield "    counts = counters.values()"
    yield from (f"    {line}" for line in numbers.lines)
    yield from _checks(numbers.conditions)
    slots, products = ", ".join(map(str, numbers.slots)), ", ".join(numbers.products)
    yield f"    return [{slots}], [{products}]"


def _checks(conditions: Sequence[str]) -> Iterator[str]:
    for start in range(0, len(conditions), _TOGETHER):
        together = " and ".join(conditions[start : start + _TOGETHER])
        yield f"    if not ({together}): raise Changed"
