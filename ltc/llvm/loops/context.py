"""The writer's place in the text of a kernel, with its registers and arguments.

Numbers that differ between batch sizes or slices (extents, offsets, constants such as the count
that a mean divides by) are arguments: one compiled kernel serves all of them.
"""

from __future__ import annotations

import math
import struct
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from ltc.ir.loop_nest import Value
from ltc.ir.node import Node
from ltc.ir.tensor_type import LOW_PRECISION
from ltc.llvm.emit import memory_ops
from ltc.llvm.emit.builder import Builder
from ltc.llvm.emit.dtype import FORMS, rounded_to_float
from ltc.llvm.emit.index import Index
from ltc.llvm.loop_schedule.iteration_space import Nest
from ltc.llvm.loop_schedule.loop_schedule import LoopSchedule
from ltc.support.sizes.extent import Extent
from ltc.support.sizes.marks import bits_of, mark_of

NEAR = 64  # elements: neighbours of a point, as a stencil reads them, are part of the text
PLAIN = frozenset({0.0, 0.5, 1.0, 2.0, math.inf})  # constants of a formula, never of a shape


class Arguments:
    """Collects the arguments of one kernel.

    Attributes:
        is_open: True if there are any; without, every number is written into the text.
        numbers: Their values, in the order of their names %n0, %n1, ...
        shifts: Bytes to add to the pointer of a node that is read.
    """

    def __init__(self, builder: Builder, is_open: bool):
        self.b, self.is_open = builder, is_open
        self.shifts: dict[Node, int] = {}
        self._values: dict[Hashable, int] = {}
        self._places: dict[Hashable, int] = {}  # of the same keys, in their order
        self._constants: dict[Value, Index] = {}

    @property
    def numbers(self) -> tuple[int, ...]:
        return tuple(self._values.values())

    def number(self, key: Hashable, value: int) -> Index:
        """The name of the argument with that key; the value itself where there are none.

        By key, not by value: two numbers that happen to be equal stay two.
        """
        if not self.is_open:
            return value
        self._values.setdefault(key, value)
        return self.b.number(self._places.setdefault(key, len(self._places)))

    # --- where loads begin -----------------------------------------------------------------------

    def place(self, values: Iterable[Value]) -> None:
        """Decides how the constant part of every load's offset is added."""
        by_node: dict[Node, list[Value]] = defaultdict(list)
        looked_up = {value.data[0] for value in values if value.kind == "lookup"}
        for value in values:
            if value.kind == "load":
                by_node[value.data[0]].append(value)
        for position, (node, loads) in enumerate(by_node.items()):
            self._place(position, node, loads, node in looked_up)

    def _place(self, position: int, node: Node, loads: list[Value], looked_up: bool) -> None:
        constants = sorted({load.data[1].constant for load in loads})
        # A guarded load outside its guards reads element 0, which must be there, and a lookup
        # counts from the first element.
        guarded = looked_up or any(load.guards for load in loads)
        first = 0 if guarded or not self.is_open else constants[0]
        if first:
            self.shifts[node] = first * FORMS[node.dtype].bytes
        for load in loads:
            constant = load.data[1].constant - first
            if guarded or constant >= NEAR:
                key = ("constant", position, constants.index(load.data[1].constant))
                constant = self.number(key, constant)
            self._constants[load] = constant

    def constant_of(self, load: Value) -> Index:
        """Return the part of a load's offset beside its variables'."""
        return self._constants[load]

    # --- constants -------------------------------------------------------------------------------

    def literal(self, value: Value) -> str:
        """The register of a constant, or its text."""
        number, form = _number(value), FORMS[value.dtype]
        if isinstance(number, Extent) and not self.is_open:
            number = float(number) if value.dtype.is_floating_point else int(number)
        if not self.is_open or not _may_depend_on_a_shape(value, number):
            return self.b.constant(form.computed, number)
        if isinstance(number, Extent) and form.computed == "i64":
            return self.b.splat("i64", str(self.number(("literal", value), number)))
        if isinstance(number, Extent):
            whole = "i64" if form.computed == "double" else "i32"
            bits = bits_of(number, whole == "i64")
        elif form.computed == "double":
            bits, whole = struct.unpack("<q", struct.pack("<d", number))[0], "i64"
        else:
            number = rounded_to_float(number)
            bits, whole = struct.unpack("<i", struct.pack("<f", number))[0], "i32"
        with self.b.lanes(1):
            register = str(self.number(("literal", value), bits))
            if whole == "i32":
                register = self.b.value(f"trunc i64 {register} to i32")
            register = self.b.value(f"bitcast {whole} {register} to {form.computed}")
        return self.b.splat(form.computed, register)

    def splat_constants(self, values: Iterable[Value], lanes: int) -> None:
        """Writes the constants that are arguments before any loop."""
        with self.b.lanes(lanes):
            for value in values:
                if value.kind == "constant" and _may_depend_on_a_shape(value, _number(value)):
                    self.literal(value)


def _number(value: Value) -> Any:
    if value.data in ("True", "False"):
        return value.data == "True"
    if (size := mark_of(value.data)) is not None:
        return float(size) if value.dtype in LOW_PRECISION else size
    if not value.dtype.is_floating_point:
        return int(value.data)
    number = float(value.data)
    if value.dtype in LOW_PRECISION:
        return torch.tensor(number, dtype=value.dtype, device="cpu").item()
    return number


def _may_depend_on_a_shape(value: Value, number: Any) -> bool:
    if isinstance(number, Extent):
        return True
    return value.dtype.is_floating_point and abs(number) not in PLAIN and number == number


@dataclass(eq=False)
class KeptRows:
    """Memory of the functions of a row that several passes read.

    Attributes:
        memory: The place of each value's row.
        begun: The values whose rows the pass under way stores.
        stored: The values whose rows are stored.
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

    Attributes:
        memory: The place of each load's rows.
        row: The row of the group that is computed now.
    """

    memory: dict[Value, str] = field(default_factory=dict)
    row: Index = 0


@dataclass(eq=False)
class LoopContext:
    """The state that the functions writing a kernel hand down, as `ctx`.

    The opener of a loop moves the variables; `known` has a scope for each loop that is open.

    Attributes:
        b: The text.
        pointers: The address of each node that is read.
        targets: The address of each node that is written.
        checks: The number of each cell that may fail.
        fault_word: The address of the word that names the cell that failed.
        is_vector: True if a value is a vector of lanes, or a scalar.
        variables: The present values of the variables.
        mask: The lanes that are inside; None: all.
        known: The registers of values.
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
        """Return the variable's exclusive bound: the name of an argument, or a number."""
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
