"""The variable that runs over the lanes of vectors, and the decisions that depend on it.

It is the innermost one, or, where a reduction's rows lie side by side in memory, the last one that
stays.
"""

from __future__ import annotations

from ltc.ir.loop_nest import Value
from ltc.llvm.loop_schedule.iteration_space import Nest, forms_of_value
from ltc.support.sizes.extent import Extent

NO_VARIABLE = -1  # no form has it, and nothing depends on it
MOST_VALUES_OF_A_TILE = 40  # each is computed once for every row of the tile


def vector_variable(nest: Nest, transposes_rows: bool) -> int:
    """The variable that runs over lanes; NO_VARIABLE where there is none."""
    depth, last = nest.depth, len(nest.extents) - 1
    if last < 0:
        return NO_VARIABLE
    if not nest.reductions or depth == 0 or depth > last or nest.summed or transposes_rows:
        return last
    offsets = [nest.offset(load) for load in nest.loads()]
    inside = [offset for offset in offsets if any(v >= depth for v, _ in offset.terms)]

    def suits(variable: int) -> tuple[int, int]:
        """Fewer loads whose lanes lie apart, then more whose lanes are neighbours."""
        steps = [offset.coefficient(variable) for offset in inside]
        return -sum(step not in (0, 1) for step in steps), steps.count(1)

    return depth - 1 if suits(depth - 1) > suits(last) else last


def column_loads(nest: Nest) -> list[Value]:
    """Loads whose neighbours in memory are neighbouring rows: then rows go innermost.

    A cache line that one row has fetched is then read by the next ones.
    """
    last = len(nest.extents) - 1
    if last <= 0:
        return []
    return [
        load
        for load in nest.loads()
        if nest.offset(load).coefficient(last) > 1 and nest.offset(load).coefficient(last - 1) == 1
    ]


def fits_tiles(nest: Nest, lanes: int) -> bool:
    """Return True if squares of vectors, transposed in registers, cover the last two variables."""
    last = nest.extents[-2:]
    whole = all(not isinstance(extent, Extent) and extent % lanes == 0 for extent in last)
    plain = not any(load.guards for load in column_loads(nest))
    return whole and plain and len(nest.order) <= MOST_VALUES_OF_A_TILE


def needs_of(nest: Nest) -> dict[Value, frozenset[int]]:
    """The variables that each value depends on."""
    needs: dict[Value, frozenset[int]] = {}
    rows = frozenset(range(nest.depth))
    for value in nest.order:
        if value.kind == "reduced":
            needs[value] = rows
            continue
        own = {v for form in forms_of_value(value) for v, _ in nest.space.form(form).terms}
        needs[value] = frozenset(own).union(*[needs[x] for x in value.operands])
    return needs


def awaited_by(nest: Nest) -> dict[Value, frozenset[Value]]:
    """The reductions that each value is computed from, without what these are computed from."""
    awaited: dict[Value, frozenset[Value]] = {}
    for value in nest.order:
        own = (value,) if value.kind == "reduced" else ()
        below = () if own else [awaited[x] for x in value.operands]
        awaited[value] = frozenset(own).union(*below)
    return awaited
