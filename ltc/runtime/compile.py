"""From the calls of a walk to a program, compiled once for each structure."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ltc import config
from ltc.aten.call import Call, Numbering, Scalar, Value
from ltc.aten.registry import expand
from ltc.backends.interface import BackendImplInterface, RemembersPrograms
from ltc.debug import metrics
from ltc.ir.fingerprint import fingerprint
from ltc.ir.graph import Graph, Origin, schedule
from ltc.passes import pipeline
from ltc.passes.narrow import narrow
from ltc.runtime import storage
from ltc.runtime.buffer import Buffer
from ltc.runtime.cache import PROGRAMS, ProgramKey
from ltc.runtime.program import InputRole, Program
from ltc.runtime.segments import compile_in_segments, runs_on
from ltc.runtime.transfers import backend


@dataclass(frozen=True)
class Ending:
    """How a walk that ended in a certain way is run, once that is known.

    key      of the program, in the cache
    inputs   positions on the walk of the buffers that the program is given, in its order
    scalars  likewise of the scalars
    """

    key: ProgramKey
    inputs: tuple[int, ...]
    scalars: tuple[int, ...]

    def given_inputs(self, inputs: list[Buffer]) -> list[Buffer]:
        """What the program is given of the walk's inputs."""
        return _picked(inputs, self.inputs)

    def given_scalars(self, scalars: list[Any]) -> list[Any]:
        return _picked(scalars, self.scalars)


def _picked(given: list, positions: tuple[int, ...]) -> list:
    # counted from 0 in the order of their first use, so all of them are most often all in order
    if len(positions) == len(given) and positions == _counted(len(positions)):
        return given
    return [given[position] for position in positions]


@functools.cache
def _counted(count: int) -> tuple[int, ...]:
    return tuple(range(count))


def program_for(
    known: Ending | None,
    path: Callable[[], list[Call]],
    outputs: tuple[Value, ...],
    device: int,
    replaced: dict[int, int],
) -> tuple[Program, Ending]:
    """The program for a walk that ends with `outputs` alive.

    known     what an earlier call returned for the same walk, or None
    path      gives the walk's calls in recorded order; asked for only where needed
    replaced  output position -> position on the walk of the input whose place it takes
    """
    calls = None
    if known is None or known.key[1] != config.value("LTC_BACKEND"):
        calls = live_calls(path(), outputs)
        known = _ending(calls, outputs, replaced)

    def build() -> Program:
        needed = live_calls(path(), outputs) if calls is None else calls
        return _compile(known.key, needed, outputs, device)

    program, compiled = PROGRAMS.get(known.key, build)
    metrics.count("UncachedCompile" if compiled else "CachedCompile")
    metrics.record("TensorsGraphSize", program.calls)
    return program, known


def _ending(calls: list[Call], outputs: tuple[Value, ...], replaced: dict[int, int]) -> Ending:
    numbering = Numbering(calls)
    # an input that the outputs do not need is not given, so nothing takes its place
    given = {o: numbering.inputs[i] for o, i in replaced.items() if i in numbering.inputs}
    name = fingerprint(calls, outputs, numbering.slots, storage.mode())
    key = ProgramKey((name, config.value("LTC_BACKEND"), tuple(given.items())))
    return Ending(key, tuple(numbering.inputs), tuple(numbering.slots))


def live_calls(path: list[Call], outputs: tuple[Value, ...]) -> list[Call]:
    """The calls of `path` that the outputs need, in recorded order."""
    needed: set[Call] = set()
    waiting = [value.call for value in outputs]
    while waiting:  # a list, not recursion: walks are long
        call = waiting.pop()
        if call not in needed:
            needed.add(call)
            waiting.extend(_producers(call))
    return [call for call in path if call in needed]


def _producers(call: Call) -> list[Call]:
    found, waiting = [], [call.args, tuple(call.kwargs.values())]
    while waiting:
        for operand in waiting.pop():
            if operand.__class__ is Value:
                found.append(operand.call)
            elif operand.__class__ is list or operand.__class__ is tuple:
                waiting.append(operand)
    return found


def _compile(key: tuple, calls: list[Call], outputs, device: int) -> Program:
    started = time.perf_counter_ns()
    numbering, replaced = Numbering(calls), dict(key[2])

    def graph_of() -> Graph:
        return pipeline.run(narrow(expand(calls, outputs, numbering), storage.kept_as()))

    computation = _recalled(key, calls)
    if computation is None:
        donated = frozenset(replaced.values())
        computation = _computation(key, backend(), graph_of(), device, donated)
    metrics.record("CompileTime", time.perf_counter_ns() - started, "time")
    metrics.record("InputOutputAliasCount", len(replaced))
    types = tuple((value.shape, value.dtype) for value in outputs)
    roles = _roles(numbering, replaced, calls)
    exchanges = any(call.overload == "ltc::collective_start" for call in calls)
    return Program(computation, types, replaced, roles, graph_of, len(calls), exchanges)


def _roles(numbering: Numbering, replaced: dict[int, int], calls) -> tuple[InputRole, ...]:
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


def _scalars(calls) -> list[Scalar]:
    found, waiting = [], [(*call.args, *call.kwargs.values(), call.seed) for call in calls]
    while waiting:
        for operand in waiting.pop():
            if operand.__class__ is Scalar:
                found.append(operand)
            elif operand.__class__ is list or operand.__class__ is tuple:
                waiting.append(operand)
    return found


def _recalled(key: tuple, calls: list[Call]) -> Any:
    """The program as an earlier process compiled it, where the backend keeps programs."""
    chosen = backend()
    if not isinstance(chosen, RemembersPrograms) or _looks_inside():
        return None
    found = chosen.recall(repr(key), lambda k: Origin(calls[k].name, calls[k].line, k))
    metrics.count("RecalledPrograms" if found is not None else "NewPrograms")
    return found


def _looks_inside() -> bool:
    """Whether the passes are to be seen: then they have to run."""
    return bool(config.value("LTC_DUMP"))


def _computation(
    key: tuple, chosen: BackendImplInterface, graph: Graph, device: int, donated: frozenset[int]
) -> Any:
    if not all(runs_on(chosen, node) for node in schedule(*graph.outputs)):
        return compile_in_segments(chosen, graph, device)
    computation = chosen.compile(graph, device, donated)
    if isinstance(chosen, RemembersPrograms):
        chosen.remember(repr(key), computation)
    return computation
