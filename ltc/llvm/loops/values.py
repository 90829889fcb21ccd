"""A kernel's values at one point: each in the outermost loop that has all it depends on.

A value is a vector of lanes where it depends on the vector variable, else a scalar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from ltc.ir import ops
from ltc.ir.loop_nest import Value
from ltc.llvm.emit.builder import Builder, multiples
from ltc.llvm.emit.dtype import BYTES, FORMS
from ltc.llvm.emit.elementwise import cast, computed
from ltc.llvm.emit.philox import adjacent_bits, random_bits
from ltc.llvm.loops.bounds_checks import Report, report_where, wrapped
from ltc.llvm.loops.context import LoopContext
from ltc.llvm.loops.coordinates import inside, lane_step, position, spans_inside
from ltc.llvm.loops.loads import load, load_unguarded, look_up, look_up_each

MOST_CHOICES = 8  # of one point that are all computed: from here on a branch takes less time


def register_of(ctx: LoopContext, value: Value) -> str:
    """The register of a value: of a vector of lanes where it is one, else of a scalar."""
    found = ctx.find(value)
    if found is not None:
        return found
    width = ctx.schedule.lanes if ctx.is_vector[value] else 1
    with ctx.b.lanes(width):
        row = ctx.kept.memory.get(value)
        register = make(ctx, value, width) if row is None else kept(ctx, value, row, width)
    ctx.known[-1][value] = register
    return register


def lanes_of(ctx: LoopContext, value: Value, width: int) -> str:
    """The register of a value with so many lanes."""
    register = register_of(ctx, value)
    if ctx.is_vector[value] or width == 1:
        return register
    with ctx.b.lanes(width):
        return ctx.b.splat(FORMS[value.dtype].computed, register)


def hoist(ctx: LoopContext, roots: Iterable[Value]) -> None:
    """Compute now what the loops to come would compute again each time."""
    needs, awaited = ctx.schedule.needs, ctx.schedule.awaited
    available = ctx.variables.keys()
    wanted: list[Value] = []
    seen: set[Value] = set()
    waiting = list(roots)
    while waiting:
        value = waiting.pop()
        if value in seen or ctx.find(value) is not None:
            continue
        seen.add(value)
        is_ready = needs[value] <= available and all(ctx.find(x) for x in awaited[value])
        if is_ready and value.kind != "constant":
            wanted.append(value)
        else:
            waiting.extend(value.operands)
    for value in wanted:
        register_of(ctx, value)


def kept(ctx: LoopContext, value: Value, row: str, width: int) -> str:
    """A value of a row that is computed once, and read from memory by later passes."""
    b, type = ctx.b, FORMS[value.dtype].computed
    address = b.address(row, ctx.variables[ctx.schedule.vector], type)
    if value in ctx.kept.stored:
        return b.effect(f"load {b.of(type)}, ptr {address}, align {BYTES[type]}")
    register = make(ctx, value, width)
    b.emit(f"store {b.of(type)} {register}, ptr {address}, align {BYTES[type]}")
    ctx.kept.begun.add(value)
    return register


def make(ctx: LoopContext, value: Value, width: int) -> str:
    """The instructions of a value that is not there yet."""
    return _MAKERS[value.kind](ctx, value, width)


def _constant(ctx: LoopContext, value: Value, width: int) -> str:
    return ctx.arguments.literal(value)


def _position(ctx: LoopContext, value: Value, width: int) -> str:
    return position(ctx, ctx.nest.space.form(value.data), width)


def _load(ctx: LoopContext, value: Value, width: int) -> str:
    return load(ctx, value)


def _lookup(ctx: LoopContext, value: Value, width: int) -> str:
    (index,) = value.operands
    if width == 1 or not ctx.is_vector[index]:
        return look_up(ctx, value, lanes_of(ctx, index, 1))
    return look_up_each(ctx, value, lanes_of(ctx, index, width), width)


def _random(ctx: LoopContext, value: Value, width: int) -> str:
    form, bits, stream = value.data
    seed, form = lanes_of(ctx, value.operands[0], 1), ctx.nest.space.form(form)
    steps = [c for v, c in form.terms if v != ctx.schedule.vector]
    whole_blocks = all(step % 4 == 0 for step in (form.constant, width, *steps))
    if width > 1 and bits <= 32 and lane_step(ctx, form) == 1 and whole_blocks:
        return adjacent_bits(ctx.b, seed, position(ctx, form, 1), bits, stream)
    return random_bits(ctx.b, seed, position(ctx, form, width), bits, stream)


def _choose(ctx: LoopContext, value: Value, width: int) -> str:
    if _branches(ctx, value):
        return _branched(ctx, value, width)
    if width > 1 and _is_plain_load(ctx, value):
        return _whole_or_mixed(ctx, value, width)
    return _mixed(ctx, value, width)


def _mixed(ctx: LoopContext, choice: Value, width: int) -> str:
    """Each lane by itself."""
    operands = [_lanes_to_choose(ctx, choice, k, width) for k in range(2)]
    condition = inside(ctx, choice.guards, width)
    return ctx.b.select(condition, FORMS[choice.dtype].computed, *operands)


def _is_plain_load(ctx: LoopContext, choice: Value) -> bool:
    """Return True if vectors that lie inside, as most do, are no more than a load."""
    load = choice.operands[0]
    if load.kind != "load" or _is_gathered(ctx, load) or ctx.find(load) is not None:
        return False
    return ctx.is_vector[load] and load.guards == choice.guards


def _whole_or_mixed(ctx: LoopContext, choice: Value, width: int) -> str:
    """A vector of what is inside, without looking at lanes, where all of them are."""
    b, load, type = ctx.b, choice.operands[0], FORMS[choice.dtype].computed
    with b.lanes(1):
        _, all = spans_inside(ctx, choice.guards, width)
        others = b.binary("xor", "i1", all, b.constant("i1", True))

    def alone(make_lanes: Callable[[], str]) -> Callable[[], list[str]]:
        def then() -> list[str]:
            with ctx.branch():
                return [make_lanes()]

        return then

    whole = alone(lambda: load_unguarded(ctx, load))
    (result,) = b.when(all, [(b.of(type), b.constant(type, 0))], whole)
    mixed = alone(lambda: _mixed(ctx, choice, width))
    (result,) = b.when(others, [(b.of(type), result)], mixed)
    return result


def _branches(ctx: LoopContext, choice: Value) -> bool:
    """Return True if only the chosen part is computed: one of many, the same for all lanes."""
    if sum(value.kind == "choose" for value in ctx.nest.order) <= MOST_CHOICES:
        return False
    return all(lane_step(ctx, ctx.nest.space.form(guard.form)) == 0 for guard in choice.guards)


def _branched(ctx: LoopContext, choice: Value, width: int) -> str:
    b, (chosen, otherwise) = ctx.b, choice.operands
    other = lanes_of(ctx, otherwise, width)
    with b.lanes(1):
        condition = inside(ctx, choice.guards, 1)

    def then() -> list[str]:
        with ctx.branch():
            return [lanes_of(ctx, chosen, width)]

    (result,) = b.when(condition, [(b.of(FORMS[choice.dtype].computed), other)], then)
    return result


def _lanes_to_choose(ctx: LoopContext, choice: Value, which: int, width: int) -> str:
    """An operand of a choice: made where a lane is of it, if each lane is loaded for itself."""
    b, operand = ctx.b, choice.operands[which]
    if width == 1 or not _is_gathered(ctx, operand) or ctx.find(operand) is not None:
        return lanes_of(ctx, operand, width)
    type = FORMS[operand.dtype].computed
    nothing = b.constant(type, 0)
    with b.lanes(1):
        some, all = spans_inside(ctx, choice.guards, width)
        is_used = some if which == 0 else b.binary("xor", "i1", all, b.constant("i1", True))

    def then() -> list[str]:
        with ctx.branch():
            return [lanes_of(ctx, operand, width)]

    (result,) = b.when(is_used, [(b.of(type), nothing)], then)
    return result


def _is_gathered(ctx: LoopContext, value: Value) -> bool:
    """Return True if each lane is loaded for itself."""
    if value.kind != "load" or not ctx.is_vector[value]:
        return False
    return lane_step(ctx, ctx.nest.offset(value)) != 1


def _cell(ctx: LoopContext, value: Value, width: int) -> str:
    compared = ctx.schedule.index_compared(value) if width > 1 else None
    if compared is not None:
        return _is_place(ctx, lanes_of(ctx, compared, 1), width)
    operands = [lanes_of(ctx, x, width) for x in value.operands]
    if value in ctx.checks:
        return _checked(ctx, value, operands, width)
    return computed(ctx.b, value, operands)


def _is_place(ctx: LoopContext, index: str, width: int) -> str:
    """i1 of each lane: whether its position in the row is the index, asked of small numbers."""
    b, vector = ctx.b, ctx.schedule.vector
    with b.lanes(1):
        is_there = b.value(f"icmp ult i64 {index}, {ctx.extent(vector)}")
        distance = b.where(is_there, b.index(index), -1) - ctx.variables[vector]
        lane = b.value(f"trunc i64 {distance} to i32")
    return b.compare("eq", "i32", multiples(width), b.splat("i32", lane))


def _checked(ctx: LoopContext, value: Value, operands: list[str], width: int) -> str:
    """A cell that reports what it can not compute."""
    b = ctx.b
    used = ctx.mask if width > 1 else None
    if value.guards:
        inner = inside(ctx, value.guards, width)
        used = inner if used is None else b.binary("and", "i1", inner, used)
    report = Report(ctx.fault_word, ctx.checks[value])
    if value.op is ops.WRAP_INDEX:
        size = ctx.size(value.data.attr("size"))
        return wrapped(b, value.data, operands[0], size, used, report)
    if value.op is ops.CHECK:
        return _held(b, value, operands, used, report)
    type = FORMS[value.dtype].computed
    is_zero = b.compare("eq", type, operands[1], b.constant(type, 0))
    report_where(b, is_zero, used, report)
    return computed(b, value, operands)


def _held(b: Builder, value: Value, operands: list[str], used: str | None, report: Report) -> str:
    """The first operand, where the second holds."""
    x, holds = operands
    wrong = b.binary("xor", "i1", holds, b.constant("i1", True))
    form = FORMS[value.dtype]
    whole = None if form.is_float else cast(b, form, FORMS[torch.int64], x)
    report_where(b, wrong, used, report, whole)
    return x


_MAKERS: dict[str, Callable[[LoopContext, Value, int], str]] = {
    "constant": _constant,
    "position": _position,
    "load": _load,
    "lookup": _lookup,
    "random": _random,
    "choose": _choose,
    "cell": _cell,
}
