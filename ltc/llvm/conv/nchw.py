"""Convolutions and the gradients of their inputs, of one to three dimensions, on [N, C, *spatial].

If the kernel is one point they are matrix products. Otherwise they are sums over channels and taps of
gathered columns, or direct sums if a group has few result channels.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch

from ltc.llvm.conv.axes import Axes, count_inside, forward_axes, gradient_phases
from ltc.llvm.conv.geometry import Geometry, KernelSequence
from ltc.llvm.emit.builder import Builder, function_text, multiples
from ltc.llvm.emit.dtype import BYTES
from ltc.llvm.emit.index import Index, least
from ltc.llvm.emit.isa import Isa
from ltc.llvm.emit.vectors import (
    LONGEST_SUM,
    Epilogue,
    GeneratedKernel,
    Vectors,
    add_in_pieces,
    is_one_piece,
    require_stack,
    reserved,
    tasks_for,
)
from ltc.llvm.gemm.blocking import Matrix, stored_plain
from ltc.llvm.gemm.kernel import matmul

# --- The sums of a convolution, or of the gradient of its input, on [N, C, *spatial] -------------

# The columns that the weights multiply are gathered for a few rows of the result at a time into
# memory that stays in a cache: padding, stride and dilation are all in that gathering, and the
# sums are those of a matrix product.
#
# Letters: N images, M result channels of a group, C operand channels of a group, T taps.

GATHERED_BYTES = 384 * 1024  # less than half of a level-2 cache
MOST_COLUMNS = 512


class Sums:
    """result[n, g, m, o] = sum over c, t of weight[g, m, c, t] * operand[n, g, c, o meets t].

    The pointers are the weight, the operand and the result, in this order.
    """

    def __init__(self, dtype, images, groups, rows, channels, axes: Axes, isa, epilogue, start=0):
        self.b = Builder()
        self.v = v = Vectors(self.b, isa, dtype)
        self.images, self.groups, self.rows, self.channels = images, groups, rows, channels
        self.axes, self.epilogue, self.start = axes, epilogue, start
        self.taps = prod(axis.taps for axis in axes)
        self.spread = any(axis.place != (0, 1) for axis in axes)
        assert epilogue is None or not self.spread, "an epilogue needs adjacent results"
        self.lines, self.width = axes[0].count * axes[1].count, axes[2].count
        self.size = prod(axis.extent for axis in axes)  # of one channel of the operand
        self.result_size = prod(axis.result for axis in axes)
        self._choose_blocks(isa)
        self._choose_tile(v)

    def _choose_blocks(self, isa: Isa) -> None:
        self.vectors = self._vectors()
        self.panel = self.vectors * self.v.width
        height = (isa.registers - self.vectors - (1 if isa.fused else 2)) // self.vectors
        self.blocks = max(1, -(-self.rows // height))
        self.height, self.taller = divmod(self.rows, self.blocks)

    def _vectors(self) -> int:
        """Return how many vectors of columns are summed at once."""
        narrow = self.lines * self.width <= self.v.width
        return 1 if narrow else (2 if self.rows >= 7 else 4)

    def _choose_tile(self, v: Vectors) -> None:
        """Choose how many lines, columns and channels are gathered at once."""
        column_bytes = BYTES[v.element] * max(1, self.taps)
        fitting = GATHERED_BYTES // (column_bytes * max(1, self.channels))
        columns = max(2 * self.panel, min(MOST_COLUMNS, fitting))
        self.depth = max(1, min(self.channels, GATHERED_BYTES // (column_bytes * columns)))
        if self.depth < self.channels:  # equal pieces
            self.depth = -(-self.channels // -(-self.channels // self.depth))
        self.segments = max(1, -(-self.width // columns))
        self.segment = self.width
        if self.segments > 1:
            even = -(-self.width // self.segments)
            self.segment = -(-even // v.width) * v.width
            self.segments = -(-self.width // self.segment)
        self.strip = 1 if self.segments > 1 else self._lines_of_a_strip(columns)
        self.strips = max(1, -(-self.lines // self.strip))
        whole = -(-(self.strip * self.segment) // self.panel) * self.panel + v.width
        vectors = -(-whole // v.width)
        self.columns = (vectors + (1 - vectors % 2)) * v.width  # odd: lines of a cache spread

    @property
    def stack_bytes(self) -> int:
        gathered = self.columns * max(1, self.depth * self.taps)
        waiting = self.rows * self.columns if self.depth < self.channels else 0
        return (gathered + waiting) * BYTES[self.v.element]

    def _lines_of_a_strip(self, columns: int) -> int:
        """Return how many lines to gather at once: those that leave the fewest columns of panels
        empty.
        """
        enough = self.images * self.groups * self.lines // 16  # more would leave threads idle
        most = max(1, min(self.lines, enough, columns // max(1, self.width)))

        def computed(lines: int) -> int:
            whole, rest = divmod(self.lines, lines)
            tiles = [lines * self.width] * whole + [rest * self.width]
            return sum(-(-tile // self.panel) for tile in tiles)

        return min(range(1, most + 1), key=lambda lines: (computed(lines), -lines))

    def kernel(self, name: str, operand: str, weight: str, operands: int) -> GeneratedKernel:
        work = (
            2 * self.images * self.groups * self.rows * self.lines * self.width
            * self.channels * self.taps
        )  # fmt: skip
        items = self.images * self.groups * self.strips * self.segments
        require_stack(self.stack_bytes, "convolution")
        if items and self.rows and self.lines and self.width:
            self._emit(items)
        arguments = (weight, operand, "result", *(f"operand{i}" for i in range(operands)))
        text = function_text(name, len(arguments), self.b)
        return GeneratedKernel(name, text, arguments, tasks_for(work, items, 1), work)

    # --- the walk over images, groups and tiles ---------------------------------------------------

    def _emit(self, items: int) -> None:
        v, b = self.v, self.b
        self.gathered = reserved(
            b, self.columns * max(1, self.depth * self.taps) + self.panel, v.element
        )
        self.totals = ""
        if not is_one_piece(self.depth * self.taps):
            self.totals = reserved(b, (self.height + 1) * self.panel, v.element)
        if self.depth < self.channels:
            self.waiting = reserved(b, self.rows * self.columns, v.element)
        b.loop(*b.share(items), 1, [], lambda item, _: self._tile(item))

    def _locate(self, part: Index) -> None:
        """Sets the pointers to what an image and group, counted together, has."""
        v = self.v
        group = part % self.groups
        weights = self.rows * self.channels * self.taps
        self.weight_at = v.at("%p0", group * weights + self.start)
        self.operand_at = v.at("%p1", part * (self.channels * self.size))
        self.result_row = part * self.rows

    def _tile(self, item: Index) -> None:
        v, b = self.v, self.b
        rest, segment = divmod(item, self.segments)
        part, strip = divmod(rest, self.strips)
        self._locate(part)
        line, column = strip * self.strip, segment * self.segment
        lines = least(self.strip, self.lines - line)
        if self.lines % self.strip == 0:
            lines = self.strip
        width: Index = self.width
        if self.segments > 1:
            width = least(self.segment, self.width - column)
        count = lines * width
        tile = (line, lines, column, width)

        if self.depth >= self.channels:
            self._gather(0, self.channels, tile)
            self._each_block(count, lambda p, row, rows: self._finish(
                p, row, rows, self._accumulate(p, row, rows, 0, self.channels, None), tile, count
            ))  # fmt: skip
            return

        def waiting(p, row, rows):
            return [
                v.load_computed(self.waiting, self._spot(p, row, r, j))
                for r in range(rows)
                for j in range(self.vectors)
            ]

        def keep(p, row, rows, values):
            for i, value in enumerate(values):
                spot = self._spot(p, row, *divmod(i, self.vectors))
                v.store_computed(value, self.waiting, spot)

        def piece(start: Index, _) -> None:
            depth = least(self.depth, self.channels - start)
            self._gather(start, depth, tile)
            self._each_block(count, lambda p, row, rows: keep(p, row, rows, self._accumulate(
                p, row, rows, start, depth, waiting(p, row, rows)
            )))  # fmt: skip

        self._each_block(
            count, lambda p, row, rows: keep(p, row, rows, [v.zero] * (rows * self.vectors))
        )
        b.loop(0, self.channels, self.depth, [], piece)
        self._each_block(count, lambda p, row, rows: self._finish(
            p, row, rows, waiting(p, row, rows), tile, count
        ))  # fmt: skip

    def _spot(self, p: Index, row: Index, r: int, j: int) -> Index:
        v = self.v
        return (row + r) * self.columns + (p + j * v.width)

    def _each_block(self, count: Index, body) -> None:
        """body(first column, first row, rows) for every block of a tile of `count` columns."""
        b, split = self.b, (self.height + 1) * self.taller

        def blocks(p: Index, rows: int, low: int, high: int) -> None:
            if low < high:
                b.loop(low, high, rows, [], lambda row, _: body(p, row, rows))

        def panel(p: Index, _) -> None:
            blocks(p, self.height + 1, 0, split)
            blocks(p, self.height, split, self.rows)

        b.loop(0, count, self.panel, [], panel)

    # --- one block --------------------------------------------------------------------------------

    def _accumulate(self, p, row, rows, start, depth, sums) -> list[str]:
        v = self.v
        stride = self.channels * self.taps
        left = v.at(self.weight_at, row * stride + start * self.taps)
        right = v.at(self.gathered, p, v.element)
        sums = sums or [v.zero] * (rows * self.vectors)

        def step(k: Index, values: list[str]) -> list[str]:
            line = v.at(right, k * self.columns, v.element)
            ys = [v.load_computed(line, j * v.width) for j in range(self.vectors)]
            here, result = v.at(left, k), []
            for r in range(rows):
                x = v.splat(v.scalar(here, r * stride))
                for j, y in enumerate(ys):
                    result.append(v.multiply_add(x, y, values[r * self.vectors + j]))
            return result

        return add_in_pieces(v, depth * self.taps, sums, step, self.totals)

    def _finish(self, p, row, rows, sums, tile, count) -> None:
        """Store a block, of which only the first `count` - p columns exist."""
        v, b = self.v, self.b
        if self.spread:
            left = count - p
            for i, value in enumerate(sums):
                r, j = divmod(i, self.vectors)
                self._store_spread(value, row + r, p + j * v.width, tile,
                                   v.first(left - j * v.width))  # fmt: skip
            return
        whole = b.value(f"icmp sle i64 {p + self.panel}, {count}")
        b.when(whole, [], lambda: self._store(p, row, sums, tile, None))
        partly = b.value(f"xor i1 {whole}, true")
        b.when(partly, [], lambda: self._store(p, row, sums, tile, count - p))

    def _store(self, p, row, sums, tile, left) -> None:
        v = self.v
        first = tile[0] * self.width + tile[2] + p
        for i, value in enumerate(sums):
            r, j = divmod(i, self.vectors)
            mask = None if left is None else v.first(left - j * v.width)
            self._store_vector(value, row + r, first + j * v.width, mask)

    def _store_vector(self, value: str, row: Index, position: Index, mask: str | None) -> None:
        v = self.v
        flat = self.result_row + row
        if self.epilogue is not None:
            with self.b.lanes(v.width):
                value = self.epilogue(self.b, value, flat, position, mask)
        line = v.at("%p2", flat * self.result_size)
        v.store(value, line, position, mask)

    def _store_spread(self, value: str, row: Index, p: Index, tile, mask: str | None) -> None:
        """Store positions that are not adjacent in the result."""
        v, b, n = self.v, self.b, self.v.width
        words = f"<{n} x i32>"
        line, _, column, _ = tile

        def vector(x: Index) -> str:
            return v.splat(v.narrow(x), "i32")

        def op(name: str, x: str, y: Index) -> str:
            return b.value(f"{name} {words} {x}, {y if isinstance(y, str) else vector(y)}")

        at = op("add", vector(p), multiples(n))
        down = 0 if self.segments > 1 else op("udiv", at, self.width)
        across = op("add", at, column if isinstance(column, int) else vector(column))
        if self.segments == 1:
            across = op("sub", at, op("mul", down, self.width))
        lines = vector(line) if down == 0 else op("add", down, vector(line))
        outer = op("udiv", lines, self.axes[1].count)
        inner = op("sub", lines, op("mul", outer, self.axes[1].count))
        total = None
        for index, axis in zip((outer, inner, across), self.axes):
            element = op("add", op("mul", index, axis.place[1]), axis.place[0])
            total = element if total is None else op("add", op("mul", total, axis.result), element)
        base = v.at("%p2", (self.result_row + row) * self.result_size)
        v.scatter(value, base, total, mask)

    # --- gathering --------------------------------------------------------------------------------

    def _gather(self, start: Index, depth: Index, tile) -> None:
        """The columns of a tile, [depth * taps, columns], zero where a tap meets nothing.

        Channels are the innermost loop: which lanes meet nothing is the same for all of them.
        """
        v, b = self.v, self.b
        first_line, lines, column, width = tile
        deep, high, wide = self.axes
        source = v.at(self.operand_at, start * self.size)

        def line(d: Index, h: Index, i: Index, _) -> None:
            at, limit = self._operand_line(source, first_line + i, d, h)
            k = (d * high.taps + h) * wide.taps
            target = k * self.columns + i * width
            b.nest([(0, width, v.width), wide.taps], [], lambda j, w, _: self._gather_vectors(
                at, limit, depth, wide.input_index(column + j, w), target + j + w * self.columns
            ))  # fmt: skip

        b.nest((deep.taps, high.taps, lines), [], line)

    def _gather_vectors(
        self, line: str, limit: Index, depth: Index, first: Index, target: Index
    ) -> None:
        """Gather the operand of adjacent columns of every channel at one tap, from its element
        `first` on.
        """
        v, stride = self.v, self.axes[2].stride
        masks = v.masks_of(first, stride, limit)

        def channel(c: Index, _) -> None:
            value = v.strided(v.at(line, c * self.size), first, stride, masks)
            v.store_computed(value, self.gathered, target + c * (self.taps * self.columns))

        self.b.loop(0, depth, 1, [], channel)

    def _operand_line(self, source: str, line: Index, d: Index, h: Index) -> tuple[str, Index]:
        """Return where the operand's line begins that a line of the result meets, and its length."""
        v, b = self.v, self.b
        deep, high, wide = self.axes
        o, p = divmod(line, high.count)
        down = deep.input_index(o, d)
        across = high.input_index(p, h)
        at = v.at(source, (down * high.extent + across) * wide.extent)
        return at, count_inside(b, self.axes, down, across, wide.extent)


