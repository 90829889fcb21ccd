"""From the calls of a recording to a program, compiled once for each structure."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any
from weakref import ref

from ltc.aten.call import Call, CallResult, Numbering, Scalar, parts_of_kind
from ltc.aten.expansion import expand
from ltc.backends.eager import EagerBackend
from ltc.backends.interpreter.interpreted import InterpretedComputation, NotInterpretable
from ltc.backends.plain_dispatch import PlainDispatch
from ltc.ir.graph import Graph, Origin, fingerprint
from ltc.passes import pipeline
from ltc.passes.narrow_dtypes import narrow
from ltc.runtime import physical_dtype
from ltc.runtime.background import compile_behind
from ltc.runtime.background.compile_behind import Job, Request, request_of
from ltc.runtime.background.graph_record import record_of_graph
from ltc.runtime.buffer import Buffer, Outputs
from ltc.runtime.first_runs import FirstRuns, looks_inside, may_run_uncompiled
from ltc.runtime.graph_compiler import (
    compile_and_keep,
    compiled_call,
    settings_now,
)
from ltc.runtime.program import InputRole, Program
from ltc.runtime.program_cache import PROGRAMS, note_use
from ltc.runtime.transfers import backend, capabilities
from ltc.runtime.verification.finite import FiniteComputation
from ltc.runtime.verification.verified import VerifiedComputation
from ltc.support.observation import metrics, spans
from ltc.support.observation.often import counting

count_found = counting("CachedCompile")


def _no_program() -> None:
    """Return None, like a weak reference to a dropped program."""


@dataclass(slots=True, eq=False)
class ProgramBinding:
    """The program of a recording that ended at a certain entry, and the program's arguments.

    Attributes:
        key: The program's key in the cache: (fingerprint, settings, pairs of an output and the
        input that it replaces, its device or None for every device).
        inputs: Positions in the recording of the program's buffers, in its order.
        scalars: Positions in the recording of the program's scalars, in its order.
        outputs: For each output of the recording its position among the program's outputs.
        program: Returns the program, or None if it is no longer kept.
    """

    key: tuple[Any, ...]
    inputs: tuple[int, ...]
    scalars: tuple[int, ...]
    outputs: tuple[int, ...]
    program: Callable[[], Program | None] = field(default=_no_program)

    def is_in_order(self, inputs: int, scalars: int, outputs: int) -> bool:
        """Return True if the program takes and returns all of so many in the recording's order."""
        counts = inputs, scalars, outputs
        return (self.inputs, self.scalars, self.outputs) == tuple(map(_counted, counts))

    def given_inputs(self, inputs: list[Buffer]) -> list[Buffer]:
        """Return the inputs of the program, out of the recording's."""
        return _picked(inputs, self.inputs)

    def given_scalars(self, scalars: list[Any]) -> list[Any]:
        return _picked(scalars, self.scalars)

    def recorded_outputs(self, outputs: list[Buffer]) -> list[Buffer]:
        """Return the outputs of the program, in the recording's order."""
        return _picked(outputs, self.outputs)


def _picked(given: list[Any], positions: tuple[int, ...]) -> list[Any]:
    # a recording has its inputs, scalars and outputs in the program's order most often
    if positions is _counted(len(given)):
        return given
    return [given[position] for position in positions]


@functools.cache
def _counted(count: int) -> tuple[int, ...]:
    return tuple(range(count))


def _positions(found: Iterable[int]) -> tuple[int, ...]:
    """Return the positions as a tuple; if they are in order, the one by which `_picked` knows that."""
    positions = tuple(found)
    counted = _counted(len(positions))
    return counted if positions == counted else positions


def program_for(
    known: ProgramBinding | None,
    path: Callable[[], list[Call]],
    outputs: tuple[CallResult, ...],
    device: int,
    replaced: dict[int, int],
) -> tuple[Program, ProgramBinding]:
    """Return the program for a recording that ends with `outputs` alive.

    Args:
        known: The binding that an earlier call returned for the same recording, or None.
        path: Gives the recording's calls in recorded order; asked for only where needed.
        replaced: Output position -> position in the recording of the input whose place it takes.
    """
    calls = None
    if known is None or known.key[1] != settings_now():
        calls = live_calls(path(), outputs)
        known = _binding(calls, outputs, replaced, device)
    elif (program := known.program()) is not None:
        count_use(program)
        return program, known

    def build() -> Program:
        needed = live_calls(path(), outputs) if calls is None else calls
        by_place = sorted(zip(known.outputs, outputs), key=itemgetter(0))
        with PlainDispatch():  # what is folded or timed is on the CPU, whatever the default device
            return _compile(known.key, needed, tuple(value for _, value in by_place), device)

    program, is_new = PROGRAMS.get(known.key, build)
    known.program = ref(program)
    if is_new:
        metrics.count("UncachedCompile" if program.first_runs is None else "UncompiledPrograms")
    else:
        count_found()
    return program, known


