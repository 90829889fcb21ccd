"""The runs of a network that bring it through every tier: repeated, with other values, at other sizes.

A program is interpreted first, compiled when it comes back, and becomes one of symbols when it comes
back at other sizes. A network of another size is the same text with other extents, drawn and tried on
the CPU; where the CPU refuses each of them, the network is repeated at its own size alone.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from ltc.debug import metrics
from ltc.device.policy import Policy
from ltc.runtime import first_runs
from ltc.runtime.background import compile_behind
from ltc.runtime.program import Program, _Work
from ltc.runtime.program_of_sizes import Variant
from tests.networks.drawing import LARGE, SMALL
from tests.networks.network import Leaf, Network, Step, head, precision

SIZES = 4  # beside the network's own: from the third on a path has symbols
ORDER = (0, 0, 0, 1, 2, 3, 4, 2, 0, 4)  # of sizes; the third run in a row is compiled
STEADY = (0,) * 10  # all of its own size: from the sixth run on the core launches most programs
TRIES = 12  # of other extents, for all sizes together
SYMBOLIC, COMPILED, CALL_BY_CALL, IMMEDIATE = "symbolic", "compiled", "call by call", "immediate"
IN_CORE = "launched by the core"


def runs_of(network: Network, is_steady: bool) -> list[Network]:
    """The network of each run: always the same ones. Each run has values of its own.

    Args:
        is_steady: All have the network's own size.
    """
    sizes = [network] if is_steady else [network, *_other_sizes(network)]
    order = STEADY if is_steady else ORDER
    return [_with_other_values(sizes[k % len(sizes)], run) for run, k in enumerate(order)]


def _with_other_values(network: Network, run: int) -> Network:
    """Indices and masks as well: their seeds differ from run to run."""
    leaves = tuple(replace(leaf, seed=leaf.seed + 1009 * run) for leaf in network.leaves)
    return replace(network, leaves=leaves)


def _other_sizes(network: Network) -> list[Network]:
    source, found = random.Random(network.text()), []
    extents = sorted({n for leaf in network.leaves for n in leaf.shape if n > 1})
    for _ in range(TRIES if extents else 0):
        old = source.choice(extents)
        new = source.choice([n for n in (*SMALL[1:], *LARGE) if n <= max(16, 2 * old)])
        other = _resized(network, old, new)
        if other not in (network, *found) and _runs_on_the_cpu(other):
            found.append(other)
            extents = [old]  # one extent that changes is what most programs have
        if len(found) == SIZES:
            break
    return found


def _resized(network: Network, old: int, new: int) -> Network:
    """With `new` in place of `old` in every shape and in every call."""
    leaves = tuple(_leaf_resized(leaf, old, new) for leaf in network.leaves)
    return replace(
        network, leaves=leaves, steps=tuple(_step_resized(step, old, new) for step in network.steps)
    )


def _leaf_resized(leaf: Leaf, old: int, new: int) -> Leaf:
    shape = tuple(new if n == old else n for n in leaf.shape)
    return replace(leaf, shape=shape, count=new if leaf.count == old else leaf.count)


def _step_resized(step: Step, old: int, new: int) -> Step:
    number = re.compile(rf"(?<![\w.{{-]){old}(?![\w.}}])")
    attributes = tuple((name, _exchanged(value, old, new)) for name, value in step.attributes)
    return replace(step, template=number.sub(str(new), step.template), attributes=attributes)


def _exchanged(value: Any, old: int, new: int) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_exchanged(one, old, new) for one in value)
    return new if type(value) is int and value == old else value


def _runs_on_the_cpu(network: Network) -> bool:
    there = head()
    exec(compile(network.function(), "<network>", "exec"), there)
    try:
        _, results = there["network"]("cpu", dtype=precision(network.dtype))
    except Exception:  # whatever the CPU says of it
        return False
    return all(_is_finite(x) for x in results)


def _is_finite(x: torch.Tensor) -> bool:
    return not x.is_floating_point() or bool(x.detach().isfinite().all())


def wait_for_compilers() -> None:
    """Until each program that another process compiles is there."""
    compile_behind.wait()


def follow_small_steps() -> None:
    """From now on they get programs with the native core as well, which is as quick without."""
    Policy.calls_are_quick = False  # type: ignore[assignment, method-assign]


@contextmanager
def counted_by_tier() -> Iterator[Counter[str]]:
    """Counts the runs of programs by who launched them, and the steps whose calls ran at once."""
    found: Counter[str] = Counter()
    counters = {IMMEDIATE: "ImmediateSteps", IN_CORE: "CoreLaunches"}
    before = {tier: metrics.counter_value(name) or 0 for tier, name in counters.items()}
    started, program_at = _Work.__init__, Variant.program_at
    _Work.__init__ = _counting(started, found)  # type: ignore[method-assign]
    Variant.program_at = _marking(program_at)  # type: ignore[method-assign]
    try:
        yield found
    finally:
        _Work.__init__ = started  # type: ignore[method-assign]
        Variant.program_at = program_at  # type: ignore[method-assign]
        for tier, name in counters.items():
            found[tier] += (metrics.counter_value(name) or 0) - before[tier]


def _counting(started: Callable, found: Counter[str]) -> Callable:
    def counted(work: Any, program: Program, chosen: Any, *others: Any) -> None:
        found[_tier_of(program, chosen[0])] += 1
        started(work, program, chosen, *others)

    return counted


def _tier_of(program: Program, computation: Any) -> str:
    if isinstance(computation, first_runs._Observed):
        return CALL_BY_CALL
    return SYMBOLIC if getattr(program, "is_of_symbols", False) else COMPILED


def _marking(program_at: Callable) -> Callable:
    def marked(variant: Variant, values: Any) -> Program:
        program = program_at(variant, values)
        program.is_of_symbols = True  # type: ignore[attr-defined]
        return program

    return marked
