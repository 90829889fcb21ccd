"""Winograd's convolutions of 3x3 taps on [N, H, W, C]: F(2x2, 3x3), with 16 products for 36.

The result falls into tiles of 2x2 positions. The 4x4 pixels that a tile meets, and the 3x3 weights
of a pair of channels, are both transformed to 16 numbers; their products, summed over channels,
are transformed back to the four results. Each of the 16 is a matrix product of tiles by weights.

No result depends on a pixel that its window does not meet: one that is not finite spreads no further
than in a direct convolution. But where that gives an infinity, this may give NaN, and results within a
factor of ten of the largest number may overflow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ltc.llvm.conv.axes import Axes, Axis, forward_axes, gradient_phases
from ltc.llvm.conv.geometry import Geometry, KernelSequence
from ltc.llvm.conv.nhwc import Sizes, sums_across_lanes, tile_of
from ltc.llvm.conv.nhwc_input_tile import ascending
from ltc.llvm.conv.nhwc_tile import most_rows, panel_widths, step_cycles, tile_cycles
from ltc.llvm.conv.nhwc_weight_packing import WeightPacker
from ltc.llvm.emit.builder import Builder, function_text
from ltc.llvm.emit.dtype import BYTES
from ltc.llvm.emit.index import Index, least, most
from ltc.llvm.emit.isa import LEVEL_2_BYTES, LEVEL_3_BYTES_A_CYCLE, Isa
from ltc.llvm.emit.vectors import (
    STACK_BYTES,
    Epilogue,
    GeneratedKernel,
    Vectors,
    require_stack,
    reserved,
    tasks_for,
)
from ltc.support.sizes.extent import Extent

SIDE, TILE, TAPS = 4, 2, 3  # extents of what a tile meets, of its results, and of the kernel
PLACES = SIDE * SIDE  # numbers of a transformed tile, and of transformed weights
# Of the transformed tiles of a block, which each panel of outputs reads anew: its weights, which pass by,
# have the other half.
BLOCK_BYTES = LEVEL_2_BYTES // 2
FEWEST_TILES = 24  # of a block: fewer would read the transformed weights too often
LINE = 64  # bytes of a cache line, by which planes are longer: they share no set of a cache
CHUNK = 32  # channels whose weights are packed, and stay in a level-1 cache to be transformed
# Channels that are added one by one; a longer sum is a sum of such. The transforms add errors of their
# own, which shorter pieces make up for.
PIECE = 64
STEPS_TOGETHER = 4  # channels of one turn
WEIGHT_FLOPS = 28


def vector_cycles(loads: int, arithmetic: int, stores: int) -> float:
    """Return the cycles of a vector's transform: as of multiply-adds, two instructions make one, but a
    store is alone.
    """
    return (loads + arithmetic) / 2 + stores


PIXEL_CYCLES = vector_cycles(16, 32, 16)
RESULT_CYCLES = vector_cycles(16, 24, 4 + 16)  # with the stores of its sums
WEIGHT_CYCLES = vector_cycles(18, 28 + 36, 25)  # 28: shuffles of what is packed
WORK_ITEMS = 16  # that a launch falls into, where there are enough panels


def winograd_convolution(
    name: str, dtype: torch.dtype, geometry: Geometry, isa: Isa,
    epilogue: Epilogue | None = None, operands: int = 0,
) -> KernelSequence:  # fmt: skip
    """A convolution that these kernels compute; as `channels_last_convolution`."""
    body = _Sum.forward(geometry)
    return body.kernels(name, dtype, isa, epilogue, "operand", operands)


def winograd_input_gradient(
    name: str, dtype: torch.dtype, geometry: Geometry, isa: Isa,
    epilogue: Epilogue | None = None, operands: int = 0,
) -> KernelSequence:  # fmt: skip
    """The gradient of a convolution's operand; as `channels_last_input_gradient`."""
    body = _Sum.gradient(geometry)
    return body.kernels(name, dtype, isa, epilogue, "gradient", operands)


