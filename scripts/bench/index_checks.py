"""Measure the cost of index checks in a step: its programs with and without them, in turns.

    python scripts/bench/index_checks.py [WORKLOAD] [--rounds N] [--threads N]

Both programs are compiled several times, in turns: where their memory lies makes a difference of
some percent. All of them get the same buffers, and run in an order that is drawn for each round.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch
from profile_program import programs_of

from ltc import config
from ltc.backends.llvm import backend
from ltc.ir import ops
from ltc.ir.graph import Graph, schedule
from ltc.ir.node import Node

COPIES = 4
WARM_UP_ROUNDS = 5


def largest_program(workload: str, checked: bool) -> tuple[Graph, frozenset[int]]:
    """(graph, donated) of the program of a step that has the most nodes."""
    with config.override(LTC_CHECK_INDEX=checked):
        found = programs_of(workload)
    return max(found, key=lambda program: len(schedule(*program[0].outputs)))


def checks_of(graph: Graph) -> int:
    return sum(node.op is ops.WRAP_INDEX for node in schedule(*graph.outputs))


def rows_of(graph: Graph) -> dict[Node, int]:
    """Return how many rows the smallest table has that is read at an input's indices."""
    rows: dict[Node, int] = {}
    for node in schedule(*graph.outputs):
        if node.op is ops.WRAP_INDEX:
            for source in schedule(node):
                rows[source] = min(rows.get(source, node.attr("size")), node.attr("size"))
    return rows


def buffer_of(node: Node, rows: int) -> torch.Tensor:
    if node.dtype.is_floating_point:
        return torch.randn(node.shape).to(node.dtype) * 0.1
    return torch.randint(0, rows, node.shape).to(node.dtype)


def measured(programs: dict, graph: Graph, rounds: int) -> dict:
    """Seconds of every launch of each program."""
    rows = rows_of(graph)
    buffers = [buffer_of(node, rows.get(node, 2)) for node in graph.inputs]
    numbers = [0.1] * len(graph.scalars)
    seconds: dict = {name: [] for name in programs}
    for number in range(rounds + WARM_UP_ROUNDS):
        for name in random.sample(list(programs), len(programs)):
            started = time.perf_counter()
            programs[name].launch(list(buffers), list(numbers))
            seconds[name].append(time.perf_counter() - started)
    return {name: found[WARM_UP_ROUNDS:] for name, found in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("workload", nargs="?", default="dlrm", help="the workload to run")
    parser.add_argument("--rounds", type=int, default=400, help="number of rounds")
    parser.add_argument(
        "--threads", type=int, default=torch.get_num_threads(), help="number of threads"
    )
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    graphs = {checked: largest_program(asked.workload, checked) for checked in (True, False)}
    compile = backend.LlvmBackend().compile
    programs = {
        (checked, copy): compile(graphs[checked][0], 0, graphs[checked][1])
        for copy in range(COPIES)
        for checked in (True, False)
    }
    seconds = measured(programs, graphs[True][0], asked.rounds)
    report({checked: checks_of(graphs[checked][0]) for checked in graphs}, seconds)


def report(checks: dict[bool, int], seconds: dict) -> None:
    for checked in (True, False):
        medians = [statistics.median(seconds[checked, copy]) * 1e3 for copy in range(COPIES)]
        print(f"{checks[checked]:3} checks: {' '.join(f'{m:.3f}' for m in medians)} ms")
    paired = [
        with_checks / without
        for copy in range(COPIES)
        for with_checks, without in zip(seconds[True, copy], seconds[False, copy])
    ]
    print(f"with checks {statistics.median(paired) - 1:+.2%}, the median of {len(paired)} pairs")


if __name__ == "__main__":
    main()
