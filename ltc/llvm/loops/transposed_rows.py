"""Groups of rows whose elements side by side in memory belong to different rows.

A group is copied to memory of the thread, in squares of vectors that are transposed in registers;
then each of its rows is reduced and stored as any other row is.
"""

from __future__ import annotations

from ltc.ir.loop_nest import Value
from ltc.llvm.emit import memory_ops
from ltc.llvm.emit.builder import LANES
from ltc.llvm.emit.dtype import FORMS
from ltc.llvm.emit.index import Index, least
from ltc.llvm.emit.vectors import transposed
from ltc.llvm.loop_schedule.row_groups import pitch_of
from ltc.llvm.loops.context import LoopContext
from ltc.llvm.loops.coordinates import element
from ltc.llvm.loops.rows import write_row
from ltc.llvm.loops.values import hoist

SQUARES_AHEAD = 2  # that memory is asked for


def reserve_groups(ctx: LoopContext) -> None:
    """Memory for the rows of a group of each load."""
    for load in ctx.schedule.transposed:
        size, stored = ctx.schedule.group * pitch_of(ctx.nest), FORMS[load.data[0].dtype].stored
        ctx.group.memory[load] = ctx.b.effect(f"alloca [{size} x {stored}], align 64")


def write_group(ctx: LoopContext, number: Index) -> None:
    """Everything that a group of rows is for."""
    row = ctx.nest.depth - 1
    first = number * ctx.schedule.group
    left = ctx.nest.extents[row] - first
    for load in ctx.schedule.transposed:
        _copy(ctx, load, first, left)
    count = least(left, ctx.schedule.group)

    def one(i: Index, _) -> None:
        with ctx.scope():
            ctx.variables[row], ctx.group.row = first + i, i
            hoist(ctx, [store.value for store in ctx.nest.kernel.stores])
            write_row(ctx)

    ctx.b.loop(0, count, 1, (), one)


def _copy(ctx: LoopContext, load: Value, first: Index, left: Index) -> None:
    """Copies a group of rows from number `first` on, of which so many are left."""

    def squares(i: Index, _) -> None:
        for start in range(0, ctx.schedule.group, LANES):
            _square(ctx, load, first, left, start, i)

    ctx.b.loop(0, ctx.nest.extents[-1], LANES, (), squares)


def _square(ctx: LoopContext, load: Value, first: Index, left: Index, start: int, i: Index) -> None:
    """The elements from i on of the rows from `start` on of a group."""
    form, extents, b = FORMS[load.data[0].dtype], ctx.nest.extents, ctx.b
    mask = None
    if extents[ctx.nest.depth - 1] % ctx.schedule.group:
        mask = ctx.first_lanes(left - start)
    columns = []
    for k in range(LANES):
        at = i + k
        if extents[-1] % LANES:  # what is beyond the row may be anything
            at = least(at, extents[-1] - 1)
        columns.append(_column(ctx, load, first + start, at, mask))
    target = b.address(ctx.group.memory[load], i, form.stored)
    with b.lanes(LANES):
        for k, row in enumerate(transposed(b, columns, form.stored)):
            address = b.address(target, (start + k) * pitch_of(ctx.nest), form.stored)
            memory_ops.store(b, row, address, form.stored)


def _column(ctx: LoopContext, load: Value, row: Index, at: Index, mask: str | None) -> str:
    """One element of a vector of rows, as it is stored."""
    b, nest, vector = ctx.b, ctx.nest, ctx.schedule.vector
    node, form, offset = load.data[0], FORMS[load.data[0].dtype], nest.offset(load)
    with ctx.scope():
        ctx.variables[nest.depth - 1], ctx.variables[vector] = row, at
        with b.lanes(1):
            base = element(ctx, load, offset)
            address = b.address(ctx.pointers[node], base, form.stored)
        ahead = SQUARES_AHEAD * LANES * offset.coefficient(vector)
        b.prefetch(b.address(address, ahead, form.stored))
        with b.lanes(LANES):
            return memory_ops.load(b, address, form.stored, mask)
