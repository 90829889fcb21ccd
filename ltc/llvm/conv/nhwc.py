"""Convolutions and the gradients of their inputs on [N, *spatial, C].

A vector is adjacent output channels.  A tile of positions keeps its sums in registers, over all
taps of a block of channels; for each tap and channel, one number of every position multiplies the
vectors of weights, which are packed in the order in which they are met.

Letters: N images; a group has *left* channels, which are summed, and *right* ones, which remain.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import torch

from ltc.llvm.conv.axes import Axes, forward_axes, gradient_phases, padded
from ltc.llvm.conv.geometry import Geometry, KernelSequence
from ltc.llvm.conv.nhwc_accumulate import StripSums
from ltc.llvm.conv.nhwc_input_tile import (
    ascending,
    input_tile_of,
    is_read_in_place,
    most_images,
    strip_extents,
)
from ltc.llvm.conv.nhwc_pointwise import forward_shape, input_gradient_shape
from ltc.llvm.conv.nhwc_tile import TileShape, tile_shape
from ltc.llvm.conv.nhwc_weight_packing import WeightPacker
from ltc.llvm.emit.builder import Builder, function_text
from ltc.llvm.emit.dtype import BYTES, FORMS
from ltc.llvm.emit.index import Index, least
from ltc.llvm.emit.isa import LEVEL_2_BYTES, Isa
from ltc.llvm.emit.vectors import (
    Epilogue,
    GeneratedKernel,
    Vectors,
    require_stack,
    reserved,
    shuffled,
    tasks_for,
)
from ltc.llvm.gemm.blocking import Shape
from ltc.llvm.gemm.kernel import matmul

PACKED_BYTES = 160 * 1024  # of one block of weights: a level-2 cache holds it beside the strip
STRIP_PIXELS = 512  # so many positions pay for the packing of the weights
STRIP_BYTES = 1280 * 1024
# Of a strip whose elements few taps meet: each panel reads it anew, so it stays in half of a level-2
# cache. More taps hide what comes from the next level.
NEAR_BYTES, FEW_TAPS = LEVEL_2_BYTES // 2, 4
STEPS_TOGETHER = 4  # channels of one turn: threads that share a core wait for fewer instructions
STORING = 8  # multiplications that take as long as storing one result: all there is without taps
WORK_ITEMS = 16  # that a launch falls into, where there are enough panels


def channels_last_convolution(
    name: str, dtype: torch.dtype, geometry: Geometry, isa: Isa,
    epilogue: Epilogue | None = None, operands: int = 0,
) -> KernelSequence:  # fmt: skip
    """[N, *windows, O] of operand [N, *spatial, C] and weight [O, C / groups, *kernel].

    otherwise as `convolution`

    Args:
        geometry: Its shapes have the channels second, as elsewhere.
        epilogue: Its row is the position, its column the output channel.
    """
    if geometry.is_pointwise:
        shape = forward_shape(geometry)
        return _product(name, dtype, shape, isa, epilogue, operands, "operand")
    axes = forward_axes(*geometry.window)
    groups, outputs = geometry.groups, geometry.weight[0] // geometry.groups
    sizes = Sizes(geometry.operand[0], groups, geometry.weight[1], outputs)
    body = _Tiles(dtype, sizes, axes, padded(geometry.weight[2:], 1), isa, epilogue, True)
    return KernelSequence((body.kernel(name, "operand", operands),), {})


def channels_last_input_gradient(
    name: str, dtype: torch.dtype, geometry: Geometry, isa: Isa,
    epilogue: Epilogue | None = None, operands: int = 0,
) -> KernelSequence:  # fmt: skip
    """The gradient [N, *spatial, C] of a convolution's operand, from that of its result.

    arguments  "weight" [O, C / groups, *kernel], "gradient" [N, *windows, O], "result"
    """
    groups, outputs = geometry.groups, geometry.weight[0] // geometry.groups
    if geometry.is_pointwise:
        shape = input_gradient_shape(geometry)
        return _product(name, dtype, shape, isa, epilogue, operands, "gradient")
    sizes = Sizes(geometry.operand[0], groups, outputs, geometry.weight[1])
    extents = padded(geometry.weight[2:], 1)
    v = Vectors(Builder(), isa, dtype)
    bodies = [
        ChannelTotals(dtype, geometry, axes, isa, epilogue)
        if sums_across_lanes(v, geometry, axes)
        else _Tiles(dtype, sizes, axes, extents, isa, epilogue, False)
        for axes in gradient_phases(*geometry.window)
    ]
    kernels = tuple(body.kernel(name, "gradient", operands) for body in bodies)
    return KernelSequence(kernels, {})


def _product(name, dtype, shape: Shape, isa, epilogue, operands, operand: str) -> KernelSequence:
    kernel = matmul(
        name, dtype, (), (shape.m, shape.n, shape.k), shape.left, shape.right, shape.result, isa,
        epilogue, operands,
    )  # fmt: skip
    return KernelSequence((kernel.called(operand, "weight"),), {})


@dataclass(frozen=True)
class Sizes:
    """The numbers of images and groups, and of channels of each group: summed, and remaining."""

    images: int
    groups: int
    left: int
    right: int


def tile_of(v: Vectors, sizes: Sizes, axes: Axes) -> TileShape:
    """The positions that are summed together; the axes ascend."""
    images = most_images(axes, sizes.left, BYTES[v.element], STRIP_BYTES)
    return tile_shape(axes, sizes.right, v.isa, v.width, sizes.images, images)


class _Tiles:
    """result[n, o, g, m] = sum over t, c of operand[n, o meets t, g, c] * weight[g, m, c, t].

    Forward, weights are [g, m, c, t]; in a gradient they are [g, c, m, t].
    The pointers are the weight, the operand and the result; the numbers are the images, and into
    how many parts the panels of output channels fall.
    """

    def __init__(self, dtype, sizes: Sizes, axes: Axes, extents, isa: Isa, epilogue, forward):
        self.b = Builder()
        self.v = v = Vectors(self.b, isa, dtype)
        self.sizes, self.axes, self.epilogue = sizes, ascending(axes), epilogue
        self.kernel_taps = tuple(axis.taps for axis in axes)
        self.taps = self.kernel_taps[0] * self.kernel_taps[1] * self.kernel_taps[2]
        _, high, wide = self.axes
        size = BYTES[v.element]
        self.tile = tile_of(v, sizes, self.axes)
        self.panel = self.tile.vectors * v.width
        self.panels = -(-sizes.right // self.panel)
        together = self.tile.images, self.tile.height
        apart = sizes.left * sizes.groups
        self.images, self.lines = strip_extents(
            self.axes, sizes.left, size, together, STRIP_PIXELS, _strip_bytes(self.axes),
            is_read_in_place(v, self.axes, apart),
        )  # fmt: skip
        self.strips = -(-high.count // max(1, self.lines))
        self.input_tile = input_tile_of(v, self.axes, sizes.left, apart, self.images, self.lines)
        self._choose_block()
        self.packer = WeightPacker(
            v, self.axes, extents, sizes.left, sizes.right, self.panel, self.depth, forward
        )
        self.pixels = self.images * self.lines * wide.count

    def _choose_block(self) -> None:
        """Choose how many channels' weights are packed at once."""
        row = self.panel * BYTES[self.v.element] * max(1, self.taps)
        left = self.sizes.left
        self.depth, fitting = left, max(16, PACKED_BYTES // row)
        if fitting < left:
            blocks = -(-left // fitting)
            self.depth = -(-left // (blocks * 16)) * 16
        self.waits = self.depth < left
        self.joins_taps = self.input_tile.taps_touch and not self.waits

    @property
    def stack_bytes(self) -> int:
        waiting = self.pixels * self.panel * BYTES[self.v.element] if self.waits else 0
        return self.input_tile.bytes + self.packer.bytes + waiting

    def kernel(self, name: str, operand: str, operands: int) -> GeneratedKernel:
        sizes, (deep, high, wide) = self.sizes, self.axes
        require_stack(self.stack_bytes, "convolution")
        positions = deep.count * high.count * wide.count
        work = 2 * sizes.images * positions * sizes.groups * sizes.left * sizes.right * self.taps
        strips = -(-sizes.images // self.images) * deep.count * self.strips * sizes.groups
        parts = max(1, min(self.panels, WORK_ITEMS // max(1, strips)))
        if positions and sizes.right:
            self._emit()
        arguments = ("weight", operand, "result", *(f"operand{i}" for i in range(operands)))
        text = function_text(name, len(arguments), self.b, 2)
        stored = sizes.images * positions * sizes.groups * sizes.right
        tasks = tasks_for(work + STORING * stored, strips * parts, 1)
        return GeneratedKernel(name, text, arguments, tasks, work, (sizes.images, parts))

    # --- the walk ---------------------------------------------------------------------------------

    def _emit(self) -> None:
        v, b, deep = self.v, self.b, self.axes[0]
        self.input_tile.reserve()
        self.packer.reserve()
        if self.waits:
            self.waiting = reserved(b, self.pixels * self.panel, v.element)
        blocks = (b.number(0) + (self.images - 1)) // self.images
        strips = blocks * (deep.count * self.strips)
        items = strips * self.sizes.groups * b.number(1)

        def item(number: Index, _) -> None:
            # One after the other, the strips that read the same weights.
            rest = number // strips
            strip = number - rest * strips
            part, group = divmod(rest, self.sizes.groups)
            self._strip(strip, part, group)

        b.loop(*b.share(items), 1, [], item)

    def _strip(self, strip: Index, part: Index, group: Index) -> None:
        b, (deep, high, _) = self.b, self.axes
        block, rest = divmod(strip, deep.count * self.strips)
        self.deep, number = divmod(rest, self.strips)
        self.first_image = block * self.images
        self.image_count = least(self.images, b.number(0) - self.first_image)
        self.first_line = number * self.lines
        self.line_count: Index = self.lines
        if high.count % self.lines:
            self.line_count = least(self.lines, high.count - self.first_line)
        self.group = group
        channel = group * self.sizes.left
        self.input_tile.copy(
            "%p1", channel, self.first_image, self.image_count, self.deep, self.first_line
        )
        parts = b.number(1)
        first, last = part * self.panels // parts, (part + 1) * self.panels // parts
        b.loop(first, last, 1, [], lambda panel, _: self._panel(panel * self.panel))

    def _panel(self, column: Index) -> None:
        b, left = self.b, self.sizes.left
        self.column = column
        if not self.waits:
            self.packer.pack(self.group, column, 0, left)
            self._each_tile(lambda place, spot, shape: self._finish(
                spot, shape, self._summed(place, spot, shape, 0, left, None)
            ))  # fmt: skip
            return
        self._each_tile(lambda _, spot, shape: self._keep(spot, shape, None))

        def block(start: Index, _) -> None:
            depth = least(self.depth, left - start)
            self.packer.pack(self.group, column, start, depth)
            self._each_tile(lambda place, spot, shape: self._keep(
                spot, shape,
                self._summed(place, spot, shape, start, depth, self._kept(spot, shape)),
            ))  # fmt: skip

        b.loop(0, left, self.depth, [], block)
        self._each_tile(lambda _, spot, shape: self._finish(spot, shape, self._kept(spot, shape)))

    def _each_tile(self, body) -> None:
        """body(where its first tap is, (image, line, column), (height, width)) for every tile."""
        v, b, tile = self.v, self.b, self.tile

        def line(n: Index, i: Index, _) -> None:
            start = 0
            for width, count in tile.widths:

                def one(j: Index, _=None, width=width) -> None:
                    place = v.at(self.input_tile.memory, self.input_tile.place(n, i, j), v.element)
                    body(place, (n, i, j), (tile.height, width))

                if count == 1:
                    one(start)
                else:
                    b.loop(start, start + width * count, width, [], one)
                start += width * count

        b.nest([(0, self.image_count, tile.images), (0, self.line_count, tile.height)], [], line)

    def _members(self, shape) -> list[tuple[int, int, int]]:
        """(image, line, column) of each position of a tile, counted from its first."""
        height, width = shape
        each = itertools.product(range(self.tile.images), range(height), range(width))
        return list(each)

    # --- one tile ---------------------------------------------------------------------------------

    def _summed(self, place: str, spot, shape, start: Index, depth: Index, sums) -> list[str]:
        """`_accumulate`, during which what the epilogue will read is on its way."""
        if self.epilogue is not None:
            for row in self._rows(spot, shape):
                for j in range(self.tile.vectors):
                    self.v.fetch(self.epilogue, row, self._channel(j))
        return self._accumulate(place, spot, shape, start, depth, sums)

    def _accumulate(self, place: str, spot, shape, start: Index, depth: Index, sums) -> list[str]:
        """`sums`, or zeros, plus the products of a block of channels at every tap."""
        v, b, count = self.v, self.b, self.tile.vectors
        rows = [self.input_tile.place(*member) for member in self._members(shape)]
        _, high, wide = self.kernel_taps
        sums = sums or [v.zero] * (len(rows) * count)
        # Blocks of channels are of multiples of 16, but for the last one.
        together = math.gcd(self.sizes.left, STEPS_TOGETHER)

        def step(left: str, right: str, k: Index, values: list[str]) -> list[str]:
            line = v.at(right, k * self.panel, v.element)
            ys = [v.load_computed(line, j * v.width) for j in range(count)]
            here, result = v.at(left, k, v.element), []
            for r, offset in enumerate(rows):
                x = v.splat(v.computed_scalar(here, offset))
                for j, y in enumerate(ys):
                    result.append(v.multiply_add(x, y, values[r * count + j]))
            return result

        def segment(d: Index, h: Index, w: Index, run: Index, values: list[str]) -> list[str]:
            left = v.at(place, self.input_tile.tap(d, h, w) + start, v.element)
            tap = (d * high + h) * wide + w
            right = v.at(self.packer.memory, tap * (self.depth * self.panel), v.element)

            def steps(k: Index, values: list[str]) -> list[str]:
                for one in range(together):
                    values = step(left, right, k + one, values)
                return values

            return b.loop(0, run, together, v.typed(values), steps)

        line = self.first_line + spot[1]
        low_deep, end_deep = self.axes[0].taps_inside(self.deep, self.deep)
        low, end = self.axes[1].taps_inside(line, line + (shape[0] - 1))
        first: Index = 0
        last: Index = wide
        if self.tile.across_images:
            first, last = self.axes[2].taps_inside(spot[2], spot[2])

        def row(d: Index, h: Index, values: list[str]) -> list[str]:
            if self.joins_taps:
                return segment(d, h, first, (last - first) * depth, values)
            return b.loop(
                first, last, 1, v.typed(values), lambda w, values: segment(d, h, w, depth, values)
            )

        return b.nest([(low_deep, end_deep, 1), (low, end, 1)], v.typed(sums), row)

    def _spots(self, spot, shape):
        """The place in the waiting sums of each vector of a tile."""
        v, (n, i, j), wide = self.v, spot, self.axes[2].count
        first = (n * self.lines + i) * wide + j
        base = v.at(self.waiting, first * self.panel, v.element)
        return base, [
            ((m * self.lines + r) * wide + c) * self.panel + u * v.width
            for m, r, c in self._members(shape)
            for u in range(self.tile.vectors)
        ]

    def _keep(self, spot, shape, sums: list[str] | None) -> None:
        base, places = self._spots(spot, shape)
        for value, place in zip(sums or [self.v.zero] * len(places), places):
            self.v.store_computed(value, base, place)

    def _kept(self, spot, shape) -> list[str]:
        base, places = self._spots(spot, shape)
        return [self.v.load_computed(base, place) for place in places]

    def _finish(self, spot, shape, sums: list[str]) -> None:
        b, count = self.b, self.tile.vectors
        for r, row in enumerate(self._rows(spot, shape)):

            def store(row=row, values=sums[r * count : (r + 1) * count]) -> None:
                for j, value in enumerate(values):
                    self._store(value, row, self._channel(j), j)

            if self.tile.across_images and r:
                image = spot[0] + r
                exists = b.value(f"icmp slt i64 {image}, {self.image_count}")
                b.when(exists, [], store)
            else:
                store()

    def _rows(self, spot, shape) -> list[Index]:
        """The flat position in the result of each position of a tile."""
        (deep, high, wide), (n, i, j) = self.axes, spot
        first: Index = self.first_image + n
        lines = self.first_line + i
        for index, axis in zip((self.deep, lines, j), self.axes):
            at = index * axis.place[1] + axis.place[0]
            first = first * axis.result + at
        image = deep.result * high.result * wide.result
        return [
            first + (m * image + r * high.place[1] * wide.result + c * wide.place[1])
            for m, r, c in self._members(shape)
        ]

    def _channel(self, j: int) -> Index:
        v = self.v
        group = self.group * self.sizes.right
        return group + (self.column + j * v.width)

    def _store(self, value: str, row: Index, channel: Index, j: int) -> None:
        v, right = self.v, self.sizes.right
        left = right - (self.column + j * v.width)
        mask = v.first(left) if right % self.panel else None
        if self.epilogue is not None:
            with self.b.lanes(v.width):
                value = self.epilogue(self.b, value, row, channel, mask)
        line = v.at("%p2", row * (right * self.sizes.groups))
        v.store(value, line, channel, mask)


def _strip_bytes(axes: Axes) -> int:
    taps = math.prod(axis.taps for axis in axes)
    return STRIP_BYTES if taps >= FEW_TAPS * math.prod(a.stride for a in axes) else NEAR_BYTES


# The gradient [N, *spatial, C] of a convolution's operand of so few channels C that they would
# leave most of a vector empty. A vector is adjacent channels of what is summed. Each result keeps
# a vector of sums in registers over all taps; at the end the lanes of each are added up, those of
# many results at once.

FULL_SHARE = 4  # of a vector's lanes, one in so many; more results are better off side by side


def sums_across_lanes(v: Vectors, geometry: Geometry, axes: Axes) -> bool:
    """Return True if these kernels compute a phase of a gradient, and are worth it."""
    outputs, channels = geometry.weight[:2]
    few = 1 <= channels <= v.width // FULL_SHARE and geometry.groups == 1 and outputs >= v.width
    weights = axes[2].taps * channels
    return few and weights + v.width + 2 <= v.isa.registers


class ChannelTotals(StripSums):
    """result[n, o, m] = sum over t, c of operand[n, o meets t, c] * weight[c, m, t]."""

    def __init__(self, dtype, geometry: Geometry, axes: Axes, isa: Isa, epilogue: Epilogue | None):
        positions = isa.lanes(BYTES[FORMS[dtype].computed]) // geometry.weight[1]
        super().__init__(dtype, geometry, axes, isa, epilogue, positions)

    def _line(self, image: Index, line: Index, position: Index) -> None:
        self._tiles(image, line, 0, lambda place, width, column: self._store(
            total_of_each(self.v, self._summed(place, width)), width, position, column
        ))  # fmt: skip

    def _summed(self, place: str, width: int) -> list[str]:
        """A vector of sums for each result: those of a position are neighbours."""
        v, b, (deep, high, _) = self.v, self.b, self.axes

        def line(d: Index, h: Index, values: list[str]) -> list[str]:
            row = (d * high.taps + h) * (self.axes[2].taps * self.right)
            weights = v.at(self.packed, row * self.packed_row, v.element)
            here = v.at(place, self.input_tile.tap(d, h, 0), v.element)
            return b.loop(0, self.channels, v.width, v.typed(values), lambda c, values: (
                self._vector(v.at(here, c, v.element), v.at(weights, c, v.element), c, values)
            ))  # fmt: skip

        zeros = v.typed([v.zero] * (width * self.right))
        return b.nest((deep.taps, high.taps), zeros, line)

    def _vector(self, here: str, weights: str, channel: Index, values: list[str]) -> list[str]:
        """One vector of channels of a line of taps: each element is loaded once."""
        v, values, mask = self.v, list(values), self.mask(channel)
        rows = range(self.axes[2].taps * self.right)
        ys = [v.load_computed(weights, row * self.packed_row) for row in rows]
        for element, meetings in self._meetings(
            len(values) // self.right, self.axes[2].taps
        ).items():
            x = v.load_computed(here, element, mask)
            for r, t in meetings:
                for m in range(self.right):
                    at = r * self.right + m
                    values[at] = v.multiply_add(x, ys[t * self.right + m], values[at])
        return values

    def _store(self, totals: str, width: int, position: Index, column: Index) -> None:
        v, right = self.v, self.right
        if self.epilogue is None and self.axes[2].place[1] == 1:
            first = self._row(position, column, 0) * right
            v.store(totals, "%p2", first, v.first(width * right))
            return
        for r in range(width):
            lanes = [min(r * right + k, v.width - 1) for k in range(v.width)]
            self._store_one(
                shuffled(self.b, v.vector, totals, totals, lanes), self._row(position, column, r)
            )

    def _store_one(self, value: str, row: Index) -> None:
        v, mask = self.v, self.v.first(self.right)
        if self.epilogue is not None:
            with self.b.lanes(v.width):
                value = self.epilogue(self.b, value, row, 0, mask)
        v.store(value, "%p2", row * self.right, mask)


def total_of_each(v: Vectors, vectors: list[str]) -> str:
    """A vector of the sums of the lanes of each vector, of as many as it has lanes at most."""
    width, step = v.width, 1
    vectors = vectors + [v.zero] * (width - len(vectors))
    while step < width:
        keep = [lane if not lane & step else width + lane - step for lane in range(width)]
        move = [lane + step if not lane & step else width + lane for lane in range(width)]
        vectors = [
            v.add(*(shuffled(v.builder, v.vector, x, y, lanes) for lanes in (keep, move)))
            for x, y in zip(vectors[::2], vectors[1::2])
        ]
        step *= 2
    return vectors[0]
