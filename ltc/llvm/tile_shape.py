"""How many positions and vectors of channels a channels-last convolution sums in registers."""

from __future__ import annotations

from dataclasses import dataclass

from ltc.llvm.isa import Isa
from ltc.llvm.windows import Axes


@dataclass(frozen=True)
class TileShape:
    """Positions and vectors whose sums are in registers together.

    height, widths  lines, and the columns of each tile of a line: [(columns, how many such tiles)]
    """

    vectors: int
    height: int
    widths: tuple[tuple[int, int], ...]


def tile_shape(axes: Axes, right: int, isa: Isa, lanes: int) -> TileShape:
    """The shape that computes a line's sums in the fewest cycles.

    Counted at two multiply-adds and two loads a cycle, of which eight must be under way.
    """
    choices = [_tile_of(axes, vectors, isa) for vectors in range(1, 5 if isa.registers > 16 else 3)]
    return min(choices, key=lambda tile: _cycles(tile, right, lanes))


def _tile_of(axes: Axes, vectors: int, isa: Isa) -> TileShape:
    _, high, wide = axes
    most = max(1, (isa.registers - vectors - (1 if isa.fused else 2)) // vectors)
    tiles = max(1, -(-wide.count // most))
    width, wider = divmod(wide.count, tiles)
    height = 1
    if tiles == 1 and wide.count:
        fitting = range(1, min(high.count, most // wide.count) + 1)
        height = max(h for h in fitting if high.count % h == 0)
    widths = ((width + 1, wider), (width, tiles - wider))
    return TileShape(vectors, height, tuple((w, n) for w, n in widths if w and n))


def _cycles(tile: TileShape, right: int, lanes: int) -> float:
    panels = -(-right // (tile.vectors * lanes))
    total = 0.0
    for width, count in tile.widths:
        positions = tile.height * width
        sums, loads = positions * tile.vectors, positions + tile.vectors
        total += count * max(sums / 2, loads / 2, 4) / tile.height
    return total * panels