def kept_program(binding: ProgramBinding) -> Program | None:
    """The program of a recording that ended so before, where it is kept and settings are as they were."""
    return binding.program() if binding.key[1] == settings_now() else None


def known_program(binding: ProgramBinding) -> Program | None:
    """The same, which is launched now."""
    program = kept_program(binding)
    if program is not None:
        count_use(program)
    return program


def count_use(program: Program) -> None:
    """Count that a program which was compiled before is launched."""
    note_use(program)
    count_found()


def _binding(
    calls: list[Call],
    outputs: tuple[CallResult, ...],
    replaced: dict[int, int],
    device: int,
) -> ProgramBinding:
    def name(order: list[int], numbering: Numbering) -> Any:
        wanted = [outputs[o] for o in order]
        return fingerprint(calls, wanted, numbering.slots, physical_dtype.mode())

    own_device = None if capabilities().any_device else device
    return binding_of(calls, outputs, replaced, name, own_device)


def binding_of(
    calls: list[Call],
    outputs: tuple[CallResult, ...],
    replaced: dict[int, int],
    name: Callable[[list[int], Numbering], Any],
    device: int | None,
) -> ProgramBinding:
    """Return the binding by which a recording of these calls, as `live_calls` gives them, is run.

    Args:
        name: Gives the program's name from the order of its outputs and its numbering.
        device: The program's device; None: every device.
    """
    numbering = Numbering(calls)
    # an input that the outputs do not need is not given, so nothing takes its place
    given = {o: numbering.inputs[i] for o, i in replaced.items() if i in numbering.inputs}
    order = _output_order(calls, outputs, given)
    places = {output: place for place, output in enumerate(order)}
    key = (
        name(order, numbering),
        settings_now(),
        tuple(sorted((places[o], i) for o, i in given.items())),
        device,
    )
    return ProgramBinding(
        key,
        _positions(numbering.inputs),
        _positions(numbering.slots),
        _positions(places[o] for o in range(len(outputs))),
    )


def _output_order(
    calls: list[Call], outputs: tuple[CallResult, ...], given: dict[int, int]
) -> list[int]:
    """The outputs in the program's order, whatever order the recording met its inputs in.

    An exchange's token is first, so that a backend that computes what the outputs need in their
    order has begun every exchange before it waits for one.  Then comes what is new, newest first;
    then what takes an input's place, that of the last input first: its gradient is there first.

    Args:
        given: Output -> the input that it takes the place of, as the program counts them.
    """
    made = {call: position for position, call in enumerate(calls)}

    def rank(output: int) -> tuple[int, ...]:
        value = outputs[output]
        if output in given:
            return 2, -given[output]
        is_token = value.call.overload == "ltc::collective_start"
        return 0 if is_token else 1, -made[value.call], -value.index

    return sorted(range(len(outputs)), key=rank)


def live_calls(path: list[Call], outputs: tuple[CallResult, ...]) -> list[Call]:
    """Return the calls of `path` that the outputs need: as recorded, but inputs where first used.

    So neither the order of a recording's inputs nor an unneeded call shows.
    """
    producers = _producers_of_needed(outputs)
    ordered: dict[Call, None] = {}
    for call in path:
        if call in producers and call.overload != "ltc::input":
            for producer in producers[call]:
                ordered.setdefault(producer)
            ordered[call] = None
    for value in outputs:
        ordered.setdefault(value.call)  # an input that is asked for as it is
    return list(ordered)


def _producers_of_needed(outputs: tuple[CallResult, ...]) -> dict[Call, list[Call]]:
    needed: dict[Call, list[Call]] = {}
    waiting = [value.call for value in outputs]
    while waiting:  # a list, not recursion: recordings are long
        call = waiting.pop()
        if call not in needed:
            producers: list[Call] = []
            needed[call] = producers
            _add_producers((*call.args, *call.kwargs.values()), producers)
            waiting.extend(producers)
    return needed


def _add_producers(operands: Iterable[Any], found: list[Call]) -> None:
    for operand in operands:
        kind = operand.__class__
        if kind is CallResult:
            found.append(operand.call)
        elif kind is list or kind is tuple:
            _add_producers(operand, found)


