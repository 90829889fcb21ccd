"""A panel of output channels of the gradient of a convolution's result, on [N, *windows, O]."""

from __future__ import annotations

from ltc.llvm.conv.axes import Axes
from ltc.llvm.emit.dtype import BYTES
from ltc.llvm.emit.index import Index
from ltc.llvm.emit.vectors import Vectors, reserved

FETCHED_PIXELS = 8  # ahead of the one that is read


class GradientPanel:
    """Some lines of some images, where they lie: for those who read each number once.

    step     elements of the gradient from one position to the next
    outputs  channels of a group, of which a panel has `vectors` vectors
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

        channel  the panel's first, of those of all groups; `column`: of those of its group
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
