"""A row of a kernel, or a vector of rows: its reductions, then what is stored of it."""

from __future__ import annotations

from ltc.ir.loop_nest import Value
from ltc.llvm.emit.index import Index
from ltc.llvm.loop_schedule.open_extents import LONG_ROW
from ltc.llvm.loops.context import LoopContext
from ltc.llvm.loops.nests import loop_over
from ltc.llvm.loops.one_hot_sums import take_term
from ltc.llvm.loops.reductions import columns_together, reduce_columns, reduce_row
from ltc.llvm.loops.stores import begin_sums, store_all
from ltc.llvm.loops.values import hoist


def write_row(ctx: LoopContext) -> None:
    """What is made once for each row, then what is made at each of its points."""
    _reduce_all(ctx)
    inner, stores = ctx.nest.inner, ctx.nest.kernel.stores
    short = [store for store in stores if ctx.nest.is_made_once_a_row(store)]
    full = [store for store in stores if store not in short]
    if not inner:
        short, full = [*short, *full], []
    store_all(ctx, short)
    if full:
        roots = [store.value for store in full]
        hoist(ctx, roots)
        loop_over(ctx, inner, roots, [], lambda _: store_all(ctx, full))


def _reduce_all(ctx: LoopContext) -> None:
    together, passes = columns_together(ctx), ctx.schedule.passes
    if together:
        hoist(ctx, together)
        reduce_columns(ctx, together)
    for value in ctx.nest.reductions[len(together) :]:
        hoist(ctx, [value])
        if value in ctx.schedule.one_hot:
            take_term(ctx, value)
            continue
        if ctx.schedule.vector in ctx.nest.inner:
            is_last = value is passes[-1] and len(passes) > 1
            reduce_row(ctx, value, _loads_of_following_row(ctx) if is_last else [])
        else:
            reduce_columns(ctx, [value])
        ctx.kept.stored |= ctx.kept.begun


def _loads_of_following_row(ctx: LoopContext) -> list[tuple[Value, int]]:
    """What the first pass over the next row will wait for, and how many elements away it is.

    The passes over a row find it in the cache but for the first one: fetched during the last
    reduction, which computes and hardly touches memory, it does not wait either.
    """
    nest, vector = ctx.nest, ctx.schedule.vector
    if nest.inner != [vector] or not nest.depth or nest.extents[-1] < LONG_ROW:
        return []
    found = []
    for load in nest.loads():
        if not load.guards:
            offset = nest.offset(load)
            step = offset.coefficient(nest.depth - 1)
            if step > 0 and offset.coefficient(vector) == 1:
                found.append((load, step))
    return found


def write_summed_rows(ctx: LoopContext) -> None:
    """The rows of a work item, one after the other: some stores add them up."""
    sums = [store for store in ctx.nest.kernel.stores if store.sums]
    loop_over(ctx, ctx.nest.inner, [], [], lambda _: begin_sums(ctx, sums))
    _each_row(ctx, list(ctx.nest.summed))


def _each_row(ctx: LoopContext, variables: list[int]) -> None:
    if not variables:
        write_row(ctx)
        return

    def one(i: Index, _) -> None:
        with ctx.scope():
            ctx.variables[variables[0]] = i
            hoist(ctx, [store.value for store in ctx.nest.kernel.stores])
            _each_row(ctx, variables[1:])

    ctx.b.loop(0, ctx.extent(variables[0]), 1, (), one)
