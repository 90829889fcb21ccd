"""The program of a path's end for the sizes at which its guards hold, and where it comes from.

It takes as long to make as a program of one size.  So it is made behind, by the process that compiles
large programs, wherever there is one; steps go on without it meanwhile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from ltc.backends.capabilities import Resizable
from ltc.ir.json_codec import Unrecordable
from ltc.runtime.background import compile_behind
from ltc.runtime.background.compile_behind import Job, Request, request_of
from ltc.runtime.background.graph_record import record_of_graph
from ltc.runtime.graph_compiler import resizable_and_keep, settings_now
from ltc.runtime.program import Program
from ltc.runtime.symbolic.traced_end import TracedEnd
from ltc.runtime.transfers import capabilities
from ltc.support.sizes.as_json import dumped, record_of_trace
from ltc.support.sizes.choices import tracing


class Variant:
    """A program of symbols."""

    def __init__(self, end: TracedEnd, resizable: Resizable) -> None:
        self._end, self._resizable = end, resizable
        self.fits = resizable.fits

    def program_at(self, values: Sequence[int]) -> Program:
        return self._end.program(self._resizable.at(values), values)


class VariantToCome:
    """One that is made, here or behind.

    calls  how many it runs
    error  what keeps it from being made; "" where nothing does that is known
    """

    def __init__(self, end: TracedEnd, device: int) -> None:
        self._end, self._device = end, device
        self._request: Request | None = None
        self.error, self.calls = "", len(end.calls)
        self._record: dict[str, Any] | None = None  # of the graph; None where there can be none
        with tracing(end.trace):
            self._graph = end.graph()
            self._name = self._named()

    def _named(self) -> str | None:
        """What it is kept under: equal in every process that traces the same at the same sizes."""
        try:
            record = self._record = record_of_graph(self._graph)
        except Unrecordable:
            return None
        donated = sorted(self._end.donated)
        text = dumped([record_of_trace(self._end.trace), record, donated, settings_now()[:-3]])
        return f"sizes {hashlib.sha256(text.encode()).hexdigest()}"

    def begin_behind(self) -> bool:
        """Whether another process makes it."""
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

    def kept(self) -> Variant | None:
        """As some process has made it; None where none has."""
        programs = capabilities().programs
        if programs is None or self._name is None:
            return None
        found = programs.recall_resizable(self._name, self._end.origin_of)
        return None if found is None else Variant(self._end, found)

    def taken(self) -> Variant | None:
        """What has been made behind; where that process has gone, it is made here."""
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
        except Exception as error:  # whatever in the passes knows nothing of expressions
            self.error = f"{type(error).__name__}: {error}"
            return None
        return Variant(self._end, made)
