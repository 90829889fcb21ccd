"""Pooling windows, forward and backward, on [N, *spatial, C]: a vector is adjacent channels.

Which elements a window covers is the same for all lanes, so that the edges need no masks.  A
gradient is gathered: each element of the operand asks the windows that cover it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ltc.llvm.conv.axes import Axis, Windows, padded
from ltc.llvm.emit.builder import Builder, function_text
from ltc.llvm.emit.index import Index, least, most
from ltc.llvm.emit.isa import Isa
from ltc.llvm.emit.vectors import Epilogue, GeneratedKernel, Vectors, tasks_for

MOST_UNROLLED_TAPS = 9


@dataclass(frozen=True)
class ChannelsLastPool(Windows):
    """Windows over [images, *spatial, channels]."""

    images: int
    channels: int

    @property
    def stays_inside(self) -> bool:
        """Return True if no window reaches beyond the operand."""
        return all(
            axis.first >= 0
            and (axis.count - 1) * axis.stride + axis.first + (axis.taps - 1) * axis.step
            < axis.extent
            for axis in self.axes
        )


def channels_last_max_pool(
    name: str, dtype: torch.dtype, pool: ChannelsLastPool, isa: Isa
) -> GeneratedKernel:
    """The largest element of each window and its place: "operand", "result", "indices".

    indices  as max_pool's: i64, flat in *spatial
    """
    loops = _WindowLoops(dtype, pool, isa, pool.axes, over_operand=False)
    v, b, axes = loops.v, loops.b, pool.axes
    words, n = f"<{v.width} x i32>", v.width
    lowest = f"splat ({v.element} 0xFFF0000000000000)"

    def tap(spot: tuple[Index, Index, Index], best: list[str], is_first: bool) -> list[str]:
        flat = loops.flat(spot, axes)
        at = v.splat(v.narrow(flat), "i32")
        x = v.load(loops.operand_at(flat), 0, loops.mask)
        if is_first:
            return [x, at]
        value, index = best
        larger = v.test("ogt", x, value)
        taken = b.value(f"or {v.mask_type} {larger}, {v.test('uno', x, x)}")
        if not loops.unrolls:  # no element is at -1: until one is found, the first is taken
            none = b.value(f"icmp eq {words} {index}, splat (i32 -1)")
            taken = b.value(f"or {v.mask_type} {taken}, {none}")
        return [
            v.select(taken, x, value),
            b.value(f"select {v.mask_type} {taken}, {words} {at}, {words} {index}"),
        ]

    def body(place: tuple[Index, Index, Index], channel: Index, position: Index) -> None:
        start = [(v.vector, lowest), (words, "splat (i32 -1)")]
        best, index = loops.over_taps(place, start, tap)
        at = position * pool.channels + channel
        v.store(best, "%p1", at, loops.mask)
        long = b.value(f"sext {words} {index} to <{n} x i64>")
        v.raw_store(long, v.at("%p2", at, "i64"), loops.mask, "i64", n)

    return loops.kernel(name, ("operand", "result", "indices"), body)


def channels_last_max_pool_gradient(
    name: str, dtype: torch.dtype, pool: ChannelsLastPool, isa: Isa,
    epilogue: Epilogue | None = None, operands: int = 0,
) -> GeneratedKernel:  # fmt: skip
    """The gradient of max_pool's operand: "gradient", "indices", "result".

    indices   those that max_pool gave for this pool
    epilogue  its row is the position in the operand, its column the channel
    """
    loops = _WindowLoops(dtype, pool, isa, pool.axes, over_operand=True)
    v, b, n = loops.v, loops.b, loops.v.width

    def body(place, channel: Index, position: Index) -> None:
        own = v.splat(loops.flat_operand(place), "i64")

        def window(spot: Index, total: str) -> str:
            at = spot * pool.channels + channel
            index = v.raw_load(v.at("%p1", at, "i64"), loops.mask, "i64", n)
            chosen = b.value(f"icmp eq <{n} x i64> {index}, {own}")
            gradient = v.load("%p0", at, loops.mask)
            part = v.select(chosen, gradient, v.zero)
            return v.add(total, part)

        total = loops.over_windows(place, window)
        loops.store(total, position, channel, epilogue, "%p2")

    arguments = ("gradient", "indices", "result", *(f"operand{i}" for i in range(operands)))
    return loops.kernel(name, arguments, body)


def channels_last_average_pool(
    name: str,
    dtype: torch.dtype,
    pool: ChannelsLastPool,
    isa: Isa,
    count_padding: bool,
    divisor: int,
) -> GeneratedKernel:
    """The mean of each window: "operand", "result"; arguments as average_pool's."""
    loops = _WindowLoops(dtype, pool, isa, pool.axes, over_operand=False)
    v = loops.v

    def tap(spot, best: list[str], is_first: bool) -> list[str]:
        x = v.load(loops.operand_at(loops.flat(spot, pool.axes)), 0, loops.mask)
        return [x if is_first else v.add(best[0], x)]

    def body(place, channel: Index, position: Index) -> None:
        (total,) = loops.over_taps(place, [(v.vector, v.zero)], tap)
        by = _divisor(v, pool, place, count_padding, divisor)
        mean = v.div(total, by)
        loops.store(mean, position, channel, None, "%p1")

    return loops.kernel(name, ("operand", "result"), body)


