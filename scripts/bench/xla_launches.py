"""Host time of a launch on XLA: ltc's `begin` beside the same function of `jax.jit` called directly.

    python scripts/bench/xla_launches.py [--buffers 20 200 800] [--rounds 25]

Half of the buffers are written over, as parameters are, half are read, as gradients are; a learning
rate is a number. Processor time of the launching thread, call by call in turns: medians in
microseconds. The exit code is 1 where the ratio of ltc to `jax.jit` is above the limit.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))
import jax
import torch

from ltc.backends.interface import BackendRegistrar
from ltc.ir import ops
from ltc.ir.graph import Graph
from ltc.ir.node import make

LIMIT = 1.3
CALLS = 40  # of a round, after which both begin anew

Call = Callable[[], object]


def updated(parameters: list[Any], gradients: list[Any], rate: Any) -> list[Any]:
    return [p - g * rate for p, g in zip(parameters, gradients)]


def calls(buffers: int) -> tuple[Call, Call]:
    """The launch by ltc, and by JAX alone."""
    half = buffers // 2
    inputs = [make(ops.INPUT, index=i, dtype=torch.float32, shape=(4,)) for i in range(2 * half)]
    rate = make(ops.SCALAR, slot=0, dtype=torch.float32, wrapped=True)
    outputs = tuple(updated(inputs[:half], inputs[half:], rate))
    graph = Graph(tuple(inputs), (rate,), outputs)
    computation = BackendRegistrar.get("xla").compile(graph, 0, frozenset(range(half)))
    jitted = jax.jit(updated, donate_argnums=0)

    def uploaded() -> list[Any]:
        return [computation.upload(torch.ones(4), 0) for _ in range(half)]

    def direct() -> None:
        nonlocal theirs
        theirs = jitted(theirs, their_gradients, 0.1)

    def by_ltc() -> None:
        nonlocal ours
        ours, _ = computation.begin([*ours, *gradients], [0.1])

    ours, gradients, theirs, their_gradients = (uploaded() for _ in range(4))
    return by_ltc, direct


def microseconds(call: Call) -> float:
    began = time.thread_time_ns()
    call()
    return (time.thread_time_ns() - began) / 1e3


def measured(buffers: int, rounds: int) -> tuple[float, float]:
    """The medians of ltc and of JAX alone."""
    pair = calls(buffers)
    found: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        round_ = [[microseconds(call) for call in pair] for _ in range(CALLS)]
        if number:  # the first one warms up
            for times, medians in zip(zip(*round_), found):
                medians.append(statistics.median(times))
    return statistics.median(found[0]), statistics.median(found[1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    numbers = {"type": int, "nargs": "+", "default": [20, 200, 800]}
    parser.add_argument("--buffers", **numbers, help="numbers of buffers of a launch")
    parser.add_argument("--rounds", type=int, default=25, help="number of rounds")
    options = parser.parse_args()
    worst = 0.0
    for buffers in options.buffers:
        ours, theirs = measured(buffers, options.rounds)
        worst = max(worst, ours / theirs)
        print(
            f"{buffers} buffers: ltc {ours:.1f} us, jax.jit {theirs:.1f} us: {ours / theirs:.2f}",
            flush=True,
        )
    return int(worst > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
