"""Rows that lie apart in memory and whose results are to lie in order: they are transposed first.

A few neighbouring rows at a time, a group, are copied to memory of the thread.
"""

from __future__ import annotations

from math import prod

from ltc.ir.loop_nest import Value
from ltc.llvm.emit.builder import LANES
from ltc.llvm.emit.dtype import FORMS
from ltc.llvm.loop_schedule.iteration_space import Nest
from ltc.support.sizes.extent import Extent, Size

GROUP_BYTES = 5 << 18  # a second-level cache, and what of the next one is near
MOST_ROWS = 4 * LANES  # of a group: whole runs of cache lines from each element of the rows
WORK_ITEMS = 16  # that a launch falls into, where there are enough rows


def loads_to_transpose(nest: Nest) -> list[Value]:
    """The loads of neighbouring rows that lie side by side, where all else is along rows."""
    last, row = len(nest.extents) - 1, nest.depth - 1
    if not nest.reductions or nest.depth != last or row < 0 or nest.summed:
        return []
    if _are_few(nest.extents[row]) or _are_few(nest.extents[last]):
        return []
    steps = {nest.space.form(store.offset).coefficient(last) for store in nest.kernel.stores}
    if 1 not in steps or not steps <= {0, 1}:
        return []
    apart = [load for load in nest.loads() if nest.offset(load).coefficient(last) > 1]
    beside = all(nest.offset(load).coefficient(row) == 1 and not load.guards for load in apart)
    return apart if beside and rows_of_a_group(nest, apart) else []


def _are_few(extent: Size) -> bool:
    """Return True if they fill no vector; where any number may come, that decides nothing."""
    return not isinstance(extent, Extent) and extent < LANES


def rows_of_a_group(nest: Nest, loads: list[Value]) -> int:
    """Return how many rows of all loads are transposed together; 0 if no vector of them fits."""
    bytes = sum(FORMS[load.data[0].dtype].bytes for load in loads)
    fitting = GROUP_BYTES // max(1, bytes * pitch_of(nest))
    rows = prod(nest.extents[: nest.depth])
    # Groups of any height are right: no guard decides on one where rows are many or few.
    enough = 2 * LANES if isinstance(rows, Extent) else max(LANES, rows // WORK_ITEMS)
    return min(MOST_ROWS, fitting // LANES * LANES, enough // LANES * LANES)


def pitch_of(nest: Nest) -> int:
    """Elements from one copied row to the next: a vector more, so that they spread in caches."""
    return (-(-nest.extents[-1] // LANES) + 1) * LANES
