"""The end of a recording: living values become the outputs of one program, which is started.

The result of an end is kept at the recording's last entry. The next recording along that path ends
alike if as many references lead to each of its states, and each holds the same value: the holders
follow from these and from the path. So the end of a steady step is a comparison of a few lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import ref

from ltc import config
from ltc.aten.call import CallResult
from ltc.backends.collective_runner import abort
from ltc.device.call_observer import observer_of, watching
from ltc.device.evidence.new_programs import explain_new, explain_returned
from ltc.device.evidence.transitions import show_asked, show_left
from ltc.device.policy import Begin, Path
from ltc.device.recording import core_ends
from ltc.device.recording.entries import INPUT
from ltc.device.recording.recorder import Recorder
from ltc.device.recording.state import State
from ltc.device.symbolic.path_selection import (
    ask_for_sizes,
    give_up_if_refused,
    leave_to_itself,
    note_path,
    program_at_sizes,
)
from ltc.device.user_line import told_of_lack, user_line
from ltc.native.core import Summed
from ltc.runtime.buffer import Buffer, Execution, Failure, input_key
from ltc.runtime.compile import ProgramBinding, known_program, program_for
from ltc.runtime.dump import save_graph
from ltc.runtime.program import Program
from ltc.support.observation.often import Often
from ltc.support.reference_counts import (
    IN_TWO_LISTS,
    IN_TWO_LISTS_AND_A_VIEW,
    reference_counts,
)
from ltc.support.shallow_copy import elements_at

_MADE = Often((), (), ("CreateLtcTensor", "DestroyLtcTensor"))


@dataclass(slots=True)
class ExitSignature:
    """The facts by which a recording ends as an earlier one along its path did.

    All lists are of the states that the recorded calls made, then of those that inputs belong to.

    Attributes:
        references: The number of references to each.
        values: The value that each holds.
        bases: (place of a view, place of its base) for each view; a base that is not among the
            states has the place of the view itself, which no base has.
        bufferless: Number of the inputs' states that were written to.
        alone: True if no other thread uses the device.
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
    """The result of a recording's end.

    Attributes:
        made: Number of tensors that the recording's calls made.
        died: Number of these that are gone.
        alive: Gives the live states among those of `ExitSignature`. Their numbers begin with the
        states that hold an output each, in the order of the outputs.
        own: The numbers of views that become tensors of their own.
        shared: (position of an input, numbers of the states that hold just that).
        outputs: The values to compute; first, if there is one, a token that no state holds.
        holders: The numbers of the states that hold each of them.
        several: (position of an output, all numbers) of those that several states hold.
        replaced: Output position -> position of the input whose place it takes.
        elsewhere: The part of `replaced` with inputs that the program does not get, by the
        program's outputs.
        binding: The program's key and arguments; None until it is known.
        in_order: True if the program gets all recorded inputs and gives all outputs, in recorded
        order.
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
        leave_to_itself(recorder, recorder.last)
    if recorder.walked is not None:
        core_ends.learn(recorder, ended, alive)
    if observer is not None:
        observer.after_end(recorder, ended, alive)


# --- what is alive ----------------------------------------------------------------------------


def _as_before(recorder: Recorder) -> tuple[Ended, list[State]] | None:
    """Return the result of the latest end along this path, and the states that live on this time."""
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
    """The live states, and the values that they are to hold.

    All references were counted at once, in `signature`. If one was counted later, another thread could
    release it meanwhile, and a dead state would have the count of a live one.

    Attributes:
        alive, places: The states, and their places in the signature.
        own: Numbers of the views that became tensors of their own.
        outputs: Value -> numbers of the states that hold it.
        replaced: Value -> position of the input whose place it takes.
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
        """Make a reordering of a base that has no other holder a tensor of its own.

        The gradient that autograd gives a linear layer's weight is the transposition of a product
        that stays hidden. So the program's output is the transposition, in its own order.
        """
        (references,) = reference_counts([view.base])  # the recorder's list holds it as well
        is_last = references == IN_TWO_LISTS_AND_A_VIEW and self.alone
        base: Any = view.base  # a State: of views only
        if not is_last or base.buffer is not None or hasattr(base, "number"):
            return
        if view.is_reordering:
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
    _tell_policy(recorder, program)
    inputs, scalars, elsewhere = recorder.inputs, recorder.scalars, _NOWHERE
    if not ended.in_order:
        elsewhere = {output: inputs[position] for output, position in ended.elsewhere.items()}
        inputs, scalars = binding.given_inputs(inputs), binding.given_scalars(scalars)
    made = program.launch(recorder.device.index, inputs, scalars, elsewhere, recorder.replica)
    return made if ended.in_order else binding.recorded_outputs(made)


