"""Functions of a row that more than one pass over it reads: computed once, and kept in memory.

A row stays in the nearest cache, and a load is a tenth of an exponential.
"""

from __future__ import annotations

from collections.abc import Iterable

from ltc.ir.loop_nest import Value
from ltc.llvm.emit.elementwise import COSTLY
from ltc.llvm.loop_schedule.loop_schedule import LoopSchedule

LONGEST_KEPT_ROW = 4096  # elements: a quarter of a first-level cache


def values_to_keep(schedule: LoopSchedule) -> list[Value]:
    """The costly values of a row that several passes over it compute."""
    nest, vector = schedule.nest, schedule.vector
    if not nest.reductions or nest.inner != [vector]:
        return []
    if vector in schedule.open or nest.extents[-1] > LONGEST_KEPT_ROW:
        return []
    stored = [s.value for s in nest.kernel.stores if not nest.is_made_once_a_row(s)]
    passes = [read_by(value.operands) for value in schedule.passes]
    passes.append(read_by(stored))
    return [
        value
        for value in nest.order
        if value.kind == "cell"
        and value.op in COSTLY
        and vector in schedule.needs[value]
        and sum(value in read for read in passes) > 1
    ]


def room_for_a_row(schedule: LoopSchedule) -> int:
    """Elements of a kept row: whole steps of the accumulators."""
    return -(-schedule.nest.extents[-1] // schedule.step) * schedule.step


def read_by(roots: Iterable[Value]) -> set[Value]:
    """Return the values that one pass computes: none behind a reduction."""
    seen: set[Value] = set()
    waiting = list(roots)
    while waiting:
        value = waiting.pop()
        if value not in seen and value.kind != "reduced":
            seen.add(value)
            waiting.extend(value.operands)
    return seen