def _compile(
    key: tuple[Any, ...], calls: list[Call], outputs: Sequence[CallResult], device: int
) -> Program:
    started = time.perf_counter_ns()
    numbering, replaced = Numbering(calls), dict(key[2])
    donated = frozenset(replaced.values())

    def traced() -> Graph:
        graph = narrow(expand(calls, outputs, numbering), physical_dtype.kept_as())
        return replace(graph, reproducible=key[1][0])

    def graph_of() -> Graph:
        return pipeline.run(traced())

    def native() -> Any:
        return compile_and_keep(_record_name(key), traced(), device, donated)

    first_runs, computation = None, _recalled(key, calls)
    if computation is None and not _is_looked_at(key) and may_run_uncompiled():
        first_runs = _first_runs(key, calls, outputs, numbering, device, traced, native)
    if first_runs is not None:
        computation = first_runs.by_calls
    elif computation is None:
        computation = native()
    if _is_verified(key):
        computation = VerifiedComputation(computation, backend(), traced(), device, donated)
    if key[1][-1]:
        computation = FiniteComputation(computation, traced(), device, donated)
    if first_runs is None:
        _note_compilation(started, len(calls))
    metrics.record("InputOutputAliasCount", len(replaced))
    types = tuple((value.shape, value.dtype) for value in outputs)
    exchanges = any(call.overload == "ltc::collective_start" for call in calls)
    # seldom asked for, and many objects
    roles_of = functools.partial(input_roles, numbering, replaced, calls)
    return Program(
        computation,
        Outputs(types, replaced),
        roles_of,
        graph_of,
        len(calls),
        exchanges,
        is_verified=_is_looked_at(key),
        first_runs=first_runs,
    )


def _note_compilation(started: int, calls: int) -> None:
    nanoseconds = time.perf_counter_ns() - started
    metrics.record("CompileTime", nanoseconds, "time")
    if spans.timeline is not None:
        end, name = spans.now(), f"compile {calls} calls"
        spans.timeline.add("compile", name, end - nanoseconds, end, {"calls": calls})


def _first_runs(
    key: tuple[Any, ...],
    calls: list[Call],
    outputs: Sequence[CallResult],
    numbering: Numbering,
    device: int,
    traced: Callable[[], Graph],
    native: Callable[[], Any],
) -> FirstRuns | None:
    """Return the runner of the calls until they are compiled; None if they must be compiled at
    once.
    """
    donated = frozenset(dict(key[2]).values())
    compile = functools.partial(compiled_call, device=device)
    try:
        interpreted = InterpretedComputation(calls, outputs, numbering, donated, compile)
    except NotInterpretable:
        return None

    def compiled_later() -> Any:
        started = time.perf_counter_ns()
        metrics.count("UncachedCompile")
        computation = _recalled(key, calls) or native()  # another process may have compiled it
        _note_compilation(started, len(calls))
        return computation

    def begin_behind() -> Request | None:
        name = _record_name(key)
        return compile_behind.begin(
            Job(
                keep=lambda: compile_and_keep(name, traced(), device, donated),
                record=lambda: request_of(name, record_of_graph(traced()), device, donated),
            )
        )

    return FirstRuns(interpreted, compiled_later, begin_behind, len(calls))


def input_roles(
    numbering: Numbering, replaced: dict[int, int], calls: Sequence[Call]
) -> tuple[InputRole, ...]:
    """Every input and scalar of the program, by what it is to the step."""
    state = set(replaced.values())
    roles = [
        InputRole("state" if position in state else "data", position)
        for position in numbering.inputs.values()
    ]
    for scalar in _scalars(calls):
        kind = "seed" if scalar.origin == "seed" else "scalar"
        roles.append(InputRole(kind, numbering.slots[scalar.slot], scalar.origin))
    return tuple(dict.fromkeys(roles))


def _scalars(calls: Sequence[Call]) -> list[Scalar]:
    return parts_of_kind(Scalar, [(*call.args, *call.kwargs.values(), call.seed) for call in calls])


def _recalled(key: tuple[Any, ...], calls: list[Call]) -> Any:
    """The program as an earlier process compiled it, where the backend keeps programs."""
    programs, looked_at = capabilities().programs, looks_inside()
    if programs is None or looked_at:
        return None
    found = programs.recall(_record_name(key), lambda k: Origin(calls[k].name, calls[k].line, k))
    metrics.count("RecalledPrograms" if found is not None else "NewPrograms")
    return found


def _record_name(key: tuple[Any, ...]) -> str:
    """Names the program on disk: the same whether it was interpreted first, or is verified."""
    name, settings, replaced, device = key
    return repr((name, settings[:-3], replaced, device))


def _is_verified(key: tuple[Any, ...]) -> bool:
    """Return True if its launches are judged; the reference could be judged only by itself."""
    return bool(key[1][-2]) and backend().name != EagerBackend.name


def _is_looked_at(key: tuple[Any, ...]) -> bool:
    """Return True if the results of its launches are checked: then it runs before its caller goes
    on.
    """
    return bool(key[1][-1]) or _is_verified(key)
