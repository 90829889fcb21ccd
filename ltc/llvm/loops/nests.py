"""Loops of a kernel: over the vector variable, its last lanes masked, and over the others."""

from __future__ import annotations

from ltc.ir.loop_nest import Value
from ltc.llvm.emit import memory_ops
from ltc.llvm.emit.index import Index
from ltc.llvm.loops.loads_stores import PointMemory


class Nests(PointMemory):
    """Loops over variables around what is done at one point."""

    def extent(self, variable: int) -> Index:
        """What the variable stays below: the name of an argument, or a number."""
        if variable in self.open:
            return self.arguments.number(("extent", variable), self.space.extents[variable])
        return self.space.extents[variable]

    def _over_vectors(self, first: Index, limit: Index, carried, body) -> list[str]:
        """The vector variable from first (a multiple of the lanes) to limit, the rest masked."""
        extent = self.extent(self.vector)
        if not isinstance(extent, int):
            return self._over_any_vectors(first, limit, carried, body)
        whole = extent // self.lanes * self.lanes
        values = [value for _, value in carried]
        if whole:
            until = (
                whole
                if extent == whole or isinstance(limit, int)
                else self._whole_multiples(limit, self.lanes)
            )
            until = limit if extent == whole else until
            values = self.b.loop(
                first, until, self.lanes, carried, lambda i, inside: self._at(i, None, inside, body)
            )
        if extent > whole:
            again = [(type, value) for (type, _), value in zip(carried, values)]

            def rest() -> list[str]:
                inside = [value for _, value in again]
                return self._at(whole, self._first_lanes(extent - whole), inside, body)

            if isinstance(limit, int):
                values = rest()
            else:
                at_end = self.b.value(f"icmp eq i64 {limit}, {extent}")
                values = self.b.when(at_end, again, rest)
        return values

    def _over_any_vectors(self, first: Index, limit: Index, carried, body) -> list[str]:
        """The same where the extent is an argument, and with it how many lanes the rest has."""
        until = self._whole_multiples(limit, self.lanes)
        values = self.b.loop(
            first, until, self.lanes, carried, lambda i, inside: self._at(i, None, inside, body)
        )
        again = [(type, value) for (type, _), value in zip(carried, values)]
        has_rest = self.b.value(f"icmp slt i64 {until}, {limit}")

        def rest() -> list[str]:
            mask = self._first_lanes(limit - until)
            return self._at(until, mask, [value for _, value in again], body)

        return self.b.when(has_rest, again, rest)

    def _whole_multiples(self, x: Index, power: int) -> Index:
        """The largest multiple of a power of two up to x."""
        return self.b.index(self.b.value(f"and i64 {x}, -{power}"))

    def _first_lanes(self, count: Index) -> str | None:
        """The mask of the first `count` lanes."""
        with self.b.lanes(self.lanes):
            return memory_ops.first_lanes(self.b, count)

    def _at(self, i: Index, mask: str | None, carried: list[str], body) -> list[str]:
        with self._scope():
            self.variables[self.vector], self.mask = i, mask
            result = body(carried)
        self.mask = None
        return result or []

    def _nest(self, inner: list[int], roots: list[Value], carried, body) -> list[str]:
        """Loops over the inner variables around a body that takes and gives what is carried.

        roots  the values that the body computes
        """
        if not inner:
            with self._scope():
                return body([value for _, value in carried]) or []
        variable = inner[0]
        if variable == self.vector:
            return self._over_vectors(0, self.extent(variable), carried, body)

        return self.b.loop(
            0, self.extent(variable), 1, carried, self._step_of(inner, roots, carried, body)
        )

    def _step_of(self, inner: list[int], roots: list[Value], carried, body):
        """What a loop over the first inner variable does: the loops inside it."""

        def step(i: Index, values: list[str]) -> list[str]:
            with self._scope():
                self.variables[inner[0]] = i
                self._hoist(roots)
                again = [(type, value) for (type, _), value in zip(carried, values)]
                return self._nest(inner[1:], roots, again, body)

        return step
