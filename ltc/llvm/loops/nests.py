"""Loops of a kernel: over the vector variable, its last lanes masked, and over the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ltc.ir.loop_nest import Value
from ltc.llvm.emit.index import Index, IndexRegister
from ltc.llvm.loops.context import LoopContext
from ltc.llvm.loops.values import hoist

Carried = Sequence[tuple[str, str]]  # (LLVM type, first value) of what goes around a loop
Body = Callable[[list[str]], list[str] | None]  # takes what is carried, and gives it


def over_vectors(
    ctx: LoopContext, first: Index, limit: Index, carried: Carried, body: Body
) -> list[str]:
    """The vector variable from first (a multiple of the lanes) to limit, the rest masked."""
    b, lanes, extent = ctx.b, ctx.schedule.lanes, ctx.extent(ctx.schedule.vector)
    if not isinstance(extent, int):
        return over_any_vectors(ctx, first, limit, carried, body)
    whole = extent // lanes * lanes
    values = [value for _, value in carried]
    if whole:
        until = limit
        if extent != whole:
            until = whole if isinstance(limit, int) else whole_multiples(ctx, limit, lanes)
        values = b.loop(first, until, lanes, carried, _all_lanes(ctx, body))
    if extent == whole:
        return values

    def rest(values: list[str]) -> list[str]:
        return at_vector(ctx, whole, ctx.first_lanes(extent - whole), values, body)

    if isinstance(limit, int):
        return rest(values)
    at_end = b.value(f"icmp eq i64 {limit}, {extent}")
    return b.when(at_end, again(carried, values), lambda: rest(values))


def over_any_vectors(
    ctx: LoopContext, first: Index, limit: Index, carried: Carried, body: Body
) -> list[str]:
    """The same where the extent is an argument, and with it how many lanes the rest has."""
    b, lanes = ctx.b, ctx.schedule.lanes
    until = whole_multiples(ctx, limit, lanes)
    values = b.loop(first, until, lanes, carried, _all_lanes(ctx, body))
    has_rest = b.value(f"icmp slt i64 {until}, {limit}")

    def rest() -> list[str]:
        mask = ctx.first_lanes(limit - until)
        return at_vector(ctx, until, mask, values, body)

    return b.when(has_rest, again(carried, values), rest)


def _all_lanes(ctx: LoopContext, body: Body) -> Callable[[IndexRegister, list[str]], list[str]]:
    return lambda i, values: at_vector(ctx, i, None, values, body)


def again(carried: Carried, values: list[str]) -> list[tuple[str, str]]:
    """Return the carried values of the next loop: those that another one has left."""
    return [(type, value) for (type, _), value in zip(carried, values)]


def whole_multiples(ctx: LoopContext, x: Index, power: int) -> IndexRegister:
    """The largest multiple of a power of two up to x."""
    return ctx.b.index(ctx.b.value(f"and i64 {x}, -{power}"))


def at_vector(
    ctx: LoopContext, i: Index, mask: str | None, values: list[str], body: Body
) -> list[str]:
    """The body at one vector of points."""
    with ctx.scope():
        ctx.variables[ctx.schedule.vector], ctx.mask = i, mask
        result = body(values)
    ctx.mask = None
    return result or []


def loop_over(
    ctx: LoopContext, inner: list[int], roots: Sequence[Value], carried: Carried, body: Body
) -> list[str]:
    """Loops over the inner variables around a body that takes and gives what is carried.

    Args:
        roots: The values that the body computes.
    """
    if not inner:
        with ctx.scope():
            return body([value for _, value in carried]) or []
    extent = ctx.extent(inner[0])
    if inner[0] == ctx.schedule.vector:
        return over_vectors(ctx, 0, extent, carried, body)
    return ctx.b.loop(0, extent, 1, carried, step_of(ctx, inner, roots, carried, body))


def step_of(
    ctx: LoopContext, inner: list[int], roots: Sequence[Value], carried: Carried, body: Body
) -> Callable[[IndexRegister, list[str]], list[str]]:
    """Return the body of a loop over the first inner variable: the loops inside it."""

    def step(i: IndexRegister, values: list[str]) -> list[str]:
        with ctx.scope():
            ctx.variables[inner[0]] = i
            hoist(ctx, roots)
            return loop_over(ctx, inner[1:], roots, again(carried, values), body)

    return step
