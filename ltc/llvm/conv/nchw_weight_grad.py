"""The gradient of a convolution's weight of few channels: sums along the lines, in one fixed order.

Each weight's gradient is the sum over all images and lines of one output channel and one operand
channel; a task has whole lines of taps, so neither tasks nor threads change a bit.
"""

from __future__ import annotations

import torch

from ltc.llvm.conv.axes import Axes, count_inside, forward_axes
from ltc.llvm.conv.geometry import Geometry, KernelSequence
from ltc.llvm.emit.builder import Builder, function_text
from ltc.llvm.emit.index import Index, least
from ltc.llvm.emit.isa import Isa
from ltc.llvm.emit.vectors import (
    GeneratedKernel,
    Vectors,
    reserved,
    tasks_for,
)

MOST_TAPS = 16  # of a line that are summed at once
MOST_SUMS = 16  # of several output channels: with more, registers would not hold them


def convolution_weight_gradient(
    name: str, dtype: torch.dtype, geometry: Geometry, isa: Isa
) -> KernelSequence:
    """The gradient [O, C / groups, *kernel] of a convolution's weight.

    arguments  "gradient" [N, O, *windows], "operand" [N, C, *spatial], "result"
    tasks      the results do not depend on their number
    """
    axes = forward_axes(*geometry.window)
    body = _LineSums(dtype, geometry, axes, isa)
    items = body.kernels * axes[0].taps * axes[1].taps * body.blocks
    if items:
        body.b.loop(*body.b.share(items), 1, [], body.item)
    arguments = ("gradient", "operand", "result")
    work = 2 * body.images * body.positions * body.kernels * body.together * body.taps
    text = function_text(name, len(arguments), body.b)
    tasks = tasks_for(4 * work, items, 1)
    return KernelSequence((GeneratedKernel(name, text, arguments, tasks, work),), {})


class _LineSums:
    """The gradients of some taps of a line, of one operand channel, in vectors along the lines.

    The pointers are the gradient, the operand and the result.

    Attributes:
        together: Output channels whose sums are made at once.
        kernels: Pairs of so many output channels and an operand channel.
    """

    def __init__(self, dtype, geometry: Geometry, axes: Axes, isa: Isa):
        deep, high, wide = axes
        self.b = Builder()
        self.v = v = Vectors(self.b, isa, dtype)
        self.axes = axes
        self.images, self.groups = geometry.operand[0], geometry.groups
        self.outputs, self.channels = geometry.weight[0] // self.groups, geometry.weight[1]
        self.size = deep.extent * high.extent * wide.extent
        self.positions = deep.count * high.count * wide.count
        self.taps = deep.taps * high.taps * wide.taps
        self.blocks = -(-wide.taps // MOST_TAPS)
        self.width = -(-wide.taps // max(1, self.blocks))  # taps of a block
        fitting = (k for k in range(1, self.outputs + 1) if self.outputs % k == 0)
        self.together = max(k for k in fitting if k == 1 or k * self.width <= MOST_SUMS)
        self.kernels = geometry.weight[0] // self.together * self.channels
        self.row = reserved(self.b, self.width + v.width, v.element)

    def item(self, number: Index, _) -> None:
        v, b, (deep, high, wide) = self.v, self.b, self.axes
        row, block = divmod(number, self.blocks)
        rest, h = divmod(row, high.taps)
        rest, d = divmod(rest, deep.taps)
        output, channel = divmod(rest, self.channels)
        output = output * self.together
        operand = output // self.outputs * self.channels + channel
        tap = block * self.width

        zeros = v.typed([v.zero] * (self.width * self.together))

        def image(n: Index, totals: list[str]) -> list[str]:
            """Add the sums of an image, which are made by themselves: none gets long."""
            gradient = v.at("%p0", (n * (self.groups * self.outputs) + output) * self.positions)
            source = v.at("%p1", (n * (self.groups * self.channels) + operand) * self.size)
            sums = b.loop(0, deep.count * high.count, 1, zeros, lambda i, sums: self._line(
                gradient, source, i, (d, h, tap), sums
            ))  # fmt: skip
            return [v.add(total, part) for total, part in zip(totals, sums)]

        totals = b.loop(0, self.images, 1, zeros, image)
        place = (d * high.taps + h) * wide.taps + tap
        for r in range(self.together):
            kernel = (output + r) * self.channels + channel
            self._store(totals[r :: self.together], kernel * self.taps + place, tap)

    def _store(self, totals: list[str], place: Index, tap: Index) -> None:
        """Store the gradients of adjacent taps, as far as the line goes."""
        v, b = self.v, self.b
        for w, total in enumerate(totals):
            b.emit(f"store {v.element} {v.total(total)}, ptr {v.at(self.row, w, v.element)}")
        left = self.axes[2].taps - tap
        count = self.width if self.blocks == 1 else least(self.width, left)
        target = v.at("%p2", place)

        def store(w: Index, _) -> None:
            v.store(v.load_computed(self.row, w), target, w, v.first(count - w))

        b.loop(0, count, v.width, [], store)

    def _line(
        self, gradient: str, source: str, i: Index, first_tap: tuple[Index, Index, Index], sums
    ) -> list[str]:
        """The sums, and what line `i` of an image adds to each of them."""
        v, b, (deep, high, wide), (d, h, tap) = self.v, self.b, self.axes, first_tap
        o, p = divmod(i, high.count)
        down, across = deep.input_index(o, d), high.input_index(p, h)
        end = count_inside(b, self.axes, down, across, wide.count)
        source = v.at(source, (down * high.extent + across) * wide.extent)
        gradient = v.at(gradient, i * wide.count)

        def vector(j: Index, sums: list[str]) -> list[str]:
            mask, result = v.first(wide.count - j), []
            xs = [v.load(gradient, j + r * self.positions, mask) for r in range(self.together)]
            for w in range(self.width):
                first = wide.input_index(j, tap + w)
                masks = v.masks_of(first, wide.stride, wide.extent)
                y = v.strided(source, first, wide.stride, masks)
                totals = sums[w * self.together : (w + 1) * self.together]
                result += [v.multiply_add(x, y, total) for x, total in zip(xs, totals)]
            return result

        return b.loop(0, end, v.width, v.typed(sums), vector)