FEW_CHANNELS = 4  # a group with fewer result channels would gather more than it multiplies


def convolution(
    name: str, dtype: torch.dtype, geometry: Geometry, isa: Isa,
    epilogue: Epilogue | None = None, operands: int = 0,
) -> KernelSequence:  # fmt: skip
    """[N, O, *windows] of operand [N, C, *spatial] and weight [O, C / groups, *kernel].

    arguments "weight", "operand", "result", then "operand0" and on

    Raises Unsupported where a kernel is so large that its columns fit in no stack.

    Args:
        dtype: The dtype of all three: float32, float64, or float16 and bfloat16, which sum in float32.
        epilogue: Maps a vector of sums to the vector stored: its row is image * O + channel, its
            column the position in the flat *windows.
        operands: Pointers that the epilogue reads, %p3 and on.
        tasks: Each computes whole rows of the result; no result depends on their number.
    """
    n, channels, *_ = geometry.operand
    if geometry.is_pointwise:
        return _pointwise(name, dtype, geometry, isa, epilogue, operands)
    axes = forward_axes(*geometry.window)
    rows = geometry.weight[0] // geometry.groups
    sums = _sums_for(rows)
    body = sums(dtype, n, geometry.groups, rows, channels // geometry.groups, axes, isa, epilogue)
    return KernelSequence((body.kernel(name, "operand", "weight", operands),), {})


def convolution_input_gradient(
    name: str, dtype: torch.dtype, geometry: Geometry, isa: Isa
) -> KernelSequence:
    """The gradient [N, C, *spatial] of a convolution's operand, from that of its result.

    arguments  "weight" as the convolution's, "gradient" [N, O, *windows], "result"; between them
               "transposed", the weights in the order in which they are read here
    """
    (n, channels, *_), groups = geometry.operand, geometry.groups
    rows, depth = channels // groups, geometry.weight[0] // groups
    if geometry.is_pointwise:
        return _pointwise_gradient(name, dtype, geometry, isa)
    phases = gradient_phases(*geometry.window)
    kernels, start = [], 0
    for axes in phases:
        body = _sums_for(rows)(dtype, n, groups, rows, depth, axes, isa, None, start)
        kernels.append(_transposed_weights(name, dtype, geometry, axes, start, isa))
        kernels.append(body.kernel(name, "gradient", "transposed", 0))
        start += groups * rows * depth * body.taps
    size = max(1, start) * dtype.itemsize
    return KernelSequence(tuple(kernels), {"transposed": size})


def _sums_for(rows: int) -> type[Sums]:
    """Return the class for the sums of a group with so many result channels."""
    return DirectSums if rows < FEW_CHANNELS else Sums


def _pointwise(name, dtype, geometry, isa, epilogue, operands) -> KernelSequence:
    (n, channels, *spatial), outputs = geometry.operand, geometry.weight[0]
    positions = prod(spatial)
    kernel = matmul(
        name, dtype, (n,), (outputs, positions, channels),
        Matrix(channels, 1, (0,)), stored_plain(channels, positions, (n,)),
        stored_plain(outputs, positions, (n,)), isa, epilogue, operands,
    )  # fmt: skip
    return KernelSequence((_renamed(kernel, "weight", "operand"),), {})


def _pointwise_gradient(name, dtype, geometry, isa) -> KernelSequence:
    (n, channels, *spatial), outputs = geometry.operand, geometry.weight[0]
    positions = prod(spatial)
    kernel = matmul(
        name, dtype, (n,), (channels, positions, outputs),
        Matrix(1, channels, (0,)), stored_plain(outputs, positions, (n,)),
        stored_plain(channels, positions, (n,)), isa,
    )  # fmt: skip
    return KernelSequence((_renamed(kernel, "weight", "gradient"),), {})


def _renamed(kernel: GeneratedKernel, left: str, right: str) -> GeneratedKernel:
    arguments = (left, right, *kernel.arguments[2:])
    return replace(kernel, arguments=arguments)


def _transposed_weights(name, dtype, geometry: Geometry, axes: Axes, start: int, isa):
    """transposed[group, channel, output, taps of this phase] from weight[group, output, channel, *]."""
    b = Builder(1)
    v = Vectors(b, isa, dtype)
    groups, outputs = geometry.groups, geometry.weight[0] // geometry.groups
    channels, kernel = geometry.weight[1], geometry.weight[2:]
    kernel = (*[1] * (3 - len(kernel)), *kernel)
    taps = prod(axis.taps for axis in axes)
    size = prod(kernel)
    low, high = b.share(groups * channels)

    def weights(number: Index, o: Index) -> None:
        group, channel = divmod(number, channels)
        first = group * outputs + o
        source = v.at("%p0", (first * channels + channel) * size)
        target = v.at("%p1", start + (number * outputs + o) * taps)
        each_tap(b, axes, lambda tap, k: copy(v.at(source, kernel_element(tap)), v.at(target, k)))

    def kernel_element(tap: tuple[Index, Index, Index]) -> Index:
        at: Index = 0
        for index, axis, extent in zip(tap, axes, kernel):
            at = at * extent + (index * axis.kernel[1] + axis.kernel[0])
        return at

    def copy(source: str, target: str) -> None:
        bits = f"i{8 * dtype.itemsize}"
        b.emit(f"store {bits} {b.effect(f'load {bits}, ptr {source}')}, ptr {target}")

    if taps:
        b.nest([(low, high, 1), outputs], [], lambda number, o, _: weights(number, o))
    tasks = tasks_for(20 * groups * channels * outputs * taps, groups * channels, 1)
    return GeneratedKernel(name, function_text(name, 2, b), ("weight", "transposed"), tasks, 0)


def each_tap(b: Builder, axes: Axes, body) -> None:
    """Loops body((d, h, w), flat number) over the taps."""
    depth, height, width = (axis.taps for axis in axes)
    b.nest(
        (depth, height, width), [],
        lambda d, h, w, _: body((d, h, w), (d * height + h) * width + w),
    )  # fmt: skip


# The sums of a convolution whose groups have few result channels, straight from the operand.


class DirectSums(Sums):
    """Gathers nothing: a line of the result meets a line of the operand at each tap."""

    stack_bytes = 0

    def _vectors(self) -> int:
        return max(1, min(4, -(-self.width // self.v.width)))

    def _emit(self, items: int) -> None:
        lines = self.images * self.groups * self.lines
        self.b.loop(*self.b.share(lines), 1, [], self._direct_line)

    def _direct_line(self, number: Index, _) -> None:
        """One line of the result."""
        part, line = divmod(number, self.lines)
        self._locate(part)
        self.b.loop(
            0, self.width, self.panel, [], lambda column, _: self._direct_columns(line, column)
        )

    def _direct_columns(self, line: Index, column: Index) -> None:
        """A panel of columns of every row of the result."""
        v, b = self.v, self.b
        zeros = v.typed([v.zero] * (self.rows * self.vectors))
        together = max(1, LONGEST_SUM // max(1, self.taps))  # channels of one piece of a long sum

        def piece(start: Index, totals: list[str]) -> list[str]:
            end = least(start + together, self.channels)
            parts = b.loop(
                start, end, 1, zeros, lambda c, sums: self._direct_channel(line, column, c, sums)
            )
            return [v.add(total, part) for total, part in zip(totals, parts)]

        for i, value in enumerate(b.loop(0, self.channels, together, zeros, piece)):
            r, j = divmod(i, self.vectors)
            at = column + j * v.width
            mask = v.first(self.width - at)
            if self.spread:
                self._store_spread_line(value, r, line, at, mask)
            else:
                self._store_vector(value, r, line * self.width + at, mask)

    def _direct_channel(
        self, line: Index, column: Index, channel: Index, sums: list[str]
    ) -> list[str]:
        """The sums, and what one channel adds to them at every tap."""
        v, b, (deep, high, wide) = self.v, self.b, self.axes
        source = v.at(self.operand_at, channel * self.size)

        def taps(d: Index, h: Index, sums: list[str]) -> list[str]:
            at, limit = self._operand_line(source, line, d, h)
            k = (channel * deep.taps + d) * high.taps + h
            weights = v.at(self.weight_at, k * wide.taps)
            return b.loop(0, wide.taps, 1, v.typed(sums), lambda w, sums: self._direct_tap(
                at, limit, weights, column, w, sums
            ))  # fmt: skip

        return b.nest((deep.taps, high.taps), v.typed(sums), taps)

    def _direct_tap(self, line, limit, weights, column, w, sums: list[str]) -> list[str]:
        v = self.v
        ys = [
            self._operand_vector(line, column + j * v.width, w, limit) for j in range(self.vectors)
        ]
        result = []
        for r in range(self.rows):
            x = v.splat(v.scalar(weights, w + r * self.channels * self.taps))
            for j, y in enumerate(ys):
                result.append(v.multiply_add(x, y, sums[r * self.vectors + j]))
        return result

    def _operand_vector(self, line: str, column: Index, w: Index, limit: Index) -> str:
        """Return the operand of adjacent columns of the result at one tap."""
        v, axis = self.v, self.axes[2]
        first = axis.input_index(column, w)
        return v.strided(line, first, axis.stride, v.masks_of(first, axis.stride, limit))

    def _store_spread_line(self, value, row, line, column, mask) -> None:
        v = self.v
        o, p = divmod(line, self.axes[1].count)
        at: Index = 0
        for index, axis in zip((o, p, column), self.axes):
            at = at * axis.result + (index * axis.place[1] + axis.place[0])
        base = v.at("%p2", (self.result_row + row) * self.result_size + at)
        step = self.axes[2].place[1]
        v.scatter(value, base, multiples(v.width, step), mask)
