"""The recurrent weight in the order in which a scan reads it: packed once, read at every step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ltc.llvm.emit.builder import Builder, function_text
from ltc.llvm.emit.dtype import BYTES
from ltc.llvm.emit.index import Index, least
from ltc.llvm.emit.isa import Isa
from ltc.llvm.emit.vectors import (
    GeneratedKernel,
    Vectors,
    add_in_pieces,
    reserved,
    tasks_for,
    transposed,
)
from ltc.llvm.recurrence.recurrent_shape import Recurrence

MOST_VECTORS = 4  # of a panel: with as many rows as registers hold, sums wait for no load


@dataclass(frozen=True)
class Panels:
    """Groups of columns of hidden states: [groups, depth, gates, vectors] of vectors.

    Attributes:
        gates: Matrices whose columns of one group lie together.
        vectors: The vectors of each of them.
        width: Columns of a matrix.
        depth: Rows that are read; what is packed may have some more.
        lanes: The lanes of a vector.
    """

    gates: int
    vectors: int
    width: int
    depth: int
    lanes: int

    @property
    def columns(self) -> int:
        """Return the columns of a group."""
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
    """Return the mask of lanes that are columns of a matrix, in the vector at a column of a group."""
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


# --- Rows of numbers in memory times a panel: sums of some rows stay in registers ----------------

MOST_ROWS = 8  # summed at once
OTHER_REGISTERS = 2  # a number of the left operand, and what the compiler needs

# (first row, how many of them, their sums, row after row)
Finish = Callable[[Index, int, list[str]], None]


class StateProduct:
    """Adds up rows times panels.

    Args:
        pitch: Numbers from one row of the left operand to the next, as they are computed.
    """

    def __init__(self, v: Vectors, panels: Panels, pitch: int):
        self.v, self.b, self.panels, self.pitch = v, v.builder, panels, pitch
        self.vectors = panels.gates * panels.vectors
        free = v.isa.registers - self.vectors - OTHER_REGISTERS
        self.height = max(1, min(MOST_ROWS, free // self.vectors))
        self.memory = reserved(v.builder, self.height * panels.row, v.element)

    def block(self, left: str, row: Index, count: Index, panel: str, finish: Finish) -> None:
        """finish(...) for up to `height` rows from `row` on: all, or by powers of two."""
        b = self.b
        is_whole = b.value(f"icmp eq i64 {count}, {self.height}")
        b.when(is_whole, [], partial(self._rows, left, row, self.height, panel, finish))
        rest = b.where(is_whole, 0, count)
        rows = 1 << (self.height - 1).bit_length() - 1 if self.height > 1 else 0
        while rows:
            wanted = b.value(f"icmp ne i64 {b.value(f'and i64 {rest}, {rows}')}, 0")
            before = b.index(b.value(f"and i64 {rest}, {-2 * rows}"))
            b.when(wanted, [], partial(self._rows, left, row + before, rows, panel, finish))
            rows //= 2

    def blocks(self, low: Index, high: Index, body: Callable[[Index, Index], None]) -> None:
        """body(first row, count) for blocks of the rows from `low` up to `high`."""
        self.b.loop(low, high, self.height, [], lambda row, _: body(
            row, least(self.height, high - row)
        ))  # fmt: skip

    def _rows(self, left: str, row: Index, rows: int, panel: str, finish: Finish) -> None:
        v, width = self.v, self.v.width
        line = v.at(left, row * self.pitch, v.element)

        def step(k: Index, sums: list[str]) -> list[str]:
            here = v.at(panel, k * self.panels.row, v.element)
            right = [v.load_computed(here, j * width) for j in range(self.vectors)]
            number, made = v.at(line, k, v.element), []
            for r in range(rows):
                x = v.splat(v.computed_scalar(number, r * self.pitch))
                for y, total in zip(right, sums[r * self.vectors :]):
                    made.append(v.multiply_add(x, y, total))
            return made

        zeros = [v.zero] * (rows * self.vectors)
        finish(row, rows, add_in_pieces(v, self.panels.depth, zeros, step, self.memory))