class _KeptProgram:
    """A program, which the cache of programs may drop."""

    def __init__(self, program: Program) -> None:
        self._program = ref(program)

    @property
    def is_kept(self) -> bool:
        return self._program() is not None

    @property
    def is_ready(self) -> bool:
        program = self._program()
        return program is not None and program.is_ready


def _tell_policy(recorder: Recorder, program: Program) -> None:
    """The recording has come to an end that has a program, compiled or not."""
    if recorder.is_left:
        return
    if not recorder.may_run_at_once():  # its calls are followed in any case: no state to choose
        if recorder.last.ended is not None:
            program.ask()
        return
    path, behind = recorder.last.ended_path, recorder.ended.ended_path
    reads = _is_of_reads(recorder, recorder.cut_here is not None)
    last, inputs = recorder.last, len(recorder.inputs)
    followed = last.depth if last.of is not None or recorder.is_unlearned else 0
    calls, in_core = max(program.calls, path.calls), _may_end_in_core(recorder, path, followed)
    weight = recorder.policy.weight(calls, last.size, inputs, followed, in_core)
    if recorder.optimizer_steps:
        recorder.policy.trained()
    if program.is_ready:
        if path.program is None or not path.program.is_kept:
            path.program = _KeptProgram(program)
        recorder.policy.followed(path, behind, weight, reads, in_core, recorder.has_left_track)
        return
    is_read_alone = reads and program.calls - inputs <= 1
    (recorder.policy.cut_short if is_read_alone else recorder.policy.left)(behind)
    show_left(recorder.policy, behind, program.calls, "their end has no compiled program")
    if recorder.policy.noted(path, behind, weight, reads):
        recorder.policy.asked(path, _KeptProgram(program))
        show_asked(path, program.calls)
        program.ask()
    elif path.program is not None:  # other tensors are alive than in the program that was asked for
        program.ask()


def _may_end_in_core(recorder: Recorder, path: Path, followed: int = 0) -> bool:
    """True if a recording along a path may be followed and launched in the core.

    Args:
        followed: its calls that Python follows.
    """
    is_alone = len(recorder.device.recorders) == 1  # those of ended threads stay meanwhile
    return path.ends_in_core and not followed and is_alone


def _is_of_reads(recorder: Recorder, is_read: bool) -> bool:
    """True if a read ends the recording, and no optimizer has made a step in it."""
    return is_read and not recorder.optimizer_steps


def end_immediate(recorder: Recorder) -> None:
    """End a recording whose calls have run; the policy hears of the path that was noted."""
    session = recorder.immediate
    assert session is not None
    if session.notes is None:
        leaf = session.ended_at or _end_unnoted(recorder, session, recorder.cut_here is not None)
    else:
        summed = session.sketched()
        leaf = session.notes.last
        if leaf is not recorder.root:
            _end_notes(recorder, session, leaf, summed)
            if summed.calls:
                recorder.sketches.noted(summed.exact, summed.shape, leaf)
    session.end()
    recorder.last = leaf


def pass_cut(recorder: Recorder, is_read: bool) -> bool:
    """End a recording whose calls are not noted, and begin another such one, in the same session.

    Its values stay where they are.  Returns False where the session has to end: the caller sees to it.
    """
    session = recorder.immediate
    if session is None or not recorder.is_of_this_dtype():
        return False
    if not recorder.may_run_at_once():  # a setting of the environment may be another
        return False
    if session.passes_settled(is_read):
        return True
    if not session.may_pass():
        return False
    if not session.has_calls_since_cut() or session.passes_alike(is_read):
        return True
    ended = session.ended_at = session.ended_at or _end_unnoted(recorder, session, is_read)
    begins = recorder.decided = recorder.decided or recorder.decide(ended)
    if begins in (Begin.NOTE, Begin.FOLLOW):
        return False
    session.ended_at = None
    session.pass_cut(begins)
    recorder.pass_cut(ended, begins)
    return True


