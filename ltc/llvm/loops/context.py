"""Where in the text of a kernel the writer stands, and which registers it has there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ltc.ir.loop_nest import Value
from ltc.ir.node import Node
from ltc.llvm.emit import memory_ops
from ltc.llvm.emit.builder import Builder
from ltc.llvm.emit.index import Index
from ltc.llvm.loop_schedule.iteration_space import Nest
from ltc.llvm.loop_schedule.loop_schedule import LoopSchedule
from ltc.llvm.loops.arguments import Arguments
from ltc.support.sizes.extent import Extent


@dataclass(eq=False)
class KeptRows:
    """Memory of the functions of a row that several passes read.

    memory  where the row of each value is
    begun   whose rows the pass under way stores
    stored  whose rows are there
    """

    memory: dict[Value, str] = field(default_factory=dict)
    begun: set[Value] = field(default_factory=set)
    stored: set[Value] = field(default_factory=set)

    def to_read(self) -> KeptRows:
        """The rows that are there, where nothing is to be stored."""
        there = {value: row for value, row in self.memory.items() if value in self.stored}
        return KeptRows(there, self.begun, self.stored)


@dataclass(eq=False)
class RowGroup:
    """Memory of a group of rows that are copied before they are reduced.

    memory  where the rows of each load are
    row     of the group, of which values are made now
    """

    memory: dict[Value, str] = field(default_factory=dict)
    row: Index = 0


@dataclass(eq=False)
class LoopContext:
    """What the functions that write a kernel hand down, as `ctx`.

    Whoever opens a loop moves the variables; `known` has a scope for each loop that is open.

    b           the text
    pointers    the address of each node that is read
    targets     the address of each node that is written
    checks      the number of each cell that may fail
    fault_word  the address of the word that says which one did
    is_vector   whether a value is a vector of lanes, or a scalar
    variables   where the variables stand
    mask        the lanes that are inside; None: all
    known       the registers of values
    """

    nest: Nest
    schedule: LoopSchedule
    b: Builder
    arguments: Arguments
    pointers: dict[Node, str]
    targets: dict[Node, str]
    checks: dict[Value, int]
    fault_word: str
    is_vector: dict[Value, bool]
    variables: dict[int, Index] = field(default_factory=dict)
    mask: str | None = None
    known: list[dict[Value, str]] = field(default_factory=lambda: [{}])
    kept: KeptRows = field(default_factory=KeptRows)
    group: RowGroup = field(default_factory=RowGroup)

    def scope(self) -> Scope:
        return Scope(self)

    @contextmanager
    def branch(self) -> Iterator[None]:
        """A scope that is not entered at every point of a row: it reads kept rows and stores none."""
        rows = self.kept
        with self.scope():
            self.kept = rows.to_read()
            yield
        self.kept = rows

    def find(self, value: Value) -> str | None:
        """The register of a value where it has one."""
        for scope in reversed(self.known):
            if value in scope:
                return scope[value]
        return None

    def extent(self, variable: int) -> Index:
        """What the variable stays below: the name of an argument, or a number."""
        extent = self.nest.extents[variable]
        if variable in self.schedule.open:
            return self.arguments.number(("extent", variable), extent)
        return extent

    def size(self, size: int) -> Index:
        """A size that indices stay below: an argument where it is an expression."""
        if isinstance(size, Extent):
            return self.arguments.number(("size", size), size)
        return size

    def first_lanes(self, count: Index) -> str | None:
        """The mask of the first `count` lanes."""
        with self.b.lanes(self.schedule.lanes):
            return memory_ops.first_lanes(self.b, count)


class Scope:
    """Values made inside are forgotten at its end, and so are variables that began inside."""

    __slots__ = ("_ctx", "_variables")

    def __init__(self, ctx: LoopContext):
        self._ctx = ctx

    def __enter__(self) -> None:
        self._variables = dict(self._ctx.variables)
        self._ctx.known.append({})

    def __exit__(self, *error: object) -> None:
        self._ctx.known.pop()
        self._ctx.variables = self._variables


def context_of(schedule: LoopSchedule, builder: Builder) -> LoopContext:
    """At the beginning of a kernel; an epilogue has no arguments of its own."""
    nest = schedule.nest
    kernel = nest.kernel
    arguments = Arguments(builder, is_open=not schedule.is_epilogue)
    arguments.place(nest.order)
    reads, writes = kernel.reads(), kernel.writes()
    return LoopContext(
        nest,
        schedule,
        builder,
        arguments,
        pointers={node: f"%p{k}" for k, node in enumerate(reads)},
        targets={node: f"%p{len(reads) + k}" for k, node in enumerate(writes)},
        checks={value: min(k, 254) + 1 for k, value in enumerate(kernel.checks())},
        fault_word=f"%p{len(reads) + len(writes)}",
        is_vector={value: schedule.vector in needs for value, needs in schedule.needs.items()},
    )
