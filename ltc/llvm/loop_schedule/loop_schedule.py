"""All that is decided of a kernel's loops: what is written follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch

from ltc.ir import ops
from ltc.ir.loop_nest import Affine, Value
from ltc.ir.node import Node
from ltc.llvm.emit.builder import LANES
from ltc.llvm.emit.elementwise import COSTLY
from ltc.llvm.loop_schedule.iteration_space import Nest
from ltc.llvm.loop_schedule.open_extents import open_variables
from ltc.llvm.loop_schedule.row_groups import loads_to_transpose, rows_of_a_group
from ltc.llvm.loop_schedule.vector_axis import (
    NO_VARIABLE,
    awaited_by,
    column_loads,
    fits_tiles,
    needs_of,
    vector_variable,
)
from ltc.support.sizes.choices import by_sample, least, most

MOST_PLACES = 1 << 30  # of a row: their differences are 32-bit numbers
ACCUMULATORS = 4  # vectors: additions depend on one another only every fourth time


@dataclass(frozen=True, eq=False)
class LoopSchedule:
    """The way the loops of a nest run.

    Attributes:
        is_epilogue: True if it is written into a product, which gives the place of each vector.
        lanes: The lanes of its vectors.
        vector: The variable that runs over lanes; NO_VARIABLE where there is none.
        open: The variables whose extents are arguments.
        transposed: Loads whose rows are copied, transposed, before they are reduced.
        group: Rows that are copied together.
        reads_columns: True if strips are narrow, since neighbours in memory are neighbouring rows.
        tiles: True if squares of vectors are transposed in registers.
        needs: The variables that each value depends on.
        awaited: The reductions that each value is computed from.
        one_hot: Sum of one term -> (its index, its term).
        streamed: Nodes whose buffers, aligned to vectors, are written past the caches.
    """

    nest: Nest
    is_epilogue: bool
    lanes: int
    vector: int
    open: frozenset[int]
    transposed: tuple[Value, ...]
    group: int
    reads_columns: bool
    tiles: bool
    needs: dict[Value, frozenset[int]]
    awaited: dict[Value, frozenset[Value]]
    one_hot: dict[Value, tuple[Value, Value]]
    streamed: frozenset[Node]

    @property
    def step(self) -> int:
        """Elements that the accumulators of a reduction take in at once."""
        return ACCUMULATORS * self.lanes

    @property
    def passes(self) -> list[Value]:
        """The reductions that run over whole rows."""
        return [value for value in self.nest.reductions if value not in self.one_hot]

    @property
    def has_strips(self) -> bool:
        """Return True if the vector variable is the last one of a work item's row."""
        nest = self.nest
        return self.vector != NO_VARIABLE and (not nest.reductions or self.vector < nest.depth)

    @property
    def reduces_columns(self) -> bool:
        """Return True if the lanes of a vector are rows whose reductions run side by side."""
        return bool(self.nest.reductions) and self.has_strips

    def index_compared(self, value: Value) -> Value | None:
        """The index of a row whose equality with the lanes' positions the value is, if any.

        Only where 32-bit numbers tell the positions of a row apart.
        """
        if value.kind != "cell" or self.vector in self.open:  # then rows may have any length
            return None
        if self.vector == NO_VARIABLE or self.nest.extents[self.vector] > MOST_PLACES:
            return None
        return index_compared(self.nest, self.vector, self.needs, value)


def schedule_of(
    nest: Nest,
    lanes: int = LANES,
    is_epilogue: bool = False,
    streamed: frozenset[Node] = frozenset(),
) -> LoopSchedule:
    """The schedule of a nest whose vectors have so many lanes."""
    transposed = loads_to_transpose(nest)
    vector = vector_variable(nest, bool(transposed))
    reads_columns = not (nest.reductions or is_epilogue) and bool(column_loads(nest))
    moves_columns = reads_columns or bool(transposed)
    needs = needs_of(nest)
    return LoopSchedule(
        nest,
        is_epilogue,
        lanes,
        vector,
        open=frozenset() if is_epilogue else open_variables(nest, vector, moves_columns),
        transposed=tuple(transposed),
        group=rows_of_a_group(nest, transposed) if transposed else 0,
        reads_columns=reads_columns,
        tiles=reads_columns and fits_tiles(nest, lanes),
        needs=needs,
        awaited=awaited_by(nest),
        one_hot={} if transposed else one_hot_sums(nest, vector, needs),
        streamed=streamed,
    )


# --- elements of a row that are chosen by their place -----------------------------------------
# where(position == index, term, 0): a cross entropy picks one of each row, and so does its gradient.

ZEROS = ("0", "0.0")
Needs = Mapping[Value, frozenset[int]]


def one_hot_sums(nest: Nest, vector: int, needs: Needs) -> dict[Value, tuple[Value, Value]]:
    """For each sum over the vector variable that has one term: its index and its term."""
    if nest.inner != [vector]:
        return {}
    found = {value: _single_term(nest, vector, needs, value) for value in nest.reductions}
    return {value: pair for value, pair in found.items() if pair is not None}


def _single_term(nest: Nest, vector: int, needs: Needs, value: Value) -> tuple[Value, Value] | None:
    (chosen,) = value.operands
    if value.op is not ops.SUM or chosen.kind != "cell" or chosen.op is not ops.WHERE:
        return None
    condition, term, other = chosen.operands
    is_zero = other.kind == "constant" and other.data in ZEROS
    index = index_compared(nest, vector, needs, condition) if is_zero else None
    return None if index is None else (index, term)


def index_compared(nest: Nest, vector: int, needs: Needs, value: Value) -> Value | None:
    """The index of a row that a comparison finds equal to the position in it."""
    if value.kind != "cell" or value.op is not ops.EQ:
        return None
    for position, index in (value.operands, value.operands[::-1]):
        is_of_row = vector not in needs[index] and index.dtype == torch.int64
        if is_of_row and _is_place_in_row(nest, vector, position):
            return index
    return None


def _is_place_in_row(nest: Nest, vector: int, value: Value) -> bool:
    is_position = value.kind == "position"
    return is_position and nest.space.form(value.data) == Affine(0, ((vector, 1),))


# --- the work as threads share it out ---------------------------------------------------------
# Rows, or strips of a long innermost dimension: work items, shared out among a fixed number of tasks.

STRIP = 2048  # elements of the innermost dimension in one work item
TASK_WORK = 1 << 15  # values that one task computes, at least: a few microseconds
MOST_TASKS = 64
COLUMNS_TOGETHER = 4  # vectors of columns that are reduced or computed at once
LONG_CHAIN = 100  # instructions: a processor looks some 200 ahead for what need not wait
INSTRUCTIONS_OF_A_FUNCTION = 25
WIDE = COLUMNS_TOGETHER * LANES


def wants_wide_vectors(schedule: LoopSchedule) -> bool:
    """Return True if whole runs of cache lines from each row, or vectors that fill waits, are a
    gain.
    """
    if schedule.vector == NO_VARIABLE:
        return False
    extent = schedule.nest.extents[schedule.vector]
    with by_sample(extent):
        if extent < WIDE:
            return False
    return schedule.reduces_columns or _is_long_chain(schedule)


def _is_long_chain(schedule: LoopSchedule) -> bool:
    """Return True if the next vector's instructions are too far away to fill the waits of this one."""
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
