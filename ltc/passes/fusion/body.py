"""The values of a kernel, from the nodes that a draft computes at their places."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ltc.errors import InvalidGraph
from ltc.ir import ops
from ltc.ir.loop_nest import Affine, Guard, Value
from ltc.ir.node import Node, constant_value
from ltc.passes.fusion.draft import Draft, Index
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
        """What is stored at each point as an element of the node."""
        if node is self.draft.product:
            return self._intern("load", node.dtype, (), None, (node, offset), ())
        return self.value(node, *_home_place(node, self.draft))

    def operand(self, node: Node, index: Index, guards: tuple[Guard, ...]) -> Value:
        """What a node is where it is read: computed in this kernel, or in memory."""
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
