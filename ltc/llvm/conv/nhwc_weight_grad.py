"""The gradient of a convolution's weight, from channels-last operands.

The operand's lines are copied with their padding, and the gradient of one panel of output channels
beside them, unless all rows fit in registers, which read it but once; each (tap, channel) is a row
of sums over all positions, some rows at a time in registers.
"""

from __future__ import annotations

import functools

import torch

from ltc.llvm.conv.axes import Axes, forward_axes
from ltc.llvm.conv.geometry import Geometry, KernelSequence
from ltc.llvm.conv.nhwc_input_tile import ascending, strip_extents
from ltc.llvm.conv.nhwc_pointwise import weight_gradient_shape
from ltc.llvm.conv.nhwc_tile import step_cycles
from ltc.llvm.conv.nhwc_window_tile import SharedTile, WindowTile, are_apart, closed_up
from ltc.llvm.conv.split_images import Adder, adding_kernel, image_split, images_of, near_split
from ltc.llvm.emit.builder import Builder, function_text
from ltc.llvm.emit.dtype import BYTES
from ltc.llvm.emit.index import Index, least, most
from ltc.llvm.emit.isa import LEVEL_2_BYTES, Isa
from ltc.llvm.emit.vectors import (
    STACK_BYTES,
    Epilogue,
    GeneratedKernel,
    Vectors,
    require_stack,
    reserved,
    tasks_for,
)
from ltc.llvm.gemm.blocking import Shape
from ltc.llvm.gemm.kernel import matmul

STRIP_PIXELS = 256  # so many positions pay for the loading and storing of their sums
# Of a strip of positions whose sums are added to memory: with fewer, that takes more than an eighth of
# the time, as of so many channels that few positions fit. A product has all positions in registers.
FEWEST_POSITIONS = 64
STRIP_BYTES = LEVEL_2_BYTES // 2


def channels_last_weight_gradient(
    name: str, dtype: torch.dtype, geometry: Geometry, isa: Isa,
    epilogue: Epilogue | None = None, operands: int = 0,
) -> KernelSequence:  # fmt: skip
    """The gradient [O, C / groups, *kernel] of a convolution's weight.

    arguments  "gradient" [N, *windows, O], "operand" [N, *spatial, C], "result", "partial"
    otherwise as `convolution_weight_gradient`
    """
    body = PartialSums(dtype, geometry, isa)
    if geometry.is_pointwise and body.strip_positions < FEWEST_POSITIONS:
        return _product(name, dtype, weight_gradient_shape(geometry), isa, epilogue, operands)
    if body.adds_at_once:
        return KernelSequence((body.whole_kernel(name, epilogue, operands),), {})
    last = adding_kernel(name, dtype, isa, body.split, body.row_of, epilogue, operands)
    return KernelSequence((body.kernel(name), last), {"partial": body.split.bytes(body.v.element)})


def _product(name, dtype, shape: Shape, isa: Isa, epilogue, operands: int) -> KernelSequence:
    kernel = matmul(
        name, dtype, (), (shape.m, shape.n, shape.k), shape.left, shape.right, shape.result, isa,
        epilogue, operands,
    )  # fmt: skip
    return KernelSequence((kernel.called("gradient", "operand"),), {})


