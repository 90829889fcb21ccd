"""Squares of rows and lanes: what lies in columns is loaded so, and transposed in registers."""

from __future__ import annotations

from ltc.ir.loop_nest import Value
from ltc.llvm.emit import memory_ops
from ltc.llvm.emit.conversions import from_memory
from ltc.llvm.emit.dtype import FORMS
from ltc.llvm.emit.index import Index
from ltc.llvm.emit.vectors import transposed
from ltc.llvm.loop_schedule.vector_axis import column_loads
from ltc.llvm.loops.context import LoopContext
from ltc.llvm.loops.coordinates import element
from ltc.llvm.loops.stores import store_all


def write_tile(ctx: LoopContext, first_row: Index) -> None:
    """The square from a row on whose columns begin where the vector variable stands."""
    row = len(ctx.nest.extents) - 2
    loaded = {load: _rows_of(ctx, load, row, first_row) for load in column_loads(ctx.nest)}
    for k in range(ctx.schedule.lanes):
        with ctx.scope():
            ctx.variables[row] = first_row + k
            for load, rows in loaded.items():
                ctx.known[-1][load] = from_memory(ctx.b, FORMS[load.dtype], rows[k])
            store_all(ctx, ctx.nest.kernel.stores)


def _rows_of(ctx: LoopContext, load: Value, row: int, first_row: Index) -> list[str]:
    """The stored elements of each row of the tile, one vector each."""
    b, form, vector = ctx.b, FORMS[load.dtype], ctx.schedule.vector
    offset, pointer = ctx.nest.offset(load), ctx.pointers[load.data[0]]
    column, columns = ctx.variables[vector], []
    for k in range(ctx.schedule.lanes):
        with ctx.scope():
            ctx.variables[row], ctx.variables[vector] = first_row, column + k
            base = element(ctx, load, offset)
        address = b.address(pointer, base, form.stored)
        columns.append(memory_ops.load(b, address, form.stored))
    return transposed(b, columns, form.stored)
