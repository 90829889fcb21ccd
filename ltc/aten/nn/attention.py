"""Rules of attention: ltc::attention, its gradient, and which of its scores dropout keeps.

Letters: L queries of E numbers, S keys of E and values of V numbers; every other dimension is one
of the batch, over which operands broadcast.  Heads of the query may share a head of the key.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ltc.aten.registry import traces
from ltc.aten.rules.rng import uniform
from ltc.ir import build, ops
from ltc.ir.infer import broadcast
from ltc.ir.node import Node, Operand, constant, make

ATTENTION, GRADIENT, KEPT = "ltc::attention", "ltc::attention_gradient", "ltc::attention_kept"


class _Operands:
    """The operands of one call as the primitive takes them.

    Attributes:
        batch: The batch of every operand: its heads are two dimensions where heads of the query
            share a key.
    """

    def __init__(self, query: Node, key: Node, value: Node, bias: Node | None) -> None:
        self.groups = _shared_heads(query, key, value)
        operands = ((query, False), (key, True), (value, True))
        batches = [self._grouped(x.shape, is_shared) for x, is_shared in operands]
        self.batch = broadcast(*[shape[:-2] for shape in batches])
        self.query, self.key, self.value = (
            self.expanded(x, shape) for x, shape in zip((query, key, value), batches)
        )
        self.scores = (*self.batch, query.shape[-2], key.shape[-2])
        self.bias = None if bias is None else self._bias(bias)

    def _grouped(self, shape: tuple[int, ...], is_shared: bool) -> tuple[int, ...]:
        """With the heads as (heads of the key, queries of each)."""
        if self.groups == 1:
            return shape
        *batch, heads, rows, columns = shape
        pair = (heads, 1) if is_shared else (heads // self.groups, self.groups)
        return (*batch, *pair, rows, columns)

    def expanded(self, x: Node, shape: tuple[int, ...]) -> Node:
        return build.expand(build.reshape(x, shape), (*self.batch, *x.shape[-2:]))

    def _bias(self, bias: Node) -> Node:
        shape = bias.shape
        if self.groups > 1 and len(shape) > 2:
            *batch, heads, rows, columns = shape
            key_heads = self.batch[-2]
            pair = (1, 1) if heads == 1 else (key_heads, self.groups)
            shape = (*batch, *pair, rows, columns)
        return build.expand(build.reshape(bias, shape), self.scores)

    def whole(self, x: Node) -> Node:
        """A result with its heads as one dimension again."""
        if self.groups == 1:
            return x
        first = len(self.batch) - 2
        merged = self.batch[first] * self.batch[first + 1]
        return build.reshape(x, (*x.shape[:first], merged, *x.shape[first + 2 :]))

    def like_result(self, x: Node) -> Node:
        """The other way: something shaped as a result, with its heads as two dimensions."""
        if self.groups == 1:
            return x
        first = len(self.batch) - 2
        return build.reshape(x, (*self.batch, *x.shape[first + 1 :]))

    def gradient(self, x: Node, operand: Node, is_shared: bool) -> Node:
        """Sum the gradient over the repeats of the operand, and return it in the operand's shape."""
        shape = self._grouped(operand.shape, is_shared)
        return build.reshape(build.sum_to(x, shape), operand.shape)


def _shared_heads(query: Node, key: Node, value: Node) -> int:
    """Return how many heads of the query read one head of the key; 1 also if all heads broadcast."""
    if len(query.shape) < 3 or len(key.shape) < 3 or len(value.shape) < 3:
        return 1
    heads, shared = query.shape[-3], key.shape[-3]
    if shared in (1, heads) or heads == 1:
        return 1
    return heads // shared


def _scale(scale: Any, query: Node) -> Node:
    if scale is None:
        extent = query.shape[-1]
        return constant(1 / math.sqrt(extent) if extent else 1.0, torch.float64)
    return _double(scale)


def _double(number: Any) -> Node:
    if isinstance(number, Node):
        return build.cast(number, torch.float64)
    return constant(number, torch.float64)


def _rest(operands: _Operands, seed: Node | None, probability: Any) -> list[Node]:
    bias = [] if operands.bias is None else [operands.bias]
    return bias if seed is None else [*bias, seed, _double(probability)]