def is_convolution_faster(dtype: torch.dtype, geometry: Geometry, isa: Isa) -> bool:
    """Return True if `winograd_convolution` computes it, and in fewer cycles than the direct one."""
    return is_possible(dtype, geometry) and _Sum.forward(geometry).gain(dtype, isa) > 1


def is_input_gradient_faster(dtype: torch.dtype, geometry: Geometry, isa: Isa) -> bool:
    """Return True if `winograd_input_gradient` computes it, and in fewer cycles."""
    if not is_possible(dtype, geometry):
        return False
    body, v = _Sum.gradient(geometry), Vectors(Builder(), isa, dtype)
    return not sums_across_lanes(v, geometry, body.axes) and body.gain(dtype, isa) > 1


def is_possible(dtype: torch.dtype, geometry: Geometry) -> bool:
    """Return True if a sum is of 3x3 taps side by side at every position, of sizes that are known."""
    known = not any(isinstance(n, Extent) for n in (*geometry.operand[1:], *geometry.weight))
    steps = {*geometry.stride, *geometry.dilation, geometry.groups}
    return known and dtype is torch.float32 and geometry.weight[2:] == (TAPS, TAPS) and steps == {1}


@dataclass(frozen=True)
class _Sum:
    """result[n, o, m] = sum over t, c of operand[n, o + t, c] * weight of m, c and t.

    Attributes:
        axes: They ascend.
        is_forward: Weights are [right, left, 3, 3]; else [left, right, 3, 3].
    """

    sizes: Sizes
    axes: Axes
    is_forward: bool

    @classmethod
    def forward(cls, geometry: Geometry) -> _Sum:
        outputs, channels = geometry.weight[:2]
        sizes = Sizes(geometry.operand[0], 1, channels, outputs)
        return cls(sizes, forward_axes(*geometry.window), True)

    @classmethod
    def gradient(cls, geometry: Geometry) -> _Sum:
        outputs, channels = geometry.weight[:2]
        (axes,) = gradient_phases(*geometry.window)
        return cls(Sizes(geometry.operand[0], 1, outputs, channels), ascending(axes), False)

    def kernels(self, name: str, dtype, isa: Isa, epilogue, operand: str, operands: int):
        weights, tiles = _Weights(dtype, self, isa), _TileProducts(dtype, self, isa, epilogue)
        require_stack(tiles.stack_bytes, "convolution")
        kernels = weights.kernel(name), tiles.kernel(name, operand, operands)
        return KernelSequence(kernels, {"transformed": tiles.layout.weight_bytes})

    def gain(self, dtype: torch.dtype, isa: Isa) -> float:
        """Return how often its cycles go into those of direct sums, without what both do.

        The batch counts only where it is known.
        """
        v, sizes = Vectors(Builder(), isa, dtype), self.sizes
        images = 1 if isinstance(sizes.images, Extent) else sizes.images
        direct = sizes.left * tile_cycles(
            tile_of(v, sizes, self.axes), self.axes, sizes.right, v.width, images
        )
        tiles = _TileProducts(dtype, self, isa, None)
        return direct / max(1.0, tiles.cycles(images)) if tiles.stack_bytes <= STACK_BYTES else 0.0


