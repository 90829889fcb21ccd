"""The loads of a kernel at one point, or at one vector of points."""

from __future__ import annotations

from ltc.ir.loop_nest import Affine, Guard, Value
from ltc.llvm.emit import memory_ops
from ltc.llvm.emit.conversions import from_memory
from ltc.llvm.emit.dtype import FORMS, Form
from ltc.llvm.emit.index import Index
from ltc.llvm.loop_schedule.row_groups import pitch_of
from ltc.llvm.loops.bounds_checks import inside_of
from ltc.llvm.loops.context import LoopContext
from ltc.llvm.loops.coordinates import element, inside, lane_step, position, stepping, uniform


def load(ctx: LoopContext, value: Value) -> str:
    if value in ctx.group.memory:
        return _load_copied(ctx, value)
    return _load_where(ctx, value, value.guards)


def load_unguarded(ctx: LoopContext, value: Value) -> str:
    """Return the value loaded where its guards hold for every lane."""
    return _load_where(ctx, value, ())


def _load_where(ctx: LoopContext, value: Value, guards: tuple[Guard, ...]) -> str:
    offset = ctx.nest.offset(value)
    base = element(ctx, value, offset)
    pointer, form = ctx.pointers[value.data[0]], FORMS[value.dtype]
    return read(ctx, pointer, base, offset, guards, form)


def _load_copied(ctx: LoopContext, value: Value) -> str:
    """From the row of the group that has been copied, transposed."""
    b, form = ctx.b, FORMS[value.dtype]
    place = ctx.group.row * pitch_of(ctx.nest) + ctx.variables[ctx.schedule.vector]
    address = b.address(ctx.group.memory[value], place, form.stored)
    return from_memory(b, form, memory_ops.load(b, address, form.stored, ctx.mask))


def read(
    ctx: LoopContext,
    pointer: str,
    base: Index,
    offset: Affine,
    guards: tuple[Guard, ...],
    form: Form,
) -> str:
    """Return the values at `base`, and over the lanes where `offset` goes from there."""
    b, step = ctx.b, lane_step(ctx, offset)
    loaded: str
    if b.width == 1:
        if guards:
            base = b.where(inside(ctx, guards, 1), base, 0)
        address = b.address(pointer, base, form.stored)
        loaded = b.effect(f"load {form.stored}, ptr {address}, align {form.bytes}")
    elif step == 1:
        address = b.address(pointer, base, form.stored)
        loaded = memory_ops.load(b, address, form.stored, _mask(ctx, guards))
    else:
        positions = stepping(ctx, base, step)
        loaded = _gathered(ctx, pointer, positions, form, _mask(ctx, guards))
    return from_memory(b, form, loaded)


def _gathered(ctx: LoopContext, pointer: str, positions: str, form: Form, mask: str | None) -> str:
    pointers = memory_ops.addresses(ctx.b, pointer, positions, form.stored)
    return memory_ops.gather(ctx.b, pointers, form.stored, mask)


def _mask(ctx: LoopContext, guards: tuple[Guard, ...]) -> str | None:
    """The lanes that are read."""
    if not guards:
        return ctx.mask
    inner = inside(ctx, guards, ctx.b.width)
    return inner if ctx.mask is None else ctx.b.binary("and", "i1", inner, ctx.mask)


def look_up(ctx: LoopContext, value: Value, index: str) -> str:
    """Return the value at a computed index, one for all lanes."""
    b, form = ctx.b, FORMS[value.dtype]
    node, _, step, size = value.data
    offset = ctx.nest.offset(value)
    with b.lanes(1):
        found = inside_of(b, index, ctx.size(size))
        pointer = b.address(ctx.pointers[node], b.index(found) * ctx.size(step), form.stored)
    return read(ctx, pointer, uniform(ctx, offset), offset, value.guards, form)


def look_up_each(ctx: LoopContext, value: Value, indices: str, width: int) -> str:
    """Return the values at an index of each lane."""
    b, form = ctx.b, FORMS[value.dtype]
    node, _, step, size = value.data
    found = inside_of(b, indices, ctx.size(size))
    found = b.binary("mul", "i64", found, b.splat("i64", ctx.size(step)))
    first = position(ctx, ctx.nest.offset(value), width)
    positions = b.binary("add", "i64", first, found)
    loaded = _gathered(ctx, ctx.pointers[node], positions, form, _mask(ctx, value.guards))
    return from_memory(b, form, loaded)


def prefetch(ctx: LoopContext, value: Value, ahead: int = 0) -> None:
    """Asks memory for what a load will want, so many elements from here."""
    node, b = value.data[0], ctx.b
    with b.lanes(1):
        base = element(ctx, value, ctx.nest.offset(value)) + ahead
        address = b.address(ctx.pointers[node], base, FORMS[node.dtype].stored)
    b.prefetch(address)
