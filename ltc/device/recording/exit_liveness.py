"""How a recording ends: what is still alive becomes the outputs of one program, which is started.

What an end came to is kept at the recording's last entry.  The next recording along that path ends
alike where as many references lead to each of its states and each holds the same value: who holds
what follows from these and from the path.  So the end of a steady step is a comparison of a few lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ltc import config
from ltc.aten.call import CallResult
from ltc.backends.collective_runner import abort
from ltc.debug.often import Often
from ltc.device.call_observer import observer_of, watching
from ltc.device.evidence.new_programs import explain_new
from ltc.device.recording.recorder import INPUT, Recorder
from ltc.device.recording.state import State
from ltc.device.recording.user_line import told_of_lack, user_line
from ltc.device.shapes import type_cache
from ltc.device.symbolic.ending import leave_to_itself, program_at_sizes
from ltc.runtime.buffer import Buffer, Execution, Failure, input_key
from ltc.runtime.compile import ProgramBinding, known_program, program_for
from ltc.runtime.dump import save_graph
from ltc.runtime.program import Program
from ltc.support.reference_counts import (
    IN_TWO_LISTS,
    IN_TWO_LISTS_AND_A_VIEW,
    reference_counts,
)
from ltc.support.shallow_copy import elements_at

_MADE = Often((), (), ("CreateLtcTensor", "DestroyLtcTensor"))
_aten = torch.ops.aten
REORDERINGS = frozenset(
    {  # views of all elements of their base, each once
        _aten.t.default,
        _aten.transpose.int,
        _aten.permute.default,
        _aten.view.default,
        _aten._unsafe_view.default,
        _aten.unsqueeze.default,
        _aten.squeeze.default,
        _aten.squeeze.dim,
        _aten.squeeze.dims,
        _aten.detach.default,
        _aten.alias.default,
    }
)


@dataclass(slots=True)
class ExitSignature:
    """What tells whether a recording ends as an earlier one along its path did.

    All lists are of the states that the recorded calls made, then of those that inputs belong to.

    references  how many there are to each
    values      what each holds
    bases       (place of a view, place of its base) for each view; a base that is not among the
                states has the place of the view itself, which no base has
    bufferless  how many of the inputs' states were written to
    alone       whether no other thread uses the device
    """

    references: list[int]
    values: list[CallResult | None]
    bases: list[tuple[int, int]]
    bufferless: int
    alone: bool

    def match(self, recorder: Recorder, states: list[State]) -> bool:
        return (
            reference_counts(states) == self.references
            and [state.value for state in states] == self.values
            and [state.buffer for state in recorder.bound].count(None) == self.bufferless
            and all([states[view].base is states[base] for view, base in self.bases])
            and recorder.device.has_one_recorder() is self.alone
        )


def _exit_signature(recorder: Recorder) -> ExitSignature:
    states = recorder.live + recorder.bound
    references = reference_counts(states)  # as `match` counts, with this one list beside
    places = {state: place for place, state in enumerate(states)}
    return ExitSignature(
        references,
        [state.value for state in states],
        [(i, places.get(s.base, i)) for i, s in enumerate(states) if s.base is not None],
        [state.buffer for state in recorder.bound].count(None),
        recorder.device.has_one_recorder(),
    )


@dataclass(slots=True)
class Ended:
    """What the end of a recording came to.

    made      how many tensors the recording's calls made
    died      how many of these are gone
    alive     gives the states that live on, of those that `ExitSignature` has; their numbers here
              count from those that hold an output each, in the order of the outputs
    own       the numbers of views that become tensors of their own
    shared    (position of an input, numbers of the states that hold just that)
    outputs   the values that are to be computed; first, where there is one, a token that none holds
    holders   the numbers of the states that hold each of them
    several   (position of an output, all numbers) of those that several states hold
    replaced  output position -> position of the input whose place it takes
    elsewhere  those of `replaced` whose input the program does not get, by the program's outputs
    binding   how the program is found and what it is given; None until it is known
    in_order  whether it is given all that was recorded, and gives all outputs, in recorded order
    """

    signature: ExitSignature
    made: int
    died: int
    alive: Callable[[list[State]], Sequence[State]]
    own: list[int]
    shared: list[tuple[int, list[int]]]
    outputs: tuple[CallResult, ...]
    holders: list[list[int]]
    several: list[tuple[int, list[int]]]
    replaced: dict[int, int]
    elsewhere: dict[int, int]
    binding: ProgramBinding | None = None
    in_order: bool = False


def end(recorder: Recorder) -> None:
    """Start what is alive of the recording, and say of each state what it now holds.

    Raises what keeps the program from being started; then all that was pending fails with it.
    """
    observer = observer_of(recorder) if watching else None
    if observer is not None:
        observer.before_end(recorder)
    ended, alive = _as_before(recorder) or _looked_at(recorder)
    if ended.made:
        _MADE.happened(ended.made, ended.died)
    for position, holders in ended.shared:
        buffer = recorder.inputs[position]
        buffer.shared = True
        for number in holders:
            alive[number].buffer = buffer
    try:
        buffers = _launch(recorder, ended) if ended.outputs else []
    except BaseException as error:
        _settle(recorder, ended, alive, _failed(recorder, ended, error))
        if recorder.token is not None:
            abort(recorder.replica, error)  # nobody is to wait for what does not run
        raise
    recorder.last.ended = ended
    _settle(recorder, ended, alive, buffers)
    if recorder.last.of is not None:
        leave_to_itself(recorder)
    if observer is not None:
        observer.after_end(recorder, ended, alive)


# --- what is alive ----------------------------------------------------------------------------


def _as_before(recorder: Recorder) -> tuple[Ended, list[State]] | None:
    """What the latest recording along this path came to, and the states that live on this time."""
    ended = recorder.last.ended
    if ended is None:
        return None
    states = recorder.live + recorder.bound
    if not ended.signature.match(recorder, states):
        return None
    alive = list(ended.alive(states))
    del states
    recorder.live.clear()  # now dead views no longer keep their bases alive
    recorder.bound.clear()
    for number in ended.own:
        alive[number].leave_base()
    return ended, alive


def _looked_at(recorder: Recorder) -> tuple[Ended, list[State]]:
    """The same, found by looking at every state."""
    signature = _exit_signature(recorder)
    look, made = _Look(recorder, signature), len(recorder.live)
    look.at_live(recorder.live)
    died = made - len(look.alive)
    look.at_bound(recorder.bound, made)
    inputs = [v for v in look.outputs if v.call.overload == INPUT]
    shared = [(v.call.args[0], look.outputs.pop(v)) for v in inputs]
    outputs = tuple(look.outputs)
    order = look.order()
    numbers = {looked_at: number for number, looked_at in enumerate(order)}
    holders = [[numbers[n] for n in found] for found in look.outputs.values()]
    replaced = {i: look.replaced[v] for i, v in enumerate(outputs) if v in look.replaced}
    ended = Ended(
        signature,
        made,
        died,
        elements_at([look.places[n] for n in order]),
        [numbers[n] for n in look.own],
        [(position, [numbers[n] for n in found]) for position, found in shared],
        outputs,
        holders,
        [(output, found) for output, found in enumerate(holders) if len(found) > 1],
        replaced,
        {},
    )
    return ended, [look.alive[n] for n in order]


class _Look:
    """Which states are alive, and what they are to hold.

    The references were all counted at once, in `signature`: were one counted later, another thread
    that lets go of it meanwhile would make a dead state of one that has the count of a living one.

    alive, places  the states, and where they were
    own            numbers of the views that became tensors of their own
    outputs        value -> numbers of the states that hold it
    replaced       of these values, which input each takes the place of
    """

    def __init__(self, recorder: Recorder, signature: ExitSignature) -> None:
        self.recorder, self.alone = recorder, signature.alone
        self._references, self._bases = list(signature.references), dict(signature.bases)
        self.alive: list[State] = []
        self.places: list[int] = []
        self.own: list[int] = []
        self.outputs: dict[CallResult, list[int]] = {}
        if recorder.token is not None:
            self.outputs[recorder.token] = []
        self.replaced: dict[CallResult, int] = {}

    def at_live(self, live: list[State]) -> None:
        """Newest first, so that a dead view no longer keeps its base alive by then."""
        while live:
            state = live.pop()
            if self._is_dead(len(live)):
                self._leave_base(len(live))
            elif self._is_here(state):
                self._keep(state, len(live))
                if state.base is not None:
                    self._outlive_base(state)
                if state.base is None and state.buffer is None and state.value is not None:
                    self.outputs.setdefault(state.value, []).append(len(self.alive) - 1)

    def at_bound(self, bound: list[State], first_place: int) -> None:
        while bound:
            state, place = bound.pop(), first_place + len(bound)
            if not self._is_dead(place) and self._is_here(state):
                self._keep(state, place)
                if state.buffer is None and state.base is None and state.value is not None:
                    self.outputs.setdefault(state.value, []).append(len(self.alive) - 1)
                    self._replace(state.value, len(bound))

    def order(self) -> list[int]:
        """The numbers of the states, of those first that hold an output each, in the outputs' order."""
        first = [found[0] for found in self.outputs.values() if found]
        return list(dict.fromkeys([*first, *range(len(self.alive))]))

    def _is_dead(self, place: int) -> bool:
        return self._references[place] <= IN_TWO_LISTS

    def _leave_base(self, place: int) -> None:
        """The view of that place holds its base no more."""
        if place in self._bases:
            self._references[self._bases[place]] -= 1

    def _is_here(self, state: State) -> bool:
        return _is_of(state, self.recorder)

    def _keep(self, state: State, place: int) -> None:
        self.alive.append(state)
        self.places.append(place)

    def _replace(self, value: CallResult, position: int) -> None:
        if self.recorder.inputs[position].key is not input_key(value.shape, value.dtype):
            return
        of = self.recorder.last.of
        if of is None or of[0].has_size_of_input(value, position):
            self.replaced[value] = position

    def _outlive_base(self, view: State) -> None:
        """Make a reordering of a base that nobody else has a tensor of its own.

        What autograd gives a linear layer's weight is the transposition of a product that no one
        ever sees: the program is then asked for what is seen, in the order in which it is.
        """
        (references,) = reference_counts([view.base])  # the recorder's list holds it as well
        is_last = references == IN_TWO_LISTS_AND_A_VIEW and self.alone
        base: Any = view.base  # a State: of views only
        if not is_last or base.buffer is not None or hasattr(base, "number"):
            return
        if all(link[0] in REORDERINGS for link in view.chain):
            self.own.append(len(self.alive) - 1)
            view.leave_base()
            self._leave_base(self.places[-1])


