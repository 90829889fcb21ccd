"""One program for all sizes: traced and planned once with symbols, then filled in for each size.

Where a size decides how a kernel is made, the program is right for some sizes alone, which its guards
tell: for others it is made again, a few times at most.  Until it is made, and that is behind where
another process can, the calls run one by one on PyTorch's kernels, with sizes filled in as well.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from ltc.backends.plain_dispatch import PlainDispatch
from ltc.debug import metrics
from ltc.explaining.explanation import TIERS, Explanation
from ltc.explaining.history import note
from ltc.explaining.user_stack import user_stack
from ltc.runtime.compile import ProgramBinding
from ltc.runtime.graph_compiler import settings_now
from ltc.runtime.program import Program
from ltc.runtime.program_cache import note_use
from ltc.runtime.symbolic.interpreted_end import InterpretedEnd
from ltc.runtime.symbolic.traced_end import Derive, TracedEnd
from ltc.runtime.symbolic.variant import Variant, VariantToCome

MOST_VARIANTS = 6  # of one program: each takes about as long to make as a program of one size
MOST_READY = 64  # sizes at which it is kept ready
FIRST_USES = 2  # at sizes that no variant fits, before one is made for them
MOST_MISSES = 40  # at sizes that none of all variants fits: from then on most have to fit


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
        self.binding: ProgramBinding | None = None
        self._forget()

    def _forget(self) -> None:
        self._settings, self.refusal = settings_now(), ""
        self._misses = self._hits = 0
        self._variants: list[Variant] = []
        self._to_come: VariantToCome | None = None
        self._ready: dict[tuple[int, ...], Program] = {}
        self._latest: Program | None = None
        self._interpreter = InterpretedEnd(self._derive, self._replaced, self._device)

    @property
    def has_variants(self) -> bool:
        """Whether there are some, or will be."""
        return bool(self._variants) or self._to_come is not None

    def at(self, values: Sequence[int], may_compile: bool = True) -> Program | None:
        """The program at these values of the symbols; None where the recording is to be run otherwise.

        may_compile  whether a variant is begun where there is none for these values
        """
        if settings_now() != self._settings:
            self._forget()
        key = tuple(values)
        program = self._ready.pop(key, None) or self._made(key, may_compile)
        if program is not None:
            if len(self._ready) >= MOST_READY:
                del self._ready[next(iter(self._ready))]
            self._ready[key] = program  # the one used last is the last to go
        elif not self.refusal and len(self._variants) < MOST_VARIANTS:
            program = self._interpreter.at(key)
            if program is not None:
                metrics.count("InterpretedSizes")
                self.binding = self._interpreter.binding
        if program is None:
            return None
        if self._latest is not None and not program.seconds:
            program.seconds = self._latest.seconds  # about as long at any size
        self._latest = program
        note_use(program)
        metrics.count("CachedCompile")
        return program

    def _made(self, values: tuple[int, ...], may_compile: bool) -> Program | None:
        self._take_over()
        program = self._by_variant(values)
        if program is not None or self.refusal or self._to_come is not None or not may_compile:
            return program
        self._misses += 1
        if self._misses < FIRST_USES:
            return None
        if len(self._variants) < MOST_VARIANTS:
            with PlainDispatch():
                self._ask_for_another(values)
            return self._by_variant(values)
        if self._misses > max(MOST_MISSES, self._hits):
            self.refusal = f"none of {MOST_VARIANTS} variants fits most sizes"
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
        except Exception as error:  # whatever in a rule knows nothing of expressions
            self.refusal = f"{type(error).__name__}: {error}"
            return
        self.binding, self._misses = end.binding, 0
        found = to_come.kept()
        if found is not None:
            metrics.count("RecalledPrograms")
        elif to_come.begin_behind():
            self._to_come = to_come
            return
        else:
            found = to_come.made_here()
        metrics.record("CompileTime", time.perf_counter_ns() - began, "time")
        self._add(found, to_come)

    def _take_over(self) -> None:
        """Whether what is made behind is there is asked at each size that has no program."""
        to_come = self._to_come
        if to_come is not None and to_come.is_over:
            self._to_come = None
            with PlainDispatch():
                variant = to_come.taken()
            self._add(variant, to_come)
            if variant is not None:
                _explain(to_come.calls)

    def _add(self, variant: Variant | None, to_come: VariantToCome) -> None:
        if variant is None:
            self.refusal = to_come.error
            return
        metrics.note((("SymbolicPrograms", 1), ("UncachedCompile", 1)))
        self._variants.append(variant)


def _explain(calls: int) -> None:
    what = f"a program of {calls} calls, whose sizes are symbols, has been compiled behind"
    why = "its sizes change from run to run: until now its calls ran one by one"
    note(Explanation(TIERS, user_stack(), what, why, "", "symbolic"))