class WeightLayout:
    """Transformed weights [panel of right channels, place, left channel, right channel of the panel].

    Attributes:
        vectors: The width of a panel in vectors.
        height: Tiles whose sums are in registers together.
        plane: Elements of the weights of a panel from one place to the next.
    """

    def __init__(self, sizes: Sizes, v: Vectors):
        self.vectors, self.height = _register_block(sizes.right, v.isa, v.width)
        self.panel = self.vectors * v.width
        self.panels = -(-sizes.right // self.panel)
        self.gap = LINE // BYTES[v.element]
        self.plane = sizes.left * self.panel + self.gap
        self.weight_bytes = max(1, self.panels) * PLACES * self.plane * BYTES[v.element]


def _register_block(right: int, isa: Isa, lanes: int) -> tuple[int, int]:
    """(vectors, tiles) whose sums fit in registers, and which take the fewest cycles."""

    def cost(block: tuple[int, int]) -> tuple[float, float]:
        vectors, height = block
        cycles = -(-right // (vectors * lanes)) * step_cycles(height, vectors) / height
        return cycles, (vectors + height) / (vectors * height)  # of equal ones, that of fewer loads

    return min(((n, most_rows(isa, n)) for n in panel_widths(isa)), key=cost)


def _cycles_from_afar(size: int) -> float:
    """Return the cycles that so many bytes take if no level-2 cache holds them."""
    return size / LEVEL_3_BYTES_A_CYCLE if size > LEVEL_2_BYTES else 0.0


class _Weights:
    """The kernel of the transformed weights; its pointers are the weight and the result."""

    def __init__(self, dtype, sum_: _Sum, isa: Isa):
        self.b = Builder()
        self.v = v = Vectors(self.b, isa, dtype)
        self.sizes = sizes = sum_.sizes
        self.layout = WeightLayout(sizes, v)
        self.packer = WeightPacker(
            v, sum_.axes, (1, TAPS, TAPS), sizes.left, sizes.right, self.layout.panel,
            min(CHUNK, sizes.left), sum_.is_forward,
        )  # fmt: skip

    def kernel(self, name: str) -> GeneratedKernel:
        chunks = -(-self.sizes.left // CHUNK)
        items = self.layout.panels * chunks
        if items:
            self.packer.reserve()
            self.b.loop(
                *self.b.share(items), 1, [], lambda item, _: self._chunk(*divmod(item, chunks))
            )
        arguments = ("weight", "transformed")
        work = WEIGHT_FLOPS * self.sizes.left * self.sizes.right
        text = function_text(name, len(arguments), self.b)
        tasks = tasks_for(4 * work, items, 1)
        return GeneratedKernel(name, text, arguments, tasks, work)

    def _chunk(self, panel: Index, chunk: Index) -> None:
        v, layout, packer = self.v, self.layout, self.packer
        start = chunk * CHUNK
        depth = least(CHUNK, self.sizes.left - start)
        packer.pack(0, panel * layout.panel, start, depth)

        def vector(k: Index, j: Index, _) -> None:
            here = v.at(packer.memory, k * layout.panel + j)
            rows = range(TAPS * TAPS)
            taps = [v.load(here, tap * packer.depth * layout.panel) for tap in rows]
            first = panel * (PLACES * layout.plane) + ((start + k) * layout.panel + j)
            there = v.at("%p1", first)
            for place, value in enumerate(_transformed_weights(v, taps)):
                v.store(value, there, place * layout.plane)

        self.b.nest([depth, (0, layout.panel, v.width)], [], vector)


def _transformed_weights(v: Vectors, taps: list[str]) -> list[str]:
    """16 vectors, line by line, of 9: first the columns, then the lines."""
    columns = [_four_of_three(v, taps[column::TAPS]) for column in range(TAPS)]
    lines = zip(*columns)
    return [value for line in lines for value in _four_of_three(v, list(line))]


def _four_of_three(v: Vectors, taps: list[str]) -> list[str]:
    a, b, c = taps
    ends = v.add(a, c)
    return [a, v.mul(v.add(ends, b), 0.5), v.mul(v.sub(ends, b), 0.5), c]


def _two_of_four(v: Vectors, sums: list[str]) -> list[str]:
    a, b, c, d = sums
    return [v.add(v.add(a, b), c), v.sub(v.sub(b, c), d)]


class PixelTiles:
    """transformed[place, row, channel]: some channels of what tiles of results meet, of [N, H, W, C].

    Attributes:
        lines, columns: Tiles of an image.
        row, plane: Elements from one tile, and from one place, to the next.

    Args:
        channels: Number of the operand's channels, of which `width` are transformed.
        rows: Number of tiles that there is room for.
    """

    def __init__(self, v: Vectors, axes: Axes, channels: int, width: int, rows: int):
        self.v, self.axes, self.channels, self.width = v, axes, channels, width
        self.lines, self.columns = tiles_of(axes)
        self.row = -(-width // v.width) * v.width
        self.plane = rows * self.row + LINE // BYTES[v.element]
        self.bytes = (PLACES * self.plane + self.row) * BYTES[v.element]

    def reserve(self) -> None:
        v, b = self.v, self.v.builder
        self.memory = reserved(b, PLACES * self.plane, v.element)
        self.zeros = reserved(b, max(1, self.row), v.element)
        b.loop(0, self.row, v.width, [], lambda c, _: v.store(v.zero, self.zeros, c))

    def position(self, tile: Index) -> tuple[Index, Index, Index]:
        """The image, line and column of the first result of a tile."""
        image, rest = divmod(tile, self.lines * self.columns)
        line, column = divmod(rest, self.columns)
        return image, line * TILE, column * TILE

    def transform(self, row: Index, tile: Index, first: Index) -> None:
        """Transform a tile's channels from `first` on; those that it does not have are zeros."""
        v = self.v
        is_cut = self.channels % self.width or self.width % v.width
        count = least(self.width, self.channels - first)
        pixels = self._pixels(*self.position(tile), first)
        there = v.at(self.memory, row * self.row)

        def vector(channel: Index, _) -> None:
            mask = v.first(count - channel) if is_cut else None
            here = v.at(there, channel)
            lines = [[v.load(pixel, channel, mask) for pixel in line] for line in pixels[:3:2]]
            self._store_line(0, here, map(v.sub, *lines))
            second = [v.load(pixel, channel, mask) for pixel in pixels[1]]
            self._store_line(1, here, map(v.add, second, lines[1]))
            self._store_line(2, here, map(v.sub, lines[1], second))
            last = [v.load(pixel, channel, mask) for pixel in pixels[3]]
            self._store_line(3, here, map(v.sub, second, last))

        v.builder.loop(0, self.width, v.width, [], vector)

    def _pixels(self, image: Index, line: Index, column: Index, first: Index) -> list[list[str]]:
        """The addresses of the pixels that a tile meets, of which those outside are zeros."""
        (_, high, wide), v, b = self.axes, self.v, self.v.builder
        lines = [self._inside(high, line, tap) for tap in range(SIDE)]
        columns = [self._inside(wide, column, tap) for tap in range(SIDE)]
        base = image * high.extent

        def pixel(down: Index, across: Index, is_inside: str) -> str:
            place = ((base + down) * wide.extent + across) * self.channels + first
            return b.value(f"select i1 {is_inside}, ptr {v.at('%p1', place)}, ptr {self.zeros}")

        return [
            [pixel(down, across, b.value(f"and i1 {x}, {y}")) for across, y in columns]
            for down, x in lines
        ]

    def _inside(self, axis: Axis, position: Index, tap: int) -> tuple[Index, str]:
        """The operand's index, and whether it lies inside: a negative one is a large one unsigned."""
        index = axis.input_index(position, tap)
        return index, self.v.builder.value(f"icmp ult i64 {index}, {axis.extent}")

    def _store_line(self, line: int, here: str, values) -> None:
        v, (a, b, c, d) = self.v, values
        for k, value in enumerate((v.sub(a, c), v.add(b, c), v.sub(c, b), v.sub(b, d))):
            v.store(value, here, (line * SIDE + k) * self.plane)


def tiles_together(v: Vectors, channels: int) -> int:
    """The tiles whose transformed channels stay in half of a level-2 cache."""
    row = max(1, -(-channels // v.width)) * v.width * BYTES[v.element]
    return max(1, BLOCK_BYTES // (PLACES * row))


def tiles_of(axes: Axes) -> tuple[int, int]:
    """The lines and columns of tiles of an image."""
    return -(-axes[1].count // TILE), -(-axes[2].count // TILE)


class _TileProducts:
    """The results of blocks of tiles: transformed, multiplied by each panel, and transformed back.

    The pointers are the transformed weights, the operand and the result; the numbers are the images,
    and into how many parts the panels of output channels fall.
    """

    def __init__(self, dtype, sum_: _Sum, isa: Isa, epilogue: Epilogue | None):
        self.b = Builder()
        self.v = v = Vectors(self.b, isa, dtype)
        self.sizes, self.axes, self.epilogue = sum_.sizes, sum_.axes, epilogue
        sizes = sum_.sizes
        self.layout = layout = WeightLayout(sizes, v)
        fitting = max(FEWEST_TILES, tiles_together(v, sizes.left))
        self.block = -(-fitting // layout.height) * layout.height
        self.tiles = PixelTiles(v, self.axes, sizes.left, sizes.left, self.block)
        self.of_image = self.tiles.lines * self.tiles.columns
        self.sum_plane = self.block * layout.panel + layout.gap

    @property
    def stack_bytes(self) -> int:
        return self.tiles.bytes + PLACES * self.sum_plane * BYTES[self.v.element]

    def cycles(self, images: int) -> float:
        """Return the cycles of both kernels, for so many images."""
        v, sizes, layout = self.v, self.sizes, self.layout
        tiles = images * self.of_image
        left, right = -(-sizes.left // v.width), layout.panels * layout.vectors
        step = step_cycles(layout.height, layout.vectors) / layout.height * layout.panels
        products = PLACES * step * sizes.left
        around = left * PIXEL_CYCLES + right * RESULT_CYCLES
        weights = sizes.left * right
        far_weights = _cycles_from_afar(PLACES * weights * v.width * BYTES[v.element])
        blocks = -(-tiles // self.block)
        # Weights are read in their order: they come while others are multiplied, or are waited for.
        multiplied = max(tiles * products, blocks * far_weights)
        read_anew = blocks * layout.panels * _cycles_from_afar(self.tiles.bytes)
        made = weights * WEIGHT_CYCLES + 2 * far_weights  # a line comes before it is written
        return multiplied + read_anew + tiles * around + made

    def kernel(self, name: str, operand: str, operands: int) -> GeneratedKernel:
        sizes, layout = self.sizes, self.layout
        tiles = sizes.images * self.of_image
        blocks = -(-tiles // self.block)
        parts = most(1, least(layout.panels, WORK_ITEMS // most(1, blocks)))
        if self.of_image and sizes.right:
            self._emit()
        work = 2 * PLACES * tiles * sizes.left * sizes.right
        arguments = ("transformed", operand, "result", *(f"operand{i}" for i in range(operands)))
        text = function_text(name, len(arguments), self.b, 2)
        tasks = tasks_for(work, blocks * parts, 1)
        return GeneratedKernel(name, text, arguments, tasks, work, (sizes.images, parts))

    # --- the walk ---------------------------------------------------------------------------------

    def _emit(self) -> None:
        v, b = self.v, self.b
        self.tiles.reserve()
        self.sums = reserved(b, PLACES * self.sum_plane, v.element)
        self.count = b.number(0) * self.of_image
        blocks = (self.count + (self.block - 1)) // self.block
        items = blocks * b.number(1)

        def item(number: Index, _) -> None:
            part = number // blocks
            self._block((number - part * blocks) * self.block, part)

        b.loop(*b.share(items), 1, [], item)

    def _block(self, first: Index, part: Index) -> None:
        b, layout, parts = self.b, self.layout, self.b.number(1)
        count = least(self.block, self.count - first)
        rows = (count + (layout.height - 1)) // layout.height * layout.height

        def transform(row: Index, _) -> None:
            tile = least(first + row, self.count - 1)  # rows beyond the last tile repeat it
            self.tiles.transform(row, tile, 0)

        b.loop(0, rows, 1, [], transform)

        def panel(number: Index, _) -> None:
            self._multiply(number, rows)
            b.loop(0, count, 1, [], lambda row, _: self._finish(row, first + row, number))

        b.loop(part * layout.panels // parts, (part + 1) * layout.panels // parts, 1, [], panel)

    # --- products ---------------------------------------------------------------------------------

    def _multiply(self, panel: Index, rows: Index) -> None:
        """The 16 products of the block's tiles by the weights of a panel."""
        v, layout = self.v, self.layout
        weights = v.at("%p0", panel * (PLACES * layout.plane))

        def block(place: Index, row: Index, _) -> None:
            left = v.at(self.tiles.memory, place * self.tiles.plane + row * self.tiles.row)
            right = v.at(weights, place * layout.plane)
            there = v.at(self.sums, place * self.sum_plane + row * layout.panel)
            self._add_up(left, right, there)

        self.b.nest([PLACES, (0, rows, layout.height)], [], block)

    def _add_up(self, left: str, right: str, there: str) -> None:
        """Store the sums of a block of tiles; long ones are sums of pieces, which errs less."""
        v, depth, count = self.v, self.sizes.left, self.layout.height * self.layout.vectors
        if depth <= PIECE:
            self._store_sums(there, self._product(left, right, 0, depth))
            return
        self._store_sums(there, [v.zero] * count)

        def piece(start: Index, _) -> None:
            values = self._product(left, right, start, least(start + PIECE, depth))
            totals = [v.load(there, k * v.width) for k in range(count)]
            self._store_sums(there, list(map(v.add, totals, values)))

        self.b.loop(0, depth, PIECE, [], piece)

    def _store_sums(self, there: str, values: list[str]) -> None:
        for k, value in enumerate(values):
            self.v.store(value, there, k * self.v.width)

    def _product(self, left: str, right: str, start: Index, end: Index) -> list[str]:
        v, layout = self.v, self.layout
        together = math.gcd(self.sizes.left, STEPS_TOGETHER)

        def step(k: Index, values: list[str]) -> list[str]:
            line = v.at(right, k * layout.panel)
            ys = [v.load(line, j * v.width) for j in range(layout.vectors)]
            here, sums = v.at(left, k), iter(values)
            result = []
            for row in range(
                layout.height
            ):  # a number is loaded when it is wanted: registers are few
                x = v.splat(v.scalar(here, row * self.tiles.row))
                result += [v.multiply_add(x, y, next(sums)) for y in ys]
            return result

        def steps(k: Index, values: list[str]) -> list[str]:
            for one in range(together):
                values = step(k + one, values)
            return values

        zeros = v.typed([v.zero] * (layout.height * layout.vectors))
        return self.b.loop(start, end, together, zeros, steps)

    # --- results ----------------------------------------------------------------------------------

    def _finish(self, row: Index, tile: Index, panel: Index) -> None:
        v, layout = self.v, self.layout
        position = self.tiles.position(tile)
        here = v.at(self.sums, row * layout.panel)

        def vector(j: Index, _) -> None:
            columns = []
            for column in range(SIDE):
                places = range(column, PLACES, SIDE)
                sums = [v.load(v.at(here, j), place * self.sum_plane) for place in places]
                columns.append(_two_of_four(v, sums))
            for i, line in enumerate(zip(*columns)):
                self._store_results(
                    i, _two_of_four(v, list(line)), position, panel * layout.panel + j
                )

        self.b.loop(0, layout.panel, v.width, [], vector)

    def _store_results(self, i: int, values: list[str], position, channel: Index) -> None:
        """Store a line of a tile's results, as far as they are inside."""
        (_, high, wide), (image, line, column) = self.axes, position
        row = (image * high.count + (line + i)) * wide.count + column

        def one(k: int) -> None:
            self._store(values[k], row + k, channel)

        def both() -> None:
            one(0)
            self._where_inside(wide, column, 1, lambda: one(1))

        self._where_inside(high, line, i, both)

    def _where_inside(self, axis: Axis, first: Index, k: int, body: Callable[[], None]) -> None:
        if k == 0 or axis.count % TILE == 0:
            body()
        else:
            exists = self.b.value(f"icmp slt i64 {first + k}, {axis.count}")
            self.b.when(exists, [], body)

    def _store(self, value: str, row: Index, channel: Index) -> None:
        v, right = self.v, self.sizes.right
        mask = v.first(right - channel) if right % self.layout.panel else None
        if self.epilogue is not None:
            with self.b.lanes(v.width):
                value = self.epilogue(self.b, value, row, channel, mask)
        v.store(value, v.at("%p2", row * right), channel, mask)
