"""Drafts as kernels and products, in an order in which they may run."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from math import prod
from typing import Any

import torch

from ltc.errors import InvalidGraph
from ltc.ir import ops
from ltc.ir.loop_nest import (
    Access,
    Affine,
    Guard,
    Kernel,
    Product,
    Store,
    Unit,
    Value,
    flattened,
    identity,
)
from ltc.ir.node import Node, constant_value
from ltc.ir.tensor_type import LOW_PRECISION, TensorType
from ltc.passes.fusion.draft import Draft, Index, ReadPlace
from ltc.passes.fusion.index_maps import (
    LOOKUPS,
    VIEWS,
    Place,
    behind_barrier,
    looked_up,
    offset_of,
    operand_places,
    through_views,
)  # fmt: skip
from ltc.support.sizes.choices import by_sample
from ltc.support.sizes.marks import is_symbolic


class FusedUnits:
    """The units that run, made from the fusion's decisions.

    Args:
        position: The position of every node in the graph's order.
        products: The nodes that can hold an epilogue.
        accesses: The place where each product finds its operands.
        parts: The nodes that take the results of a product with several, by their index.
    """

    def __init__(
        self,
        position: Mapping[Node, int],
        products: Container[Node],
        accesses: Mapping[Node, tuple[Access, ...]],
        parts: Mapping[Node, Mapping[int, Node]],
    ) -> None:
        self.position, self.products, self.accesses = position, products, accesses
        self.parts = parts

    def ordered(
        self, units: list[Draft | Node], needs: Mapping[Draft | Node, Iterable[Draft | Node]]
    ) -> list[Unit]:
        """Every unit after those it needs, otherwise as the graph was recorded."""
        done: set[Draft | Node] = set()
        result: list[Unit] = []
        for unit in sorted(units, key=self._time):
            waiting = [(unit, False)]
            while waiting:
                one, needs_done = waiting.pop()
                if one in done:
                    continue
                if needs_done:
                    done.add(one)
                    result.append(self._unit(one))
                else:
                    waiting.append((one, True))
                    waiting.extend((u, False) for u in needs[one] if u not in done)
        return result

    def _unit(self, unit: Draft | Node) -> Unit:
        if isinstance(unit, Node):
            return self._product(unit, None) if unit in self.products else unit
        kernel = self._kernel(unit)
        if unit.product is None:
            return kernel
        return self._product(unit.product, kernel)

    def _product(self, node: Node, epilogue: Kernel | None) -> Product:
        results: tuple[Node | None, ...] = (node,)
        if not isinstance(node.type, TensorType):
            results = tuple(self.parts[node].get(i) for i in range(len(node.type)))
        return Product(node, self.accesses[node], epilogue, results)

    def _time(self, unit: Draft | Node) -> int:
        if isinstance(unit, Node):
            return self.position[unit]
        return max(self.position[n] for n in (*unit.stores, *unit.sums))

    def _kernel(self, draft: Draft) -> Kernel:
        body = Body(draft)
        stores = tuple(
            Store(node, body.stored(node, offset), offset) for node, offset in draft.stores.items()
        )
        sums = tuple(
            Store(node, body.operand(*place), offset, node.op)
            for node, (offset, place) in draft.sums.items()
        )
        depth = len(draft.space) if draft.depth is None else draft.depth
        return Kernel(draft.space, depth, stores + sums)


# --- the values of a kernel, from the nodes that a draft computes at their places -------------


class Body:
    """The values of one kernel, equal ones once."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        # By offset: a draft that was joined to another has other variables than it was made with,
        # in which an index that was one position may be one of each dimension.
        self._computed = {
            (node, offset_of(node, index), guards)
            for node, places in draft.members.items()
            for index, guards in places
        }
        self._made: dict[tuple[Any, ...], Value] = {}
        self._interned: dict[tuple[Any, ...], Value] = {}

    def _intern(self, *key: Any) -> Value:
        value = self._interned.get(key)
        if value is None:
            value = self._interned[key] = Value(*key)
        return value

    def value(self, node: Node, index: Index, guards: tuple[Guard, ...]) -> Value:
        key = (node, index, guards)
        if key not in self._made:
            self._made[key] = self._make(node, index, guards)
        return self._made[key]

    def stored(self, node: Node, offset: Affine) -> Value:
        """Return the value stored at each point as an element of the node."""
        if node is self.draft.product:
            return self._intern("load", node.dtype, (), None, (node, offset), ())
        return self.value(node, *_home_place(node, self.draft))

    def operand(self, node: Node, index: Index, guards: tuple[Guard, ...]) -> Value:
        """Return a node's value where it is read: computed in this kernel, or in memory."""
        base, index = through_views(node, index, self.draft.space, self._stays(guards))
        if behind_barrier(base):
            return self._load(base.inputs[0], index, guards)
        if base.op is ops.CONSTANT:
            return self.value(base, index, ())
        if (base, offset_of(base, index), guards) in self._computed:
            return self.value(base, index, guards)
        return self._load(base, index, guards)

    def _stays(self, guards: tuple[Guard, ...]) -> Callable[[Node, Index], bool]:
        views = self.draft.views
        return lambda view, index: bool(views) and (view, offset_of(view, index), guards) in views

    def _load(self, node: Node, index: Index, guards: tuple[Guard, ...]) -> Value:
        if node.op is ops.CONSTANT:
            return self.value(node, index, ())
        if node in self.draft.stores and node is not self.draft.product:
            # Extents that are equal at all sizes may be two expressions, and so two places.
            raise InvalidGraph(f"a kernel reads {node} at {index} before it has stored it")
        return self._intern("load", node.dtype, (), None, (node, offset_of(node, index)), guards)

    def _make(self, node: Node, index: Index, guards: tuple[Guard, ...]) -> Value:
        if node.op is ops.CONSTANT:
            # By its text: 0.0 and -0.0 are equal keys.
            number = repr(constant_value(node))
            return self._intern("constant", node.dtype, (), None, number, ())
        if node.op is ops.IOTA:
            form = index if isinstance(index, Affine) else index[0]
            return self._intern("position", node.dtype, (), None, form, ())
        places = operand_places(node, index, guards, self.draft)
        if node.op is ops.RANDOM_BITS:
            data = (offset_of(node, index), node.attr("bits"), node.attr("stream"))
            return self._intern("random", node.dtype, (self.operand(*places[0]),), None, data, ())
        operands = tuple(self.operand(*place) for place in places)
        if node.op in VIEWS or node.op is ops.TO_SYMMETRIC:
            return operands[0]
        if node.op in LOOKUPS:
            return self._lookup(node, index, guards, operands[0])
        if ops.may_fail(node):
            return self._intern("cell", node.dtype, operands, node.op, node, guards)
        if node.op.kind == "reduce":
            return self._intern("reduced", node.dtype, operands, node.op, None, ())
        if node.op in (ops.PAD, ops.CONCAT, ops.INSERT):
            return self._chosen(node, operands, places, len(guards))
        return self._intern("cell", node.dtype, operands, node.op, node.attrs, ())

    def _lookup(
        self, node: Node, index: Index, guards: tuple[Guard, ...], position: Value
    ) -> Value:
        base, offset, step = looked_up(node, index, self.draft)
        if base.op is ops.CONSTANT:
            return self._looked_at(position, self.value(base, (), ()))
        data = (base, offset, step, node.inputs[0].shape[node.attr("dim")])
        return self._intern("lookup", node.dtype, (position,), None, data, guards)

    def _looked_at(self, position: Value, value: Value) -> Value:
        """The value, whatever the position: which is computed, since it may be one that fails."""
        zero = self._intern("constant", position.dtype, (), None, "0", ())
        inside = self._intern("cell", torch.bool, (position, zero), ops.GE, (), ())
        return self._intern("cell", value.dtype, (inside, value, value), ops.WHERE, (), ())

    def _chosen(
        self, node: Node, operands: tuple[Value, ...], places: list[Place], outer: int
    ) -> Value:
        """A guarded operand where its own guards hold, else the one that has none left."""
        choices = [(v, place[2][outer:]) for v, place in zip(operands, places)]
        if node.op is ops.CONCAT:
            result = choices.pop()[0]
        else:
            result = choices.pop(1 if node.op is ops.PAD else 0)[0]
        for value, guards in reversed(choices):
            result = self._intern("choose", node.dtype, (value, result), None, None, guards)
        return result


