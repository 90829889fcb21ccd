"""From a graph as it was traced to what runs it: every pass, then the backend; kept by its name."""

from __future__ import annotations

from typing import Any

from ltc.backends.capabilities import Resizable
from ltc.ir.graph import Graph, calls_text
from ltc.passes import pipeline
from ltc.runtime.partition import SegmentedComputation, compiled
from ltc.runtime.transfers import backend, capabilities
from ltc.support.sizes.extent import SizeTrace
from ltc.support.torch_private import shown_region


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
