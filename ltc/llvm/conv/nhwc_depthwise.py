"""Depthwise convolutions on [N, *spatial, C]: each channel has weights of its own.

A vector is adjacent channels, each lane with its own weights.  The operand's lines are copied with
their padding; a few positions of a line keep their sums in registers over all taps.
"""

from __future__ import annotations

import itertools

import torch

from ltc.llvm.conv.axes import Axes, forward_axes, gradient_phases
from ltc.llvm.conv.geometry import Geometry, KernelSequence
from ltc.llvm.conv.nhwc_accumulate import Strips, StripSums
from ltc.llvm.conv.split_images import ImageSplit, adding_kernel, images_of
from ltc.llvm.emit.builder import function_text
from ltc.llvm.emit.index import Index, least
from ltc.llvm.emit.isa import Isa
from ltc.llvm.emit.vectors import Epilogue, GeneratedKernel, require_stack, tasks_for

MOST_POSITIONS = 12  # of a tile
FEWEST_POSITIONS = 8  # beside the weights of a line of taps: fewer sums wait for one another
MOST_TAPS_TOGETHER = 25  # whose sums a weight's gradient keeps in registers
MOST_SLOTS = 16


def is_depthwise(geometry: Geometry) -> bool:
    """Return True if each channel of the operand gives one of the result."""
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
    body = _DepthwisePartialSums(dtype, geometry, isa)
    last = adding_kernel(name, dtype, isa, body.split, lambda column: column, epilogue, operands)
    return KernelSequence((body.kernel(name), last), {"partial": body.split.bytes(body.v.element)})


class _Sums(StripSums):
    """result[n, o, c] = sum over t of operand[n, o meets t, c] * weight[c, t]."""

    def __init__(self, dtype, geometry: Geometry, axes: Axes, isa: Isa, epilogue):
        # The sums of a tile, the weights of a line of taps and one element fill the registers.
        free = isa.registers - 1 - (0 if isa.fused else 1)
        most = min(MOST_POSITIONS, free - axes[2].taps)
        self.joins_taps = most >= FEWEST_POSITIONS
        if not self.joins_taps:
            most = min(MOST_POSITIONS, free - 2)
        super().__init__(dtype, geometry, axes, isa, epilogue, most)

    def _line(self, image: Index, line: Index, position: Index) -> None:
        self.b.loop(0, self.channels, self.v.width, [], lambda c, _: self._tiles(
            image, line, c, lambda place, width, j: self._tile(place, width, position, j, c)
        ))  # fmt: skip

    def _tile(self, place: str, width: int, position: Index, column: Index, channel: Index) -> None:
        v, b = self.v, self.b
        deep, high, wide = self.axes
        weights = v.at(self.packed, channel, v.element)
        joined = wide.taps if self.joins_taps else 1
        meetings = self._meetings(width, joined)

        def taps(d: Index, h: Index, w: Index, values: list[str]) -> list[str]:
            k = (d * high.taps + h) * wide.taps + w
            row = v.at(weights, k * self.packed_row, v.element)
            ys = [v.load_computed(row, t * self.packed_row) for t in range(joined)]
            here, values = v.at(place, self.input_tile.tap(d, h, w), v.element), list(values)
            for element, pairs in meetings.items():
                x = v.load_computed(here, element)
                for r, t in pairs:
                    values[r] = v.multiply_add(x, ys[t], values[r])
            return values

        zeros = v.typed([v.zero] * width)
        across = wide.taps // joined if joined else 0
        sums = b.nest((deep.taps, high.taps, across), zeros, taps)
        for r, value in enumerate(sums):
            self._store(value, self._row(position, column, r), channel)

    def _store(self, value: str, row: Index, channel: Index) -> None:
        v, mask = self.v, self.mask(channel)
        if self.epilogue is not None:
            with self.b.lanes(v.width):
                value = self.epilogue(self.b, value, row, channel, mask)
        v.store(value, "%p2", row * self.channels + channel, mask)


