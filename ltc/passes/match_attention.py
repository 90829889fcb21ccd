"""Attention that a user wrote out, softmax(query @ key.T * scale + bias) @ value, as one primitive.

Forward and backward are recognised together, as autograd records them, and only if no other node reads
a score, a weight or one of their gradients: then no matrix of them is made. The fused primitive sums in
another order, so its results differ from the written ones by rounding alone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from ltc.ir import build, ops
from ltc.ir.graph import Graph, schedule
from ltc.ir.node import Node, constant, constant_value, make
from ltc.passes.simplify import simplify

DTYPES = frozenset({torch.float32, torch.float64})
KEEP_BITS = 24

T = TypeVar("T")


class NoMatch(Exception):
    """The node is no attention, or another one reads a value that must not be kept."""


def _need(holds: bool) -> None:
    if not holds:
        raise NoMatch


def _there(found: T | None) -> T:
    """Return the found object; raise NoMatch for None."""
    if found is None:
        raise NoMatch
    return found


@dataclass
class MatchedScores:
    """The operand of a softmax.

    Attributes:
        product: The matrix product of the queries and the transposed keys.
        conditions: Masks: where true, the score is -inf.
        bias: The added bias, or None.
        scale: The factor of the product, f64.
    """

    product: Node
    conditions: list[Node]
    bias: Node | None
    scale: Node


@dataclass
class Dropout:
    """The weights that dropout kept: 0 or 1 of each, with its seed and probability."""

    kept: Node
    seed: Node
    probability: Node


@dataclass
class Found:
    """One attention: what stands for which node of the graph."""

    node: Node
    gradient: Node | None
    replaced: dict[Node, Node] = field(default_factory=dict)


def recognise_attention(graph: Graph, can_attend: Callable[[Node], bool]) -> Graph:
    """The graph with every attention that is recognised, and for which `can_attend` holds."""
    order = schedule(*graph.outputs)
    finder = _Finder(order, graph)
    replaced: dict[Node, Node] = {}
    for node in order:
        if node.op is not ops.DIV or node.dtype not in DTYPES:
            continue
        try:
            found = finder.find(node)
        except NoMatch:
            continue
        if all(can_attend(n) for n in (found.node, found.gradient) if n is not None):
            replaced |= found.replaced
    return simplify(_with(graph, replaced)) if replaced else graph


def _with(graph: Graph, replaced: dict[Node, Node]) -> Graph:
    """The graph with other nodes in the place of some."""
    made: dict[Node, Node] = {}
    origins = dict(graph.origins)
    waiting = [(output, False) for output in reversed(graph.outputs)]
    while waiting:
        node, is_ready = waiting.pop()
        if node in made:
            continue
        needs = (replaced[node],) if node in replaced else node.inputs
        if not is_ready:
            waiting.append((node, True))
            waiting.extend((n, False) for n in needs if n not in made)
            continue
        inputs = tuple(made[n] for n in needs)
        if node in replaced:
            made[node] = inputs[0]
        else:
            made[node] = node if inputs == needs else make(node.op, *inputs, **dict(node.attrs))
        if node in graph.origins:
            origins.setdefault(made[node], graph.origins[node])
    return graph.with_outputs([made[n] for n in graph.outputs], origins)


# --- small patterns -----------------------------------------------------------------------------


def _is_swap(node: Node, operand: Node) -> bool:
    """Return True if the node is the operand with its last two dimensions exchanged."""
    rank = len(node.shape)
    swapped = (*range(rank - 2), rank - 1, rank - 2)
    if node.op is ops.PERMUTE and node.attr("dims") == swapped:
        return node.inputs[0] is operand
    return (
        operand.op is ops.PERMUTE
        and operand.attr("dims") == swapped
        and (operand.inputs[0] is node)
    )


def _is_number(node: Node, value: float) -> bool:
    while node.op in (ops.CAST, ops.EXPAND):
        (node,) = node.inputs
    return node.op is ops.CONSTANT and constant_value(node) == value


def _double(number: Node) -> Node:
    """A number of the formula, as it was given where it was rounded."""
    if number.op is ops.CAST and number.inputs[0].op is ops.SCALAR:
        (number,) = number.inputs
    return build.cast(number, torch.float64)


def _factor(node: Node) -> tuple[Node, Node] | None:
    """(x, number) of x * number, or of x / number with the number's inverse."""
    if node.op is ops.MUL:
        x, y = node.inputs
        if not y.shape and x.shape:
            return x, _double(y)
        if not x.shape and y.shape:
            return y, _double(x)
    if node.op is ops.DIV and not node.inputs[1].shape and node.inputs[0].shape:
        return node.inputs[0], 1.0 / _double(node.inputs[1])
    return None


