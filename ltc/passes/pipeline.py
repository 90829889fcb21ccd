"""The passes in their order; this list alone times, checks and prints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ltc import config
from ltc.debug import metrics
from ltc.ir.check import check
from ltc.ir.graph import Graph
from ltc.passes.simplify import simplify


@dataclass(frozen=True)
class Pass:
    """A function from graph to graph, its name in metrics and dumps, why it is worth its time."""

    name: str
    run: Callable[[Graph], Graph]
    why: str


PIPELINE = (Pass("simplify", simplify, "fewer nodes for every later pass and for the backend"),)


def run(graph: Graph, passes: tuple[Pass, ...] = PIPELINE) -> Graph:
    """The graph after every pass, verified between them under LTC_CHECK."""
    if config.value("LTC_CHECK"):
        check(graph, after="tracing")
    wanted = dumped()
    for p in passes:
        with metrics.timed(f"pass.{p.name}"):
            graph = p.run(graph)
        if config.value("LTC_CHECK"):
            check(graph, after=p.name)
        if p.name in wanted:
            print(f"# after {p.name}: {p.why}\n{graph}")
    return graph


def dumped() -> frozenset[str]:
    """The stages that LTC_DUMP names."""
    return frozenset(map(str.strip, config.value("LTC_DUMP").split(","))) - {""}
