"""A row of a kernel, or a vector of rows: its reductions, then what is stored of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod

from ltc.ir.loop_nest import Value
from ltc.llvm.emit import memory_ops
from ltc.llvm.emit.builder import LANES
from ltc.llvm.emit.dtype import FORMS, Form
from ltc.llvm.emit.index import Index, IndexRegister, least
from ltc.llvm.emit.memory_ops import CACHE_LINE
from ltc.llvm.emit.vectors import transposed
from ltc.llvm.loop_schedule.kept_rows import read_by
from ltc.llvm.loop_schedule.loop_schedule import ACCUMULATORS
from ltc.llvm.loop_schedule.open_extents import LONG_ROW
from ltc.llvm.loop_schedule.row_groups import pitch_of
from ltc.llvm.loops import reduction_ops
from ltc.llvm.loops.context import LoopContext
from ltc.llvm.loops.coordinates import element, lane_step
from ltc.llvm.loops.loads import prefetch
from ltc.llvm.loops.nests import (
    Body,
    Carried,
    again,
    at_vector,
    loop_over,
    over_any_vectors,
    step_of,
    whole_multiples,
)
from ltc.llvm.loops.stores import begin_sums, store_all
from ltc.llvm.loops.values import hoist, lanes_of
from ltc.support.sizes.choices import by_sample


def write_row(ctx: LoopContext) -> None:
    """Write the values made once for each row, then those made at each of its points."""
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
    """Return the loads that the first pass over the next row waits for, and their distance.

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


# --- sums of where(position == index, term, 0), an index for each row -------------------------
# Each such sum is its one term.


def take_term(ctx: LoopContext, value: Value) -> None:
    """The term at the index, and zero where no element of the row has it."""
    index, term = ctx.schedule.one_hot[value]
    form, b = FORMS[value.dtype], ctx.b
    with b.lanes(1):
        at = b.index(lanes_of(ctx, index, 1))
        inside = b.value(f"icmp ult i64 {at}, {ctx.extent(ctx.schedule.vector)}")
        zero = b.constant(form.computed, 0)

        def taken() -> list[str]:
            with _at_one_point(ctx, at):  # adding a zero, as the sum does: -0.0 is 0.0 then
                one = lanes_of(ctx, term, 1)
                return [reduction_ops.combine(b, reduction_ops.op_of(value), form, one, zero)]

        (total,) = b.when(inside, [(b.of(form.computed), zero)], taken)
        ctx.known[-1][value] = reduction_ops.finished(b, form, total)


@contextmanager
def _at_one_point(ctx: LoopContext, place: Index) -> Iterator[None]:
    """Values made inside are those of one element of the row, scalars all."""
    before = ctx.is_vector
    with ctx.branch():
        ctx.variables[ctx.schedule.vector] = place
        ctx.is_vector = dict.fromkeys(before, False)
        yield
    ctx.is_vector = before


# --- groups of rows whose neighbours in memory belong to different rows -----------------------
# A group is copied to memory of the thread, in squares of vectors that are transposed in registers;
# then each of its rows is reduced and stored as any other row is.

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


# --- Reductions inside a kernel: several accumulators, and no chain of additions that is long ----

# The order of additions follows from the extents alone.

Step = Callable[[IndexRegister, list[str]], list[str] | None]  # what a loop does at an index

CHAIN = 32  # additions to one accumulator before it is added to another: sums stay accurate
FAR_APART_BYTES = 2048  # from row to row: two are in a page, and no processor foresees the next
LARGE_BYTES = 8 << 20  # of what no cache that is near holds
ROWS_AHEAD, MANY_ROWS = 12, 64  # how far ahead rows are asked for, and of how many
MOST_COLUMN_SUMS = 3  # in one pass: their accumulators fill the registers
BLOCKS = (512, 64, 8)  # likewise where rows are added: blocks of blocks of rows


@dataclass(frozen=True)
class Accumulators:
    """The accumulators of the values that one pass reduces.

    Attributes:
        width: The lanes of each.
    """

    ctx: LoopContext
    values: tuple[Value, ...]
    width: int

    @property
    def forms(self) -> list[Form]:
        return [FORMS[value.dtype] for value in self.values]

    def starts(self) -> list[tuple[str, str]]:
        b = self.ctx.b
        with b.lanes(self.width):
            return [
                (
                    b.of(form.computed),
                    b.constant(
                        form.computed, reduction_ops.start(reduction_ops.op_of(value), form)
                    ),
                )
                for value, form in zip(self.values, self.forms)
            ]

    def combined(self, totals: Sequence[str], parts: Sequence[str]) -> list[str]:
        """Each total with one part more."""
        b = self.ctx.b
        with b.lanes(self.width):
            return [
                reduction_ops.combine(b, reduction_ops.op_of(value), form, x, y)
                for value, form, x, y in zip(self.values, self.forms, totals, parts)
            ]

    def takes_in(self, totals: list[str]) -> list[str]:
        """Each total with the operand of this point, or of this vector of points."""
        ctx = self.ctx
        _ask_for_rows(ctx, [value.operands[0] for value in self.values])
        with ctx.b.lanes(self.width):
            return self.combined(totals, [self._operand(value) for value in self.values])

    def _operand(self, value: Value) -> str:
        ctx = self.ctx
        one = lanes_of(ctx, value.operands[0], self.width)
        if ctx.mask is None or ctx.schedule.vector not in ctx.nest.inner:
            return one
        form = FORMS[value.dtype]
        nothing = ctx.b.constant(
            form.computed, reduction_ops.start(reduction_ops.op_of(value), form)
        )
        return ctx.b.select(ctx.mask, form.computed, one, nothing)


