"""A path's end run call by call on PyTorch's kernels, at any sizes: until a variant is made, and no longer."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from ltc.backends.interpreter.any_size import InterpretedAtAnySize
from ltc.backends.interpreter.call_kernel import NotInterpretable
from ltc.backends.plain_dispatch import PlainDispatch
from ltc.runtime.compile import ProgramBinding
from ltc.runtime.graph_compiler import compile_traced, compiled_call
from ltc.runtime.program import Program
from ltc.runtime.symbolic.traced_end import Derive, TracedEnd
from ltc.runtime.tiers import Tiers, begin_interpreted


class InterpretedEnd:
    """Made the first time that it is asked for."""

    def __init__(self, derive: Derive, replaced: dict[int, int], device: int) -> None:
        """As ProgramOfSizes."""
        self._derive, self._replaced, self._device = derive, replaced, device
        self._end: TracedEnd | None = None
        self._calls: InterpretedAtAnySize | None = None
        self._is_made = False
        self._latest: Tiers | None = None

    @property
    def binding(self) -> ProgramBinding:
        """What its programs are given of the recording."""
        assert self._end is not None
        return self._end.binding

    def at(self, values: Sequence[int]) -> Program | None:
        """The program at these values of the symbols; None where it has to be compiled for them."""
        if not self._is_made:
            self._is_made = True
            with PlainDispatch():
                self._make(values)
        if self._latest is not None and self._latest.has_failed:
            self._calls = None  # a kernel cannot: at the next sizes it could not either
        end, calls = self._end, self._calls
        if end is None or calls is None or not begin_interpreted():
            return None

        def compiled() -> Any:
            return compile_traced(end.traced_at(values), self._device, end.donated)

        try:
            interpreted = calls.at(values)
        except NotInterpretable:  # at these sizes
            return None
        self._latest = Tiers(interpreted, compiled, lambda: None, end.calls)
        return end.program(self._latest.interpreted, values)

    def _make(self, values: Sequence[int]) -> None:
        try:
            end = TracedEnd(self._derive, values, self._replaced)
            self._calls = InterpretedAtAnySize(
                end.trace, end.calls, end.outputs, end.numbering, end.donated,
                functools.partial(compiled_call, device=self._device),
            )  # fmt: skip
        except Exception:  # of a call that needs its sizes: the whole is run for these alone
            return
        self._end = end
