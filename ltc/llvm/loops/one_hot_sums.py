"""Sums of where(position == index, term, 0), an index for each row: each is its one term."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ltc.ir.loop_nest import Value
from ltc.llvm.emit.dtype import FORMS
from ltc.llvm.emit.index import Index
from ltc.llvm.loops import reduction_ops
from ltc.llvm.loops.context import LoopContext
from ltc.llvm.loops.values import lanes_of


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