def _is_of(state: State, recorder: Recorder) -> bool:
    value = state.value
    return value is not None and value.recorder is recorder


# --- its program ------------------------------------------------------------------------------


_saves = config.reader("LTC_SAVE_TENSORS_FILE")
_NOWHERE: dict[int, Buffer] = {}  # never changed


def _launch(recorder: Recorder, ended: Ended) -> list[Buffer]:
    binding = ended.binding
    program = None
    if binding is not None and recorder.last.of is None:
        program = known_program(binding)
    if program is None or binding is None:
        program, binding = _found_program(recorder, ended)
    if any(_saves()):
        with told_of_lack("LTC_SAVE_TENSORS_FILE"):
            save_graph(program, binding.key[0], user_line())
    recorder.short_reads.note_program(
        program, recorder.cut_here is not None, bool(recorder.optimizer_steps)
    )
    inputs, scalars, elsewhere = recorder.inputs, recorder.scalars, _NOWHERE
    if not ended.in_order:
        elsewhere = {output: inputs[position] for output, position in ended.elsewhere.items()}
        inputs, scalars = binding.given_inputs(inputs), binding.given_scalars(scalars)
    made = program.launch(recorder.device.index, inputs, scalars, elsewhere, recorder.replica)
    return made if ended.in_order else binding.recorded_outputs(made)


