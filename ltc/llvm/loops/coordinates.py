"""The coordinates of a point: the places it reads and writes, its number, whether it is inside.

A uniform value is a number of one point, the first lane of a vector of them.
"""

from __future__ import annotations

from ltc.ir.loop_nest import Affine, Guard, Value
from ltc.llvm.emit.builder import Builder, multiples
from ltc.llvm.emit.index import Index
from ltc.llvm.loops.context import LoopContext
from ltc.support.sizes.extent import Extent, Size


def uniform(ctx: LoopContext, form: Affine) -> Index:
    """The part of a form that is the same for every lane, the vector variable at lane 0."""
    total: Index = form.constant
    for v, c in form.terms:
        total = ctx.variables[v] * _factor(ctx, v, c) + total
    return total


def _factor(ctx: LoopContext, variable: int, coefficient: int) -> Index:
    """A coefficient, or an argument where it may be a multiple of an extent that is one."""
    schedule = ctx.schedule
    if isinstance(coefficient, Extent):
        return _argument(ctx, coefficient)
    if variable != 0 or variable == schedule.vector or not any(v > 0 for v in schedule.open):
        return coefficient
    return _argument(ctx, coefficient)


def _argument(ctx: LoopContext, coefficient: Size) -> Index:
    return ctx.arguments.number(("coefficient", coefficient), coefficient)


def element(ctx: LoopContext, load: Value, offset: Affine) -> Index:
    """Return where a load begins, in elements from its pointer."""
    base = uniform(ctx, Affine(0, offset.terms))
    return base + ctx.arguments.constant_of(load)


def lane_step(ctx: LoopContext, form: Affine) -> Size:
    """Return how far a form goes from one lane to the next."""
    return form.coefficient(ctx.schedule.vector)


def position(ctx: LoopContext, form: Affine, width: int) -> str:
    """A form at each of so many lanes, as i64."""
    base = uniform(ctx, form)
    return str(base) if width == 1 else stepping(ctx, base, lane_step(ctx, form))


def stepping(ctx: LoopContext, base: Index, step: Size) -> str:
    """base, base + step, ... over the lanes, as i64."""
    b = ctx.b
    if isinstance(step, Extent):
        apart = b.splat("i64", _argument(ctx, step))
        lanes = b.binary("mul", "i64", multiples(b.width, 1, "i64"), apart)
    else:
        lanes = multiples(b.width, step, "i64")
    return b.value(f"add {b.of('i64')} {b.splat('i64', base)}, {lanes}")


def inside(ctx: LoopContext, guards: tuple[Guard, ...], width: int) -> str:
    """i1 of `width` lanes: where all guards hold."""
    b, result = ctx.b, None
    for guard in guards:
        one = _holds(ctx, guard, width)
        result = one if result is None else b.binary("and", "i1", result, one)
    return b.constant("i1", True) if result is None else result


def spans_inside(ctx: LoopContext, guards: tuple[Guard, ...], width: int) -> tuple[str, str]:
    """i1, i1: whether, from the first to the last of so many lanes, each guard holds somewhere; and
    whether all hold everywhere."""
    b = ctx.b
    some = all = b.constant("i1", True)
    for guard in guards:
        form, (low, high) = _without_constant(ctx, guard)
        first, step = uniform(ctx, form), lane_step(ctx, form)
        apart = _argument(ctx, step) if isinstance(step, Extent) else step
        ends = str(first), str(first + apart * (width - 1))
        least, most = reversed(ends) if step < 0 else ends
        some = b.binary("and", "i1", some, _is_between(b, most, least, low, high))
        all = b.binary("and", "i1", all, _is_between(b, least, most, low, high))
    return some, all


def _is_between(b: Builder, above: str, below: str, low: Index, high: Index) -> str:
    """i1: whether one number is at least `low` and another one less than `high`."""
    not_less, less = (
        b.compare("sge", "i64", above, str(low)),
        b.compare("slt", "i64", below, str(high)),
    )
    return b.binary("and", "i1", not_less, less)


def _holds(ctx: LoopContext, guard: Guard, width: int) -> str:
    b = ctx.b
    form, bounds = _without_constant(ctx, guard)
    if width > 1 and lane_step(ctx, form):
        return _between(ctx, position(ctx, form, width), bounds)
    with b.lanes(1):
        one = _between(ctx, position(ctx, form, 1), bounds)
    return b.splat("i1", one) if width > 1 else one


def _without_constant(ctx: LoopContext, guard: Guard) -> tuple[Affine, tuple[Index, Index]]:
    """A guard's form without its constant, and the bounds of that form."""
    form = ctx.nest.space.form(guard.form)
    low, high = guard.low - form.constant, guard.high - form.constant
    bounds = (
        ctx.arguments.number(("low", guard), low),
        ctx.arguments.number(("high", guard), high),
    )
    return Affine(0, form.terms), bounds


def _between(ctx: LoopContext, at: str, bounds: tuple[Index, Index]) -> str:
    b = ctx.b
    low, high = (b.splat("i64", bound) for bound in bounds)
    above, below = b.compare("sge", "i64", at, low), b.compare("slt", "i64", at, high)
    return b.binary("and", "i1", above, below)
