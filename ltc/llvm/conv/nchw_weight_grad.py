"""The gradient of a convolution's weight: sums over images and positions, in one fixed order.

Images fall into chunks, whose sums are kept apart and added at the end, so that neither tasks nor
threads change a bit.  For some lines of the result at a time, the gradient is transposed so that output
channels are adjacent, and the operand is copied with its padding; then each tap is a product.

Letters: N images, O output channels of a group, C operand channels of a group, T taps.
"""

from __future__ import annotations

from functools import partial

import torch

from ltc.llvm.conv.axes import Axes, count_inside, forward_axes
from ltc.llvm.conv.geometry import Geometry, KernelSequence
from ltc.llvm.conv.split_images import WORK_ITEMS, ImageSplit, adding_kernel
from ltc.llvm.emit.builder import Builder, function_text
from ltc.llvm.emit.dtype import BYTES
from ltc.llvm.emit.index import Index, least
from ltc.llvm.emit.isa import Isa
from ltc.llvm.emit.vectors import (
    Epilogue,
    GeneratedKernel,
    Vectors,
    require_stack,
    reserved,
    tasks_for,
    transposed,
)

COPIED_BYTES = 128 * 1024  # of the operand, beside the transposed gradient in a level-2 cache
TURNED_POSITIONS = 1024
FEW_CHANNELS = 4  # a group with fewer output channels leaves most of a vector empty
MOST_STATIC_ROWS = 160  # (channel, tap) pairs that may each have code of their own


def convolution_weight_gradient(
    name: str, dtype: torch.dtype, geometry: Geometry, isa: Isa,
    epilogue: Epilogue | None = None, operands: int = 0,
) -> KernelSequence:  # fmt: skip
    """The gradient [O, C / groups, *kernel] of a convolution's weight.

    arguments  "gradient" [N, O, *windows], "operand" [N, C, *spatial], "result"; between them
               "partial", the sums of each chunk, as they are computed
    epilogue   maps a vector of sums to the vector stored: its row is the output channel, its column
               the position in the flat [C / groups, *kernel]
    operands   pointers that the epilogue reads, %p2 and on of the last kernel
    tasks      the results do not depend on their number

    Raises Unsupported where one line of the result or the operand fits in no stack.
    """
    axes = forward_axes(*geometry.window)
    if geometry.weight[0] // geometry.groups < FEW_CHANNELS:
        return KernelSequence((_direct(name, dtype, geometry, axes, isa, epilogue, operands),), {})
    body = _PartialSums(dtype, geometry, axes, isa)
    split = ImageSplit(body.chunks, body.groups, body.outputs, body.panel, body.rows)
    last = adding_kernel(name, dtype, isa, split, lambda column: column, epilogue, operands)
    kernels = (body.kernel(name), last)
    return KernelSequence(kernels, {"partial": body.partial_bytes})


