"""The gradient of the weight of a 3x3 convolution, by the transformed tiles of `winograd`.

What is 16 products of tiles by weights in the convolution is 16 products of transposed tiles by the
tiles of the gradient here: F(3x3, 2x2). Their sums over all tiles are transformed back to the 9 taps.

Channels fall into blocks, and tiles into chunks, whose sums are kept apart and added in one order.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ltc.llvm.conv.axes import Axes, forward_axes
from ltc.llvm.conv.geometry import Geometry, KernelSequence
from ltc.llvm.conv.nhwc_tile import most_rows, panel_widths, step_cycles
from ltc.llvm.conv.nhwc_weight_grad import PartialSums
from ltc.llvm.conv.split_images import ImageSplit, adding_kernel, images_of
from ltc.llvm.conv.winograd import (
    LINE,
    PIXEL_CYCLES,
    PLACES,
    SIDE,
    TAPS,
    TILE,
    WORK_ITEMS,
    PixelTiles,
    is_possible,
    vector_cycles,
)
from ltc.llvm.emit.builder import Builder, function_text
from ltc.llvm.emit.dtype import BYTES
from ltc.llvm.emit.index import Index, least
from ltc.llvm.emit.isa import LEVEL_2_BYTES, LEVEL_3_BYTES_A_CYCLE, Isa
from ltc.llvm.emit.vectors import (
    Epilogue,
    GeneratedKernel,
    Vectors,
    require_stack,
    reserved,
    tasks_for,
)
from ltc.support.sizes.extent import Extent

CHANNELS = 64  # of a block: of so many others is each transformed number a factor
TOGETHER = 16  # tiles that are added one by one: short sums make up for errors of the transforms
FORM = "float"  # of all numbers
GRADIENT_CYCLES = vector_cycles(4, 12, 16)
TAP_CYCLES = vector_cycles(0, 35, 9)  # beside the loads and additions of the sums of each chunk
SUM_CYCLES = vector_cycles(1, 1, 1)  # of a sum that is added to those in memory


def winograd_weight_gradient(
    name: str, dtype: torch.dtype, geometry: Geometry, isa: Isa,
    epilogue: Epilogue | None = None, operands: int = 0,
) -> KernelSequence:  # fmt: skip
    """The gradient [O, C, 3, 3] of a convolution's weight; as `channels_last_weight_gradient`."""
    plan = Plan.of(geometry, Vectors(Builder(), isa, dtype))
    sums = _TileSums(dtype, geometry, plan, isa).kernel(name)
    taps = _Taps(dtype, geometry, plan, isa).kernel(name)
    outputs, channels = geometry.weight[:2]
    split = ImageSplit(1, 1, outputs, plan.panel, TAPS * TAPS * channels)

    def row_of(column: Index) -> Index:
        channel, tap = divmod(column, TAPS * TAPS)
        return tap * channels + channel

    last = adding_kernel(name, dtype, isa, split, row_of, epilogue, operands)
    scratch = {"sums": plan.bytes, "partial": split.bytes(FORM)}
    return KernelSequence((sums, taps, last), scratch)


def is_weight_gradient_faster(dtype: torch.dtype, geometry: Geometry, isa: Isa) -> bool:
    """Return True if `winograd_weight_gradient` computes it, and in fewer cycles than the direct one."""
    return is_possible(dtype, geometry) and gain(dtype, geometry, isa) > 1


def gain(dtype: torch.dtype, geometry: Geometry, isa: Isa) -> float:
    """Return how often its cycles go into those of direct sums, without what both do."""
    if isinstance(geometry.operand[0], Extent):  # the choice is that of one image
        geometry = replace(geometry, operand=(1, *geometry.operand[1:]))
    v, axes = Vectors(Builder(), isa, dtype), forward_axes(*geometry.window)
    direct = PartialSums(dtype, geometry, isa).cycles
    return direct / max(1.0, Plan.of(geometry, v).cycles(geometry, axes, v))


