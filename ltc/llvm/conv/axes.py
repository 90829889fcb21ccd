"""The positions of a result and of an operand that meet through a sliding window.

Every convolution, and the gradient of its input, is the same sum over channels and taps; they
differ in the axes below. Spatial axes are always three: depth, height, width; missing ones are 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ltc.llvm.emit.builder import Builder
from ltc.llvm.emit.index import Index, least, most

Axes = tuple["Axis", "Axis", "Axis"]


@dataclass(frozen=True)
class Axis:
    """One spatial axis: position `o` and tap `t` meet operand element o*stride + first + t*step.

    Attributes:
        extent: The operand's extent; elements outside it count as zero.
        count: Positions o that are computed.
        taps: Number of taps.
        kernel: (first, step) of the kernel element that each tap reads.
        place: (first, step) of the result element that each position is.
        result: Extent of the result.
    """

    extent: int
    count: int
    stride: int
    first: int
    step: int
    taps: int
    kernel: tuple[int, int] = (0, 1)
    place: tuple[int, int] = (0, 1)
    result: int = 0

    def input_index(self, position: Index, tap: Index) -> Index:
        """The operand's element that a position meets at a tap; it may lie outside."""
        return position * self.stride + tap * self.step + self.first

    @property
    def is_always_inside(self) -> bool:
        """Return True if no position meets anything outside the operand; the axis ascends."""
        last = (self.count - 1) * self.stride + self.first + max(0, self.taps - 1) * self.step
        return self.first >= 0 and last < self.extent

    @property
    def meetings(self) -> int:
        """Return how many pairs of a position and a tap meet an element."""
        places = (
            o * self.stride + self.first + t * self.step
            for o in range(self.count)
            for t in range(self.taps)
        )
        return sum(0 <= place < self.extent for place in places)

    def taps_inside(self, first: Index, last: Index) -> tuple[Index, Index]:
        """The taps, from one up to another, at which positions `first` to `last` meet any element.

        The axis ascends.  All other taps meet only the padding, and add nothing.
        """
        if self.is_always_inside or not self.taps:
            return 0, self.taps
        below = -self.first - last * self.stride
        above = self.extent - self.first - first * self.stride
        low, end = (_rounded_up(most(0, x), self.step) for x in (below, above))
        return low, least(self.taps, end)

    def positions_inside(self, tap: Index) -> tuple[Index, Index]:
        """The positions, from one up to another, that meet an element at a tap; it ascends."""
        if self.is_always_inside:
            return 0, self.count
        below = -self.first - tap * self.step
        above = self.extent - self.first - tap * self.step
        low, end = (_rounded_up(most(0, x), self.stride) for x in (below, above))
        return low, least(self.count, end)


def count_inside(b: Builder, axes: Axes, down: Index, across: Index, count: int) -> Index:
    """`count`, or 0 where the operand's line of that depth and height lies in the padding."""
    deep = b.value(f"icmp ult i64 {down}, {axes[0].extent}")
    high = b.value(f"icmp ult i64 {across}, {axes[1].extent}")
    return b.where(b.value(f"and i1 {deep}, {high}"), count, 0)


def _rounded_up(x: Index, by: int) -> Index:
    return (x + (by - 1)) // by


def padded(values: tuple[int, ...], missing: int) -> tuple[int, int, int]:
    """Three values, of which the leading ones are `missing`."""
    deep, high, wide = (*[missing] * (3 - len(values)), *values)
    return deep, high, wide


def forward_axes(operand, kernel, result, stride, padding, dilation) -> Axes:
    """The axes of a convolution or pooling; every argument one number for each spatial axis."""
    rows = zip(
        padded(operand, 1), padded(kernel, 1), padded(result, 1), padded(stride, 1),
        padded(padding, 0), padded(dilation, 1),
    )  # fmt: skip
    deep, high, wide = (Axis(i, o, s, -p, d, k, result=o) for i, k, o, s, p, d in rows)
    return deep, high, wide


@dataclass(frozen=True)
class Windows:
    """Windows of a pooling; operand and result are spatial shapes, of one to three dimensions."""

    operand: tuple[int, ...]
    result: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]

    @property
    def axes(self) -> Axes:
        return forward_axes(
            self.operand, self.kernel, self.result, self.stride, self.padding, self.dilation
        )


def gradient_phases(operand, kernel, result, stride, padding, dilation) -> list[Axes]:
    """The axes of the gradient of a convolution's input, one for each residue of its strides.

    operand is the convolution's input, which is the result here; the gradient of the convolution's
    result is the operand here.  Elements of one residue meet the same taps, at stride 1.
    """
    rows = list(zip(
        padded(operand, 1), padded(kernel, 1), padded(result, 1), padded(stride, 1),
        padded(padding, 0), padded(dilation, 1),
    ))  # fmt: skip
    choices = [
        [_phase(i, k, o, s, p, d, residue) for residue in range(min(s, i))]
        for i, k, o, s, p, d in rows
    ]
    return [(d, h, w) for d in choices[0] for h in choices[1] for w in choices[2]]


def _phase(i: int, k: int, o: int, s: int, p: int, d: int, residue: int) -> Axis:
    taps = [t for t in range(k) if (residue + p - t * d) % s == 0]
    count = -(-(i - residue) // s)
    if not taps:
        return Axis(o, count, 1, 0, 0, 0, (0, 1), (residue, s), i)
    apart = s // math.gcd(s, d)
    first, step = (residue + p - taps[0] * d) // s, -(d * apart // s)
    return Axis(o, count, 1, first, step, len(taps), (taps[0], apart), (residue, s), i)