def channels_last_average_pool_gradient(
    name: str,
    dtype: torch.dtype,
    pool: ChannelsLastPool,
    isa: Isa,
    count_padding: bool,
    divisor: int,
) -> GeneratedKernel:
    """The gradient of average_pool's operand: "gradient", "result"."""
    loops = _WindowLoops(dtype, pool, isa, pool.axes, over_operand=True)
    v = loops.v

    def body(place, channel: Index, position: Index) -> None:
        def window(spot: Index, total: str) -> str:
            gradient = v.load("%p0", spot * pool.channels + channel, loops.mask)
            by = _divisor(v, pool, loops.window, count_padding, divisor)
            return v.add(total, v.div(gradient, by))

        loops.store(loops.over_windows(place, window), position, channel, None, "%p1")

    return loops.kernel(name, ("gradient", "result"), body)


class _WindowLoops:
    """Every position and vector of channels of the result, or of the operand for a gradient.

    Attributes:
        mask: The mask of the lanes that exist, or None.
        image: The image at hand.
        channel: The first of the vector at hand.
        window: The depth, height and width of the window at hand.
    """

    def __init__(self, dtype, pool: ChannelsLastPool, isa: Isa, axes, over_operand: bool):
        self.b = Builder()
        self.v = Vectors(self.b, isa, dtype)
        self.pool, self.axes, self.over_operand = pool, axes, over_operand
        self.taps = axes[0].taps * axes[1].taps * axes[2].taps
        self.unrolls = pool.stays_inside and self.taps <= MOST_UNROLLED_TAPS
        self.extents = [axis.extent if over_operand else axis.count for axis in axes]

    def kernel(self, name: str, arguments: tuple[str, ...], body: Callable) -> GeneratedKernel:
        v, b, pool = self.v, self.b, self.pool
        deep, high, wide = self.extents
        size = deep * high * wide
        lines = b.number(0) * (deep * high)

        def line(number: Index, _) -> None:
            self.image, rest = divmod(number, deep * high)
            place = divmod(rest, high)
            start = number * wide
            b.loop(0, wide, 1, [], lambda w, _: pixel((*place, w), start + w))

        def pixel(place, position: Index) -> None:
            def vector(channel: Index) -> None:
                self.channel = channel
                body(place, channel, position)

            whole = pool.channels // v.width * v.width
            self.mask = None
            if whole:
                b.loop(0, whole, v.width, [], lambda c, _: vector(c))
            if whole < pool.channels:
                self.mask = v.first(pool.channels - whole)
                vector(whole)

        if size and pool.channels:
            b.loop(*b.share(lines), 1, [], line)
        work = pool.images * size * pool.channels * self.taps
        tasks = tasks_for(4 * work, pool.images * deep * high, 1)
        text = function_text(name, len(arguments), b, 1)
        return GeneratedKernel(name, text, arguments, tasks, work, (pool.images,))

    def store(self, value: str, position: Index, channel: Index, epilogue, pointer: str) -> None:
        v = self.v
        if epilogue is not None:
            with self.b.lanes(v.width):
                value = epilogue(self.b, value, position, channel, self.mask)
        v.store(value, pointer, position * self.pool.channels + channel, self.mask)

    # --- from a window to its elements ------------------------------------------------------------

    def over_taps(self, place, start, tap: Callable) -> list[str]:
        """Return the result of tap(element, carried, is it the first) after all taps that exist."""
        axes = self.axes
        if self.unrolls:
            values = [value for _, value in start]
            for k in range(self.taps):
                d, rest = divmod(k, axes[1].taps * axes[2].taps)
                h, w = divmod(rest, axes[2].taps)
                spot = tuple(x.input_index(p, t) for x, p, t in zip(axes, place, (d, h, w)))
                values = tap(spot, values, k == 0)
            return values
        return self._taps_of(0, place, (), start, tap)

    def _taps_of(self, dim: int, place, spot, carried, tap) -> list[str]:
        if dim == 3:
            return tap(spot, [value for _, value in carried], False)
        axis = self.axes[dim]

        def one(t: Index, values: list[str]) -> list[str]:
            at = axis.input_index(place[dim], t)
            inside = self.b.value(f"icmp ult i64 {at}, {axis.extent}")
            typed = [(type, value) for (type, _), value in zip(carried, values)]
            return self.b.when(
                inside, typed, lambda: self._taps_of(dim + 1, place, (*spot, at), typed, tap)
            )

        return self.b.loop(0, axis.taps, 1, carried, one)

    def flat(self, spot, axes) -> Index:
        """The place of an element of the operand in its flat *spatial."""
        total: Index = 0
        for at, axis in zip(spot, axes):
            total = total * axis.extent + at
        return total

    def flat_operand(self, place) -> Index:
        return self.flat(place, self.axes)

    def operand_at(self, flat: Index) -> str:
        v = self.v
        size = self.axes[0].extent * self.axes[1].extent * self.axes[2].extent
        at = self.image * size + flat
        return v.at("%p0", at * self.pool.channels + self.channel)

    # --- from an element to its windows -----------------------------------------------------------

    def over_windows(self, place, window: Callable) -> str:
        """The sum that window(its position in the whole result, total) makes, in their order."""
        return self._windows_of(0, place, (), self.v.zero, window)

    def _windows_of(self, dim: int, place, spot, total: str, window: Callable) -> str:
        v, b = self.v, self.b
        if dim == 3:
            self.window = spot
            flat: Index = self.image
            for at, axis in zip(spot, self.axes):
                flat = flat * axis.count + at
            return window(flat, total)
        axis = self.axes[dim]
        if axis.taps == axis.stride == axis.step == 1 and axis.first == 0:
            return self._windows_of(dim + 1, place, (*spot, place[dim]), total, window)
        low, high = self._covering(axis, place[dim])

        def one(o: Index, values: list[str]) -> list[str]:
            if axis.step == 1:
                return [self._windows_of(dim + 1, place, (*spot, o), values[0], window)]
            # Between the taps of a dilated window are elements that it does not cover.
            apart = place[dim] - axis.first - o * axis.stride
            touches = b.value(f"icmp eq i64 {apart % axis.step}, 0")
            return b.when(touches, [(v.vector, values[0])], lambda: [
                self._windows_of(dim + 1, place, (*spot, o), values[0], window)
            ])  # fmt: skip

        return b.loop(low, high, 1, [(v.vector, total)], one)[0]

    def _covering(self, axis: Axis, element: Index) -> tuple[Index, Index]:
        """The windows, from the first up to but not including the second, around an element."""
        at = element - axis.first
        last = at // axis.stride
        reach = (axis.taps - 1) * axis.step + 1
        beyond = most(at + (axis.stride - reach), 0)
        return beyond // axis.stride, least(last + 1, axis.count)


def _divisor(v: Vectors, pool: ChannelsLastPool, place, count_padding: bool, divisor: int) -> str:
    """Return the divisor of a window's sum."""
    if divisor:
        return v.constant(divisor)
    if pool.stays_inside and not any(pool.padding):
        return v.constant(pool.axes[0].taps * pool.axes[1].taps * pool.axes[2].taps)
    b, total = v.builder, 1
    for at, axis, padding in zip(place, pool.axes, padded(pool.padding, 0)):
        start = at * axis.stride + axis.first
        end = least(start + axis.taps, axis.extent + padding)
        if not count_padding:
            start, end = most(start, 0), least(end, axis.extent)
        total = total * (end - start)
    if isinstance(total, int):
        return v.constant(total)
    return v.splat(b.value(f"sitofp i64 {total} to {v.element}"))
