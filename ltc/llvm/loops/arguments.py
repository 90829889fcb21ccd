"""The numbers that a kernel is called with, so that its text does not hold them.

Another batch size or another slice changes extents, offsets and constants such as the count that a
mean divides by. Where they are arguments, one compiled kernel serves all of them.
"""

from __future__ import annotations

import math
import struct
from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import Any

import torch

from ltc.ir.loop_nest import Value
from ltc.ir.node import Node
from ltc.ir.tensor_type import LOW_PRECISION
from ltc.llvm.emit.builder import Builder
from ltc.llvm.emit.dtype import FORMS, rounded_to_float
from ltc.llvm.emit.index import Index
from ltc.support.sizes.extent import Extent
from ltc.support.sizes.marks import bits_of, mark_of

NEAR = 64  # elements: neighbours of a point, as a stencil reads them, are part of the text
PLAIN = frozenset({0.0, 0.5, 1.0, 2.0, math.inf})  # constants of a formula, never of a shape


class Arguments:
    """Collects the arguments of one kernel.

    is_open  whether there are any; without, every number is written into the text
    numbers  their values, in the order of their names %n0, %n1, ...
    shifts   bytes to add to the pointer of a node that is read
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
        """What the offset of a load adds to its variables' part."""
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