def reduce_columns(ctx: LoopContext, values: Sequence[Value]) -> None:
    """Reductions whose rows are the lanes of a vector, or a scalar, in one pass over all."""
    schedule = ctx.schedule
    width = schedule.lanes if schedule.reduces_columns else 1
    sums, mask = Accumulators(ctx, tuple(values), width), ctx.mask
    totals = _in_blocks(ctx, sums, ctx.nest.inner, sums.takes_in)
    ctx.mask = mask
    with ctx.b.lanes(width):
        for value, form, total in zip(values, sums.forms, totals):
            ctx.known[-1][value] = reduction_ops.finished(ctx.b, form, total)


def columns_together(ctx: LoopContext) -> list[Value]:
    """The first reductions, where they add up rows and none of them needs another."""
    reductions = ctx.nest.reductions
    if not ctx.schedule.reduces_columns or len(reductions) < 2:
        return []
    found: list[Value] = []
    for value in reductions[:MOST_COLUMN_SUMS]:
        if any(x.kind == "reduced" for x in value.made_from()):
            break
        found.append(value)
    return found if len(found) > 1 else []


def reduce_row(ctx: LoopContext, value: Value, ahead: Sequence[tuple[Value, int]]) -> None:
    """A reduction of the elements of a row, which are the lanes of vectors.

    Args:
        ahead: Loads that are asked of memory on the way, and how many elements from here.
    """
    inner, form = ctx.nest.inner, FORMS[value.dtype]
    sums, mask = Accumulators(ctx, (value,), ctx.schedule.lanes), ctx.mask

    def body(totals: list[str]) -> list[str]:
        for load, step in ahead:
            prefetch(ctx, load, step)
        return sums.takes_in(totals)

    if len(inner) == 1 and _unrolls(ctx):
        total = _unrolled(ctx, sums, body)
    elif len(inner) > 1 and _unrolls(ctx):
        (total,) = _in_blocks(
            ctx, sums, inner[:-1],
            lambda totals: sums.combined(totals, [_unrolled(ctx, sums, body)]),
        )  # fmt: skip
    else:
        (total,) = _in_blocks(ctx, sums, inner, body)
        ctx.mask = mask
    with ctx.b.lanes(sums.width):
        total = reduction_ops.across_lanes(ctx.b, reduction_ops.op_of(value), form, total)
    with ctx.b.lanes(1):
        ctx.known[-1][value] = reduction_ops.finished(ctx.b, form, total)


# --- rows that come later ------------------------------------------------------------------------


def _ask_for_rows(ctx: LoopContext, roots: Sequence[Value]) -> None:
    """Asks memory for what the roots load of rows to come."""
    if not _walks_down_columns(ctx):
        return
    wanted = read_by(roots)
    for value in ctx.nest.loads():
        if value in wanted and _is_worth_asking(ctx, value):
            row = ctx.nest.offset(value).coefficient(ctx.nest.depth)
            line = CACHE_LINE // FORMS[value.data[0].dtype].bytes
            for first in range(0, ctx.schedule.lanes, line):
                prefetch(ctx, value, ROWS_AHEAD * row + first)


def _walks_down_columns(ctx: LoopContext) -> bool:
    """Return True if many rows, one after another, are added to the lanes of a vector."""
    extents, depth = ctx.nest.extents, ctx.nest.depth
    if not ctx.schedule.reduces_columns or depth != len(extents) - 1:
        return False
    with by_sample(extents[depth]):
        return bool(extents[depth] >= MANY_ROWS)


def _is_worth_asking(ctx: LoopContext, load: Value) -> bool:
    """Return True if a load of a vector of rows, walked down, waits for memory at each step."""
    nest, bytes = ctx.nest, FORMS[load.data[0].dtype].bytes
    offset = nest.offset(load)
    is_far = offset.coefficient(nest.depth) * bytes >= FAR_APART_BYTES
    with by_sample(*nest.extents):
        is_large = bool(prod(nest.extents) * bytes >= LARGE_BYTES)
    return not load.guards and is_far and is_large and lane_step(ctx, offset) == 1


# --- loops that add up ---------------------------------------------------------------------------


