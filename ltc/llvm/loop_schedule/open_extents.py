"""Extents that are arguments of the kernel: one text for batches and slices of any size.

The outermost extent and that of the outermost reduced variable change with the size of a batch.
"""

from __future__ import annotations

from ltc.llvm.loop_schedule.iteration_space import Nest
from ltc.support.sizes.extent import Extent

LONG_ROW = 1024  # elements from which on a row that is only reduced is as fast with any extent


def open_variables(nest: Nest, vector: int, moves_columns: bool) -> frozenset[int]:
    """The outermost variable and the outermost reduced one, but no short row of lanes.

    Args:
        moves_columns: True if what lies in columns is read or copied so.
    """
    depth, last = nest.depth, len(nest.extents) - 1
    if last < 0:
        return frozenset()
    is_open = {0} if not nest.reductions or (depth != 0 and vector != 0) else set()
    if moves_columns and last <= 1:
        is_open.clear()
    if nest.reductions and depth <= last and _takes_any_extent(nest, depth, vector):
        is_open.add(depth)
    is_open.update(nest.summed[:1])
    is_open.update(v for v, extent in enumerate(nest.extents) if isinstance(extent, Extent))
    return frozenset(is_open)


def _takes_any_extent(nest: Nest, variable: int, vector: int) -> bool:
    """Return True if loops over a reduced variable are as good where its extent is an argument."""
    if variable != vector or nest.depth == 0 or isinstance(nest.extents[variable], Extent):
        return True
    is_last = variable == len(nest.extents) - 1
    is_short = all(nest.is_made_once_a_row(store) for store in nest.kernel.stores)
    return is_last and is_short and nest.extents[variable] >= LONG_ROW
