"""Padded copies of some lines of a channels-last operand, near the processor.

In such a copy every tap of every position lies at a constant distance from the position's first
one, so that the sums over taps need no test for the edges.
"""

from __future__ import annotations

from dataclasses import replace

from ltc.llvm.conv.axes import Axes, Axis
from ltc.llvm.emit.dtype import BYTES
from ltc.llvm.emit.index import Index
from ltc.llvm.emit.isa import ALIASING_BYTES
from ltc.llvm.emit.vectors import Vectors, reserved

FETCHED_BYTES = 1024  # a copy asks for what it reads so far ahead


def ascending(axes: Axes) -> Axes:
    """The same axes with their taps in the order in which the operand's elements lie."""
    deep, high, wide = (_reversed(axis) if axis.step < 0 else axis for axis in axes)
    return deep, high, wide


def _reversed(axis: Axis) -> Axis:
    last = axis.taps - 1
    (first, step), (tap, apart) = (axis.first, axis.step), axis.kernel
    return replace(axis, first=first + last * step, step=-step, kernel=(tap + last * apart, -apart))


class InputTile:
    """copied[image, depth tap, line, column, channel]: the operands of some lines of the result.

    pixel, line, plane, image: elements between neighbours of the copy

    Args:
        axes: Axes as `ascending` gives them.
        channels: Number of channels that are copied together.
        apart: Elements of the operand from one pixel to the next.
        images: Number of images copied together, each with its whole content of one depth.
        lines: Number of lines of the result in each image.
    """

    def __init__(self, v: Vectors, axes: Axes, channels: int, apart: int, images: int, lines: int):
        self.v, self.axes, self.channels, self.apart = v, axes, channels, apart
        deep, high, wide = axes
        self.columns = _reach(wide, wide.count)
        self.copied_lines = _reach(high, lines)
        aliases = channels and channels * BYTES[v.element] % ALIASING_BYTES == 0
        self.pixel = channels + v.width if aliases else channels
        self.line = self.columns * self.pixel
        self.plane = self.copied_lines * self.line
        self.image = max(1, deep.taps) * self.plane
        if self.image * BYTES[v.element] % ALIASING_BYTES == 0:
            self.image += v.width
        self.size = images * self.image
        self.bytes = self.size * BYTES[v.element]

    def reserve(self) -> None:
        """Memory of this call; vectors may reach beyond the last element."""
        v = self.v
        self.memory = reserved(v.builder, self.size + v.width, v.element)

    def copy(
        self, operand: str, channel: Index, first: Index, images: Index, deep: Index, line: Index
    ) -> None:
        """Copies what the result's lines from `line` on meet, at one depth of each image.

        Args:
            channel: The first that is copied, of those of all groups.
        """
        v, b, (axis, high, wide) = self.v, self.v.builder, self.axes
        size = axis.extent * high.extent * wide.extent * self.apart

        def one_line(n: Index, d: Index, i: Index, _) -> None:
            down = axis.input_index(deep, d)
            across = line * high.stride + high.first + i
            inside = b.value(
                f"and i1 {b.value(f'icmp ult i64 {down}, {axis.extent}')}, "
                f"{b.value(f'icmp ult i64 {across}, {high.extent}')}"
            )
            at = (down * high.extent + across) * wide.extent + wide.first
            source = v.at(operand, at * self.apart + channel + (first + n) * size)
            place = n * self.image + d * self.plane + i * self.line
            target = v.at(self.memory, place, v.element)
            if self.channels % v.width and self.apart == self.pixel:
                columns = b.where(inside, wide.extent, 0)
                self._short_pixels(source, target, columns)
                return
            low = min(self.columns, max(0, -wide.first))
            most = max(low, min(self.columns, wide.extent - wide.first))
            end = b.where(inside, most, low)
            self._clear(target, 0, low)
            self._clear(target, end, self.columns)
            self._pixels(source, target, low, end)

        b.nest((images, axis.taps, self.copied_lines), [], one_line)

    def _short_pixels(self, source: str, target: str, columns: Index) -> None:
        """All channels of all columns, which lie side by side and fill no whole vectors."""
        v, shift = self.v, self.axes[2].first * self.channels
        limit = columns * self.channels

        def vector(j: Index, _) -> None:
            v.store_computed(v.load(source, j, v.between(j + shift, limit)), target, j)

        v.builder.loop(0, self.line, v.width, [], vector)

    def _clear(self, target: str, first: Index, end: Index) -> None:
        v = self.v
        if first != end:
            low, high = first * self.pixel, end * self.pixel
            v.builder.loop(low, high, v.width, [], lambda j, _: v.store_computed(v.zero, target, j))

    def _pixels(self, source: str, target: str, low: int, end: Index) -> None:
        """The columns from `low` on."""
        v, b = self.v, self.v.builder
        ahead = FETCHED_BYTES // BYTES[v.stored] * -(-self.apart // self.channels)

        def vector(at: Index, to: Index, mask: str | None) -> None:
            b.prefetch(v.at(source, at + ahead))
            v.store_computed(v.load(source, at, mask), target, to)

        def pixel(j: Index, _) -> None:
            at, to = j * self.apart, j * self.pixel
            whole = self.channels // v.width * v.width
            b.loop(0, whole, v.width, [], lambda c, _: vector(at + c, to + c, None))
            if rest := self.channels - whole:
                vector(at + whole, to + whole, v.first(rest))

        if self.apart == self.pixel == self.channels:
            first, last = low * self.pixel, end * self.pixel
            b.loop(first, last, v.width, [], lambda j, _: vector(j, j, None))
        else:
            b.loop(low, end, 1, [], pixel)

    def place(self, image: Index, line: Index, column: Index) -> Index:
        """Return where the first tap of a position of the strip lies."""
        (_, high, wide) = self.axes
        down = line * (high.stride * self.line)
        return image * self.image + down + column * (wide.stride * self.pixel)

    def tap(self, d: Index, h: Index, w: Index) -> Index:
        """Return how far a tap lies from the first one."""
        (_, high, wide) = self.axes
        return d * self.plane + h * (high.step * self.line) + w * (wide.step * self.pixel)

    @property
    def taps_touch(self) -> bool:
        """Return True if the channels of all taps of a line are one run."""
        return self.axes[2].step == 1 and self.pixel == self.channels


