"""Sums over rows beside a kernel that makes those rows: their common operands are read once.

The gradients of a norm's weight and bias add up, over all rows, what the kernel that makes the
operand's gradient row by row computes anyway. Its rows are cut into the pieces that the sums are
cut into already; the thread that runs a piece adds each of its rows to a row of totals, which stays
in the nearest cache. The graph fixes the pieces, so that no result depends on the threads that run them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

from ltc.ir import ops
from ltc.ir.loop_nest import ZERO, Affine, Guard, bounds, split, variable
from ltc.ir.node import Node
from ltc.ir.tensor_type import LOW_PRECISION
from ltc.passes.fusion.draft import Draft, Index, ReadPlace
from ltc.passes.fusion.index_maps import offset_of, operand_places, through_views

FEWEST_PIECES = 8  # threads that such a kernel keeps busy

# What each variable of a draft is in the variables of another.
Renaming = list[Affine]


def renamed(form: Affine, by: Renaming) -> Affine:
    """A form of old variables as one of new ones."""
    result = Affine(form.constant)
    for old, coefficient in form.terms:
        result = result.plus(by[old].times(coefficient))
    return result


def renamed_index(index: Index, by: Renaming) -> Index:
    if isinstance(index, Affine):
        return renamed(index, by)
    return tuple(renamed(form, by) for form in index)


def renamed_guards(guards: tuple[Guard, ...], by: Renaming) -> tuple[Guard, ...]:
    return tuple(Guard(renamed(guard.form, by), guard.low, guard.high) for guard in guards)


def are_sums(draft: Draft) -> bool:
    """Return True if a draft does nothing but add up, over some dimensions, the values it reads.

    No sum is made of another: beside rows, all are there only when the last row has been added.
    """
    return (
        draft.product is None
        and not draft.sums
        and draft.reads.isdisjoint(draft.stores)
        and draft.passes == len(draft.stores)
        and all(
            node.op is ops.SUM and node.dtype not in LOW_PRECISION and len(draft.members[node]) == 1
            for node in draft.stores
        )
    )


def are_rows(draft: Draft) -> bool:
    """Return True if a draft reduces its rows and stores something at every point."""
    depth = draft.depth
    if draft.product is not None or depth is None:
        return False
    return any(any(v >= depth for v, _ in offset.terms) for offset in draft.stores.values())


class Joint:
    """One space for a draft of rows and one of sums over them.

    Attributes:
        rows, sums: Variable of each draft -> form in the new space. The space has first the
        variables that number the rows of sums, then the summed ones, then the ones along a
        row: each of the rows' own, with one element too, since reductions count them.
        kept: Number of variables of the first kind.
        depth: Number of variables of the first two kinds.
        pieces: Number of rows of sums.
    """

    def __init__(self, rows: Draft, sums: Draft, along: list[Affine]) -> None:
        """`along`: the form of each variable of the rows in variables of the sums."""
        assert sums.depth is not None
        columns = [form.terms[0][0] if form.terms else None for form in along[rows.depth :]]
        kept = [v for v in range(sums.depth) if v not in columns]
        summed = list(range(sums.depth, len(sums.space)))
        order = [*kept, *summed, *columns]
        self.space = tuple(1 if v is None else sums.space[v] for v in order)
        self.kept, self.depth = len(kept), len(kept) + len(summed)
        self.pieces = prod(sums.space[v] for v in kept)
        places = {v: k for k, v in enumerate(order)}
        self.sums = [
            Affine(0, ((places[v], 1),)) if extent > 1 else ZERO
            for v, extent in enumerate(sums.space)
        ]
        self.rows = [renamed(form, self.sums) for form in along]


def joint_of(rows: Draft, sums: Draft) -> Joint | None:
    """The space in which both are one kernel, if there is one."""
    if prod(rows.space) != prod(sums.space) or prod(sums.space[sums.depth :]) == 1:
        return None
    for node in sums.stores:
        ((index, guards),) = sums.members[node]
        ((operand, index, guards),) = operand_places(node, index, guards, sums)
        base, index = through_views(operand, index, sums.space)
        if guards or base.size != prod(rows.space):
            continue
        along = split(offset_of(base, index), rows.space, sums.space)
        if along is not None and _fits(rows, sums, list(along)):
            joint = Joint(rows, sums, list(along))
            return joint if joint.pieces >= FEWEST_PIECES and _is_like(rows, joint) else None
    return None


def _is_like(rows: Draft, joint: Joint) -> bool:
    """Return True if the rows are cut as the sums joined before need them."""
    if not rows.sums:
        return True
    kept = {v for v in range(joint.kept) if joint.space[v] > 1}
    offsets = [offset for offset, _ in rows.sums.values()]
    return joint.rows == [variable(k, extent) for k, extent in enumerate(rows.space)] and all(
        {v for v, _ in offset.terms if v < joint.depth} == kept for offset in offsets
    )


def _fits(rows: Draft, sums: Draft, along: list[Affine]) -> bool:
    """Return True if each column of the rows is one of the sums', and no other variable is in it."""
    assert sums.depth is not None
    columns: set[int] = set()
    for extent, form in zip(rows.space[rows.depth :], along[rows.depth :]):
        if extent == 1:
            continue
        if form.constant or len(form.terms) != 1 or form.terms[0][1] != 1:
            return False
        ((variable, _),) = form.terms
        if variable >= sums.depth or sums.space[variable] != extent:
            return False
        columns.add(variable)
    row_variables = {v for form in along[: rows.depth] for v, _ in form.terms}
    is_whole = all(
        bounds(form, sums.space) == (0, extent - 1) for form, extent in zip(along, rows.space)
    )
    return is_whole and not columns & row_variables


