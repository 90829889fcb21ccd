"""Depthwise convolutions on [N, *spatial, C]: each channel has weights of its own.

A vector is adjacent channels, each lane with its own weights.  The operand's lines are copied with
their padding; a few positions of a line keep their sums in registers over all taps.
"""

from __future__ import annotations

import torch

from ltc.llvm.builder import Builder, function_text
from ltc.llvm.geometry import Geometry, KernelSequence
from ltc.llvm.isa import Isa
from ltc.llvm.lanes import (
    BYTES,
    Epilogue,
    GeneratedKernel,
    Index,
    Lanes,
    multiples,
    require_stack,
    reserved,
    share,
    tasks_for,
)  # fmt: skip
from ltc.llvm.slots import Slots, adding_kernel, images_of
from ltc.llvm.strips import Strip, ascending, strip_extents
from ltc.llvm.windows import Axes, forward_axes, gradient_phases, padded

STRIP_BYTES = 256 * 1024
STRIP_PIXELS = 512
MOST_POSITIONS = 12  # of a tile
MOST_TAPS_TOGETHER = 25  # whose sums a weight's gradient keeps in registers
MOST_SLOTS = 16


def is_depthwise(geometry: Geometry) -> bool:
    """Whether each channel of the operand gives one of the result."""
    channels = geometry.operand[1]
    return geometry.groups == channels == geometry.weight[0] and channels > 1


def depthwise_convolution(
    name: str, dtype: torch.dtype, geometry: Geometry, isa: Isa,
    epilogue: Epilogue | None = None, operands: int = 0,
) -> KernelSequence:  # fmt: skip
    """[N, *windows, C] of operand [N, *spatial, C] and weight [C, 1, *kernel]."""
    body = _Sums(dtype, geometry, forward_axes(*geometry.window), isa, epilogue)
    return KernelSequence((body.kernel(name, "operand", operands),), {})


def depthwise_input_gradient(
    name: str, dtype: torch.dtype, geometry: Geometry, isa: Isa,
    epilogue: Epilogue | None = None, operands: int = 0,
) -> KernelSequence:  # fmt: skip
    """The gradient [N, *spatial, C] of the operand: "weight", "gradient", "result"."""
    bodies = [
        _Sums(dtype, geometry, axes, isa, epilogue) for axes in gradient_phases(*geometry.window)
    ]
    kernels = tuple(body.kernel(name, "gradient", operands) for body in bodies)
    return KernelSequence(kernels, {})


def depthwise_weight_gradient(
    name: str, dtype: torch.dtype, geometry: Geometry, isa: Isa,
    epilogue: Epilogue | None = None, operands: int = 0,
) -> KernelSequence:  # fmt: skip
    """The gradient [C, 1, *kernel] of the weight; arguments as channels_last_weight_gradient's."""
    body = _SlotSums(dtype, geometry, isa)
    last = adding_kernel(
        name, dtype, isa, body.slots, lambda l, column: column, epilogue, operands
    )
    return KernelSequence((body.kernel(name), last), {"partial": body.slots.bytes(body.l.element)})


