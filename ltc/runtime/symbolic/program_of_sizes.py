"""One program for all sizes: traced and planned once with symbols, then filled in for each size.

Where a size decides how a kernel is made, the program is right for some sizes alone, which its guards
tell: for others it is made again, a few times at most.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence

from ltc.aten.call import Call, CallResult, Numbering
from ltc.aten.registry import expand
from ltc.debug import metrics
from ltc.ir.graph import Graph
from ltc.passes import pipeline
from ltc.passes.narrow_dtypes import narrow
from ltc.runtime import physical_dtype
from ltc.runtime.compile import (
    ProgramBinding,
    binding_of,
    input_roles,
    live_calls,
    settings_now,
)
from ltc.runtime.program import Program
from ltc.runtime.program_cache import note_use
from ltc.runtime.transfers import capabilities
from ltc.support.sizes.choices import tracing
from ltc.support.sizes.extent import Extent, SizeTrace

MOST_VARIANTS = 6  # of one program: each takes about as long to make as a program of one size
MOST_READY = 64  # sizes at which it is kept ready
FIRST_USES = 2  # at sizes that no variant fits, before one is made for them
MOST_MISSES = 40  # at sizes that none of all variants fits: from then on most have to fit

# (values of the symbols, whether sizes are to be Extents) -> the trace of these, the calls, the outputs
Derive = Callable[[Sequence[int], bool], tuple[SizeTrace, list[Call], tuple[CallResult, ...]]]


class ProgramOfSizes:
    """What runs a path that ends in a certain way.

    binding   what the program is given of the recording, and in which order it gives the outputs
    refusal   why there is none any more; "" while there may be
    """

    def __init__(self, derive: Derive, replaced: dict[int, int], device: int) -> None:
        """
        derive    gives the path's calls and outputs at given sizes
        replaced  output position -> position in the recording of the input whose place it takes
        """
        self._derive, self._replaced = derive, replaced
        self._device = device
        self._settings = settings_now()
        self._variants: list[_Variant] = []
        self._ready: dict[tuple[int, ...], Program] = {}
        self._misses = self._hits = 0
        self.binding: ProgramBinding | None = None
        self.refusal = ""

    @property
    def has_variants(self) -> bool:
        return bool(self._variants)

    def at(self, values: Sequence[int]) -> Program | None:
        """The program at these values of the symbols; None where the recording is to be run otherwise."""
        if settings_now() != self._settings:
            self._forget()
        key = tuple(values)
        program = self._ready.pop(key, None)
        if program is None:
            program = self._made(key)
            if program is None:
                return None
            if len(self._ready) >= MOST_READY:
                del self._ready[next(iter(self._ready))]
        self._ready[key] = program  # the one used last is the last to go
        note_use(program)
        metrics.note((("CachedCompile", 1),), (("TensorsGraphSize", program.calls, "value"),))
        return program

    def _forget(self) -> None:
        self._settings, self.refusal = settings_now(), ""
        self._misses = self._hits = 0
        self._variants.clear()
        self._ready.clear()

    def _made(self, values: tuple[int, ...]) -> Program | None:
        for variant in self._variants:
            if variant.fits(values):
                self._hits += 1
                metrics.count("SymbolicSizes")
                return variant.program_at(values)
        self._misses += 1
        if self.refusal or self._misses < FIRST_USES:
            return None
        if len(self._variants) >= MOST_VARIANTS:
            if self._misses > max(MOST_MISSES, self._hits):
                self.refusal = f"none of {MOST_VARIANTS} variants fits most sizes"
                self._variants.clear()
            return None
        made = self._new_variant(values)
        if made is None:
            return None
        self._misses = 0
        metrics.count("SymbolicSizes")
        return made.program_at(values)

    def _new_variant(self, values: tuple[int, ...]) -> _Variant | None:
        started = time.perf_counter_ns()
        try:
            variant = _Variant(self._derive, values, self._replaced, self._device)
        except Exception as error:  # whatever in the passes knows nothing of expressions
            self.refusal = f"{type(error).__name__}: {error}"
            return None
        metrics.note((("SymbolicPrograms", 1), ("UncachedCompile", 1)))
        metrics.record("CompileTime", time.perf_counter_ns() - started, "time")
        self._variants.append(variant)
        self.binding = variant.binding
        return variant


class _Variant:
    """The program for the sizes at which its guards hold."""

    def __init__(
        self,
        derive: Derive,
        values: Sequence[int],
        replaced: dict[int, int],
        device: int,
    ) -> None:
        self._derive = derive
        trace, calls, made = derive(values, True)
        with tracing(trace):
            calls = live_calls(calls, made)
            self.binding = binding_of(calls, made, replaced, lambda order, numbering: id(self))
            self._replaced = dict(self.binding.key[2])
            by_place = sorted(zip(self.binding.outputs, made), key=lambda pair: pair[0])
            self._wanted = tuple(value for _, value in by_place)
            numbering = Numbering(calls)
            graph = narrow(expand(calls, self._wanted, numbering), physical_dtype.kept_as())
            graph = pipeline.run(graph)
            resizable = capabilities().resizable
            assert resizable is not None
            donated = frozenset(self._replaced.values())
            self._program = resizable(graph, device, donated, trace)
        self.fits = self._program.fits
        self._calls = len(calls)
        self._roles = functools.partial(input_roles, numbering, self._replaced, calls)
        sizes = [size for value in self._wanted for size in value.shape]
        shown = ", ".join(s.source if isinstance(s, Extent) else str(s) for s in sizes)
        self._sizes = trace.function(f"({shown},)" if sizes else "()")

    def program_at(self, values: Sequence[int]) -> Program:
        sizes = iter(self._sizes(*values))
        types = tuple((tuple([next(sizes) for _ in v.shape]), v.dtype) for v in self._wanted)
        return Program(
            self._program.at(values),
            types,
            self._replaced,
            self._roles,
            functools.partial(_graph_at, self._derive, self.binding, tuple(values)),
            self._calls,
        )


def _graph_at(derive: Derive, binding: ProgramBinding, values: Sequence[int]) -> Graph:
    """The graph at these sizes, with numbers: for what runs it again where it has failed."""
    _, calls, outputs = derive(values, False)
    calls = live_calls(calls, outputs)
    by_place = sorted(zip(binding.outputs, outputs), key=lambda pair: pair[0])
    wanted = tuple(value for _, value in by_place)
    return pipeline.run(narrow(expand(calls, wanted, Numbering(calls)), physical_dtype.kept_as()))