def _home_place(node: Node, draft: Draft) -> tuple[Index, tuple[Guard, ...]]:
    """The place whose value is stored: the one without guards that covers the node."""
    for index, guards in draft.members[node]:
        if not guards and offset_of(node, index) == draft.stores[node]:
            return index, guards
    raise AssertionError(f"{node} is stored by a kernel that does not compute it")


# --- Rules whether a node may be computed where it is read, and how often that would be ----------

LEAVES = frozenset({ops.INPUT, ops.SCALAR, ops.CONSTANT})
COSTLY = frozenset(
    op for op in ops.ALL.values() if op.infer is ops.EXP.infer and op.kind == "elementwise"
) - {ops.FLOOR, ops.CEIL, ops.TRUNC, ops.ROUND, ops.COPYSIGN}

FLOAT32 = torch.float32
MOST_MEMBERS = 160  # nodes of one kernel: code grows with them, and registers do not
MOST_PASSES = 6  # reductions of one kernel: each recomputes what it reads
FEWEST_ROWS = 16  # below this a kernel that reduces inside its rows keeps too few threads busy
SMALL_SPACE = 4096  # elements that one thread is done with before a second has begun


def base_of(node: Node) -> Node:
    while node.op in VIEWS:
        node = node.inputs[0]
    return node


def fits(node: Node, place: ReadPlace) -> bool:
    """Return True if the index map of every operand, and each number, can be written at this place."""
    if place.draft.product is not None and computes_with_size(node):
        return False
    if isinstance(place.index, Affine):
        if node.op is ops.RANDOM_BITS:
            return True
        return node.op.kind == "elementwise" and all(
            n.shape == node.shape or n.size == 1 for n in node.inputs
        )
    return True