class _PartialSums:
    """partial[chunk, group, panel, c * T + t, o]: what each chunk's images add to the gradient.

    The pointers are the gradient, the operand and the partial sums.
    """

    def __init__(self, dtype, geometry: Geometry, axes: Axes, isa: Isa):
        self.b = Builder()
        self.v = v = Vectors(self.b, isa, dtype)
        self.isa, self.axes = isa, axes
        self.images, self.groups = geometry.operand[0], geometry.groups
        self.outputs, self.channels = geometry.weight[0] // self.groups, geometry.weight[1]
        self.kernel_taps = tuple(axis.taps for axis in axes)
        self.taps = self.kernel_taps[0] * self.kernel_taps[1] * self.kernel_taps[2]
        self.size = axes[0].extent * axes[1].extent * axes[2].extent
        self.positions = axes[0].count * axes[1].count * axes[2].count
        self.vectors = 1 if self.outputs <= v.width else 2
        self.panel = self.vectors * v.width
        self.panels = -(-self.outputs // self.panel)
        self.rows = self.channels * self.taps
        parts = self.groups * self.panels
        self.chunks = max(1, min(self.images, -(-WORK_ITEMS // max(1, parts))))
        self.block = (isa.registers - self.vectors - (1 if isa.fused else 2)) // self.vectors
        self.static = self.channels < 8 and self.rows <= MOST_STATIC_ROWS
        self._choose_strip()

    def _choose_strip(self) -> None:
        v, (deep, high, wide) = self.v, self.axes
        self.lines = max(1, min(high.count, TURNED_POSITIONS // max(1, wide.count)))
        self.lines = max(1, -(-high.count // max(1, -(-high.count // self.lines))))
        self.strips = -(-high.count // self.lines)
        self.copied_lines = (self.lines - 1) * high.stride + (high.taps - 1) * high.step + 1
        self.pitch = max(1, (wide.count - 1) * wide.stride + (wide.taps - 1) * wide.step + 1)
        self.plane = self.copied_lines * self.pitch
        vectors = -(-deep.taps * self.plane // v.width)
        self.channel_pitch = (vectors + (1 - vectors % 2)) * v.width  # spreads lines of a cache
        fitting = COPIED_BYTES // (self.channel_pitch * BYTES[v.element])
        self.depth = self.channels if self.static else max(1, min(self.channels, fitting))

    @property
    def partial_size(self) -> int:
        return self.chunks * self.groups * self.panels * self.rows * self.panel

    @property
    def partial_bytes(self) -> int:
        return max(1, self.partial_size) * BYTES[self.v.element]

    @property
    def stack_bytes(self) -> int:
        transposed = self.lines * self.axes[2].count * self.panel
        return (transposed + self.depth * self.channel_pitch) * BYTES[self.v.element]

    # --- the sums of a chunk -----------------------------------------------------------------------

    def kernel(self, name: str) -> GeneratedKernel:
        v, b = self.v, self.b
        items = self.chunks * self.groups * self.panels
        require_stack(self.stack_bytes, "weight gradient")
        work = 2 * self.images * self.positions * self.groups * self.outputs * self.rows
        if items and self.rows:
            self.transposed = reserved(
                b, (self.lines * max(1, self.axes[2].count) + v.width) * self.panel, v.element
            )
            self.copied = reserved(b, self.depth * self.channel_pitch + v.width, v.element)
            b.loop(*b.share(items), 1, [], self._work_item)
        text = function_text(name, 3, b)
        tasks = tasks_for(work, items, 1)
        return GeneratedKernel(name, text, ("gradient", "operand", "partial"), tasks, work)

    def _work_item(self, item: Index, _) -> None:
        """All images of one chunk, for one panel of output channels."""
        v, b = self.v, self.b
        chunk, part = divmod(item, self.groups * self.panels)
        group, panel = divmod(part, self.panels)
        size = self.rows * self.panel
        self.partial = v.at("%p2", item * size, v.element)
        b.loop(0, size, v.width, [], lambda i, _: v.store_computed(v.zero, self.partial, i))
        first = chunk * self.images // self.chunks
        last = (chunk + 1) * self.images // self.chunks

        def image(n: Index, _) -> None:
            part = n * self.groups + group
            gradient = v.at("%p0", part * (self.outputs * self.positions))
            operand = v.at("%p1", part * (self.channels * self.size))
            b.nest((self.axes[0].count, self.strips), [], lambda deep, strip, _: self._strip(
                gradient, operand, panel, deep, strip * self.lines
            ))  # fmt: skip

        b.loop(first, last, 1, [], image)

    def _strip(self, gradient, operand, panel, deep, line) -> None:
        v, b, (_, high, wide) = self.v, self.b, self.axes
        lines = least(self.lines, high.count - line)
        start = (deep * high.count + line) * wide.count
        self._turn(v.at(gradient, start), panel, lines * wide.count)

        def channels(first: Index, _) -> None:
            count = least(self.depth, self.channels - first)
            self._copy(v.at(operand, first * self.size), count, deep, line)
            if self.static:
                self._static_blocks(lines)
            else:
                self._channel_blocks(first, count, lines)

        b.loop(0, self.channels, self.depth, [], channels)

    def _turn(self, gradient: str, panel: Index, positions: Index) -> None:
        """transposed[position, output channel] of one panel."""
        v, n = self.v, self.v.width

        def square(p: Index, j: Index, _) -> None:
            mask = v.first(positions - p)
            lines = []
            for i in range(n):
                channel = panel * self.panel + (j + i)
                if self.outputs % self.panel:
                    channel = least(channel, self.outputs - 1)
                lines.append(v.load(gradient, channel * self.positions + p, mask))
            target = v.at(self.transposed, p * self.panel + j, v.element)
            for i, line in enumerate(transposed(self.b, lines, v.element)):
                v.store_computed(line, target, i * self.panel)

        self.b.nest([(0, positions, n), (0, self.panel, n)], [], square)

    def _copy(self, operand: str, channels: Index, deep: Index, line: Index) -> None:
        """copied[channel, depth tap, line, column]: what the strip meets, zero outside."""
        v, b, (axis, high, wide) = self.v, self.b, self.axes

        def one_line(c: Index, d: Index, i: Index, _) -> None:
            down = axis.input_index(deep, d)
            across = line * high.stride + high.first + i
            limit = count_inside(b, self.axes, down, across, wide.extent)
            row = (c * axis.extent + down) * high.extent + across
            source = v.at(operand, row * wide.extent + wide.first)
            place = c * self.channel_pitch + d * self.plane + i * self.pitch
            target = v.at(self.copied, place, v.element)

            def vector(j: Index, _) -> None:
                mask = v.between(j + wide.first, limit)
                v.store_computed(v.load(source, j, mask), target, j)

            b.loop(0, self.pitch, v.width, [], vector)

        b.nest((channels, axis.taps, self.copied_lines), [], one_line)

    def _tap_offset(self, d: Index, h: Index, w: Index) -> Index:
        (_, high, wide) = self.axes
        across = h * (high.step * self.pitch) + w * wide.step
        return d * self.plane + across

    def _static_blocks(self, lines: Index) -> None:
        """Few channels: channels and taps together make the rows of a block."""
        _, height, width = self.kernel_taps
        offsets = []
        for row in range(self.rows):
            c, t = divmod(row, self.taps)
            d, h, w = t // (height * width), t // width % height, t % width
            offsets.append(c * self.channel_pitch + self._tap_offset(d, h, w))
        blocks = -(-self.rows // self.block)
        for i in range(blocks):
            first, last = self.rows * i // blocks, self.rows * (i + 1) // blocks
            spots = [row * self.panel for row in range(first, last)]
            self._block(self.copied, offsets[first:last], self.partial, spots, lines)

    def _channel_blocks(self, first: Index, count: Index, lines: Index) -> None:
        """Many channels: a block has some of them at one tap."""
        v, b, (_, height, width) = self.v, self.b, self.kernel_taps

        size = self.block
        whole = count // size * size

        def tap(d: Index, h: Index, w: Index, _) -> None:
            row = first * self.taps + (d * height + h) * width + w
            source = v.at(self.copied, self._tap_offset(d, h, w), v.element)
            target = v.at(self.partial, row * self.panel, v.element)
            block = partial(self._channel_block, source, target, lines)
            b.loop(0, whole, size, [], lambda c, _: block(c, size))
            c, rest = whole, size
            while rest > 1:  # what is left, in halves: any number of channels by few codes
                rest = (rest + 1) // 2
                fits = b.value(f"icmp sle i64 {c + rest}, {count}")
                (after,) = b.when(fits, [("i64", c)], partial(block, c, rest))
                c = b.index(after)

        b.nest(self.kernel_taps, [], tap)

    def _channel_block(
        self, source: str, target: str, lines: Index, channel: Index, rows: int
    ) -> list[Index]:
        """Some channels of one tap, from one on; gives the one after them."""
        v = self.v
        here = v.at(source, channel * self.channel_pitch, v.element)
        there = v.at(target, channel * (self.taps * self.panel), v.element)
        offsets = [r * self.channel_pitch for r in range(rows)]
        spots = [r * self.taps * self.panel for r in range(rows)]
        self._block(here, offsets, there, spots, lines)
        return [channel + rows]

    def _block(self, source: str, offsets, target: str, spots, lines: Index) -> None:
        """Add all positions of a strip to the sums of a few rows."""
        v, b, (_, high, wide), count = self.v, self.b, self.axes, self.vectors
        places = [spot + u * v.width for spot in spots for u in range(count)]
        sums = v.typed([v.zero] * len(places))

        def line(i: Index, values: list[str]) -> list[str]:
            here = v.at(source, i * (high.stride * self.pitch), v.element)
            there = v.at(self.transposed, i * (wide.count * self.panel), v.element)

            def position(j: Index, values: list[str]) -> list[str]:
                right = v.at(there, j * self.panel, v.element)
                ys = [v.load_computed(right, u * v.width) for u in range(count)]
                left, result = v.at(here, j * wide.stride, v.element), []
                for r, offset in enumerate(offsets):
                    x = v.splat(v.computed_scalar(left, offset))
                    for u, y in enumerate(ys):
                        result.append(v.multiply_add(x, y, values[r * count + u]))
                return result

            return b.loop(0, wide.count, 1, v.typed(values), position)

        for value, place in zip(b.loop(0, lines, 1, sums, line), places):
            v.store_computed(v.add(v.load_computed(target, place), value), target, place)


def _direct(name, dtype, geometry: Geometry, axes: Axes, isa, epilogue, operands):
    """For depthwise and narrow groups: each weight's gradient is one sum along the lines."""
    body = _LineSums(dtype, geometry, axes, isa, epilogue)
    items = body.kernels * axes[0].taps * axes[1].taps
    if items:
        body.b.loop(*body.b.share(items), 1, [], body.item)
    arguments = ("gradient", "operand", "result", *(f"operand{i}" for i in range(operands)))
    work = 2 * body.images * body.positions * body.kernels * body.taps
    text = function_text(name, len(arguments), body.b)
    return GeneratedKernel(name, text, arguments, tasks_for(4 * work, items, 1), work)


class _LineSums:
    """The gradient of one line of taps of one pair of channels, in vectors along the lines.

    The pointers are the gradient, the operand and the result.

    kernels  pairs of an output channel and an operand channel
    """

    def __init__(self, dtype, geometry: Geometry, axes: Axes, isa: Isa, epilogue):
        deep, high, wide = axes
        self.b = Builder()
        self.v = v = Vectors(self.b, isa, dtype)
        self.axes, self.epilogue = axes, epilogue
        self.images, self.groups = geometry.operand[0], geometry.groups
        self.outputs, self.channels = geometry.weight[0] // self.groups, geometry.weight[1]
        self.kernels = geometry.weight[0] * self.channels
        self.size = deep.extent * high.extent * wide.extent
        self.positions = deep.count * high.count * wide.count
        self.taps = deep.taps * high.taps * wide.taps
        self.row = reserved(self.b, wide.taps + v.width, v.element)

    def item(self, number: Index, _) -> None:
        v, b, (deep, high, wide) = self.v, self.b, self.axes
        rest, h = divmod(number, high.taps)
        rest, d = divmod(rest, deep.taps)
        output, channel = divmod(rest, self.channels)
        operand = output // self.outputs * self.channels + channel

        def line(n: Index, i: Index, sums: list[str]) -> list[str]:
            gradient = (n * (self.groups * self.outputs) + output) * self.positions
            source = (n * (self.groups * self.channels) + operand) * self.size
            return self._line(v.at("%p0", gradient), v.at("%p1", source), i, d, h, sums)

        zeros = v.typed([v.zero] * wide.taps)
        totals = b.nest((self.images, deep.count * high.count), zeros, line)
        for w, total in enumerate(totals):
            b.emit(f"store {v.element} {v.total(total)}, ptr {v.at(self.row, w, v.element)}")
        tap = number % (deep.taps * high.taps) * wide.taps
        column = channel * self.taps + tap
        b.loop(0, wide.taps, v.width, [], lambda w, _: self._store(output, column, w))

    def _line(self, gradient: str, source: str, i: Index, d: Index, h: Index, sums) -> list[str]:
        """The sums, and what line `i` of an image adds to each of them."""
        v, b, (deep, high, wide) = self.v, self.b, self.axes
        o, p = divmod(i, high.count)
        down, across = deep.input_index(o, d), high.input_index(p, h)
        end = count_inside(b, self.axes, down, across, wide.count)
        source = v.at(source, (down * high.extent + across) * wide.extent)
        gradient = v.at(gradient, i * wide.count)

        def vector(j: Index, sums: list[str]) -> list[str]:
            x = v.load(gradient, j, v.first(wide.count - j))
            result = []
            for w, total in enumerate(sums):
                first = wide.input_index(j, w)
                masks = v.masks_of(first, wide.stride, wide.extent)
                y = v.strided(source, first, wide.stride, masks)
                result.append(v.multiply_add(x, y, total))
            return result

        return b.loop(0, end, v.width, v.typed(sums), vector)

    def _store(self, output: Index, column: Index, w: Index) -> None:
        """A vector of taps of a line, the first of which is number `column` of its output."""
        v, b = self.v, self.b
        value, mask = v.load_computed(self.row, w), v.first(self.axes[2].taps - w)
        if self.epilogue is not None:
            with b.lanes(v.width):
                value = self.epilogue(b, value, output, column + w, mask)
        v.store(value, "%p2", output * (self.channels * self.taps) + (column + w), mask)
