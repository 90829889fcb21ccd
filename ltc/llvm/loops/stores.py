"""The stores of a kernel at one point, or at one vector of points."""

from __future__ import annotations

from collections.abc import Sequence

from ltc.ir.loop_nest import Affine, Store
from ltc.llvm.emit import memory_ops
from ltc.llvm.emit.conversions import to_memory
from ltc.llvm.emit.dtype import FORMS
from ltc.llvm.loops import reduction_ops
from ltc.llvm.loops.context import LoopContext
from ltc.llvm.loops.coordinates import lane_step, position, uniform
from ltc.llvm.loops.loads import read
from ltc.llvm.loops.values import lanes_of


def store_all(ctx: LoopContext, stores: Sequence[Store]) -> None:
    if ctx.kept.memory:  # what a store finds in a row's memory it does not load: another one may
        for one in stores:  # want it after its place was written over
            _register_to_store(ctx, one)
    for one in stores:
        store(ctx, one)


def store(ctx: LoopContext, one: Store) -> None:
    register = _register_to_store(ctx, one)
    if one.sums:
        form, total = FORMS[one.node.dtype], _total(ctx, one)
        with ctx.b.lanes(_width_of(ctx, one)):
            register = reduction_ops.combine(ctx.b, one.sums, form, total, register)
    _put(ctx, one, register)


def begin_sums(ctx: LoopContext, stores: Sequence[Store]) -> None:
    """The first totals of stores that sum rows."""
    for one in stores:
        assert one.sums is not None, one.node
        form = FORMS[one.node.dtype]
        with ctx.b.lanes(_width_of(ctx, one)):
            first = ctx.b.constant(form.computed, reduction_ops.start(one.sums, form))
        _put(ctx, one, first)


def _register_to_store(ctx: LoopContext, one: Store) -> str:
    """Return the value stored, or added: a vector if it goes to more than one place."""
    width = _width_of(ctx, one)
    with ctx.b.lanes(width):
        return lanes_of(ctx, one.value, width)


def _width_of(ctx: LoopContext, one: Store) -> int:
    return ctx.schedule.lanes if lane_step(ctx, ctx.nest.space.form(one.offset)) else 1


def _total(ctx: LoopContext, one: Store) -> str:
    """Return the sum so far of a store that sums rows."""
    offset, form = ctx.nest.space.form(one.offset), FORMS[one.node.dtype]
    with ctx.b.lanes(1):
        base = uniform(ctx, offset)
    with ctx.b.lanes(_width_of(ctx, one)):
        return read(ctx, ctx.targets[one.node], base, offset, (), form)


def _put(ctx: LoopContext, one: Store, register: str) -> None:
    """One element or a vector of them, to wherever the store's offset has its places."""
    b, form, target = ctx.b, FORMS[one.node.dtype], ctx.targets[one.node]
    offset, width = ctx.nest.space.form(one.offset), _width_of(ctx, one)
    with b.lanes(width):
        stored = to_memory(b, form, register)
        mask = ctx.mask if width > 1 else None
        if width > 1 and lane_step(ctx, offset) != 1:
            positions = position(ctx, offset, width)
            pointers = memory_ops.addresses(b, target, positions, form.stored)
            memory_ops.scatter(b, stored, pointers, form.stored, mask)
            return
        with b.lanes(1):
            address = b.address(target, uniform(ctx, offset), form.stored)
        if mask is None and _passes_caches(ctx, one, offset):
            memory_ops.stream(b, stored, address, form.stored)
        else:
            memory_ops.store(b, stored, address, form.stored, mask)


def _passes_caches(ctx: LoopContext, one: Store, offset: Affine) -> bool:
    """Return True if it is written for a later reader: totals are read again at the next row."""
    return one.node in ctx.schedule.streamed and not one.sums and _is_aligned(ctx, offset)


def _is_aligned(ctx: LoopContext, offset: Affine) -> bool:
    """Return True if each vector of a buffer, itself aligned, lies at a multiple of its size."""
    rest = [c for v, c in offset.terms if v != ctx.schedule.vector]
    is_aligned = all(c % ctx.schedule.lanes == 0 for c in (offset.constant, *rest))
    return lane_step(ctx, offset) == 1 and is_aligned