def computes_with_size(node: Node) -> bool:
    """Return True if an operand is a number that is a size: an epilogue's text has no such."""
    numbers = [one for one in map(base_of, (node, *node.inputs)) if one.op is ops.CONSTANT]
    return any(is_symbolic(one.attr("literal")) for one in numbers)


def times_computed(place: ReadPlace) -> int:
    """Return how often the loops around a value compute it: it moves out of those it does not read."""
    forms = [place.index] if isinstance(place.index, Affine) else list(place.index)
    forms.extend(guard.form for guard in place.guards)
    last = max((v for form in forms for v, _ in form.terms), default=-1)
    return prod(place.draft.space[: last + 1])


def is_cheap(node: Node) -> bool:
    """A number, positions, or a wider copy: what every kernel may compute for itself."""
    if node.op is ops.IOTA:
        return True
    if node.op is ops.CAST and node.inputs[0].dtype in LOW_PRECISION and node.dtype is FLOAT32:
        return True
    if node.size != 1 or node.op.kind not in ("elementwise", "view"):
        return False
    return all(base_of(n).op in LEAVES for n in node.inputs)


def is_light(node: Node) -> bool:
    """One or two instructions on what is in memory anyway."""
    is_simple = node.op.kind in ("elementwise", "leaf") and node.op not in COSTLY
    return is_simple and all(base_of(n).op in LEAVES for n in node.inputs)


def covers(node: Node, place: ReadPlace) -> bool:
    """Return True if the place sees every element of the node exactly once, in order."""
    if place.guards:
        return False
    space, depth = place.draft.space, place.draft.depth
    offset = offset_of(node, place.index)
    if _are_as_many(node, space) and offset == flattened(identity(space), space):
        return True
    rows = space[:depth] if depth is not None else None
    return (
        rows is not None and _are_as_many(node, rows) and offset == flattened(identity(rows), rows)
    )


def _are_as_many(node: Node, space: tuple[int, ...]) -> bool:
    """Return True if the node has an element for each point; the contrary is decided by no guard.

    A negative answer is right as well at sizes where the place happens to cover the node.
    """
    with by_sample(node.size, *space):
        if node.size != prod(space):
            return False
    return bool(node.size == prod(space))


def has_many_rows(rows: tuple[int, ...]) -> bool:
    """Return True if the rows keep the threads busy; a guess that is right at any sizes."""
    with by_sample(*rows):
        return bool(prod(rows) >= FEWEST_ROWS)


def may_reduce_in(node: Node, place: ReadPlace) -> bool:
    """Return True if each row of the draft can hold this reduction."""
    draft = place.draft
    if place.guards or isinstance(place.index, Affine) or draft.passes >= MOST_PASSES:
        return False
    if draft.product is not None:
        return False
    k = _rows_used(place, node)
    if k is None:
        return False
    reduced = tuple(node.inputs[0].shape[d] for d in node.attr("dims"))
    rows, rest = draft.space[:k], draft.space[k:]
    with by_sample(*rows, *reduced):  # either way is right
        if prod(rows) < FEWEST_ROWS and prod(rows) * prod(reduced) > SMALL_SPACE:
            return False
    if draft.depth is None:
        return rest == reduced or not rest
    return k == draft.depth and rest == reduced


def _rows_used(place: ReadPlace, node: Node) -> int | None:
    """Return how many leading variables the node's index is, each for one dimension in turn."""
    offset = offset_of(node, place.index)
    space = place.draft.space
    candidates = [place.draft.depth] if place.draft.depth is not None else range(len(space) + 1)
    for k in candidates:
        rows = space[:k]
        if prod(rows) == node.size and offset == flattened(identity(rows), rows):
            if k < len(space) and space[k] == 1 and place.draft.depth is None:
                continue  # a later k says the same and leaves what is reduced
            return k
    return None


def open_rows(node: Node, place: ReadPlace) -> None:
    draft = place.draft
    if draft.depth is None:
        reduced = tuple(node.inputs[0].shape[d] for d in node.attr("dims"))
        k = _rows_used(place, node)
        draft.depth = k
        if k == len(draft.space):
            draft.space = (*draft.space, *reduced)


def reduced_for(nodes: Iterable[Node], draft: Draft, native: Container[Node]) -> set[Node]:
    """The reductions of the draft's rows that the nodes are made of, or are.

    Args:
        native: The nodes that kernels can compute.
    """
    rows, waiting = draft.space[: draft.depth], list(nodes)
    seen: set[Node] = set()
    while waiting and len(seen) < MOST_MEMBERS:
        node = waiting.pop()
        is_made = node.op.kind in ("elementwise", "reduce") or node.op in VIEWS
        if is_made and node in native and node not in seen:
            seen.add(node)
            waiting.extend(node.inputs)
    return {node for node in seen if node.op.kind == "reduce" and node.shape == rows}
