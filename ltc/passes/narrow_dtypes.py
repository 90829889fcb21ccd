"""Tensors kept in a narrower type than they are reported in: what LTC_USE_BF16 asks for.

Inputs and outputs of a program are in the narrow type, and so are the operands and the results of
matrix products, convolutions and attention, and what only moves: views, joins, rows taken by
index.  All other arithmetic is done in float32 on values that are widened when they are read and
rounded when they are stored; double is computed in float32 as well.  A backend may round what it
stores between kernels, too (`round_values`): the rest stays as exact as registers are.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from dataclasses import replace
from types import MethodType

import torch

from ltc.ir import ops
from ltc.ir.graph import Graph, schedule
from ltc.ir.node import Node, make
from ltc.ir.ops import Op
from ltc.ir.tensor_type import TensorType

COMPUTED = torch.float32

# What gives each element of its result from one element of an operand, unchanged.
_VIEWS = frozenset({ops.PERMUTE, ops.SLICE, ops.EXPAND, ops.RESHAPE, ops.FLIP})
_MOVES = _VIEWS | {ops.CONCAT, ops.INSERT, ops.TAKE, ops.GATHER, ops.MAX_POOL}
_SCATTERS = frozenset({ops.PUT, ops.SCATTER})
_PRODUCTS = frozenset({"matmul", "convolution"})
_SUMMING = frozenset({"all_reduce", "reduce_scatter"})


def narrow(graph: Graph, kept_as: Mapping[torch.dtype, torch.dtype]) -> Graph:
    """The graph for inputs and outputs that are kept as other types than they are reported in.

    Args:
        kept_as: Float dtype -> the float dtype of its tensors in memory; every other dtype stays.
    """
    if not kept_as:
        return graph
    return _Narrowing(kept_as).run(graph)


def round_values(graph: Graph, chosen: Container[Node]) -> Graph:
    """The graph with the chosen float32 nodes rounded to what it stores between kernels."""
    origins = dict(graph.origins)
    replaced: dict[Node, Node] = {}
    for node in schedule(*graph.outputs):
        result = make(node.op, *[replaced[n] for n in node.inputs], **dict(node.attrs))
        if node in graph.origins:
            origins.setdefault(result, graph.origins[node])
        if node in chosen:
            result = _cast(_cast(result, graph.scratch), COMPUTED)
        elif node.op is ops.CAST and node.inputs[0] in chosen and node.dtype == graph.scratch:
            (result,) = result.inputs[0].inputs  # it is that already
        replaced[node] = result
    return graph.with_outputs([replaced[n] for n in graph.outputs], origins)


class _Narrowing:
    """`made`: for each node of the graph, what computes it now, in one of its two types.

    Of a dtype that is kept as another, a result is either of that other type or of COMPUTED,
    whichever it is by nature; `wide` and `narrowed` give the one that a reader needs.
    """

    def __init__(self, kept_as: Mapping[torch.dtype, torch.dtype]) -> None:
        self.kept_as = kept_as
        self.made: dict[Node, Node] = {}

    def run(self, graph: Graph) -> Graph:
        origins = dict(graph.origins)
        for node in schedule(*graph.outputs):
            result = self.made[node] = self._rule(node)(node)
            if node in graph.origins:
                origins.setdefault(result, graph.origins[node])
        outputs = []
        for output in graph.outputs:
            outputs.append(self.narrowed(output))
            if output in graph.origins:
                origins.setdefault(outputs[-1], graph.origins[output])
        inputs = tuple(self._input(node) for node in graph.inputs)
        scratch = self.kept_as.get(COMPUTED, COMPUTED)
        return replace(
            graph, inputs=inputs, outputs=tuple(outputs), origins=origins, scratch=scratch
        )

    # --- a node's value in either type -----------------------------------------------------------

    def _is_kept(self, node: Node) -> bool:
        return isinstance(node.type, TensorType) and node.dtype in self.kept_as

    def wide(self, node: Node) -> Node:
        """The value to compute with."""
        return _cast(self.made[node], COMPUTED) if self._is_kept(node) else self.made[node]

    def narrowed(self, node: Node) -> Node:
        """The value as it lies in memory."""
        if not self._is_kept(node):
            return self.made[node]
        dtype, views, result = self.kept_as[node.dtype], [], self.made[node]
        while result.dtype != dtype and result.op in _VIEWS:
            views.append(result)
            result = result.inputs[0]
        result = _cast(result, dtype)  # before the views: whoever computes it stores it so
        for view in reversed(views):
            result = make(view.op, result, **dict(view.attrs))
        return result

    def _recorded(self, node: Node) -> Node:
        """The value in the type it is reported in."""
        if node.op is ops.CONSTANT:
            return node
        return _cast(self.made[node], node.dtype) if self._is_kept(node) else self.made[node]

    def _moved(self, operands: tuple[Node, ...]) -> list[Node]:
        """All narrow where they are so already, else all wide."""
        is_narrow = all(
            self.made[n].dtype == self.kept_as[n.dtype] for n in operands if self._is_kept(n)
        )
        return [self.narrowed(n) if is_narrow else self.wide(n) for n in operands]

    # --- rules -----------------------------------------------------------------------------------

    def _rule(self, node: Node) -> Callable[[Node], Node]:
        if node.op in _RULES:
            return MethodType(_RULES[node.op], self)
        if node.op.kind in _PRODUCTS:
            return self._multiply
        if node.op in _MOVES or (node.op in _SCATTERS and node.attr("mode") == "set"):
            return self._move
        return self._compute

    def _compute(self, node: Node) -> Node:
        return make(node.op, *[self.wide(n) for n in node.inputs], **dict(node.attrs))

    def _move(self, node: Node) -> Node:
        return make(node.op, *self._moved(node.inputs), **dict(node.attrs))

    def _multiply(self, node: Node) -> Node:
        return make(node.op, *[self.narrowed(n) for n in node.inputs], **dict(node.attrs))

    def _attend(self, node: Node) -> Node:
        """Narrow as for products, but for numbers, and for the logarithms of sums."""
        logarithms = node.inputs[5] if node.op is ops.ATTENTION_GRADIENT else None
        operands = [
            self.wide(n) if n is logarithms else self.narrowed(n) if n.shape else self._recorded(n)
            for n in node.inputs
        ]
        return make(node.op, *operands, **dict(node.attrs))

    def _input(self, node: Node) -> Node:
        dtype = self.kept_as.get(node.dtype, node.dtype)
        return make(ops.INPUT, **{**dict(node.attrs), "dtype": dtype})

    def _scalar(self, node: Node) -> Node:
        return node  # the launch is given it as it is

    def _constant(self, node: Node) -> Node:
        if node.dtype not in self.kept_as:
            return node
        return make(ops.CONSTANT, literal=node.attr("literal"), dtype=COMPUTED)

    def _convert(self, node: Node) -> Node:
        (x,) = node.inputs
        value = self.made[x]
        if node.dtype not in self.kept_as:
            return value if value.dtype == node.dtype else _cast(self.wide(x), node.dtype)
        if self._is_kept(x) or value.dtype == self.kept_as[node.dtype]:
            return value
        return _cast(value, COMPUTED)

    def _reinterpret(self, node: Node) -> Node:
        result = make(ops.BITCAST, self._recorded(node.inputs[0]), dtype=node.dtype)
        return _cast(result, COMPUTED) if node.dtype in self.kept_as else result

    def _keep(self, node: Node) -> Node:
        """A barrier's operand is in memory."""
        return make(ops.BARRIER, self.narrowed(node.inputs[0]), **dict(node.attrs))

    def _call_torch(self, node: Node) -> Node:
        return make(ops.EXTERN, *[self._recorded(n) for n in node.inputs], **dict(node.attrs))

    def _take_part(self, node: Node) -> Node:
        result = make(ops.GET, self.made[node.inputs[0]], **dict(node.attrs))
        is_narrow = self._is_kept(node) and result.dtype == self.kept_as[node.dtype]
        return _cast(result, COMPUTED) if self._is_kept(node) and not is_narrow else result

    def _start(self, node: Node) -> Node:
        """Send moved values as they are kept; make sums of the values that are computed with."""
        sums = node.attr("collective").kind in _SUMMING
        operands = [self.wide(n) if sums else self.narrowed(n) for n in node.inputs]
        return make(ops.COLLECTIVE_START, *operands, **dict(node.attrs))

    def _wait(self, node: Node) -> Node:
        (start,) = node.inputs
        sums = start.attr("collective").kind in _SUMMING
        results = tuple(
            type if type.dtype not in self.kept_as
            else TensorType(COMPUTED if sums else self.kept_as[type.dtype], type.shape)
            for type in node.attr("results")
        )  # fmt: skip
        return make(ops.COLLECTIVE_WAIT, self.made[start], results=results)


def _cast(node: Node, dtype: torch.dtype) -> Node:
    if node.dtype == dtype:
        return node
    return make(ops.CAST, node, dtype=dtype)


_RULES: dict[Op, Callable[[_Narrowing, Node], Node]] = {
    ops.INPUT: _Narrowing._input,
    ops.SCALAR: _Narrowing._scalar,
    ops.CONSTANT: _Narrowing._constant,
    ops.CAST: _Narrowing._convert,
    ops.BITCAST: _Narrowing._reinterpret,
    ops.BARRIER: _Narrowing._keep,
    ops.EXTERN: _Narrowing._call_torch,
    ops.ATTENTION: _Narrowing._attend,
    ops.ATTENTION_GRADIENT: _Narrowing._attend,
    ops.GET: _Narrowing._take_part,
    ops.COLLECTIVE_START: _Narrowing._start,
    ops.COLLECTIVE_WAIT: _Narrowing._wait,
}
