"""All that is decided of a kernel's loops: what is written follows from it."""

from __future__ import annotations

from dataclasses import dataclass

from ltc.ir.loop_nest import Value
from ltc.ir.node import Node
from ltc.llvm.emit.builder import LANES
from ltc.llvm.loop_schedule.iteration_space import Nest
from ltc.llvm.loop_schedule.one_hot import index_compared, one_hot_sums
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

MOST_PLACES = 1 << 30  # of a row: their differences are 32-bit numbers
ACCUMULATORS = 4  # vectors: additions depend on one another only every fourth time


@dataclass(frozen=True, eq=False)
class LoopSchedule:
    """How the loops of a nest run.

    is_epilogue    whether it is written into a product, which says where each vector of it lies
    lanes          of its vectors
    vector         the variable that runs over lanes; NO_VARIABLE where there is none
    open           the variables whose extents are arguments
    transposed     loads whose rows are copied, transposed, before they are reduced
    group          rows that are copied together
    reads_columns  whether strips are narrow, since neighbours in memory are neighbouring rows
    tiles          whether squares of vectors are transposed in registers
    needs          the variables that each value depends on
    awaited        the reductions that each value is computed from
    one_hot        of each sum of one term: its index and its term
    streamed       nodes whose buffers, aligned to vectors, are written past the caches
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
        """Whether the vector variable is the last one of a work item's row."""
        nest = self.nest
        return self.vector != NO_VARIABLE and (not nest.reductions or self.vector < nest.depth)

    @property
    def reduces_columns(self) -> bool:
        """Whether the lanes of a vector are rows whose reductions run side by side."""
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