def _in_blocks(ctx: LoopContext, sums: Accumulators, inner: list[int], body: Body) -> list[str]:
    """The totals over loops, the outermost one in blocks of blocks: no chain is long."""
    vector, starts = ctx.schedule.vector, sums.starts()
    variable = inner[0] if inner else vector
    if variable == vector:
        return loop_over(ctx, inner, sums.values, starts, body)
    is_open, limit = variable in ctx.schedule.open, ctx.extent(variable)
    sizes = [size for size in BLOCKS if is_open or size < ctx.nest.extents[variable]]
    if _is_long(ctx, inner[1:]):
        step = step_of(
            ctx, inner[:1], sums.values, starts,
            lambda totals: sums.combined(totals, _in_blocks(ctx, sums, inner[1:], body)),
        )  # fmt: skip
    else:
        step = step_of(ctx, inner, sums.values, starts, body)
    return _sum_from(sums, 0, limit, sizes, step)


def _is_long(ctx: LoopContext, inner: list[int]) -> bool:
    """Return True if loops add more to an accumulator than should be in one chain."""
    others = [variable for variable in inner if variable != ctx.schedule.vector]
    if any(variable in ctx.schedule.open for variable in others):
        return True
    return prod(ctx.nest.extents[variable] for variable in others) > CHAIN


def _sum_from(
    sums: Accumulators, low: Index, limit: Index, sizes: list[int], step: Step
) -> list[str]:
    b, starts = sums.ctx.b, sums.starts()
    if not sizes:
        return b.loop(low, limit, 1, starts, step)

    def block(low: IndexRegister, totals: list[str]) -> list[str]:
        end = least(low + sizes[0], limit)
        return sums.combined(totals, _sum_from(sums, low, end, sizes[1:], step))

    return b.loop(low, limit, sizes[0], starts, block)


def _unrolls(ctx: LoopContext) -> bool:
    """Return True if rows are long enough for several accumulators, or may be."""
    schedule = ctx.schedule
    if schedule.vector in schedule.open:
        return True
    return ctx.nest.extents[schedule.vector] >= 2 * schedule.step


def _unrolled(ctx: LoopContext, sums: Accumulators, body: Body) -> str:
    """The total over the vector variable, in several accumulators."""
    lanes, stride = ctx.schedule.lanes, ctx.schedule.step * CHAIN
    starts = sums.starts() * ACCUMULATORS

    def several(i: Index, totals: list[str]) -> list[str]:
        each = enumerate(totals)
        return [at_vector(ctx, i + k * lanes, None, [one], body)[0] for k, one in each]

    def block(i: Index, totals: list[str]) -> list[str]:
        parts = ctx.b.loop(i, i + stride, ctx.schedule.step, starts, several)
        return _combined_each(sums, totals, parts)

    loops = _of_any_extent if ctx.schedule.vector in ctx.schedule.open else _of_known_extent
    totals = loops(ctx, starts, block, several, body)
    while len(totals) > 1:
        totals = _combined_each(sums, totals[::2], totals[1::2])
    return totals[0]


def _combined_each(sums: Accumulators, totals: list[str], parts: list[str]) -> list[str]:
    return [sums.combined([x], [y])[0] for x, y in zip(totals, parts)]


def _of_known_extent(
    ctx: LoopContext, starts: Carried, block: Step, several: Step, body: Body
) -> list[str]:
    """Blocks, then whole steps of the accumulators, then one vector to each of the first ones."""
    vector, step, lanes = ctx.schedule.vector, ctx.schedule.step, ctx.schedule.lanes
    extent = ctx.nest.extents[vector]
    whole = extent // step * step
    blocks = whole // (step * CHAIN) * step * CHAIN
    totals = [value for _, value in starts]
    if blocks:
        totals = ctx.b.loop(0, blocks, step * CHAIN, starts, block)
    if blocks < whole:
        totals = ctx.b.loop(blocks, whole, step, again(starts, totals), several)
    for position in range(whole, extent, lanes):
        mask = ctx.first_lanes(extent - position)
        k = (position - whole) // lanes
        (totals[k],) = at_vector(ctx, position, mask, [totals[k]], body)
    return totals


def _of_any_extent(
    ctx: LoopContext, starts: Carried, block: Step, several: Step, body: Body
) -> list[str]:
    """The same where the extent is an argument; one accumulator takes in all of the rest."""
    extent, step = ctx.extent(ctx.schedule.vector), ctx.schedule.step
    assert step & (step - 1) == 0, step
    blocks = whole_multiples(ctx, extent, step * CHAIN)
    whole = whole_multiples(ctx, extent, step)
    totals = ctx.b.loop(0, blocks, step * CHAIN, starts, block)
    totals = ctx.b.loop(blocks, whole, step, again(starts, totals), several)
    rest = over_any_vectors(ctx, whole, extent, again(starts[:1], totals), body)
    return [*rest, *totals[1:]]
