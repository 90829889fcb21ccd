"""The sums of a channels-last convolution that are in registers together."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ltc.llvm.conv.axes import Axes, Axis
from ltc.llvm.emit.isa import Isa
from ltc.support.sizes.extent import Extent

LATENCY = 5  # cycles of a multiply-add: 4 or 5 on processors of the last ten years
# Two loads a cycle, of which one in eight waits for the other's bank of the cache.
LOAD_CYCLES = 9 / 16
WORTH_ITS_CODE = 1.03  # tiles across images gain so much or are not made: they ask the batch size


@dataclass(frozen=True)
class TileShape:
    """Positions and vectors whose sums are in registers together.

    Attributes:
        images: Number of images of which the tile has one position each; if more than one, all
        other numbers are one.
        height, widths: Lines, and the tiles of a line: [(columns, number of such tiles)].
    """

    vectors: int
    images: int
    height: int
    widths: tuple[tuple[int, int], ...]

    @property
    def across_images(self) -> bool:
        return self.images > 1


def tile_shape(
    axes: Axes, right: int, isa: Isa, lanes: int, images: int, together: int
) -> TileShape:
    """The shape that computes all images in the fewest cycles.

    Counted at two multiply-adds and nearly two loads a cycle.

    Args:
        images: Number of images; if it is a symbol, a tile lies in one image.
        together: The most images of which a strip holds lines.
    """
    if isinstance(images, Extent):
        images = 1
    choices = [
        tile
        for vectors in panel_widths(isa)
        for tile in _tiles_of(axes, vectors, isa, min(images, together))
    ]
    return min(choices, key=lambda tile: tile_cycles(tile, axes, right, lanes, images))


def panel_widths(isa: Isa) -> range:
    """The widths in vectors that a panel may have."""
    return range(1, 5 if isa.registers > 16 else 3)


def most_rows(isa: Isa, vectors: int) -> int:
    """Return how many rows of so many vectors have their sums in registers, beside what they meet."""
    return max(1, (isa.registers - vectors - (1 if isa.fused else 2)) // vectors)


def _tiles_of(axes: Axes, vectors: int, isa: Isa, images: int) -> Iterator[TileShape]:
    """Neighbours in one image; and one position of several, which needs only the taps it meets.

    Args:
        images: The most images in one tile.
    """
    _, high, wide = axes
    most = most_rows(isa, vectors)
    tiles = max(1, -(-wide.count // most))
    width, wider = divmod(wide.count, tiles)
    height = 1
    if tiles == 1 and wide.count:
        fitting = range(1, min(high.count, most // wide.count) + 1)
        height = max(h for h in fitting if high.count % h == 0)
    widths = ((width + 1, wider), (width, tiles - wider))
    yield TileShape(vectors, 1, height, tuple((w, n) for w, n in widths if w and n))
    count = 2
    while count <= min(most, images):
        yield TileShape(vectors, count, 1, ((1, wide.count),))
        count *= 2


def tile_cycles(tile: TileShape, axes: Axes, right: int, lanes: int, images: int) -> float:
    """Return the cycles of one summed channel of all images."""
    _, high, wide = axes
    panels = -(-right // (tile.vectors * lanes))
    taps = sum(_taps_met(high, i, i + tile.height - 1) for i in range(0, high.count, tile.height))
    if tile.across_images:
        across = sum(_taps_met(wide, j, j) for j in range(wide.count))
        rounds = -(-images // tile.images)
        steps = WORTH_ITS_CODE * rounds * across * taps * panels
        return steps * step_cycles(tile.images, tile.vectors)
    line = sum(
        count * step_cycles(tile.height * width, tile.vectors) for width, count in tile.widths
    )
    return images * wide.taps * line * taps * panels


def step_cycles(positions: int, vectors: int) -> float:
    """Return the cycles of one channel of one tap.

    Fewer sums than two for each cycle of a latency wait for their last addition.
    """
    products, loads = positions * vectors / 2, (positions + vectors) * LOAD_CYCLES
    return max(products, loads, LATENCY)


def _taps_met(axis: Axis, first: int, last: int) -> int:
    """Return how many taps lie inside for any position from `first` to `last`; the axis ascends."""
    low, high = axis.first + first * axis.stride, axis.first + last * axis.stride
    taps = range(axis.taps)
    return sum(high + t * axis.step >= 0 and low + t * axis.step < axis.extent for t in taps)