def _end_unnoted(recorder: Recorder, session: Any, is_read: bool) -> Any:
    """The policy hears of calls that were not noted; return the entry that stands for them."""
    summed = session.sketched()
    if not session.is_sketched:
        return recorder.unnoted
    if summed.reads or summed.marks:
        recorder.ended = recorder.sketches.entry_of(summed.exact_behind, summed.shape_behind)
        recorder.before = recorder.sketches.entry_of(summed.exact_before, summed.shape_before)
        recorder.policy.passed(summed.reads, summed.marks, recorder.before.ended_path)
    if not summed.calls:
        return recorder.root
    entry = recorder.sketches.entry_of(summed.exact, summed.shape)
    path, behind = entry.ended_path, recorder.ended.ended_path
    like = recorder.sketches.like(summed.shape)
    in_core = _may_end_in_core(recorder, path)
    weigh = recorder.policy.weight
    weight = weigh(summed.calls, summed.nbytes, summed.inputs, in_core=in_core)
    of_symbols = weigh(summed.calls, summed.nbytes, summed.inputs, summed.entries)
    of_reads = _is_of_reads(recorder, is_read)
    settles = recorder.policy.sketched(path, behind, weight, of_symbols, of_reads, like, in_core)
    session.settle(settles)
    return entry


def _end_notes(recorder: Recorder, session: Any, leaf: Any, summed: Summed) -> None:
    path, behind = leaf.ended_path, recorder.ended.ended_path
    is_new = path.returns < 0
    joined = note_path(recorder, leaf) if path.returns < 0 else None
    if joined is not None:
        path = joined.entries[-1].ended_path  # the next one of them goes along the path of symbols
    elif leaf.of is not None:
        give_up_if_refused(leaf.of[0])
    joins = joined is not None
    reads = _is_of_reads(recorder, recorder.cut_here is not None)
    followed = session.depth if joined is not None or leaf.of is not None else 0
    calls = path.calls = max(session.path_calls, summed.calls, path.calls)
    inputs = len(session.notes.inputs)
    in_core = _may_end_in_core(recorder, path, followed)
    weight = recorder.policy.weight(calls, leaf.size, inputs, followed, in_core)
    if is_new and recorder.policy.sketches:
        path.returns = max(path.returns, 0)  # its sketch has come back, else it was not noted
    if not recorder.policy.noted(path, behind, weight, reads, joins, in_core):
        return
    outputs, replaced = session.notes.outcome()
    if not outputs:
        return
    show_asked(path, session.path_calls)
    if leaf.of is not None:
        program: Any = ask_for_sizes(leaf, outputs, replaced, recorder.device.index)
    else:
        program = _KeptProgram(_asked(recorder, leaf, outputs, replaced))
    recorder.policy.asked(path, program)


def _asked(
    recorder: Recorder, leaf: Any, outputs: tuple[CallResult, ...], replaced: dict[int, int]
) -> Program:
    """Return the program of a path that was noted, which is to be compiled."""
    known = leaf.bindings.get(_signature(outputs, replaced))
    program, binding = program_for(known, leaf.path_to, outputs, recorder.device.index, replaced)
    _keep_binding(leaf, outputs, replaced, binding)
    if program.why is None:
        explain_returned(program)
    program.ask()
    return program


def _keep_binding(
    leaf: Any,
    outputs: tuple[CallResult, ...],
    replaced: dict[int, int],
    binding: ProgramBinding,
) -> None:
    """Keep how a path that ends at `leaf` so is run."""
    leaf.bindings = {**leaf.bindings, _signature(outputs, replaced): binding}


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
    leaf, outputs, replaced = recorder.last, ended.outputs, ended.replaced
    before = ended.binding or leaf.bindings.get(_signature(outputs, replaced))
    program, binding = program_for(before, recorder.path, outputs, recorder.device.index, replaced)
    if program.why is None:
        explain_new(recorder, ended, before, binding.key, program)
    if binding is not ended.binding:
        _keep_binding(leaf, outputs, replaced, binding)
    return program, binding


def _signature(outputs: tuple[CallResult, ...], replaced: dict[int, int]) -> tuple:
    return outputs, tuple(replaced.items())


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
