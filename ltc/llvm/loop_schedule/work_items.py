"""The work of a kernel as threads share it out: rows, or strips of a long innermost dimension.

Work items are shared out among a fixed number of tasks.
"""

from __future__ import annotations

from math import prod

from ltc.llvm.emit.builder import LANES
from ltc.llvm.emit.elementwise import COSTLY
from ltc.llvm.loop_schedule.loop_schedule import LoopSchedule
from ltc.llvm.loop_schedule.vector_axis import NO_VARIABLE
from ltc.support.sizes.choices import by_sample, least, most

STRIP = 2048  # elements of the innermost dimension in one work item
TASK_WORK = 1 << 15  # values that one task computes, at least: a few microseconds
MOST_TASKS = 64
COLUMNS_TOGETHER = 4  # vectors of columns that are reduced or computed at once
LONG_CHAIN = 100  # instructions: a processor looks some 200 ahead for what need not wait
INSTRUCTIONS_OF_A_FUNCTION = 25
WIDE = COLUMNS_TOGETHER * LANES


def wants_wide_vectors(schedule: LoopSchedule) -> bool:
    """Whether whole runs of cache lines from each row, or vectors that fill waits, are a gain."""
    if schedule.vector == NO_VARIABLE:
        return False
    extent = schedule.nest.extents[schedule.vector]
    with by_sample(extent):
        if extent < WIDE:
            return False
    return schedule.reduces_columns or _is_long_chain(schedule)


def _is_long_chain(schedule: LoopSchedule) -> bool:
    """Whether the next vector's instructions are too far away to fill the waits of this one."""
    order = schedule.nest.order
    if schedule.nest.reductions or schedule.reads_columns:
        return False
    costly = sum(value.kind == "cell" and value.op in COSTLY for value in order)
    return len(order) + costly * INSTRUCTIONS_OF_A_FUNCTION >= LONG_CHAIN


def row_variables(schedule: LoopSchedule) -> list[int]:
    """The variables that a work item fixes."""
    nest = schedule.nest
    if not nest.reductions:
        return list(range(len(nest.extents) - 1))
    has_last = schedule.has_strips or schedule.transposed
    return [v for v in range(nest.depth - 1 if has_last else nest.depth) if v not in nest.summed]


def strip_length(schedule: LoopSchedule) -> int:
    """Elements of the vector variable in one work item; narrow where columns are read."""
    return WIDE if schedule.nest.reductions or schedule.reads_columns else STRIP


def strips_of_a_row(schedule: LoopSchedule) -> int:
    nest = schedule.nest
    if schedule.transposed:
        return -(-nest.extents[nest.depth - 1] // schedule.group)
    if not schedule.has_strips:
        return 1
    return -(-nest.extents[schedule.vector] // strip_length(schedule))


def work_items(schedule: LoopSchedule) -> int:
    rows = prod(schedule.nest.extents[v] for v in row_variables(schedule))
    items = rows * strips_of_a_row(schedule)
    return items // schedule.lanes if schedule.tiles else items


def tasks_of(schedule: LoopSchedule) -> int:
    nest = schedule.nest
    work = prod(nest.extents) * max(1, len(nest.order) // 8) * (1 + len(nest.reductions))
    return most(1, least(work_items(schedule), -(-work // TASK_WORK), MOST_TASKS))