class UncopiedInputTile(InputTile):
    """The lines where they are in the operand, as `input_tile_of` finds it possible."""

    def __init__(self, v: Vectors, axes: Axes, channels: int, apart: int, images: int, lines: int):
        self.v, self.axes, self.channels, self.apart = v, axes, channels, apart
        deep, high, wide = axes
        self.pixel, self.line = apart, wide.extent * apart
        self._depth = high.extent * self.line
        self.plane, self.image = deep.step * self._depth, deep.extent * self._depth
        self.bytes = 0

    def reserve(self) -> None:
        """Nothing is copied."""

    def copy(
        self, operand: str, channel: Index, first: Index, images: Index, deep: Index, line: Index
    ) -> None:
        v, (axis, high, _) = self.v, self.axes
        at = first * self.image + deep * (axis.stride * self._depth)
        at = at + line * (high.stride * self.line) + channel
        self.memory = v.at(operand, at)


def input_tile_of(
    v: Vectors, axes: Axes, channels: int, apart: int, images: int, lines: int
) -> InputTile:  # fmt: skip
    """A copy, unless `is_read_in_place`."""
    if is_read_in_place(v, axes, apart):
        return UncopiedInputTile(v, axes, channels, apart, images, lines)
    return InputTile(v, axes, channels, apart, images, lines)


def is_read_in_place(v: Vectors, axes: Axes, apart: int) -> bool:
    """Return True if a copy would be read but once: where no position meets a second element."""
    once = all(axis.taps <= 1 for axis in axes)
    inside = all(axis.first == 0 and _reach(axis, axis.count) <= axis.extent for axis in axes)
    aliases = apart * BYTES[v.element] % ALIASING_BYTES == 0
    return once and inside and not aliases and v.stored == v.element


def _reach(axis: Axis, positions: int) -> int:
    """Return how many elements the positions and their taps span."""
    return (positions - 1) * axis.stride + max(0, axis.taps - 1) * axis.step + 1


def strip_extents(
    axes: Axes, channels: int, element_bytes: int, together: tuple[int, int], pixels: int,
    most_bytes: int, in_place: bool = False,
) -> tuple[int, int]:  # fmt: skip
    """(images, lines) of a strip of at least so many pixels, where so many bytes hold them.

    Args:
        together: Images and lines come in multiples of these.
        in_place: True if what lies between the elements that are met is not touched.
    """
    if in_place:
        deep, high, wide = (replace(axis, stride=1) for axis in axes)
        axes = deep, high, wide
    _, high, wide = axes
    images, lines = together
    line = _line_bytes(axes, channels, element_bytes)

    def fits(images: int, lines: int) -> bool:
        return images * _reach(high, lines) * line <= most_bytes

    rows = max(1, high.count // lines)
    wanted = max(1, min(rows, -(-pixels // max(1, images * lines * wide.count))))
    while wanted > 1 and not fits(images, wanted * lines):
        wanted -= 1
    if wanted < rows:
        pieces = -(-rows // wanted)
        return images, -(-rows // pieces) * lines
    most = pixels // max(1, high.count * wide.count)
    most = max(images, most - most % images)
    while most > images and not fits(most, high.count):
        most -= images
    return most, high.count


def most_images(axes: Axes, channels: int, element_bytes: int, most_bytes: int) -> int:
    """Return how many images' lines, each with all its operand, fit so many bytes; at least 1."""
    reached = max(1, _reach(axes[1], 1)) * _line_bytes(axes, channels, element_bytes)
    return max(1, most_bytes // max(1, reached))


def _line_bytes(axes: Axes, channels: int, element_bytes: int) -> int:
    """Return the bytes of the operand of a line of one image, at each tap of its depth."""
    deep, _, wide = axes
    return max(1, _reach(wide, wide.count)) * max(1, deep.taps) * channels * element_bytes
