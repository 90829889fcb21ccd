"""The recurrent weight in the order in which a scan reads it: packed once, read at every step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from ltc.llvm.emit.builder import Builder, function_text
from ltc.llvm.emit.dtype import BYTES
from ltc.llvm.emit.index import Index, least
from ltc.llvm.emit.isa import Isa
from ltc.llvm.emit.vectors import GeneratedKernel, Vectors, tasks_for, transposed
from ltc.llvm.recurrence.recurrent_shape import Recurrence

MOST_VECTORS = 4  # of a panel: with as many rows as registers hold, sums wait for no load


@dataclass(frozen=True)
class Panels:
    """Groups of columns of hidden states: [groups, depth, gates, vectors] of vectors.

    gates    matrices whose columns of one group lie together
    vectors  of each of them
    width    columns of a matrix
    depth    rows that are read; what is packed may have some more
    lanes    of a vector
    """

    gates: int
    vectors: int
    width: int
    depth: int
    lanes: int

    @property
    def columns(self) -> int:
        """Of a group."""
        return self.vectors * self.lanes

    @property
    def groups(self) -> int:
        return -(-self.width // self.columns)

    @property
    def row(self) -> int:
        """Numbers of one row of a group."""
        return self.gates * self.columns

    @property
    def size(self) -> int:
        """Numbers of one group."""
        return -(-self.depth // self.lanes) * self.lanes * self.row

    @property
    def pitch(self) -> int:
        """From one row of states to the next, where states have the columns of all groups."""
        return self.groups * self.columns


def forward_panels(r: Recurrence, v: Vectors) -> Panels:
    """weight.T, the columns of all gates that make the same hidden states side by side."""
    vectors = min(max(1, MOST_VECTORS // r.gates), -(-r.width // v.width))
    return Panels(r.gates, vectors, r.width, r.width, v.width)


def backward_panels(r: Recurrence, v: Vectors) -> Panels:
    """weight itself."""
    return Panels(1, min(MOST_VECTORS, -(-r.width // v.width)), r.width, r.columns, v.width)


def panel_bytes(panels: Panels, v: Vectors) -> int:
    return panels.groups * panels.size * BYTES[v.element]


def mask_of(v: Vectors, panels: Panels, column: Index) -> str | None:
    """Which lanes of the vector that begins at a column of a group are columns of a matrix."""
    return None if panels.width % panels.columns == 0 else v.first(panels.width - column)


def pack_forward(name: str, r: Recurrence, isa: Isa) -> GeneratedKernel:
    """Panels of weight.T [H, gates * H] from the weight [gates * H, H]."""
    b = Builder()
    v = Vectors(b, isa, r.dtype)
    panels, w = forward_panels(r, v), v.width

    def square(at: Index, first: Index, spot: Index, k: Index, _) -> None:
        """Columns first to first + w of the gate whose rows begin at `at`, steps k to k + w."""
        mask = None if r.width % w == 0 else v.first(r.width - k)
        lines = []
        for lane in range(w):
            row = at + least(first + lane, r.width - 1)
            lines.append(v.load("%p0", row * r.width + k, mask))
        for lane, line in enumerate(transposed(b, lines, v.element)):
            v.store_computed(line, "%p1", spot + (k + lane) * panels.row)

    def group(number: Index, _) -> None:
        for gate in range(r.gates):
            for j in range(panels.vectors):
                spot = number * panels.size + (gate * panels.vectors + j) * w
                first = number * panels.columns + j * w
                b.loop(0, r.width, w, [], partial(square, gate * r.width, first, spot))

    return _packing(name, b, panels, group)


def pack_backward(name: str, r: Recurrence, isa: Isa) -> GeneratedKernel:
    """Panels of the weight [gates * H, H]."""
    b = Builder()
    v = Vectors(b, isa, r.dtype)
    panels, w = backward_panels(r, v), v.width

    def group(number: Index, _) -> None:
        starts = [number * panels.columns + j * w for j in range(panels.vectors)]
        masks = [mask_of(v, panels, column) for column in starts]

        def line(k: Index, _) -> None:
            spot = number * panels.size + k * panels.row
            for j, (column, mask) in enumerate(zip(starts, masks)):
                v.store_computed(v.load("%p0", k * r.width + column, mask), "%p1", spot + j * w)

        b.loop(0, r.columns, 1, [], line)

    return _packing(name, b, panels, group)


def _packing(name: str, b: Builder, panels: Panels, group) -> GeneratedKernel:
    b.loop(*b.share(panels.groups), 1, [], group)
    work = panels.groups * panels.size
    return GeneratedKernel(
        name,
        function_text(name, 2, b),
        ("weight", "panels"),
        tasks_for(work, panels.groups, 1),
        work,
    )
