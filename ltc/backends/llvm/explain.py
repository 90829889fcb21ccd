"""What the LLVM backend makes of a graph, stage by stage, as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ltc.backends.llvm.schedule import ProgramStep, planned_steps
from ltc.ir.graph import Graph, show
from ltc.ir.loop_nest_text import units_text
from ltc.llvm.compiler import llvm_binding
from ltc.passes.pipeline import Pass

AFTER_PASSES = ("kernels", "llvm", "assembly")


def explained(
    graph: Graph, passes: tuple[Pass, ...], donated: frozenset[int]
) -> Iterator[tuple[str, str]]:
    """(stage, text) after each pass, then of AFTER_PASSES; made only as far as it is asked for.

    donated  positions of the inputs that may be written over
    """
    for one in passes:
        graph = one.run(graph)
        yield one.name, show(*graph.outputs)
    steps = planned_steps(graph, donated)
    yield "kernels", units_text([step.unit for step in steps], graph.lines)
    yield "llvm", _of_each_kernel(steps, graph, lambda text: text)
    yield "assembly", _of_each_kernel(steps, graph, llvm_binding.assembly)


def _of_each_kernel(steps: list[ProgramStep], graph: Graph, form: Callable[[str], str]) -> str:
    """The form of every kernel's text, equal ones once, behind the users' lines it computes."""
    lines: dict[str, dict[str, None]] = {}
    for step in steps:
        for code in step.codes:
            found = (graph.lines[node] for node in step.writes if node in graph.lines)
            lines.setdefault(code.text, {}).update(dict.fromkeys(found))
    return "\n".join(
        "".join(f"; {line}\n" for line in found) + form(text) for text, found in lines.items()
    )
