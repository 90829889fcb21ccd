"""Large primitives written in smaller ones, for backends that have no row for them.

The formulas are the reference's: backends/reference/attention.py and philox.py say what they mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ltc.ir import build, ops
from ltc.ir.graph import Graph
from ltc.ir.node import Node
from ltc.ir.ops import Op
from ltc.passes import pooling_formulas
from ltc.passes.rewrite import rewrite

# A formula gives each result of the node; None where it would be no smaller.
Formula = Callable[[Node], tuple[Node, ...] | None]


def in_smaller_primitives(graph: Graph, is_lacking: Callable[[Node], bool]) -> Graph:
    """The graph without the nodes that are lacking, as far as there are formulas for them."""

    def formula_of(node: Node) -> tuple[Node, ...] | None:
        formula = FORMULAS.get(node.op)
        return formula(node) if formula is not None and is_lacking(node) else None

    def written_out(node: Node) -> Node | None:
        made = formula_of(node)
        return made[0] if made is not None and len(made) == 1 else None

    def result_written_out(node: Node) -> Node | None:
        made = formula_of(node.inputs[0])
        return None if made is None else made[node.attr("index")]

    of_one_result = dict.fromkeys(FORMULAS, (written_out,))
    made = rewrite(graph, {ops.GET: (result_written_out,), **of_one_result})
    if made.outputs == graph.outputs:
        return made
    return in_smaller_primitives(made, is_lacking)  # a formula may have what is lacking too


# --- attention -----------------------------------------------------------------------------------

_KEEP_BITS = 24  # of the uniform number that decides whether a score is dropped


def _wide(x: Node) -> Node:
    """Return x as it is computed with; a mask stays one."""
    return x if x.dtype in (torch.bool, torch.float64) else build.cast(x, torch.float32)


def _turned(x: Node) -> Node:
    return build.transpose(x, -1, -2)


def _scores(node: Node, query: Node, key: Node, scale: Node, rest: tuple[Node, ...]) -> Node:
    scores = build.matmul(query, _turned(key)) * build.cast(scale, query.dtype)
    if node.attr("biased"):
        bias = _wide(rest[0])
        is_mask = bias.dtype == torch.bool
        scores = build.where(bias, scores, -math.inf) if is_mask else scores + bias
    if node.attr("causal"):
        shape = scores.shape[-2:]
        seen = build.ge(build.iota_along(shape, 0), build.iota_along(shape, 1))
        scores = build.where(build.expand(seen, scores.shape), scores, -math.inf)
    return scores


def _logarithms(scores: Node) -> Node:
    """Return those of the sums of exp over each row; of an infinite score softmax makes NaN."""
    if not scores.shape[-1]:
        return build.full(scores.shape[:-1], -math.inf, scores.dtype)
    largest = build.max_of(scores, -1, keepdim=True)
    shift = build.where(build.eq(build.absolute(largest), math.inf), 0.0, largest)
    total = build.sum_of(build.exp(scores - shift), -1, keepdim=True)
    found = build.squeeze(build.log(total) + shift, (-1,))
    return build.where(build.eq(found, math.inf), math.nan, found)


def _weights(node: Node, scores: Node, logarithms: Node) -> Node:
    column = build.unsqueeze(logarithms, -1)
    weights = build.exp(scores - column)
    return build.where(build.eq(column, -math.inf), 0.0, weights) if node.attr("safe") else weights


def _kept(node: Node, weights: Node, rest: tuple[Node, ...]) -> Node | None:
    """The factor of each weight under dropout: 0, or 1 / (1 - probability)."""
    if not node.attr("dropped"):
        return None
    seed, probability = rest[-2:]
    bits = build.random_bits(seed, weights.shape, _KEEP_BITS)
    uniform = build.cast(bits, torch.float32) * 2.0**-_KEEP_BITS
    keep = build.ge(uniform, build.cast(probability, torch.float32))
    return build.cast(keep, weights.dtype) * build.cast(1 / (1 - probability), weights.dtype)


def attention(node: Node) -> tuple[Node, Node]:
    query, key, value, scale, *rest = node.inputs
    scores = _scores(node, _wide(query), _wide(key), scale, tuple(rest))
    logarithms = _logarithms(scores)
    weights = _weights(node, scores, logarithms)
    kept = _kept(node, weights, tuple(rest))
    used = weights if kept is None else weights * kept
    result = build.cast(build.matmul(used, _wide(value)), query.dtype)
    return build.permute(result, node.attr("order")), logarithms


def attention_gradient(node: Node) -> tuple[Node, ...]:
    gradient, query, key, value, result, logarithms, scale, factor, *rest = node.inputs
    g, q, k, v = map(_wide, (gradient, query, key, value))
    weights = _weights(node, _scores(node, q, k, scale, tuple(rest)), logarithms)
    kept = _kept(node, weights, tuple(rest))
    used, to_weights = weights, build.matmul(g, _turned(v))
    if kept is not None:
        used, to_weights = weights * kept, to_weights * kept
    along = build.sum_of(g * _wide(result), -1, keepdim=True)
    to_scores = weights * (to_weights - along)
    times = build.cast(factor, q.dtype)
    of_query = build.matmul(to_scores, k) * times
    of_key = build.matmul(_turned(to_scores), q) * times
    of_value = build.matmul(_turned(used), g)
    made = tuple(
        build.permute(build.cast(x, query.dtype), order)
        for x, order in zip((of_query, of_key, of_value), node.attr("orders"))
    )
    return made + ((build.cast(to_scores, query.dtype),) if node.attr("wants_bias") else ())


# --- random bits ---------------------------------------------------------------------------------

_ROUNDS, _LOW = 10, 0xFFFFFFFF
_MULTIPLIERS, _INCREMENTS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)


def _high(x: Node) -> Node:
    return build.shift_right(x, 32) & _LOW


def _random_words(seed: Node, count: int, stream: int) -> Node:
    """`count` words of 32 bits, each as an i64."""
    block = build.iota(-(-count // 4))
    c0, c1 = block & _LOW, _high(block)
    c2, c3 = build.full_like(block, stream), build.full_like(block, 0)
    k0, k1 = seed & _LOW, _high(seed)
    for _ in range(_ROUNDS):
        product_0, product_1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = _high(product_1) ^ c1 ^ k0, product_1 & _LOW
        c2, c3 = _high(product_0) ^ c3 ^ k1, product_0 & _LOW
        k0, k1 = (k0 + _INCREMENTS[0]) & _LOW, (k1 + _INCREMENTS[1]) & _LOW
    words = build.concat([build.unsqueeze(c, 1) for c in (c0, c1, c2, c3)], 1)
    return build.slice_dim(build.reshape(words, (-1,)), 0, 0, count)


def philox_bits(node: Node) -> tuple[Node]:
    (seed,), bits, stream = node.inputs, node.attr("bits"), node.attr("stream")
    count = node.size
    if not count:
        return (build.full(node.shape, 0, torch.int64),)
    if bits <= 32:
        top = build.shift_right(_random_words(seed, count, stream), 32 - bits)
    else:
        words = build.reshape(_random_words(seed, 2 * count, stream), (count, 2))
        whole = build.shift_left(build.select(words, 1, 1), 32) | build.select(words, 1, 0)
        top = build.shift_right(whole, 64 - bits) & ((1 << bits) - 1)
    return (build.reshape(top, node.shape),)


FORMULAS: dict[Op, Formula] = {
    ops.ATTENTION: attention,
    ops.ATTENTION_GRADIENT: attention_gradient,
    ops.RANDOM_BITS: philox_bits,
    ops.MAX_POOL: pooling_formulas.max_pool,
    ops.MAX_POOL_GRADIENT: pooling_formulas.max_pool_gradient,
    ops.AVERAGE_POOL: pooling_formulas.average_pool,
    ops.AVERAGE_POOL_GRADIENT: pooling_formulas.average_pool_gradient,
}