class PartialSums:
    """partial[chunk, group, panel, tap * C + c, o]: what each chunk's images add to the gradient.

    The kernel's number is the images.
    """

    def __init__(self, dtype, geometry: Geometry, isa: Isa):
        self.b = Builder()
        self.v = v = Vectors(self.b, isa, dtype)
        self.axes = axes = ascending(forward_axes(*geometry.window))
        self.geometry, self.groups = geometry, geometry.groups
        self.outputs, self.channels = geometry.weight[0] // self.groups, geometry.weight[1]
        self.taps = axes[0].taps * axes[1].taps * axes[2].taps
        vectors = 1 if self.outputs <= v.width else 2
        self.vectors, self.panel = vectors, vectors * v.width
        images, rows = geometry.operand[0], self.taps * self.channels
        split = image_split(images, self.groups, self.outputs, self.panel, rows)
        self.split = near_split(split, images, v.element)
        most = (isa.registers - vectors - (1 if isa.fused else 2)) // vectors
        apart = self.channels * self.groups
        is_apart = are_apart(axes, self.groups == 1)
        self.images, self.lines = strip_extents(
            closed_up(axes) if is_apart else axes, self.channels, BYTES[v.element], (1, 1),
            STRIP_PIXELS, STRIP_BYTES,
        )  # fmt: skip
        self.strips = -(-axes[1].count // max(1, self.lines))
        windows = WindowTile if is_apart else SharedTile
        self.windows = windows(v, axes, self.channels, apart, self.images, self.lines, most)
        # The longest loop is the innermost: where it ends, the processor guesses wrong.
        self.images_last = self.images > axes[2].count
        shape = (v, axes, self.outputs * self.groups, self.outputs, vectors)
        self.gradient: GradientPanel = CopiedGradientPanel(*shape, self.images, self.lines)
        if self.split.rows <= min(most, self.windows.rows.run):
            self.gradient = GradientPanel(*shape)

    def row_of(self, column: Index) -> Index:
        """Return where the sums of an element of the flat [C / groups, *kernel] are."""
        channel, tap = divmod(column, self.taps)
        return tap * self.channels + channel

    @property
    def stack_bytes(self) -> int:
        return self.windows.bytes + self.gradient.bytes

    @property
    def strip_positions(self) -> int:
        """Return of how many positions a strip's sums are, before they are added to those in memory."""
        return self.images * self.lines * self.axes[2].count

    @property
    def cycles(self) -> float:
        """Return the cycles of all products, where the number of images is known."""
        positions: float = self.geometry.operand[0] * self.groups * self.split.panels
        rows, joined = self.windows.rows, (False, self.windows.joins_lines, self.windows.joins_taps)
        for axis, is_joined in zip(self.axes, joined):
            positions *= axis.count if is_joined else axis.meetings
        low = (rows.blocks - rows.taller) * step_cycles(rows.height, self.vectors)
        return positions * (low + rows.taller * step_cycles(rows.height + 1, self.vectors))

    @property
    def adds_at_once(self) -> bool:
        """Return True if a task has all terms of one panel, in memory of its own."""
        needed = self.stack_bytes + self.split.rows * self.panel * BYTES[self.v.element]
        return self.split.count == self.split.together == 1 and needed <= STACK_BYTES

    def kernel(self, name: str) -> GeneratedKernel:
        """The partial sums: "gradient", "operand", "partial"."""
        v, split = self.v, self.split
        size = split.rows * split.panel
        sums = size * split.together
        self._emit("%p0", "%p1", lambda item: v.at("%p2", item * sums, v.element), None)
        return self._finished(name, ("gradient", "operand", "partial"))

    def whole_kernel(self, name: str, epilogue: Epilogue | None, operands: int) -> GeneratedKernel:
        """The gradient itself.  What its epilogue waits for, others can compute meanwhile."""
        v, split = self.v, self.split
        adder = Adder(v, split, self.row_of, epilogue)
        partial = reserved(self.b, split.rows * split.panel, v.element)

        def add(group: Index, panel: Index) -> None:
            self.b.loop(
                0, adder.squares, 1, [], lambda square, _: adder.add(partial, group, panel, square)
            )

        self._emit("%p0", f"%p{2 + operands}", lambda item: partial, add)
        read = tuple(f"operand{i}" for i in range(operands))
        return self._finished(name, ("gradient", "result", *read, "operand"))

    def _emit(self, gradient: str, operand: str, partial_of, then) -> None:
        b, split = self.b, self.split
        self.pointers = gradient, operand
        require_stack(self.stack_bytes, "convolution")
        if not (split.items and split.rows):
            return
        self.windows.reserve()
        self.gradient.reserve()

        def item(number: Index, _) -> None:
            self.sums = partial_of(number)
            group, panel = self._work_item(number)
            if then is not None:
                then(group, panel)

        b.loop(*b.share(split.items), 1, [], item)

    def _finished(self, name: str, arguments: tuple[str, ...]) -> GeneratedKernel:
        split = self.split
        images, outputs, *windows = self.geometry.result
        work = 2 * images * outputs * split.rows
        for extent in windows:
            work *= extent
        tasks = tasks_for(work, split.items, 1)
        text = function_text(name, len(arguments), self.b, 1)
        return GeneratedKernel(name, text, arguments, tasks, work, (images,))

    def _work_item(self, item: Index) -> tuple[Index, Index]:
        """All images of one chunk, for some panels of output channels: (group, the first panel)."""
        v, b, split = self.v, self.b, self.split
        parts = split.panels // split.together
        chunk, part = divmod(item, split.groups * parts)
        group, panel = divmod(part, parts)
        panel = panel * split.together
        size = split.rows * split.panel * split.together
        b.loop(0, size, v.width, [], lambda i, _: v.store_computed(v.zero, self.sums, i))
        first, last = images_of(chunk, b.number(0), split.count)

        def images(n: Index, _) -> None:
            count = least(self.images, last - n)
            b.nest((self.axes[0].count, self.strips), [], lambda deep, strip, _: self._strip(
                group, panel, n, count, deep, strip * self.lines
            ))  # fmt: skip

        b.loop(first, last, self.images, [], images)
        return group, panel

    def _strip(self, group, panel, image, count, deep, line) -> None:
        """The positions of one strip, for each panel of an item."""
        v, b, split, high = self.v, self.b, self.split, self.axes[1]
        lines: Index = self.lines
        if high.count % self.lines:
            lines = least(self.lines, high.count - line)
        self.windows.copy(self.pointers[1], group * self.channels, image, count, deep, line, lines)

        def one(number: Index, _) -> None:
            self.partial = v.at(self.sums, number * (split.rows * split.panel), v.element)
            column = (panel + number) * self.panel
            output = group * self.outputs + column
            self.gradient.begin(self.pointers[0], output, column, image, deep, line)
            last = b.value(f"icmp eq i64 {number}, {split.together - 1}")
            self.gradient.foresee(
                b.where(last, -(split.together - 1) * self.panel, self.panel), last
            )
            self.gradient.fill(count, lines)
            self._segments(count, line, lines)

        b.loop(0, split.together, 1, [], one)

    def _segments(self, count: Index, line: Index, lines: Index) -> None:
        """The rows of sums of one panel, tap by tap, over the positions of a strip."""
        v, b, (_, high, wide), windows = self.v, self.b, self.axes, self.windows

        def segment(d: Index, h: Index, w: Index, _) -> None:
            down: tuple[Index, Index] = (0, lines)
            if not windows.joins_lines:
                first, end = (x - line for x in high.positions_inside(h))
                down = most(0, first), least(lines, end)
            across = (0, wide.count) if windows.joins_taps else wide.positions_inside(w)
            tap = (d * high.taps + h) * wide.taps + w
            target = v.at(self.partial, tap * (self.channels * self.panel), v.element)

            def block(rows: int, k: Index, _) -> None:
                here = windows.block(d, h, w, k)
                there = v.at(target, k * self.panel, v.element)
                self._block(here, there, rows, count, down, across)

            for rows, low, end in windows.rows.kinds:
                b.loop(low, end, rows, [], functools.partial(block, rows))

        b.nest((self.axes[0].taps, windows.down, windows.across), [], segment)

    def _block(self, source: str, target: str, rows: int, images: Index, down, across) -> None:
        """Add the positions of a strip to the sums of a few rows.

        Args:
            down, across: The first line and column, and those after the last.
        """
        v, b, count = self.v, self.b, self.vectors
        places = [r * self.panel + u * v.width for r in range(rows) for u in range(count)]
        ends = ((0, images), down, across)
        order = (1, 2, 0) if self.images_last else (0, 1, 2)

        def position(n: Index, i: Index, j: Index, values: list[str]) -> list[str]:
            left = v.at(source, self.windows.place(n, i, j, rows), v.element)
            ys, result = self.gradient.read(n, i, j), []
            self.gradient.fetch(n, i, j)
            for r in range(rows):
                x = v.splat(v.computed_scalar(left, self.windows.row(r)))
                for u, y in enumerate(ys):
                    result.append(v.multiply_add(x, y, values[r * count + u]))
            return result

        def walk(place: dict[int, Index], values: list[str]) -> list[str]:
            if len(place) == len(order):
                return position(place[0], place[1], place[2], values)
            axis = order[len(place)]
            first, end = ends[axis]
            return b.loop(
                first, end, 1, v.typed(values), lambda k, inner: walk({**place, axis: k}, inner)
            )

        sums = walk({}, [v.zero] * len(places))
        for value, place in zip(sums, places):
            v.store_computed(v.add(v.load_computed(target, place), value), target, place)


# --- a panel of output channels of the gradient of the result, on [N, *windows, O] ------------

LINE = 64  # bytes of a line of the caches
FETCHED_PIXELS = 8  # ahead of the one that is read


class GradientPanel:
    """Some lines of some images, read in place: for code that reads each number once.

    Args:
        step: Elements of the gradient from one position to the next.
        outputs: Channels of a group, of which a panel has `vectors` vectors.
    """

    bytes = 0

    def __init__(self, v: Vectors, axes: Axes, step: int, outputs: int, vectors: int):
        self.v, self.axes, self.step, self.outputs = v, axes, step, outputs
        self.starts = range(0, vectors * v.width, v.width)

    def reserve(self) -> None:
        """Nothing is copied."""

    def begin(
        self, gradient: str, channel: Index, column: Index, image: Index, deep: Index, line: Index
    ) -> None:
        """Sets where the panel's first position is.

        Args:
            channel: The panel's first, of those of all groups; `column`: of those of its group.
        """
        v, (axis, high, wide) = self.v, self.axes
        at = image * axis.count + deep
        at = (at * high.count + line) * wide.count
        self.first = v.at(gradient, at * self.step + channel)
        self.image = axis.count * high.count * wide.count * self.step
        self.masks: list[str | None] = [None for _ in self.starts]
        if self.outputs % (len(self.starts) * v.width):
            left = self.outputs - column
            self.masks = [v.first(left - start) for start in self.starts]

    def foresee(self, channels: Index, is_next_strip: str) -> None:
        """Nothing is asked for before it is read.

        Args:
            channels: From this panel to the one that is read next, which may be of the next strip.
        """

    def fetch(self, image: Index, line: Index, column: Index) -> None:
        """Nothing is asked for before it is read."""

    def fill(self, images: Index, lines: Index) -> None:
        """Nothing is copied."""

    def read(self, image: Index, line: Index, column: Index) -> list[str]:
        """The vectors of a position that was not read before."""
        v = self.v
        at = (line * self.axes[2].count + column) * self.step
        here = v.at(self.first, image * self.image + at)
        result = []
        for start, mask in zip(self.starts, self.masks):
            v.builder.prefetch(v.at(here, FETCHED_PIXELS * self.step + start))
            result.append(v.load(here, start, mask))
        return result


class CopiedGradientPanel(GradientPanel):
    """A copy near the processor: copied[image, line, column, output channel of the panel]."""

    def __init__(
        self, v: Vectors, axes: Axes, step: int, outputs: int, vectors: int, images: int, lines: int
    ):
        super().__init__(v, axes, step, outputs, vectors)
        self.lines, self.panel = lines, vectors * v.width
        self.size = images * lines * axes[2].count * self.panel
        self.bytes = self.size * BYTES[v.element]

    def reserve(self) -> None:
        self.copied = reserved(self.v.builder, max(1, self.size), self.v.element)

    def foresee(self, channels: Index, is_next_strip: str) -> None:
        """Set where the panel begins that is copied next: strips lie side by side."""
        strip = self.size // self.panel * self.step
        ahead = self.v.builder.where(is_next_strip, strip, 0) + channels
        self.next = self.v.at(self.first, ahead)

    def fetch(self, image: Index, line: Index, column: Index) -> None:
        """Ask for a position of the next panel, which comes while this one is multiplied."""
        v = self.v
        at = image * self.image + (line * self.axes[2].count + column) * self.step
        here = v.at(self.next, at)
        for start in range(0, self.panel, max(1, LINE // BYTES[v.stored])):
            v.builder.prefetch(v.at(here, start), level=2)

    def fill(self, images: Index, lines: Index) -> None:
        """Copies so many lines of so many images."""
        ranges = images, lines, self.axes[2].count
        self.v.builder.nest(ranges, [], lambda n, i, j, _: self._copy(n, i, j))

    def _copy(self, image: Index, line: Index, column: Index) -> None:
        to = self._place(image, line, column)
        for start, value in zip(self.starts, super().read(image, line, column)):
            self.v.store_computed(value, to, start)

    def _place(self, image: Index, line: Index, column: Index) -> str:
        v = self.v
        at = (image * self.lines + line) * self.axes[2].count + column
        return v.at(self.copied, at * self.panel, v.element)

    def read(self, image: Index, line: Index, column: Index) -> list[str]:
        """The vectors of a position, as often as they are wanted."""
        here = self._place(image, line, column)
        return [self.v.load_computed(here, start) for start in self.starts]