def agrees(rows: Draft, joint: Joint, places: Iterable[tuple[Node, ReadPlace]]) -> bool:
    """Return True if the rows' draft computes each node where the place, in the sums' draft, reads
    it.
    """
    members = _members(rows, joint.rows)
    return all(
        (renamed_index(place.index, joint.sums), renamed_guards(place.guards, joint.sums))
        in members[node]
        for node, place in places
    )


def _members(draft: Draft, by: Renaming) -> dict[Node, set[tuple[Any, ...]]]:
    return {
        node: {(renamed_index(i, by), renamed_guards(g, by)) for i, g in places}
        for node, places in draft.members.items()
    }


def join(rows: Draft, sums: Draft, joint: Joint) -> None:
    """Let the draft of rows do what the draft of sums does."""
    rows.sums.update(_totals(sums, joint.sums))
    members = _members(rows, joint.rows)
    for node, places in _members(sums, joint.sums).items():
        if node not in sums.stores:
            members.setdefault(node, set()).update(places)
    rows.members.clear()
    rows.members.update(members)
    rows.stores = {n: renamed(offset, joint.rows) for n, offset in rows.stores.items()}
    rows.space, rows.depth = joint.space, joint.depth
    rows.reads |= sums.reads
    rows.views = _views(rows, joint.rows) | _views(sums, joint.sums)
    rows.whole |= sums.whole


def _views(draft: Draft, by: Renaming) -> set[tuple[Any, ...]]:
    return {(view, renamed(at, by), renamed_guards(g, by)) for view, at, g in draft.views}


def _totals(sums: Draft, by: Renaming) -> Iterator[tuple[Node, tuple[Any, ...]]]:
    """For each sum: its offset, and what is added up, at which index, under which guards."""
    for node, offset in sums.stores.items():
        ((index, guards),) = sums.members[node]
        ((operand, index, guards),) = operand_places(node, index, guards, sums)
        place = (operand, renamed_index(index, by), renamed_guards(guards, by))
        yield node, (renamed(offset, by), place)