def _shaped(x: Node, shape: tuple[int, ...]) -> Node:
    """The same elements in another shape.  Raises NoMatch where they are not as many.

    Weights may be multiplied in another shape than softmax has them: all rows of all heads at once.
    """
    _need(x.size == math.prod(shape))
    return build.reshape(x, shape)


def _times(x: Node | None, y: Node) -> Node:
    return y if x is None else x * y


def _other(node: Node, known: Node) -> Node | None:
    """The operand of a node of two that is not `known`."""
    if len(node.inputs) != 2 or known not in node.inputs:
        return None
    x, y = node.inputs
    return y if x is known else x


class _Finder:
    def __init__(self, order: list[Node], graph: Graph) -> None:
        self.outputs = set(graph.outputs)
        self.readers: dict[Node, list[Node]] = defaultdict(list)
        for node in order:
            for operand in dict.fromkeys(node.inputs):
                self.readers[operand].append(node)

    def find(self, weights: Node) -> Found:
        """The attention whose softmax this is.  Raises NoMatch where it is none."""
        scores = self._softmax_of(weights)
        parts = self._scores(scores)
        used, dropout = self._dropped(weights)
        forward, value_gradient, others = self._uses(used)
        if dropout is not None:
            _need(not others)
            others = {n for n in self._readers(weights) if n not in used.inputs}
        value = forward.inputs[1]
        found = self._forward(weights, parts, dropout, forward, value)
        if others or value_gradient is not None:
            self._backward(found, weights, parts, dropout, value, value_gradient, others)
        return found

    def _readers(self, node: Node) -> list[Node]:
        _need(node not in self.outputs)
        return self.readers[node]

    def _only_reader(self, node: Node) -> Node:
        readers = self._readers(node)
        _need(len(readers) == 1)
        return readers[0]

    def _readers_through(self, node: Node) -> list[Node]:
        """Readers, and in place of a reshape its readers."""
        result = []
        for reader in self._readers(node):
            result.extend(self._readers(reader) if reader.op is ops.RESHAPE else [reader])
        return result

    # --- the forward pass

    def _softmax_of(self, weights: Node) -> Node:
        exp, total = weights.inputs
        last = (len(weights.shape) - 1,)
        _need(exp.op is ops.EXP and total.op is ops.RESHAPE and len(weights.shape) >= 2)
        (sum_,) = total.inputs
        _need(sum_.op is ops.SUM and sum_.inputs[0] is exp and sum_.attr("dims") == last)
        (shifted,) = exp.inputs
        _need(shifted.op is ops.SUB)
        scores, top = shifted.inputs
        _need(top.op is ops.RESHAPE and scores.shape == weights.shape)
        (max_,) = top.inputs
        _need(max_.op is ops.MAX and max_.inputs[0] is scores and max_.attr("dims") == last)
        for node, readers in (
            (exp, {weights, sum_}),
            (sum_, {total}),
            (total, {weights}),
            (shifted, {exp}),
            (scores, {shifted, max_}),
            (max_, {top}),
            (top, {shifted}),
        ):
            _need(set(self._readers(node)) == readers)
        return scores

    def _scores(self, node: Node) -> MatchedScores:
        conditions: list[Node] = []
        bias: Node | None = None
        first = node
        while node.op in (ops.WHERE, ops.ADD):
            if node is not first:
                self._only_reader(node)
            if node.op is ops.WHERE:
                condition, fill, node = node.inputs
                _need(_is_number(fill, -math.inf) and node.shape == first.shape)
                conditions.append(condition)
            else:
                _need(bias is None)
                node, bias = self._bias(node)
        scale = None
        while node.op is not ops.MATMUL:
            if node is not first:
                self._only_reader(node)
            if node.op is ops.RESHAPE:
                (node,) = node.inputs
                continue
            node, number = _there(_factor(node))
            scale = _times(scale, number)
        if node is not first:
            self._only_reader(node)
        _need(node.shape[-2:] == first.shape[-2:])
        return MatchedScores(node, conditions, bias, scale or constant(1.0, torch.float64))

    def _bias(self, node: Node) -> tuple[Node, Node]:
        """(what leads to the product, what was added to it)"""
        for x, y in (node.inputs, node.inputs[::-1]):
            deeper = x
            while deeper.op in (ops.RESHAPE, ops.MUL, ops.DIV):
                pair = _factor(deeper)
                if pair is None and deeper.op is not ops.RESHAPE:
                    break
                deeper = deeper.inputs[0] if pair is None else pair[0]
            if x.shape == node.shape and deeper.op in (ops.MATMUL, ops.WHERE):
                return x, y
        raise NoMatch

    def _dropped(self, weights: Node) -> tuple[Node, Dropout | None]:
        """The weights as the value is multiplied by them, and what dropout they went through."""
        for reader in self._readers(weights):
            kept = _other(reader, weights) if reader.op is ops.MUL else None
            if kept is None or kept.op is not ops.CAST or kept.inputs[0].op is not ops.GE:
                continue
            dropout = self._dropout(kept, weights.shape)
            used = self._only_reader(reader)
            p = dropout.probability
            expected = build.cast(1.0 / (1.0 - p), weights.dtype)
            _need(used.op is ops.MUL and _other(used, reader) is expected)
            return used, dropout
        return weights, None

    def _dropout(self, kept: Node, shape: tuple[int, ...]) -> Dropout:
        uniform, limit = kept.inputs[0].inputs
        bits = uniform
        while bits.op in (ops.MUL, ops.CAST):
            bits = bits.inputs[0]
        _need(bits.op is ops.RANDOM_BITS and limit.op is ops.CAST)
        (seed,), (probability,) = bits.inputs, limit.inputs
        whole = build.cast(build.random_bits(seed, shape, KEEP_BITS), torch.float32)
        same = build.ge(whole * 2.0**-KEEP_BITS, probability)
        _need(kept.inputs[0] is same and probability.type == (torch.float64, ()))
        return Dropout(kept, seed, probability)

    def _uses(self, used: Node) -> tuple[Node, Node | None, set[Node]]:
        """(the product with the value, that which makes the value's gradient, other readers)"""
        forward: Node | None = None
        gradient: Node | None = None
        others: set[Node] = set()
        for reader in self._readers_through(used):
            if reader.op is ops.MATMUL and self._is(reader.inputs[0], used):
                _need(forward is None)
                forward = reader
            elif reader.op is ops.PERMUTE and _is_swap(reader, reader.inputs[0]):
                _need(gradient is None)
                gradient = self._only_reader(reader)
                _need(gradient.op is ops.MATMUL and gradient.inputs[0] is reader)
            else:
                others.add(reader)
        return _there(forward), gradient, others

    def _is(self, node: Node, other: Node) -> bool:
        return node is other or (node.op is ops.RESHAPE and node.inputs[0] is other)

    def _forward(
        self,
        weights: Node,
        parts: MatchedScores,
        dropout: Dropout | None,
        forward: Node,
        value: Node,
    ) -> Found:
        left, right = parts.product.inputs
        batch, (rows, columns) = weights.shape[:-2], weights.shape[-2:]
        self.query = _shaped(left, (*batch, rows, left.shape[-1]))
        right = _shaped(right, (*batch, right.shape[-2], columns))
        self.key = build.transpose(right, -2, -1)
        self.value = _shaped(value, (*batch, columns, value.shape[-1]))
        _need(forward.shape[-2] == rows and forward.size == weights.size // columns
              * value.shape[-1])  # fmt: skip
        self.rest, self.attrs = self._rest(parts, dropout, weights.shape)
        node = make(
            ops.ATTENTION, self.query, self.key, self.value, parts.scale, *self.rest,
            order=tuple(range(len(weights.shape))), **self.attrs,
        )  # fmt: skip
        return Found(node, None, {forward: build.reshape(build.get(node, 0), forward.shape)})

    def _rest(
        self, parts: MatchedScores, dropout: Dropout | None, shape: Sequence[int]
    ) -> tuple[list[Node], dict[str, bool]]:
        bias = parts.bias
        for condition in parts.conditions:
            if bias is not None and bias.dtype != torch.bool:
                bias = build.where(condition, -math.inf, bias)
            else:
                seen = ~condition
                bias = seen if bias is None else bias & seen
        rest = [] if bias is None else [build.expand(bias, shape)]
        if dropout is not None:
            rest += [dropout.seed, dropout.probability]
        attrs = {
            "causal": False, "biased": bias is not None, "dropped": dropout is not None,
            "safe": False,
        }  # fmt: skip
        return rest, attrs

    # --- the backward pass

    def _backward(
        self,
        found: Found,
        weights: Node,
        parts: MatchedScores,
        dropout: Dropout | None,
        value: Node,
        value_gradient: Node | None,
        others: set[Node],
    ) -> None:
        gradient = value_gradient.inputs[1] if value_gradient is not None else None
        factor, query_gradient, key_gradient = constant(1.0, torch.float64), None, None
        if others:
            of_weights, of_scores = self._through_softmax(weights, others)
            product, undropped = self._through_dropout(of_weights, dropout)
            _need(product.op is ops.MATMUL and _is_swap(product.inputs[1], value))
            _need(gradient is None or gradient is product.inputs[0])
            gradient = product.inputs[0]
            factor, query_gradient, key_gradient = self._to_operands(of_scores, parts, undropped)
        batch = weights.shape[:-2]
        gradient = _there(gradient)  # one of both has one
        rows = _shaped(gradient, (*batch, *gradient.shape[-2:]))
        result, logarithms = build.get(found.node, 0), build.get(found.node, 1)
        _need(rows.type == result.type)
        plain = tuple(range(len(weights.shape)))
        found.gradient = node = make(
            ops.ATTENTION_GRADIENT, rows, self.query, self.key, self.value, result, logarithms,
            parts.scale, factor, *self.rest, orders=(plain,) * 3, wants_bias=False, **self.attrs,
        )  # fmt: skip
        made = [build.get(node, i) for i in range(3)]
        made[1] = build.transpose(made[1], -2, -1)
        for old, new in zip((query_gradient, key_gradient, value_gradient), made):
            if old is not None:
                found.replaced[old] = build.reshape(new, old.shape)

    def _through_softmax(self, weights: Node, others: set[Node]) -> tuple[Node, Node]:
        """(gradient of the weights, gradient of the scores): w * g - w * sum(w * g)"""
        _need(len(others) == 2 and all(n.op is ops.MUL for n in others))
        for first, second in (tuple(others), tuple(others)[::-1]):
            total = _other(second, weights)
            if total is None or total.op is not ops.RESHAPE:
                continue
            (sum_,) = total.inputs
            if sum_.op is not ops.SUM or sum_.inputs[0] is not first:
                continue
            _need(sum_.attr("dims") == (len(weights.shape) - 1,))
            of_scores = self._only_reader(second)
            _need(of_scores.op is ops.SUB and of_scores.inputs == (first, second))
            _need(set(self._readers(first)) == {sum_, of_scores})
            _need(self._only_reader(sum_) is total and self._only_reader(total) is second)
            of_weights = _there(_other(first, weights))
            _need(of_weights is not weights)
            self._only_reader(of_weights)
            return of_weights, of_scores
        raise NoMatch

    def _through_dropout(self, node: Node, dropout: Dropout | None) -> tuple[Node, Node | None]:
        """(the product behind it, by what dropout multiplied here over what it did before)"""
        more = None
        if dropout is not None:
            node, number = _there(_factor(node))
            self._only_reader(node)
            _need(node.op is ops.MUL and dropout.kept in node.inputs)
            node = _there(_other(node, dropout.kept))
            self._only_reader(node)
            more = number * (1.0 - dropout.probability)
        while node.op is ops.RESHAPE:
            (node,) = node.inputs
            self._only_reader(node)
        return node, more

    def _to_operands(
        self, node: Node, parts: MatchedScores, factor: Node | None
    ) -> tuple[Node, Node | None, Node | None]:
        """(what gradients are multiplied by, that of the query, that of the transposed key)"""
        while True:
            readers = self._readers(node)
            reader = readers[0] if len(readers) == 1 else None
            if reader is None or reader.op not in (ops.WHERE, ops.RESHAPE, ops.MUL, ops.DIV):
                break
            if reader.op is ops.WHERE:
                condition, fill, inner = reader.inputs
                _need(inner is node and condition in parts.conditions and _is_number(fill, 0))
            elif reader.op is not ops.RESHAPE:
                scaled, number = _there(_factor(reader))
                _need(scaled is node)
                factor = _times(factor, number)
            node = reader
        left, right = parts.product.inputs
        query_gradient = key_gradient = None
        for reader in readers:
            _need(reader.op is ops.MATMUL)
            x, y = reader.inputs
            if x is node and _is_swap(y, right) and query_gradient is None:
                query_gradient = reader
            elif y is node and _is_swap(x, left) and key_gradient is None:
                key_gradient = reader
            else:
                raise NoMatch
        return factor or constant(1.0, torch.float64), query_gradient, key_gradient
