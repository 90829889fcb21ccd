"""One program for all sizes: traced and planned once with symbols, then filled in for each size.

Where a size decides how a kernel is made, the program is right for some sizes alone, which its guards
tell: for others it is made again, a few times at most.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from ltc.aten.call import Call, CallResult, Numbering
from ltc.aten.expansion import expand
from ltc.backends.capabilities import Resizable
from ltc.backends.plain_dispatch import PlainDispatch
from ltc.explaining.explanation import TIERS, Explanation
from ltc.explaining.history import note
from ltc.explaining.user_stack import user_stack_from
from ltc.ir.graph import Graph, Origin
from ltc.ir.json_codec import Unrecordable
from ltc.passes import pipeline
from ltc.passes.narrow_dtypes import narrow
from ltc.runtime import physical_dtype
from ltc.runtime.background import compile_behind
from ltc.runtime.background.compile_behind import Job, Request, request_of
from ltc.runtime.background.graph_record import record_of_graph
from ltc.runtime.buffer import Outputs
from ltc.runtime.compile import ProgramBinding, binding_of, input_roles, live_calls
from ltc.runtime.graph_compiler import (
    must_reproduce,
    refusal_of,
    resizable_and_keep,
    settings_now,
)
from ltc.runtime.program import Program
from ltc.runtime.program_cache import note_use
from ltc.runtime.transfers import capabilities
from ltc.support.observation import metrics
from ltc.support.sizes.as_json import dumped, record_of_trace
from ltc.support.sizes.choices import tracing
from ltc.support.sizes.extent import Extent, SizeTrace
from ltc.support.sizes.marks import is_symbolic

MOST_READY = 64  # sizes at which it is kept ready


class ProgramOfSizes:
    """The program of a path that ends at a certain entry.

    Attributes:
        binding: The inputs that the program takes from the recording, and the order of its outputs.
        refusal: The reason why there is no program any more; "" while there may be one.
    """

    def __init__(
        self, derive: Derive, replaced: dict[int, int], device: int, max_variants: int
    ) -> None:
        """Begin without a program.

        Args:
            derive: Gives the path's calls and outputs at given sizes.
            replaced: Output position -> position in the recording of the input whose place it
                takes.
            max_variants: The most variants made. Once they are, they have to fit more sizes than
                not.
        """
        self._derive, self._replaced = derive, replaced
        self._device, self._max_variants = device, max_variants
        self.binding: ProgramBinding | None = None
        self._forget()

    def _forget(self) -> None:
        self._settings, self.refusal = settings_now(), ""
        self._misses = self._hits = 0
        self._variants: list[Variant] = []
        self._to_come: VariantToCome | None = None
        self._ready: dict[tuple[int, ...], Program] = {}
        self._latest: Program | None = None

    @property
    def has_variants(self) -> bool:
        """Return True if there are variants, or will be."""
        return bool(self._variants) or self._to_come is not None

    @property
    def is_kept(self) -> bool:
        """True: its path keeps it."""
        return True

    @property
    def is_ready(self) -> bool:
        """True if there is a program, which may not hold at all sizes."""
        self._take_over()
        return bool(self._variants)

    def ask(self, values: Sequence[int]) -> None:
        """Have a variant made that holds at these values of the symbols, if there is to be another."""
        self._use_present_settings()
        self._take_over()
        if self._by_variant(tuple(values)) is not None or self.refusal or self._to_come is not None:
            return
        if len(self._variants) < self._max_variants:
            with PlainDispatch():
                self._ask_for_another(tuple(values))
            if self._to_come is not None and torch.are_deterministic_algorithms_enabled():
                self._to_come.wait()

    def at(self, values: Sequence[int]) -> Program | None:
        """The program at these values of the symbols; None where the recording is to be run otherwise."""
        self._use_present_settings()
        key = tuple(values)
        program = self._ready.pop(key, None) or self._made(key)
        if program is None:
            return None
        if len(self._ready) >= MOST_READY:
            del self._ready[next(iter(self._ready))]
        self._ready[key] = program  # the one used last is the last to go
        if self._latest is not None and not program.seconds:
            program.seconds = self._latest.seconds  # about as long at any size
        self._latest = program
        note_use(program)
        metrics.count("CachedCompile")
        return program

    def _use_present_settings(self) -> None:
        if settings_now() != self._settings:
            self._forget()

    def _made(self, values: tuple[int, ...]) -> Program | None:
        self._take_over()
        program = self._by_variant(values)
        if program is not None or self.refusal:
            return program
        self._misses += 1
        if len(self._variants) < self._max_variants:
            self.ask(values)
            return self._by_variant(values)
        if self._misses > max(self._max_variants, self._hits):
            self.refusal = f"none of {self._max_variants} variants fits most sizes"
            self._variants.clear()
        return None

    def _by_variant(self, values: tuple[int, ...]) -> Program | None:
        for variant in self._variants:
            if variant.fits(values):
                self._hits += 1
                metrics.count("SymbolicSizes")
                return variant.program_at(values)
        return None

    def _ask_for_another(self, values: tuple[int, ...]) -> None:
        """A variant for these sizes: one that is there at once, or is to come."""
        began = time.perf_counter_ns()
        try:
            end = TracedEnd(self._derive, values, self._replaced)
            to_come = VariantToCome(end, self._device)
        except Exception as error:
            self.refusal = refusal_of(error, "the trace of a path with symbols")
            return
        self.binding, self._misses = end.binding, 0
        found = to_come.kept()
        how = "was found on disk"
        if found is not None:
            metrics.count("RecalledPrograms")
        elif to_come.begin_behind():
            self._to_come = to_come
            return
        else:
            found, how = to_come.made_here(), "was compiled"
        metrics.record("CompileTime", time.perf_counter_ns() - began, "time")
        self._add(found, to_come, how)

    def _take_over(self) -> None:
        """Take the variant that was compiled behind, if it is ready; asked at each size without a
        program.
        """
        to_come = self._to_come
        if to_come is not None and to_come.is_over:
            self._to_come = None
            with PlainDispatch():
                variant = to_come.taken()
            self._add(variant, to_come, "was compiled in the background")

    def _add(self, variant: Variant | None, to_come: VariantToCome, how: str) -> None:
        if variant is None:
            self.refusal = to_come.error
            return
        metrics.note((("SymbolicPrograms", 1), ("UncachedCompile", 1)))
        self._variants.append(variant)
        _explain(to_come, how)


def _explain(to_come: VariantToCome, how: str) -> None:
    what = f"a program of {to_come.calls} calls with symbolic sizes {how}"
    why = "its sizes change from step to step; until now its calls ran one by one"
    note(Explanation(TIERS, user_stack_from(to_come.line), what, why, "", "symbolic"))


# The program of a path's end for the sizes at which its guards hold, and where it comes from. It
# takes as long to make as a program of one size. So it is made behind, by the process that
# compiles large programs, wherever there is one; steps go on without it meanwhile.


class Variant:
    """A program of symbols."""

    def __init__(self, end: TracedEnd, resizable: Resizable) -> None:
        self._end, self._resizable = end, resizable
        self.fits = resizable.fits

    def program_at(self, values: Sequence[int]) -> Program:
        return self._end.program(self._resizable.at(values), values)


class VariantToCome:
    """A variant that is being compiled, here or in the background.

    Attributes:
        calls: Number of calls that it runs.
        line: The user's line of the first call that has one.
        error: The error that keeps it from being made; "" if none is known.
    """

    def __init__(self, end: TracedEnd, device: int) -> None:
        self._end, self._device = end, device
        self._request: Request | None = None
        self.error, self.calls = "", len(end.calls)
        self.line = next((call.line for call in end.calls if call.line), "")
        self._record: dict[str, Any] | None = None  # of the graph; None where there can be none
        with tracing(end.trace):
            self._graph = end.graph()
            self._name = self._named()

    def _named(self) -> str | None:
        """Return the name it is kept under: equal in every process that traces the same at the same
        sizes.
        """
        try:
            record = self._record = record_of_graph(self._graph)
        except Unrecordable:
            return None
        donated = sorted(self._end.donated)
        text = dumped([record_of_trace(self._end.trace), record, donated, settings_now()[:-3]])
        return f"sizes {hashlib.sha256(text.encode()).hexdigest()}"

    def begin_behind(self) -> bool:
        """Let another process make it; return False if none can."""
        if self._name is None or self._record is None or not compile_behind.is_possible():
            return False
        of_program = self._name, self._record, self._device, self._end.donated, self._end.trace
        self._request = compile_behind.begin(
            Job(keep=self._kept_resizable, record=lambda: request_of(*of_program))
        )
        return self._request is not None

    @property
    def is_over(self) -> bool:
        return self._request is None or self._request.is_over

    def wait(self) -> None:
        """Block until it is over."""
        if self._request is not None:
            self._request.wait()

    def kept(self) -> Variant | None:
        """Return it as some process has made it; None if none has."""
        programs = capabilities().programs
        if programs is None or self._name is None:
            return None
        found = programs.recall_resizable(self._name, self._end.origin_of)
        return None if found is None else Variant(self._end, found)

    def taken(self) -> Variant | None:
        """Return the variant made behind; if that process has gone, make it here."""
        found = self.kept()
        if found is None and self._request is not None and self._request.error is not None:
            self.error = self._request.error
            return None
        return found or self.made_here()

    def _kept_resizable(self) -> Resizable:
        trace, donated = self._end.trace, self._end.donated
        with tracing(trace):
            return resizable_and_keep(self._name, self._graph, self._device, donated, trace)

    def made_here(self) -> Variant | None:
        try:
            made = self._kept_resizable()
        except Exception as error:
            self.error = refusal_of(error, "the compilation of a program of symbols")
            return None
        return Variant(self._end, made)


# --- The end of a path of symbols, traced with expressions in place of sizes ---------------------

# (values of the symbols, whether sizes are to be Extents) -> the trace of these, the calls, the outputs
Derive = Callable[[Sequence[int], bool], tuple[SizeTrace, list[Call], tuple[CallResult, ...]]]


class TracedEnd:
    """The end of a path of symbols, traced with expressions in place of sizes.

    Attributes:
        trace: The trace of the present sizes.
        calls: The calls that the outputs need.
        outputs: The outputs in the program's order.
        numbering: The numbering of the calls.
        binding: The program's arguments in the recording.
    """

    def __init__(self, derive: Derive, values: Sequence[int], replaced: dict[int, int]) -> None:
        """Trace the end of the path.

        Args:
            derive: Gives the path's calls and outputs at given sizes.
            replaced: Output position -> position in the recording of the input whose place it
                takes.
        """
        self._derive = derive
        self.trace, calls, made = derive(values, True)
        with tracing(self.trace):
            self.calls = live_calls(calls, made)
            self.binding = binding_of(
                self.calls, made, replaced, lambda order, numbering: id(self), None
            )  # fmt: skip
        self.outputs = _in_order(self.binding, made)
        self.numbering = Numbering(self.calls)
        self._replaced = dict(self.binding.key[2])
        self._roles = functools.partial(input_roles, self.numbering, self._replaced, self.calls)
        self._shapes = self.trace.function(_text_of_shapes(self.outputs))
        self._fixed: Outputs | None = None  # where no size of theirs changes
        if not is_symbolic([value.shape for value in self.outputs]):
            self._fixed = self._outputs_at(values)

    @property
    def donated(self) -> frozenset[int]:
        """Positions of the inputs that the program may write over."""
        return frozenset(self._replaced.values())

    def origin_of(self, position: int) -> Origin:
        """Return the origin of the call at a position."""
        call = self.calls[position]
        return Origin(call.name, call.line, position)

    def graph(self) -> Graph:
        """Return the graph as traced: no pass has run. Called under the trace."""
        return _traced(self.calls, self.outputs)

    def traced_at(self, values: Sequence[int]) -> Graph:
        """Return the graph at these sizes, with numbers."""
        _, calls, outputs = self._derive(values, False)
        return _traced(live_calls(calls, outputs), _in_order(self.binding, outputs))

    def graph_at(self, values: Sequence[int]) -> Graph:
        """Return the graph after the passes: for the code that runs it again after a failure."""
        return pipeline.run(self.traced_at(values))

    def program(self, computation: Any, values: Sequence[int]) -> Program:
        """Return the program of a computation for these values of the symbols."""
        return Program(
            computation,
            self._fixed or self._outputs_at(values),
            self._roles,
            functools.partial(self.graph_at, tuple(values)),
            len(self.calls),
        )

    def _outputs_at(self, values: Sequence[int]) -> Outputs:
        dtypes = [value.dtype for value in self.outputs]
        return Outputs(tuple(zip(self._shapes(*values), dtypes)), self._replaced)


def _text_of_shapes(outputs: Sequence[CallResult]) -> str:
    texts = [[s.source if isinstance(s, Extent) else str(s) for s in v.shape] for v in outputs]
    shapes = [f"({', '.join([*sizes, ''])})" if sizes else "()" for sizes in texts]
    return f"({', '.join([*shapes, ''])})" if shapes else "()"


def _in_order(binding: ProgramBinding, outputs: Sequence[CallResult]) -> tuple[CallResult, ...]:
    by_place = sorted(zip(binding.outputs, outputs), key=lambda pair: pair[0])
    return tuple(value for _, value in by_place)


def _traced(calls: list[Call], outputs: Sequence[CallResult]) -> Graph:
    graph = narrow(expand(calls, outputs, Numbering(calls)), physical_dtype.kept_as())
    return replace(graph, reproducible=must_reproduce())
