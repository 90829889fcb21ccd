"""Pooling windows, forward and backward, on [planes, *spatial]: planes are images times channels.

Every kernel takes lines of its result as chunks; one vector is adjacent columns of a line.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ltc.llvm.conv.axes import Axis, Windows, count_inside, padded
from ltc.llvm.emit.builder import Builder, function_text
from ltc.llvm.emit.dtype import BYTES
from ltc.llvm.emit.index import Index, least, most
from ltc.llvm.emit.isa import Isa
from ltc.llvm.emit.vectors import GeneratedKernel, Vectors, tasks_for


@dataclass(frozen=True)
class Pool(Windows):
    """Windows over planes."""

    planes: int


def max_pool(name: str, dtype: torch.dtype, pool: Pool, isa: Isa) -> GeneratedKernel:
    """The largest element of each window and its place: "operand", "result", "indices".

    dtype    of operand and result: float64, float32, or float16 and bfloat16
    indices  i64, flat in *spatial: the first of equals, and the last NaN where there is one
    """
    b = Builder()
    v = Vectors(b, isa, dtype)
    axes = deep, high, wide = pool.axes
    words, n = f"<{v.width} x i32>", v.width
    lowest = f"splat ({v.element} 0xFFF0000000000000)"

    def line(number: Index, _) -> None:
        plane, place, (o, p) = _line(v, number, axes)
        source = v.at("%p0", plane * _extent(axes))
        b.loop(0, wide.count, n, [], lambda column, _: columns(source, place, o, p, column))

    def columns(source, place, o, p, column) -> None:
        # No element is at -1: until one is found, the first in the window is taken.
        start = [(v.vector, lowest), (words, "splat (i32 -1)")]
        best, index = b.nest((deep.taps, high.taps), start, lambda d, h, best: taps(
            source, o, p, column, d, h, best
        ))  # fmt: skip
        mask = v.first(wide.count - column)
        at = place + column
        v.store(best, "%p1", at, mask)
        long = b.value(f"sext {words} {index} to <{n} x i64>")
        v.raw_store(long, v.at("%p2", at, "i64"), mask, "i64", n)

    def taps(source, o, p, column, d, h, best) -> list[str]:
        down, across = deep.input_index(o, d), high.input_index(p, h)
        limit = count_inside(b, axes, down, across, wide.extent)
        line = (down * high.extent + across) * wide.extent
        here = v.at(source, line)
        typed = [(v.vector, best[0]), (words, best[1])]
        return b.loop(0, wide.taps, 1, typed, lambda w, best: tap(
            here, line, limit, wide.input_index(column, w), best
        ))  # fmt: skip

    def tap(here, line, limit, first, best) -> list[str]:
        value, index = best
        x = v.strided(here, first, wide.stride, v.masks_of(first, wide.stride, limit))
        inside = v.between(first, limit, wide.stride)
        larger = v.test("ogt", x, value)
        larger = b.value(f"or {v.mask_type} {larger}, {v.test('uno', x, x)}")
        none = b.value(f"icmp eq {words} {index}, splat (i32 -1)")
        taken = b.value(f"or {v.mask_type} {larger}, {none}")
        taken = b.value(f"and {v.mask_type} {taken}, {inside}")
        at = v.numbers(line + first, wide.stride)
        return [
            v.select(taken, x, value),
            b.value(f"select {v.mask_type} {taken}, {words} {at}, {words} {index}"),
        ]

    return _over_lines(name, v, ("operand", "result", "indices"), pool.planes, axes, line)


def max_pool_gradient(
    name: str, dtype: torch.dtype, planes: int, operand: tuple[int, ...],
    result: tuple[int, ...], isa: Isa,
) -> GeneratedKernel:  # fmt: skip
    """The gradient of max_pool's operand: "gradient", "indices", "result", "fault".

    gradient, indices  [planes, *result]; each gradient is added where its index says
    fault              one i64, set where an index lies outside its plane, which adds nothing: that
                       index in its upper bits, 1 in its lowest 8
    """
    b = Builder()
    v = Vectors(b, isa, dtype)
    size, count = _product(operand), _product(result)
    stored = v.stored == v.element

    def plane(number: Index, _) -> None:
        target = v.at("%p2", number * size)
        b.loop(0, size, v.width, [], lambda i, _: v.store(
            v.zero, target, i, v.first(size - i)
        ))  # fmt: skip
        start = number * count
        b.loop(0, count, 1, [], lambda i, _: add(target, start + i))

    def add(target: str, at: Index) -> None:
        index = b.index(b.effect(f"load i64, ptr {v.at('%p1', at, 'i64')}, align 8"))
        inside = b.value(f"icmp ult i64 {index}, {size}")
        b.when(inside, [], lambda: add_one(v.at(target, index), at))
        outside = b.value(f"xor i1 {inside}, true")
        b.when(outside, [], lambda: note(index))

    def note(index: Index) -> None:
        upper = b.value(f"shl i64 {index}, 8")
        b.emit(f"store i64 {b.value(f'or i64 {upper}, 1')}, ptr %p3, align 8")

    def add_one(spot: str, at: Index) -> None:
        total = b.value(f"fadd {v.element} {v.scalar(spot)}, {v.scalar('%p0', at)}")
        if stored:
            b.emit(f"store {v.element} {total}, ptr {spot}, align {BYTES[v.element]}")
            return
        v.store(v.splat(total), spot, 0, v.first(1))

    if planes and size:
        b.loop(*b.share(planes), 1, [], plane)
    arguments = ("gradient", "indices", "result", "fault")
    tasks = tasks_for(8 * planes * (size + count), planes, 1)
    return GeneratedKernel(name, function_text(name, 4, b), arguments, tasks, planes * count)


def average_pool(
    name: str, dtype: torch.dtype, pool: Pool, isa: Isa, count_padding: bool, divisor: int
) -> GeneratedKernel:
    """The mean of each window: "operand", "result".

    Args:
        count_padding: True if padding that a window covers counts as zeros, as torch's
            count_include_pad; what lies even further out never does.
        divisor: The divisor of sums in place of the count, or 0.
    """
    b = Builder()
    v = Vectors(b, isa, dtype)
    axes = deep, high, wide = pool.axes

    def line(number: Index, _) -> None:
        plane, place, (o, p) = _line(v, number, axes)
        source = v.at("%p0", plane * _extent(axes))
        b.loop(0, wide.count, v.width, [], lambda column, _: columns(source, place, o, p, column))

    def columns(source, place, o, p, column) -> None:
        (total,) = b.nest((deep.taps, high.taps), v.typed([v.zero]), lambda d, h, total: taps(
            source, o, p, column, d, h, total
        ))  # fmt: skip
        by = _divisors(v, pool, (o, p), v.numbers(column), count_padding, divisor)
        mean = v.div(total, by)
        v.store(mean, "%p1", place + column, v.first(wide.count - column))

    def taps(source, o, p, column, d, h, total) -> list[str]:
        down, across = deep.input_index(o, d), high.input_index(p, h)
        limit = count_inside(b, axes, down, across, wide.extent)
        here = v.at(source, (down * high.extent + across) * wide.extent)

        def tap(w: Index, total: list[str]) -> list[str]:
            first = wide.input_index(column, w)
            masks = v.masks_of(first, wide.stride, limit)
            return [v.add(total[0], v.strided(here, first, wide.stride, masks))]

        return b.loop(0, wide.taps, 1, v.typed(total), tap)

    return _over_lines(name, v, ("operand", "result"), pool.planes, axes, line)


def average_pool_gradient(
    name: str, dtype: torch.dtype, pool: Pool, isa: Isa, count_padding: bool, divisor: int
) -> GeneratedKernel:
    """The gradient of average_pool's operand: "gradient", "result".

    Each element adds the shares of the windows that cover it, in their order.
    """
    b = Builder()
    v = Vectors(b, isa, dtype)
    windows = deep, high, wide = pool.axes
    # The lines walked over are those of the operand, which is the result here.
    axes = tuple(Axis(0, axis.extent, 1, 0, 1, 1) for axis in windows)
    size = deep.count * high.count * wide.count
    covering = -(-wide.taps // wide.stride)  # windows that cover one column

    def line(number: Index, _) -> None:
        plane, place, (i, j) = _line(v, number, axes)
        source = v.at("%p0", plane * size)
        b.loop(0, wide.extent, v.width, [], lambda column, _: columns(source, place, i, j, column))

    def columns(source, place, i, j, column) -> None:
        ranges = (*_covering(deep, i), 1), (*_covering(high, j), 1), covering
        (total,) = b.nest(ranges, v.typed([v.zero]), lambda o, p, u, total: [
            v.add(total[0], share_of(source, o, p, column, u))
        ])  # fmt: skip
        v.store(total, "%p1", place + column, v.first(wide.extent - column))

    def share_of(source, o, p, column, u) -> str:
        """Return the share that the u-th of the windows gives to adjacent columns that it may
        cover.
        """
        words = f"<{v.width} x i32>"
        at = v.numbers(column - wide.first)
        last = b.value(f"udiv {words} {at}, splat (i32 {wide.stride})")
        back = v.splat(v.narrow(covering - 1 - u), "i32")
        window = b.value(f"sub {words} {last}, {back}")
        known = b.value(f"icmp ult {words} {window}, splat (i32 {wide.count})")
        start = b.value(f"mul {words} {window}, splat (i32 {wide.stride})")
        within = b.value(f"sub {words} {at}, {start}")
        covers = b.value(f"icmp ult {words} {within}, splat (i32 {wide.taps})")
        mask = b.value(f"and {v.mask_type} {known}, {covers}")
        line = v.at(source, (o * high.count + p) * wide.count)
        gradient = v.gather(line, window, mask)
        by = _divisors(v, pool, (o, p), window, count_padding, divisor)
        part = v.div(gradient, by)
        return v.select(mask, part, v.zero)

    return _over_lines(name, v, ("gradient", "result"), pool.planes, axes, line)


# --- what they share ----------------------------------------------------------------------------


def _over_lines(name, v: Vectors, arguments, planes, axes, line) -> GeneratedKernel:
    """The kernel that runs `line` for every line of every plane of the result."""
    lines = planes * axes[0].count * axes[1].count
    if lines and axes[2].count:
        v.builder.loop(*v.builder.share(lines), 1, [], line)
    taps = axes[0].taps * axes[1].taps * axes[2].taps
    work = lines * axes[2].count * taps
    text = function_text(name, len(arguments), v.builder)
    return GeneratedKernel(name, text, arguments, tasks_for(8 * work, lines, 1), work)


def _line(v: Vectors, number: Index, axes):
    """The plane of a line of the result, where the line begins, and its depth and height."""
    deep, high, wide = axes
    plane, line = divmod(number, deep.count * high.count)
    return plane, number * wide.count, divmod(line, high.count)


def _product(extents) -> int:
    total = 1
    for extent in extents:
        total *= extent
    return total


def _extent(axes) -> int:
    return _product(axis.extent for axis in axes)


def _covering(axis: Axis, element: Index) -> tuple[Index, Index]:
    """The windows, from the first up to but not including the second, that cover an element."""
    at = element - axis.first
    last = at // axis.stride
    beyond = most(at + (axis.stride - axis.taps), 0)
    return beyond // axis.stride, least(last + 1, axis.count)


def _divisors(
    v: Vectors, pool: Pool, lines, columns: str, count_padding: bool, divisor: int
) -> str:
    """Return the divisors of adjacent windows' sums; `columns` are their i32 numbers."""
    if divisor:
        return v.constant(divisor)
    b, words = v.builder, f"<{v.width} x i32>"
    total = None
    places = (*lines, columns)
    for place, axis, padding in zip(places, pool.axes, padded(pool.padding, 0)):
        at = place if place is columns else v.splat(v.narrow(place), "i32")
        start: str = b.value(f"mul {words} {at}, splat (i32 {axis.stride})")
        start = b.value(f"add {words} {start}, splat (i32 {axis.first})")
        end: str = b.value(f"add {words} {start}, splat (i32 {axis.taps})")
        end = _bounded(v, "smin", end, axis.extent + padding)
        if not count_padding:
            start, end = _bounded(v, "smax", start, 0), _bounded(v, "smin", end, axis.extent)
        covered = b.value(f"sub {words} {end}, {start}")
        total = covered if total is None else b.value(f"mul {words} {total}, {covered}")
    return b.value(f"sitofp {words} {total} to {v.vector}")


def _bounded(v: Vectors, which: str, x: str, limit: int) -> str:
    words = f"<{v.width} x i32>"
    function = f"llvm.{which}.v{v.width}i32"
    return v.builder.pure_call(function, words, (words, x), (words, f"splat (i32 {limit})"))