def _found_program(recorder: Recorder, ended: Ended) -> tuple[Program, ProgramBinding]:
    """The program, looked for; from now on `ended` knows how it is found and launched."""
    if recorder.last.of is not None:
        program, binding = program_at_sizes(recorder, ended)
    else:
        program, binding = _program(recorder, ended)
    if binding is not ended.binding:
        ended.binding = binding
        counts = len(recorder.inputs), len(recorder.scalars), len(ended.outputs)
        placed = {binding.outputs[o]: position for o, position in ended.replaced.items()}
        ended.elsewhere = {o: i for o, i in placed.items() if o not in program.replaced}
        ended.in_order = not ended.elsewhere and binding.is_in_order(*counts)
    return program, binding


def _program(recorder: Recorder, ended: Ended) -> tuple[Program, ProgramBinding]:
    before = ended.binding or recorder.last.bindings.get(_signature(ended))
    program, binding = program_for(
        before, recorder.path, ended.outputs, recorder.device.index, ended.replaced
    )
    if program.why is None:
        explain_new(recorder, ended, before, binding.key, program)
    if binding is not ended.binding:
        type_cache.keep()
        recorder.last.bindings = {**recorder.last.bindings, _signature(ended): binding}
    return program, binding


def _signature(ended: Ended) -> tuple:
    return ended.outputs, tuple(ended.replaced.items())


def _failed(recorder: Recorder, ended: Ended, error: BaseException) -> list[Buffer]:
    """Everything pending has failed with `error`; a replaced state keeps its old buffer."""
    execution, failure = Execution(), Failure(error)
    failure.note_reported()
    execution.finish(failure)
    return [
        Buffer(
            input_key(value.shape, value.dtype),
            recorder.device.index,
            None,
            execution,
            recorder.inputs[ended.replaced[i]] if i in ended.replaced else None,
        )
        for i, value in enumerate(ended.outputs)
    ]


def _settle(recorder: Recorder, ended: Ended, alive: list[State], buffers: list[Buffer]) -> None:
    for output, holders in ended.several:
        buffers[output].shared = True
        for number in holders:
            alive[number].buffer = buffers[output]
    if buffers and not ended.holders[0]:
        buffers = buffers[1:]  # a token is nobody's
    for state, buffer in zip(alive, buffers):
        state.buffer = buffer
    alone = ended.signature.alone
    for state in alive:
        if alone or _is_of(state, recorder):  # another thread may have written to it meanwhile
            state.value = None
        if state.views is not None and state.base is None:
            state.forget_ended_views()