class _Strips:
    """What the kernels share: the strips of an operand, and the walk over them."""

    def __init__(self, dtype, geometry: Geometry, axes: Axes, isa: Isa):
        self.b = Builder()
        self.l = l = Lanes(self.b, isa, dtype)
        self.geometry, self.axes = geometry, ascending(axes)
        self.channels = geometry.weight[0]
        self.taps = axes[0].taps * axes[1].taps * axes[2].taps
        self.images, self.lines = strip_extents(
            self.axes, self.channels, BYTES[l.element], 1, STRIP_PIXELS, STRIP_BYTES
        )
        self.strips = -(-axes[1].count // max(1, self.lines))
        self.strip = Strip(l, self.axes, self.channels, self.channels, self.images, self.lines)
        self.vectors = -(-self.channels // l.width)
        self.work = 2 * geometry.operand[0] * self.channels * self.taps
        for axis in axes:
            self.work *= axis.count

    def lines_from(self, line: Index) -> Index:
        high = self.axes[1]
        if high.count % max(1, self.lines) == 0:
            return self.lines
        return self.l.least(self.lines, self.l.minus(high.count, line))

    def mask(self, channel: Index) -> str | None:
        l = self.l
        return l.first(l.minus(self.channels, channel)) if self.channels % l.width else None


class _Sums(_Strips):
    """result[n, o, c] = sum over t of operand[n, o meets t, c] * weight[c, t].

    The pointers are the weight, the operand and the result; the number is the images.
    """

    def __init__(self, dtype, geometry: Geometry, axes: Axes, isa: Isa, epilogue):
        super().__init__(dtype, geometry, axes, isa)
        self.epilogue = epilogue
        most = min(MOST_POSITIONS, isa.registers - 3)
        count = axes[2].count
        tiles = max(1, -(-count // most))
        width, wider = divmod(count, tiles)
        self.widths = [(w, n) for w, n in ((width + 1, wider), (width, tiles - wider)) if w and n]

    def kernel(self, name: str, operand: str, operands: int) -> GeneratedKernel:
        l, b, deep = self.l, self.b, self.axes[0]
        packed_size = max(1, self.taps) * self.vectors * l.width
        require_stack(self.strip.bytes + packed_size * BYTES[l.element], "convolution")
        images = self.geometry.operand[0]
        each = deep.count * self.strips
        units = -(-images // self.images) * each
        if self.work or not self.taps:
            self.strip.reserve()
            self.packed = reserved(b, packed_size, l.element)
            self._pack()
            blocks = b.value(f"udiv i64 {l.plus('%n0', self.images - 1)}, {self.images}")
            b.loop(*share(l, l.times(blocks, each)), 1, [], lambda unit, _: self._unit(unit))
        arguments = ("weight", operand, "result", *(f"operand{i}" for i in range(operands)))
        text = function_text(name, len(arguments), b, 1)
        tasks = tasks_for(4 * self.work, units, 1)
        return GeneratedKernel(name, text, arguments, tasks, self.work, (images,))

    def _pack(self) -> None:
        """packed[tap, channel]"""
        l, extents = self.l, padded(self.geometry.weight[2:], 1)
        size = extents[0] * extents[1] * extents[2]
        elements = [0]
        for axis, extent in zip(self.axes, extents):
            first, step = axis.kernel
            elements = [e * extent + first + t * step for e in elements for t in range(axis.taps)]

        def vector(c: Index, _) -> None:
            here, mask = l.at("%p0", l.times(c, size)), self.mask(c)
            for tap, element in enumerate(elements):
                value = l.gather(l.at(here, element), multiples(l.width, size), mask)
                l.store_computed(value, self.packed, l.plus(c, tap * self.vectors * l.width))

        self.b.loop(0, self.channels, l.width, [], vector)

    def _unit(self, unit: Index) -> None:
        l, b = self.l, self.b
        block, rest = l.divided(unit, self.axes[0].count * self.strips)
        deep, number = l.divided(rest, self.strips)
        first, line = l.times(block, self.images), l.times(number, self.lines)
        images, lines = l.least(self.images, l.minus("%n0", first)), self.lines_from(line)
        self.strip.copy("%p1", 0, first, images, deep, line)

        def one_line(n: Index, i: Index) -> None:
            position = self._position(l.plus(first, n), deep, l.plus(line, i))
            b.loop(0, self.channels, l.width, [], lambda c, _: vector(n, i, position, c))

        def vector(n: Index, i: Index, position: Index, channel: Index) -> None:
            start = 0
            for width, count in self.widths:
                def tile(j: Index, _=None, width=width) -> None:
                    place = l.plus(self.strip.place(n, i, j), channel)
                    self._tile(l.at(self.strip.memory, place, l.element), width, position, j,
                               channel)  # fmt: skip

                if count == 1:
                    tile(start)
                else:
                    b.loop(start, start + width * count, width, [], tile)
                start += width * count

        b.loop(0, images, 1, [], lambda n, _: b.loop(
            0, lines, 1, [], lambda i, _: one_line(n, i)
        ) and None)  # fmt: skip

    def _position(self, image: Index, deep: Index, line: Index) -> Index:
        """The flat position in the result of a line's first element."""
        l, total = self.l, image
        for index, axis in zip((deep, line, 0), self.axes):
            at = l.plus(l.times(index, axis.place[1]), axis.place[0])
            total = l.plus(l.times(total, axis.result), at)
        return total

    def _tile(self, place: str, width: int, position: Index, column: Index, channel: Index) -> None:
        l, b = self.l, self.b
        deep, high, wide = self.axes
        weights = l.at(self.packed, channel, l.element)

        def typed(values: list[str]) -> list[tuple[str, str]]:
            return [(l.vector, value) for value in values]

        def tap(d: Index, h: Index, w: Index, values: list[str]) -> list[str]:
            k = l.plus(l.times(l.plus(l.times(d, high.taps), h), wide.taps), w)
            weight = l.load_computed(weights, l.times(k, self.vectors * l.width))
            here = l.at(place, self.strip.tap(d, h, w), l.element)
            return [
                l.multiply_add(l.load_computed(here, self.strip.place(0, 0, r)), weight, value)
                for r, value in enumerate(values)
            ]

        sums = b.loop(0, deep.taps, 1, typed([l.zero] * width), lambda d, values: b.loop(
            0, high.taps, 1, typed(values), lambda h, values: b.loop(
                0, wide.taps, 1, typed(values), lambda w, values: tap(d, h, w, values)
            )
        ))  # fmt: skip
        for r, value in enumerate(sums):
            row = l.plus(position, l.times(l.plus(column, r), wide.place[1]))
            self._store(value, row, channel)

    def _store(self, value: str, row: Index, channel: Index) -> None:
        l, mask = self.l, self.mask(channel)
        if self.epilogue is not None:
            with self.b.lanes(l.width):
                value = self.epilogue(self.b, value, row, channel, mask)
        l.store(value, "%p2", l.plus(l.times(row, self.channels), channel), mask)


class _SlotSums(_Strips):
    """partial[slot, vector of channels, tap, lane]: what each slot's images add to the gradient.

    The pointers are the gradient, the operand and the partial sums; the number is the images.
    """

    def __init__(self, dtype, geometry: Geometry, isa: Isa):
        super().__init__(dtype, geometry, forward_axes(*geometry.window), isa)
        count = max(1, min(MOST_SLOTS, geometry.operand[0]))
        self.slots = Slots(count, 1, self.channels, self.l.width, self.taps)

    def kernel(self, name: str) -> GeneratedKernel:
        l, b, slots = self.l, self.b, self.slots
        require_stack(self.strip.bytes, "convolution")
        if slots.of_one:
            self.strip.reserve()
            b.loop(*share(l, slots.count), 1, [], self._slot)
        text = function_text(name, 3, b, 1)
        tasks = tasks_for(4 * self.work, slots.count, 1)
        arguments = ("gradient", "operand", "partial")
        images = self.geometry.operand[0]
        return GeneratedKernel(name, text, arguments, tasks, self.work, (images,))

    def _slot(self, slot: str, _) -> None:
        l, b, size = self.l, self.b, self.slots.of_one
        self.partial = l.at("%p2", l.times(slot, size), l.element)
        b.loop(0, size, l.width, [], lambda i, _: l.store_computed(l.zero, self.partial, i))
        first, last = images_of(l, slot, "%n0", self.slots.count)

        def images(n: str, _) -> None:
            count = l.least(self.images, l.minus(last, n))
            b.loop(0, self.axes[0].count, 1, [], lambda deep, _: b.loop(
                0, self.strips, 1, [], lambda strip, _: self._strip(
                    n, count, deep, l.times(strip, self.lines)
                )
            ) and None)  # fmt: skip

        b.loop(first, last, self.images, [], images)

    def _strip(self, first: Index, images: Index, deep: Index, line: Index) -> None:
        l, b, (axis, high, wide) = self.l, self.b, self.axes
        lines = self.lines_from(line)
        self.strip.copy("%p1", 0, first, images, deep, line)
        # Taps whose sums are in registers together: all, or those of a line.
        together = self.taps <= MOST_TAPS_TOGETHER
        outer = (1, 1) if together else (axis.taps, high.taps)
        inner = (axis.taps, high.taps) if together else (1, 1)
        rest = [(x, y, z) for x in range(inner[0]) for y in range(inner[1])
                for z in range(wide.taps)]  # fmt: skip
        offsets = [self.strip.tap(*tap) for tap in rest]

        def vector(channel: Index) -> None:
            b.loop(0, outer[0], 1, [], lambda d, _: b.loop(
                0, outer[1], 1, [], lambda h, _: taps(channel, d, h)
            ) and None)  # fmt: skip

        def taps(channel: Index, d: Index, h: Index) -> None:
            source = l.at(self.strip.memory, l.plus(self.strip.tap(d, h, 0), channel), l.element)
            mask = self.mask(channel)

            def one_line(n: Index, i: Index, values: list[str]) -> list[str]:
                here = l.at(source, self.strip.place(n, i, 0), l.element)
                at = l.plus(l.times(l.plus(first, n), axis.count), deep)
                at = l.plus(l.times(at, high.count), l.plus(line, i))
                there = l.plus(l.times(at, wide.count * self.channels), channel)
                gradient = l.at("%p0", there)

                def position(j: str, values: list[str]) -> list[str]:
                    g = l.load(gradient, l.times(j, self.channels), mask)
                    spot = l.at(here, self.strip.place(0, 0, j), l.element)
                    return [
                        l.multiply_add(g, l.load_computed(spot, offset), value)
                        for offset, value in zip(offsets, values)
                    ]

                return b.loop(0, wide.count, 1, typed(values), position)

            sums = b.loop(0, images, 1, typed([l.zero] * len(rest)), lambda n, values: b.loop(
                0, lines, 1, typed(values), lambda i, values: one_line(n, i, values)
            ))  # fmt: skip
            row = l.times(l.plus(l.times(d, high.taps), h), wide.taps)
            spot = l.plus(l.times(channel, self.taps), l.times(row, l.width))
            target = l.at(self.partial, spot, l.element)
            for k, value in enumerate(sums):
                total = l.add(l.load_computed(target, k * l.width), value)
                l.store_computed(total, target, k * l.width)

        def typed(values: list[str]) -> list[tuple[str, str]]:
            return [(l.vector, value) for value in values]

        b.loop(0, self.channels, l.width, [], lambda c, _: vector(c))
