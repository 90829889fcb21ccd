"""Kernels that change part of a value: they visit that part alone.

What is left of the value is there already where the kernel writes in place; else it is copied first.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from ltc.ir import ops
from ltc.ir.loop_nest import (
    ZERO,
    Guard,
    Kernel,
    Product,
    Store,
    Unit,
    Value,
    bounds,
    flattened,
    identity,
    variable,
)  # fmt: skip
from ltc.ir.node import Node, constant_value
from ltc.passes.fusion.column_sums import Renaming, renamed, renamed_guards
from ltc.support.sizes.choices import by_sample

FEWEST_PARTS = 2  # of a value, of the size of a change: else all of it is computed, without a copy


def is_strided_insert(node: Node) -> bool:
    """Return True if the inserted elements do not lie side by side, which no guard can express."""
    return node.op is ops.INSERT and any(step != 1 for step in node.attr("steps"))


def changed_part(unit: Unit) -> Unit:
    """The unit itself, or a kernel over the points where it changes its base."""
    if isinstance(unit, Product) and unit.node.op is ops.INSERT:
        return _inserted(unit)
    if isinstance(unit, Kernel):
        return _over_changes(unit) or unit
    return unit


def _inserted(product: Product) -> Kernel:
    """A strided insert as a kernel over what is inserted."""
    node, (base, new) = product.node, product.operands
    space = node.inputs[1].shape
    form = zip(identity(space), node.attr("starts"), node.attr("steps"))
    offset = flattened(tuple(i.times(step).shifted(start) for i, start, step in form), node.shape)
    if new.node.op is ops.CONSTANT:
        value = Value("constant", node.dtype, data=repr(constant_value(new.node)))
    else:
        value = Value("load", node.dtype, data=(new.node, new.offset))
    return Kernel(space, len(space), (Store(node, value, offset),), base.node)


def _over_changes(kernel: Kernel) -> Kernel | None:
    """The kernel over the points where its only store is not of what is there."""
    if len(kernel.stores) != 1 or kernel.depth != len(kernel.space):
        return None
    (store,) = kernel.stores
    base = _left_as_it_is(store)
    if base is None:
        return None
    ranges = _ranges(store.value.guards, kernel.space)
    if ranges is None:
        return None
    space = tuple(high - low for low, high in ranges)
    if not prod(space) or _is_most(space, kernel.space):
        return None
    moved = [
        variable(v, high - low).shifted(low) if kernel.space[v] > 1 else ZERO
        for v, (low, high) in enumerate(ranges)
    ]
    value = _moved(store.value.operands[0], moved, space)
    changes = Store(store.node, value, renamed(store.offset, moved))
    return Kernel(space, len(space), (changes,), base)


def _is_most(changes: tuple[int, ...], space: tuple[int, ...]) -> bool:
    """Return True if it is better to compute the whole value."""
    with by_sample(*changes, *space):
        return prod(changes) * FEWEST_PARTS > prod(space)


def _left_as_it_is(store: Store) -> Node | None:
    """Return the node stored outside the guards of the store's choice: an element left where it
    lies.
    """
    choice = store.value
    if choice.kind != "choose" or store.sums:
        return None
    other = choice.operands[1]
    if other.kind != "load" or other.guards or other.data[1] != store.offset:
        return None
    base: Node = other.data[0]
    is_whole = store.node.size == base.size and store.node.dtype == base.dtype
    return base if is_whole else None


def _ranges(guards: tuple[Guard, ...], space: tuple[int, ...]) -> list[tuple[int, int]] | None:
    """From where to where each variable goes inside the guards; None where they are no box."""
    ranges = [(0, extent) for extent in space]
    for guard in guards:
        if len(guard.form.terms) != 1 or guard.form.terms[0][1] != 1:
            return None
        ((v, _),) = guard.form.terms
        low, high = ranges[v]
        shift = guard.form.constant
        ranges[v] = max(low, guard.low - shift), max(low, min(high, guard.high - shift))
    return ranges


def _moved(root: Value, by: Renaming, space: tuple[int, ...]) -> Value:
    """The value, and all that it is made of, at variables that count from where the changes begin."""
    made: dict[Value, Value] = {}
    waiting = [root]
    while waiting:
        value = waiting[-1]
        missing = [x for x in value.operands if x not in made]
        if missing:
            waiting += missing
            continue
        waiting.pop()
        guards = _needed(renamed_guards(value.guards, by), space)
        operands = tuple(made[x] for x in value.operands)
        if value.kind == "choose" and not guards:
            made[value] = operands[0]
            continue
        data = _moved_data(value, by)
        made[value] = replace(value, operands=operands, data=data, guards=guards)
    return made[root]


def _needed(guards: tuple[Guard, ...], space: tuple[int, ...]) -> tuple[Guard, ...]:
    """The guards that do not hold everywhere."""
    found = []
    for guard in guards:
        low, high = bounds(guard.form, space)
        if low < guard.low or high >= guard.high:
            found.append(guard)
    return tuple(found)


def _moved_data(value: Value, by: Renaming) -> object:
    if value.kind == "position":
        return renamed(value.data, by)
    if value.kind in ("load", "lookup"):
        node, offset, *rest = value.data
        return (node, renamed(offset, by), *rest)
    if value.kind == "random":
        form, *rest = value.data
        return (renamed(form, by), *rest)
    return value.data