class _DepthwisePartialSums(Strips):
    """partial[chunk, vector of channels, tap, lane]: what each chunk's images add to the gradient.

    The pointers are the gradient, the operand and the partial sums; the number is the images.
    """

    def __init__(self, dtype, geometry: Geometry, isa: Isa):
        super().__init__(dtype, geometry, forward_axes(*geometry.window), isa)
        count = max(1, min(MOST_SLOTS, geometry.operand[0]))
        self.split = ImageSplit(count, 1, self.channels, self.v.width, self.taps)

    def kernel(self, name: str) -> GeneratedKernel:
        b, split = self.b, self.split
        require_stack(self.input_tile.bytes, "convolution")
        if split.of_one:
            self.input_tile.reserve()
            b.loop(*b.share(split.count), 1, [], self._chunk)
        text = function_text(name, 3, b, 1)
        tasks = tasks_for(4 * self.work, split.count, 1)
        arguments = ("gradient", "operand", "partial")
        images = self.geometry.operand[0]
        return GeneratedKernel(name, text, arguments, tasks, self.work, (images,))

    def _chunk(self, chunk: Index, _) -> None:
        v, b, size = self.v, self.b, self.split.of_one
        self.partial = v.at("%p2", chunk * size, v.element)
        b.loop(0, size, v.width, [], lambda i, _: v.store_computed(v.zero, self.partial, i))
        first, last = images_of(chunk, b.number(0), self.split.count)

        def images(n: Index, _) -> None:
            count = least(self.images, last - n)
            b.nest((self.axes[0].count, self.strips), [], lambda deep, strip, _: self._strip(
                n, count, deep, strip * self.lines
            ))  # fmt: skip

        b.loop(first, last, self.images, [], images)

    def _strip(self, first: Index, images: Index, deep: Index, line: Index) -> None:
        v, b, (axis, high, wide) = self.v, self.b, self.axes
        lines = self.lines_from(line)
        self.input_tile.copy("%p1", 0, first, images, deep, line)
        # Taps whose sums are in registers together: all, or those of a line.
        together = self.taps <= MOST_TAPS_TOGETHER
        outer = (1, 1) if together else (axis.taps, high.taps)
        inner = (axis.taps, high.taps) if together else (1, 1)
        rest = itertools.product(range(inner[0]), range(inner[1]), range(wide.taps))
        offsets = [self.input_tile.tap(*tap) for tap in rest]
        zeros = v.typed([v.zero] * len(offsets))

        def taps(channel: Index, d: Index, h: Index, _) -> None:
            source = v.at(self.input_tile.memory, self.input_tile.tap(d, h, 0) + channel, v.element)
            mask = self.mask(channel)

            def one_line(n: Index, i: Index, sums: list[str]) -> list[str]:
                here = v.at(source, self.input_tile.place(n, i, 0), v.element)
                at = ((first + n) * axis.count + deep) * high.count + (line + i)
                gradient = v.at("%p0", at * (wide.count * self.channels) + channel)
                return self._line(here, gradient, mask, offsets, sums)

            sums = b.nest((images, lines), zeros, one_line)
            row = (d * high.taps + h) * wide.taps
            spot = channel * self.taps + row * v.width
            self._add(sums, v.at(self.partial, spot, v.element))

        b.nest([(0, self.channels, v.width), *outer], [], taps)

    def _line(
        self, operand: str, gradient: str, mask: str | None, offsets: list[Index], sums: list[str]
    ) -> list[str]:
        """The sums of the taps at `offsets`, and what one line adds to them.

        A vector of channels is far from that of the next column: the next strip's are asked for.
        """
        v = self.v
        strip = self.images * self.lines * self.axes[2].count * self.channels

        def position(j: Index, sums: list[str]) -> list[str]:
            v.builder.prefetch(v.at(gradient, j * self.channels + strip), level=2)
            factor = v.load(gradient, j * self.channels, mask)
            spot = v.at(operand, self.input_tile.place(0, 0, j), v.element)
            return [
                v.multiply_add(factor, v.load_computed(spot, offset), value)
                for offset, value in zip(offsets, sums)
            ]

        return self.b.loop(0, self.axes[2].count, 1, v.typed(sums), position)

    def _add(self, sums: list[str], target: str) -> None:
        """Adds vectors to those that lie one after another in memory."""
        v = self.v
        for k, value in enumerate(sums):
            total = v.add(v.load_computed(target, k * v.width), value)
            v.store_computed(total, target, k * v.width)
