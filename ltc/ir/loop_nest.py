"""One loop nest: what a group of nodes computes for each point of an iteration space.

A point is the values of loop variables, numbered from the outermost.  Where a value is read or
written is an affine form of them: views, broadcasts and padding are nothing but such forms, with
guards where an index may lie outside.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ltc.ir.node import Node
from ltc.ir.ops import Op

READS = ("load", "lookup")  # kinds of values that read memory


class Affine(NamedTuple):
    """constant + the sum of coefficient * variable over (variable, coefficient) pairs, sorted."""

    constant: int
    terms: tuple[tuple[int, int], ...] = ()

    def plus(self, other: Affine) -> Affine:
        total = dict(self.terms)
        for variable, coefficient in other.terms:
            total[variable] = total.get(variable, 0) + coefficient
        terms = tuple(sorted((v, c) for v, c in total.items() if c))
        return Affine(self.constant + other.constant, terms)

    def times(self, factor: int) -> Affine:
        if factor == 0:
            return ZERO
        return Affine(self.constant * factor, tuple((v, c * factor) for v, c in self.terms))

    def shifted(self, amount: int) -> Affine:
        return Affine(self.constant + amount, self.terms)

    def coefficient(self, variable: int) -> int:
        return dict(self.terms).get(variable, 0)


ZERO = Affine(0)


def variable(number: int, extent: int) -> Affine:
    """A loop variable; one that is always 0 is left out."""
    return ZERO if extent == 1 else Affine(0, ((number, 1),))


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Elements between neighbours along each dimension of a contiguous tensor."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


def flattened(index: tuple[Affine, ...], shape: tuple[int, ...]) -> Affine:
    """The position in a contiguous tensor of an element given by an index of each dimension."""
    total = ZERO
    for one, stride in zip(index, strides_of(shape), strict=True):
        total = total.plus(one.times(stride))
    return total


def identity(shape: tuple[int, ...]) -> tuple[Affine, ...]:
    return tuple(variable(k, extent) for k, extent in enumerate(shape))


def split(
    flat: Affine, shape: tuple[int, ...], space: tuple[int, ...]
) -> tuple[Affine, ...] | None:
    """The inverse of `flattened` where it is affine for every point of `space`, else None."""
    result, rest = [], flat
    for extent, stride in zip(shape, strides_of(shape), strict=True):
        whole = tuple((v, c // stride) for v, c in rest.terms if c % stride == 0)
        constant = rest.constant // stride
        one = Affine(constant, whole)
        low, high = bounds(one, space)
        left = rest.plus(one.times(-stride))
        if low < 0 or high >= extent:
            return None
        result.append(one)
        rest = left
        low, high = bounds(rest, space)
        if low < 0 or high >= stride:
            return None
    return tuple(result)


def bounds(form: Affine, space: tuple[int, ...]) -> tuple[int, int]:
    """The least and the greatest value over the points of `space`."""
    low = high = form.constant
    for v, c in form.terms:
        reach = c * (space[v] - 1)
        low, high = (low + reach, high) if reach < 0 else (low, high + reach)
    return low, high


class Guard(NamedTuple):
    """low <= form < high; what it guards is computed everywhere and used only where it holds."""

    form: Affine
    low: int
    high: int


@dataclass(frozen=True, eq=False, slots=True)
class Value:
    """One number for each point; values of one kernel that are equal are one object.

    Attributes:
        kind: "load", "lookup", "constant", "position", "random", "cell", "choose" or "reduced".
        dtype: The dtype of the number.
        operands: The values it is computed from.
        op: The row of ir/ops.py of a cell or a reduction.
        data: Load: (node in memory, offset); constant: its text; position: its form; lookup: (node
        in memory, offset, elements between neighbours, their number), at the place that its
        operand gives; random: (its position, number of bits, the stream); cell: the node's
        attributes, or the node itself if the cell may fail.
        guards: Load, lookup and choose: the points inside; a cell that may fail: the points that
        count.
    """

    kind: str
    dtype: torch.dtype
    operands: tuple[Value, ...] = ()
    op: Op | None = None
    data: Any = None
    guards: tuple[Guard, ...] = ()

    def made_from(self) -> set[Value]:
        """All values that it is computed from, reductions included, without itself."""
        seen: set[Value] = set()
        waiting = list(self.operands)
        while waiting:
            one = waiting.pop()
            if one not in seen:
                seen.add(one)
                waiting.extend(one.operands)
        return seen


@dataclass(frozen=True, eq=False, slots=True)
class Store:
    """A value that becomes the buffer of a node, element `offset` at each point.

    Attributes:
        sums: The op of a reduction where several rows have one offset: their values are added up.
    """

    node: Node
    value: Value
    offset: Affine
    sums: Op | None = None


@dataclass(frozen=True, eq=False)
class Kernel:
    """A loop nest over `space`.

    Attributes:
        space: Extents of the loop variables, the outermost first.
        depth: The number of variables that stay when the reductions are done: every reduced value
            runs over the variables from `depth` on, for each point of those before.
        stores: Each at all variables, or at the first `depth`; one that sums rows, at all but the
            last of those `depth`.
        base: The value that its only store's buffer holds before, and keeps outside the points; or
        None.
    """

    space: tuple[int, ...]
    depth: int
    stores: tuple[Store, ...]
    base: Node | None = None

    def values(self) -> tuple[Value, ...]:
        """Every value the stores need, operands first."""
        known = self.__dict__.get("ordered")
        if known is None:  # cached_property would hold a lock, and processes fork at any time
            known = self.__dict__["ordered"] = self._in_order()
        return known

    def _in_order(self) -> tuple[Value, ...]:
        order: list[Value] = []
        placed: set[Value] = set()
        waiting = [(store.value, False) for store in reversed(self.stores)]
        while waiting:
            value, done = waiting.pop()
            if value in placed:
                continue
            if done or not value.operands:
                placed.add(value)
                order.append(value)
            else:
                waiting.append((value, True))
                waiting.extend((v, False) for v in reversed(value.operands) if v not in placed)
        return tuple(order)

    def reads(self) -> tuple[Node, ...]:
        """The nodes in memory it loads from, or begins as, each once."""
        loaded = [v.data[0] for v in self.values() if v.kind in READS]
        return tuple(dict.fromkeys(loaded if self.base is None else [*loaded, self.base]))

    def checks(self) -> tuple[Value, ...]:
        """The cells that may fail, in the order of `values`."""
        return tuple(v for v in self.values() if v.kind == "cell" and isinstance(v.data, Node))

    def writes(self) -> tuple[Node, ...]:
        return tuple(store.node for store in self.stores)

    def summed(self) -> tuple[int, ...]:
        """The variables of rows over which it sums: the last ones, all with the same offsets."""
        used = {v for store in self.stores if store.sums for v, _ in store.offset.terms}
        if not used:
            return ()
        return tuple(v for v in range(self.depth) if self.space[v] > 1 and v not in used)


class Access(NamedTuple):
    """An operand of a product as it lies in memory: its element i, j, ... at an affine offset."""

    node: Node
    offset: Affine


@dataclass(frozen=True, eq=False)
class Product:
    """A matrix product, a convolution or a pooling, with the epilogue of its results.

    Attributes:
        node: The computed node.
        operands: The accesses of its operands.
        epilogue: A kernel over the node's shape that reads the node at each point, or None.
        results: The nodes whose buffers it makes without an epilogue; None for one that is not
            read.
    """

    node: Node
    operands: tuple[Access, ...]
    epilogue: Kernel | None
    results: tuple[Node | None, ...]

    def reads(self) -> tuple[Node, ...]:
        others = self.epilogue.reads() if self.epilogue else ()
        nodes = dict.fromkeys((*[access.node for access in self.operands], *others))
        nodes.pop(self.node, None)
        return tuple(nodes)

    def writes(self) -> tuple[Node, ...]:
        if self.epilogue is not None:
            return self.epilogue.writes()
        return tuple(node for node in self.results if node is not None)


Unit = Kernel | Product | Node
