"""From a kernel to the text of its function: a loop over the work items of a task.

The points are cut into work items: a row, or a strip of a long innermost dimension. A value is
computed in the outermost loop that has all variables it depends on, as a scalar where it does not
depend on the vector one.

What changes with the size of a batch or the place of a slice is no part of the text: the outermost
extents, offsets and constants are arguments of the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ltc.ir.loop_nest import Affine, Kernel, Value
from ltc.ir.node import Node
from ltc.llvm.emit import memory_ops
from ltc.llvm.emit.builder import Builder, function_text
from ltc.llvm.emit.conversions import from_memory
from ltc.llvm.emit.dtype import FORMS
from ltc.llvm.emit.index import Index, least
from ltc.llvm.emit.kernel_code import KernelCode
from ltc.llvm.emit.vectors import transposed
from ltc.llvm.loop_schedule.iteration_space import nest_of
from ltc.llvm.loop_schedule.kept_rows import room_for_a_row, values_to_keep
from ltc.llvm.loop_schedule.loop_schedule import (
    WIDE,
    LoopSchedule,
    row_variables,
    schedule_of,
    strip_length,
    strips_of_a_row,
    tasks_of,
    wants_wide_vectors,
    work_items,
)
from ltc.llvm.loop_schedule.vector_axis import column_loads
from ltc.llvm.loops.bounds_checks import faults_of
from ltc.llvm.loops.context import LoopContext, context_of
from ltc.llvm.loops.coordinates import element
from ltc.llvm.loops.nests import over_vectors
from ltc.llvm.loops.rows import reserve_groups, write_group, write_row, write_summed_rows
from ltc.llvm.loops.stores import store_all
from ltc.llvm.loops.values import hoist
from ltc.support.sizes.extent import Extent


def kernel_code(kernel: Kernel, streamed: frozenset[Node] = frozenset()) -> KernelCode:
    """The kernel's function; `streamed`: what it writes to memory past the caches."""
    schedule = schedule_of(nest_of(_from_first_element(kernel)), streamed=streamed)
    if wants_wide_vectors(schedule):
        schedule = replace(schedule, lanes=WIDE)
    code = _code(schedule)
    first = [store.offset.constant * FORMS[store.node.dtype].bytes for store in kernel.stores]
    return replace(code, shifts=(*code.shifts, *first))


def _from_first_element(kernel: Kernel) -> Kernel:
    """The kernel whose stores begin where their pointers do: another place is no other text."""
    stores = [replace(s, offset=Affine(0, s.offset.terms)) for s in kernel.stores]
    return replace(kernel, stores=tuple(stores))


def _code(schedule: LoopSchedule) -> KernelCode:
    kernel, b = schedule.nest.kernel, Builder(schedule.lanes)
    ctx = context_of(schedule, b)
    items = ctx.arguments.number("work items", work_items(schedule))
    ctx.arguments.splat_constants(schedule.nest.order, schedule.lanes)
    _reserve_kept_rows(ctx)
    reserve_groups(ctx)
    low, high = b.share(items)
    with ctx.scope():
        hoist(ctx, [store.value for store in kernel.stores])
        b.loop(low, high, 1, (), lambda item, _: _write_item(ctx, item))
    nodes = (*kernel.reads(), *kernel.writes(), *faults_of(kernel))
    numbers = ctx.arguments.numbers
    text = function_text("kernel", len(nodes), b, len(numbers))
    shifts = tuple(ctx.arguments.shifts.get(node, 0) for node in kernel.reads())
    return KernelCode(text, nodes, tasks_of(schedule), shifts, numbers)


def _reserve_kept_rows(ctx: LoopContext) -> None:
    for value in values_to_keep(ctx.schedule):
        room, type = room_for_a_row(ctx.schedule), FORMS[value.dtype].computed
        ctx.kept.memory[value] = ctx.b.effect(f"alloca [{room} x {type}], align 64")


def _write_item(ctx: LoopContext, item: Index) -> None:
    schedule, rows = ctx.schedule, row_variables(ctx.schedule)
    number, strip = _row_and_strip(ctx, item, rows)
    locate(ctx, rows, number)
    first_row: Index = 0
    if schedule.tiles:  # what depends on this variable is not hoisted: each row has its own
        first_row = ctx.variables.pop(rows[-1]) * schedule.lanes
    with ctx.scope():
        hoist(ctx, [store.value for store in ctx.nest.kernel.stores])
        if schedule.transposed:
            write_group(ctx, strip)
        elif schedule.has_strips:
            _write_strip(ctx, strip, first_row)
        elif ctx.nest.summed:
            write_summed_rows(ctx)
        else:
            write_row(ctx)


def _row_and_strip(ctx: LoopContext, item: Index, rows: list[int]) -> tuple[Index, Index]:
    """Return a work item's row number, and that of its strip or group."""
    schedule, strips = ctx.schedule, strips_of_a_row(ctx.schedule)
    if (schedule.has_strips or schedule.transposed) and not rows:
        return item, item
    if isinstance(strips, int) and strips == 1:  # no size decides on it
        return item, 0
    if schedule.reads_columns:
        each = ctx.arguments.number("rows", work_items(schedule) // strips)
        return item % each, item // each
    if isinstance(strips, Extent):
        strips = ctx.arguments.number("strips", strips)
    strip = item % strips
    return item // strips, strip


def locate(ctx: LoopContext, variables: Sequence[int], number: Index) -> None:
    """Sets the variables of a row, from its number."""
    for v in reversed(variables[1:]):
        extent: Index = ctx.nest.extents[v]
        if ctx.schedule.tiles and v == variables[-1]:
            extent = ctx.size(ctx.nest.extents[v] // ctx.schedule.lanes)
        elif isinstance(extent, Extent):
            extent = ctx.extent(v)
        ctx.variables[v], number = number % extent, number // extent
    if variables:
        ctx.variables[variables[0]] = number


def _write_strip(ctx: LoopContext, strip: Index, first_row: Index) -> None:
    extent, length = ctx.extent(ctx.schedule.vector), strip_length(ctx.schedule)
    first, limit = strip * length, extent
    if not isinstance(extent, int) or extent > length:
        limit = least(first + length, extent)
    over_vectors(ctx, first, limit, (), lambda _: _write_point(ctx, first_row))


def _write_point(ctx: LoopContext, first_row: Index) -> None:
    """Everything at one vector of the row variables: reductions, then stores."""
    if ctx.schedule.tiles:
        write_tile(ctx, first_row)
    elif ctx.nest.reductions:
        write_row(ctx)
    else:
        store_all(ctx, ctx.nest.kernel.stores)


# --- squares of rows and lanes ----------------------------------------------------------------
# Operands that lie in columns are loaded so, and transposed in registers.


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
