"""The loop over the steps of a recurrence, whichever way they go, and which rows each step has."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ltc.llvm.emit.builder import Builder
from ltc.llvm.emit.index import Index, least, most
from ltc.llvm.emit.isa import Isa
from ltc.llvm.emit.vectors import Vectors
from ltc.llvm.recurrence.recurrent_shape import Recurrence


class TimeStep(NamedTuple):
    """One step.

    start     its first row among those of all steps
    end       of this task's sequences, the first one that the step does not have
    previous  the first row of the step that was computed before it
    continued the first sequence that this step before did not have; 0 where there is none
    """

    start: Index
    end: Index
    previous: Index
    continued: Index


class TimeWalk:
    """A kernel of the sequences `low` up to `high`; its numbers are sequences, steps and rows."""

    numbers = 3

    def __init__(self, r: Recurrence, isa: Isa, names: tuple[str, ...]):
        self.r, self.b, self.names = r, Builder(), names
        self.v = Vectors(self.b, isa, r.dtype)
        self.batch, self.steps, self.total = map(self.b.number, range(self.numbers))
        self.low, self.high = self.b.share(self.batch)

    def pointer(self, name: str) -> str:
        return f"%p{self.names.index(name)}"

    def has(self, name: str) -> bool:
        return name in self.names

    def walk(self, backwards: bool, body: Callable[[TimeStep], None]) -> None:
        """body(step) in the order in which steps are computed, or from the last one back."""
        ascending = self.r.reverse == backwards
        begin: Index = 0 if ascending else self.total

        def step(k: Index, carried: list) -> list[Index]:
            time = k if ascending else self.steps - 1 - k
            size = self._size(time)
            start = carried[0] if ascending else carried[0] - size
            previous, continued = self._step_before(time, start, size) if backwards else (0, 0)
            body(TimeStep(start, least(self.high, size), previous, continued))
            return [start + size if ascending else start]

        self.b.loop(0, self.steps, 1, [("i64", begin)], step)

    def _size(self, time: Index) -> Index:
        if not self.r.packed:
            return self.batch
        at = self.v.at(self.pointer("sizes"), time, "i64")
        return self.b.index(self.b.effect(f"load i64, ptr {at}"))

    def _step_before(self, time: Index, start: Index, size: Index) -> tuple[Index, Index]:
        """Of the step that was computed before: its first row, and how many sequences it has."""
        last = self.steps - 1
        first = last if self.r.reverse else 0
        is_first = self.b.value(f"icmp eq i64 {time}, {first}")
        near = least(time + 1, last) if self.r.reverse else most(time - 1, 0)
        before = self._size(near)
        row = start + size if self.r.reverse else start - before
        return row, self.b.where(is_first, 0, before)

    def each_vector(
        self, low: Index, high: Index, body: Callable[[Index, Index, str | None], None]
    ) -> None:
        """body(row, column, mask) for vectors of the states of rows from `low` up to `high`."""
        v, width = self.v, self.r.width

        def vector(row: Index, column: Index, _) -> None:
            mask = None if width % v.width == 0 else v.first(width - column)
            body(row, column, mask)

        self.b.nest([(low, high, 1), (0, width, v.width)], [], vector)

    def store_memory(self, value: str, pointer: str, offset: Index, mask: str | None) -> None:
        """Store a vector as it is computed."""
        at = self.v.at(pointer, offset, self.v.element)
        self.v.raw_store(value, at, mask, self.v.element, self.v.width)
