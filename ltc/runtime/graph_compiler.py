"""From a graph as it was traced to what runs it: every pass, then the backend; kept by its name."""

from __future__ import annotations

from typing import Any

from ltc import config
from ltc.backends.capabilities import Resizable
from ltc.ir.graph import Graph, calls_text
from ltc.passes import pipeline
from ltc.runtime.partition import SegmentedComputation, compiled
from ltc.runtime.transfers import backend, capabilities
from ltc.support.bounded_table import BoundedTable
from ltc.support.sizes.extent import SizeTrace
from ltc.support.torch_private import shown_region

# What a program depends on and may change while a process runs. The numeric modes may not.
# The last three do not change how a program is compiled: its record is the same.
SETTINGS = (
    "LTC_BACKEND", "LTC_CHECK", "LTC_CHECK_INDEX", "LTC_AUTOTUNE", "LTC_TIER", "LTC_VERIFY",
    "LTC_DEBUG_NANS",
)  # fmt: skip
settings_now = config.reader(*SETTINGS)
_compiled_calls: BoundedTable[tuple[Any, ...], Any] = BoundedTable("CompiledCalls", 64)


def compile_traced(graph: Graph, device: int, donated: frozenset[int] = frozenset()) -> Any:
    """A Computation of this process's backend, in segments where it cannot run every node."""
    chosen = backend()
    with shown_region("ltc::compile"):
        graph = pipeline.run(graph)
        try:
            return compiled(chosen, graph, device, donated)
        except Exception as error:  # a compiler knows nothing of the user's lines
            error.add_note(f"while {chosen.name} compiled {calls_text(graph)}")
            raise


def compiled_call(graph: Graph, device: int) -> Any:
    """Likewise of one call, which is in many programs: what draws normal numbers, say.

    Where calls of one line have equal graphs, they share what they are compiled to.
    """
    key = graph.outputs, tuple(graph.lines.values()), device, settings_now()
    known = _compiled_calls.get(key)
    if known is not None:
        return known
    return _compiled_calls.keep(key, compile_traced(graph, device))


def compile_and_keep(name: str, graph: Graph, device: int, donated: frozenset[int]) -> Any:
    """Likewise; a later process is given it under this name, where the backend keeps programs."""
    computation = compile_traced(graph, device, donated)
    programs = capabilities().programs
    if programs is not None and not isinstance(computation, SegmentedComputation):
        programs.remember(name, computation)
    return computation


def resizable_and_keep(
    name: str | None, graph: Graph, device: int, donated: frozenset[int], trace: SizeTrace
) -> Resizable:
    """What runs a graph whose sizes are expressions of the trace's symbols; called under the trace.

    name  that it is kept under; None: it is not
    """
    resizable, programs = capabilities().resizable, capabilities().programs
    assert resizable is not None
    with shown_region("ltc::compile"):
        made = resizable(pipeline.run(graph), device, donated, trace)
    if programs is not None and name is not None:
        programs.remember_resizable(name, made)
    return made