def _register_block(outputs: int, channels: int, v: Vectors) -> tuple[int, int]:
    """(vectors of outputs, channels) whose sums fit in registers and take the fewest cycles."""

    def cycles(block: tuple[int, int]) -> float:
        vectors, height = block
        rounds = -(-outputs // (vectors * v.width)) * -(-channels // height)
        return rounds * step_cycles(height, vectors)

    blocks = [(n, h) for n in panel_widths(v.isa) for h in range(1, most_rows(v.isa, n) + 1)]
    return min(blocks, key=cycles)


@dataclass(frozen=True)
class Plan:
    """sums[chunk, block of channels, panel of outputs, place, channel of the block, output of the panel].

    Attributes:
        height, vectors: Channels, and vectors of outputs, whose sums are in registers together.
        channels: The channels of a block, of which there are `blocks`.
        groups: Into so many parts the panels fall, each of which transforms the pixels anew.
        chunks: The parts that the images fall into.
    """

    vectors: int
    height: int
    panel: int
    panels: int
    channels: int
    blocks: int
    groups: int
    chunks: int

    @classmethod
    def of(cls, geometry: Geometry, v: Vectors) -> Plan:
        outputs, channels = geometry.weight[:2]
        blocks = max(1, -(-channels // CHANNELS))
        block = -(-channels // blocks)
        vectors, height = _register_block(outputs, block, v)
        panel = vectors * v.width
        groups = max(1, min(outputs // CHANNELS, -(-WORK_ITEMS // blocks)))
        chunks = max(1, min(geometry.operand[0], -(-WORK_ITEMS // (blocks * groups))))
        block = -(-block // height) * height
        return cls(vectors, height, panel, -(-outputs // panel), block, blocks, groups, chunks)

    @property
    def plane(self) -> int:
        """Elements of a place."""
        return self.channels * self.panel

    @property
    def of_chunk(self) -> int:
        return self.blocks * self.panels * PLACES * self.plane

    @property
    def bytes(self) -> int:
        return max(1, self.chunks * self.of_chunk) * BYTES[FORM]

    def place_of(self, block: Index, panel: Index) -> Index:
        """Return where the sums of a block and panel begin in a chunk."""
        return (block * self.panels + panel) * (PLACES * self.plane)

    def cycles(self, geometry: Geometry, axes: Axes, v: Vectors) -> float:
        """Return the cycles of all kernels."""
        tiles = geometry.operand[0] * -(-axes[1].count // TILE) * -(-axes[2].count // TILE)
        rows, vectors = self.blocks * self.channels, self.panels * self.vectors
        step = step_cycles(self.height, self.vectors) / self.height
        products = PLACES * rows * self.panels * step
        sums = PLACES * rows * vectors
        added = max(products, sums * self._waited_for(v) / TOGETHER) + sums * SUM_CYCLES / TOGETHER
        pixels = self.groups * self.blocks * -(-self.channels // v.width) * PIXEL_CYCLES
        around = pixels + self.blocks * vectors * GRADIENT_CYCLES
        back = rows * vectors * (TAP_CYCLES + PLACES * self.chunks)
        return tiles * (added + around) + back

    def _waited_for(self, v: Vectors) -> float:
        """Return the cycles in which a vector of an item's sums is read and written, if that is afar."""
        of_item = self.of_chunk // (self.blocks * self.groups) * BYTES[FORM]
        if of_item <= LEVEL_2_BYTES:
            return 0.0
        return 2 * v.width * BYTES[FORM] / LEVEL_3_BYTES_A_CYCLE


class _TileSums:
    """The sums of each chunk; the pointers are the gradient, the operand and the sums.

    The number is that of the images.
    """

    def __init__(self, dtype, geometry: Geometry, plan: Plan, isa: Isa):
        self.b = Builder()
        self.v = v = Vectors(self.b, isa, dtype)
        self.geometry, self.plan = geometry, plan
        self.axes = forward_axes(*geometry.window)
        channels = geometry.operand[1]
        self.apart = -(-channels // plan.blocks)  # channels from one block to the next
        self.tiles = PixelTiles(v, self.axes, channels, plan.channels, TOGETHER)
        self.of_image = self.tiles.lines * self.tiles.columns
        self.plane = TOGETHER * plan.panel + LINE // BYTES[v.element]

    @property
    def stack_bytes(self) -> int:
        elements = PLACES * self.plane + self.plan.panel
        return self.tiles.bytes + elements * BYTES[self.v.element]

    def kernel(self, name: str) -> GeneratedKernel:
        plan, images = self.plan, self.geometry.operand[0]
        require_stack(self.stack_bytes, "convolution")
        items = plan.chunks * plan.blocks * plan.groups
        if plan.panels and plan.channels:
            self._emit(items)
        arguments = ("gradient", "operand", "sums")
        work = 2 * images * self.of_image * plan.of_chunk
        text = function_text(name, len(arguments), self.b, 1)
        return GeneratedKernel(name, text, arguments, tasks_for(work, items, 1), work, (images,))

    def _emit(self, items: int) -> None:
        v, b, plan = self.v, self.b, self.plan
        self.tiles.reserve()
        self.gradients = reserved(b, PLACES * self.plane, v.element)
        self.zeros = reserved(b, plan.panel, v.element)
        for j in range(0, plan.panel, v.width):
            v.store(v.zero, self.zeros, j)

        def item(number: Index, _) -> None:
            rest, group = divmod(number, plan.groups)
            chunk, block = divmod(rest, plan.blocks)
            panels = tuple((group + k) * plan.panels // plan.groups for k in (0, 1))
            self._item(chunk, block, panels)

        b.loop(*b.share(items), 1, [], item)

    def _item(self, chunk: Index, block: Index, panels: tuple[Index, Index]) -> None:
        v, b, plan = self.v, self.b, self.plan
        sums = v.at("%p2", chunk * plan.of_chunk)
        first, last = (plan.place_of(block, panel) for panel in panels)
        b.loop(first, last, v.width, [], lambda i, _: v.store(v.zero, sums, i))
        first, last = (n * self.of_image for n in images_of(chunk, b.number(0), plan.chunks))

        def tiles(start: Index, _) -> None:
            count = least(TOGETHER, last - start)
            channel = block * self.apart
            b.loop(0, count, 1, [], lambda row, _: self.tiles.transform(row, start + row, channel))

            def panel(number: Index, _) -> None:
                b.loop(0, count, 1, [], lambda row, _: self._transform(row, start + row, number))
                self._multiply(v.at(sums, plan.place_of(block, number)), count)

            b.loop(*panels, 1, [], panel)

        b.loop(first, last, TOGETHER, [], tiles)

    def _transform(self, row: Index, tile: Index, panel: Index) -> None:
        """Transform the 2x2 numbers of the gradient of a panel; those outside are zeros.

        The fourth of each line and column has the other sign, which is made good at the end.
        """
        v, plan, outputs = self.v, self.plan, self.geometry.weight[0]
        first = panel * plan.panel
        pointers = self._numbers(*self.tiles.position(tile), first)
        there = v.at(self.gradients, row * plan.panel)
        for j in range(0, plan.panel, v.width):
            mask = v.first(outputs - (first + j)) if outputs % plan.panel else None
            lines = [[v.load(at, j, mask) for at in line] for line in pointers]
            columns = [_four_of_two(v, list(column)) for column in zip(*lines)]
            for i, line in enumerate(zip(*columns)):
                for k, value in enumerate(_four_of_two(v, list(line))):
                    v.store(value, there, (i * SIDE + k) * self.plane + j)

    def _numbers(self, image: Index, line: Index, column: Index, first: Index) -> list[list[str]]:
        """The addresses of a tile's numbers of the gradient."""
        (_, high, wide), v, b = self.axes, self.v, self.b

        def number(i: int, j: int) -> str:
            row = (image * high.count + (line + i)) * wide.count + (column + j)
            place = v.at("%p0", row * self.geometry.weight[0] + first)
            for index, count in ((line + i, high.count), (column + j, wide.count)):
                if count % TILE:
                    exists = b.value(f"icmp slt i64 {index}, {count}")
                    place = b.value(f"select i1 {exists}, ptr {place}, ptr {self.zeros}")
            return place

        return [[number(i, j) for j in range(TILE)] for i in range(TILE)]

    def _multiply(self, sums: str, count: Index) -> None:
        """Add the products of a block of tiles to the sums of a block of channels and a panel."""
        v, plan = self.v, self.plan

        def block(place: Index, channel: Index, _) -> None:
            left = v.at(self.tiles.memory, place * self.tiles.plane + channel)
            right = v.at(self.gradients, place * self.plane)
            there = v.at(sums, place * plan.plane + channel * plan.panel)
            for k, value in enumerate(self._product(left, right, count)):
                v.store(v.add(v.load(there, k * v.width), value), there, k * v.width)

        self.b.nest([PLACES, (0, plan.channels, plan.height)], [], block)

    def _product(self, left: str, right: str, count: Index) -> list[str]:
        v, plan = self.v, self.plan

        def step(tile: Index, values: list[str]) -> list[str]:
            line, here = v.at(right, tile * plan.panel), v.at(left, tile * self.tiles.row)
            ys = [v.load(line, j * v.width) for j in range(plan.vectors)]
            sums, result = iter(values), []
            for channel in range(plan.height):
                x = v.splat(v.scalar(here, channel))
                result += [v.multiply_add(x, y, next(sums)) for y in ys]
            return result

        zeros = v.typed([v.zero] * (plan.height * plan.vectors))
        return self.b.loop(0, count, 1, zeros, step)


def _four_of_two(v: Vectors, numbers: list[str]) -> list[str]:
    a, b = numbers
    return [a, v.add(a, b), v.sub(a, b), b]


def _three_of_four(v: Vectors, sums: list[str]) -> list[str]:
    a, b, c, d = sums
    half = v.mul(v.add(b, c), 0.5)
    return [v.add(a, half), v.mul(v.sub(b, c), 0.5), v.sub(half, d)]


class _Taps:
    """partial[panel, tap * C + c, output of the panel]: the sums of all chunks, transformed back."""

    def __init__(self, dtype, geometry: Geometry, plan: Plan, isa: Isa):
        self.b = Builder()
        self.v = Vectors(self.b, isa, dtype)
        self.plan, self.channels = plan, geometry.weight[1]

    def kernel(self, name: str) -> GeneratedKernel:
        plan, b = self.plan, self.b
        items = plan.panels * self.channels
        if items:
            b.loop(*b.share(items), 1, [], self._channel)
        arguments = ("sums", "partial")
        work = plan.of_chunk * plan.chunks
        text = function_text(name, len(arguments), b)
        return GeneratedKernel(name, text, arguments, tasks_for(4 * work, items, 1), work)

    def _channel(self, number: Index, _) -> None:
        v, plan, channels = self.v, self.plan, self.channels
        panel, channel = divmod(number, channels)
        block, rest = divmod(channel, -(-channels // plan.blocks))
        first = plan.place_of(block, panel) + rest * plan.panel
        there = panel * (TAPS * TAPS * channels * plan.panel) + channel * plan.panel

        def vector(j: Index, _) -> None:
            sums = self._summed(v.at("%p0", first + j))
            columns = [_three_of_four(v, sums[k::SIDE]) for k in range(SIDE)]
            taps = [tap for line in zip(*columns) for tap in _three_of_four(v, list(line))]
            to = v.at("%p1", there + j)
            for tap, value in enumerate(taps):
                v.store(value, to, tap * (channels * plan.panel))

        self.b.loop(0, plan.panel, v.width, [], vector)

    def _summed(self, memory: str) -> list[str]:
        """The 16 vectors of all chunks."""
        v, plan = self.v, self.plan

        def chunk(k: Index, totals: list[str]) -> list[str]:
            here = v.at(memory, k * plan.of_chunk)
            return [
                v.add(total, v.load(here, place * plan.plane)) for place, total in enumerate(totals)
            ]

        starts = v.typed([v.load(memory, place * plan.plane) for place in range(PLACES)])
        return self.b.loop(1, plan.chunks, 1, starts, chunk)
