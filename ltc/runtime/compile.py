"""From the calls of a walk to a program, compiled once for each structure."""

from __future__ import annotations

import time
from collections.abc import Callable

from ltc import config
from ltc.aten.call import Call, Value
from ltc.aten.registry import expand
from ltc.backends.interface import BackendImplInterface
from ltc.debug import metrics
from ltc.ir.fingerprint import fingerprint
from ltc.ir.graph import schedule
from ltc.passes import pipeline
from ltc.runtime.cache import PROGRAMS
from ltc.runtime.program import InputRole, Program
from ltc.runtime.segments import compile_in_segments, runs_on
from ltc.runtime.transfers import backend


def program_for(
    known_key,
    path: Callable[[], list[Call]],
    outputs: tuple[Value, ...],
    device: int,
    replaced: dict[int, int],
    roles: Callable[[], tuple[InputRole, ...]],
) -> tuple[Program, tuple]:
    """The program for a walk that ends with `outputs` alive, and its key in the cache.

    known_key  what an earlier call returned for the same walk, or None
    path       gives the walk's calls in recorded order; asked for only where needed
    """
    calls = None
    if known_key is None or known_key[1] != config.value("LTC_BACKEND"):
        calls = live_calls(path(), outputs)
        known_key = (
            fingerprint(calls, outputs), config.value("LTC_BACKEND"), tuple(replaced.items()),
        )

    def build() -> Program:
        needed = live_calls(path(), outputs) if calls is None else calls
        return _compile(needed, outputs, device, replaced, roles())

    program, compiled = PROGRAMS.get(known_key, build)
    metrics.count("UncachedCompile" if compiled else "CachedCompile")
    metrics.record("TensorsGraphSize", program.calls)
    return program, known_key


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


def _compile(calls, outputs, device, replaced, roles) -> Program:
    started = time.perf_counter_ns()
    graph = pipeline.run(expand(calls, outputs))
    computation = _computation(backend(), graph, device, frozenset(replaced.values()))
    metrics.record("CompileTime", time.perf_counter_ns() - started, "time")
    metrics.record("InputOutputAliasCount", len(replaced))
    types = tuple((value.shape, value.dtype) for value in outputs)
    return Program(computation, types, dict(replaced), roles, graph, len(calls))


def _computation(chosen: BackendImplInterface, graph, device: int, donated: frozenset[int]):
    if all(runs_on(chosen, node) for node in schedule(*graph.outputs)):
        return chosen.compile(graph, device, donated)
    return compile_in_segments(chosen, graph, device)