@traces(ATTENTION)
def attention(
    query: Node, key: Node, value: Node, bias: Node | None, causal: bool, scale: Operand
) -> tuple[Node, Node]:
    """(softmax(query @ key.T * scale + bias) @ value, the logarithm of each row's sum of exp)"""
    return _attention(query, key, value, bias, causal, scale, None, None)


@traces(f"{ATTENTION}.dropout")
def attention_with_dropout(
    query: Node,
    key: Node,
    value: Node,
    bias: Node | None,
    causal: bool,
    scale: Operand,
    probability: Operand,
    *,
    seed: Node,
) -> tuple[Node, Node, Node]:
    """The same, weights being dropped with a probability; and the seed that says which."""
    return *_attention(query, key, value, bias, causal, scale, seed, probability), seed


def _attention(
    query: Node,
    key: Node,
    value: Node,
    bias: Node | None,
    causal: bool,
    scale: Operand,
    seed: Node | None,
    probability: Operand | None,
) -> tuple[Node, Node]:
    operands = _Operands(query, key, value, bias)
    made = make(
        ops.ATTENTION, operands.query, operands.key, operands.value, _scale(scale, query),
        *_rest(operands, seed, probability), causal=causal, biased=bias is not None,
        dropped=seed is not None, safe=True, order=tuple(range(len(operands.batch) + 2)),
    )  # fmt: skip
    return operands.whole(build.get(made, 0)), operands.whole(build.get(made, 1))


@traces(GRADIENT)
def attention_gradient(
    gradient: Node,
    query: Node,
    key: Node,
    value: Node,
    bias: Node | None,
    result: Node,
    logarithms: Node,
    drawn: Node | None,
    causal: bool,
    scale: Operand,
    probability: Operand,
) -> tuple[Node, ...]:
    """Gradients of query, key and value."""
    operands = _Operands(query, key, value, bias)
    made = _gradient(operands, gradient, result, logarithms, drawn, causal, scale, probability)
    return _of_operands(operands, made, query, key, value)


@traces(f"{GRADIENT}.bias")
def attention_gradient_and_bias(
    gradient: Node,
    query: Node,
    key: Node,
    value: Node,
    bias: Node,
    result: Node,
    logarithms: Node,
    drawn: Node | None,
    causal: bool,
    scale: Operand,
    probability: Operand,
) -> tuple[Node, ...]:
    """Gradients of query, key, value and bias."""
    operands = _Operands(query, key, value, bias)
    made = _gradient(
        operands, gradient, result, logarithms, drawn, causal, scale, probability, wants_bias=True
    )
    of_bias = build.sum_to(operands.whole(build.get(made, 3)), bias.shape)
    return *_of_operands(operands, made, query, key, value), of_bias


def _gradient(
    operands: _Operands,
    gradient: Node,
    result: Node,
    logarithms: Node,
    seed: Node | None,
    causal: bool,
    scale: Operand,
    probability: Operand,
    wants_bias: bool = False,
) -> Node:
    gradient, result, logarithms = map(operands.like_result, (gradient, result, logarithms))
    factor = _scale(scale, operands.query)
    return make(
        ops.ATTENTION_GRADIENT, gradient, operands.query, operands.key, operands.value, result,
        logarithms, factor, factor, *_rest(operands, seed, probability),
        causal=causal, biased=operands.bias is not None, dropped=seed is not None,
        safe=True, wants_bias=wants_bias, orders=(tuple(range(len(operands.scores))),) * 3,
    )  # fmt: skip


def _of_operands(
    operands: _Operands, made: Node, query: Node, key: Node, value: Node
) -> tuple[Node, ...]:
    return (
        operands.gradient(build.get(made, 0), query, False),
        operands.gradient(build.get(made, 1), key, True),
        operands.gradient(build.get(made, 2), value, True),
    )


@traces(KEPT)
def attention_kept(drawn: Node, like: Node, probability: Operand) -> Node:
    """Return whether dropout keeps each weight, of the shape of the scores that `like` has."""
    return build.ge(uniform(drawn, like.shape, torch.float32), probability)
