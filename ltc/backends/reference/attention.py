"""The meaning of attention: whole matrices of scores, which generated kernels never make."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ltc.backends.reference.philox import random_bits
from ltc.ir.node import Node

KEEP_BITS = 24  # of the uniform number that decides whether a score is dropped


class ReferenceScores(NamedTuple):
    """Softmax of the scores, made from the logarithms of their sums; and what dropout makes of 1.

    Attributes:
        kept: 1 / (1 - probability) where a score is kept, 0 where not; None without dropout.
    """

    weights: torch.Tensor
    logarithms: torch.Tensor
    kept: torch.Tensor | None


def scores_of(
    query: torch.Tensor,
    key: torch.Tensor,
    scale: torch.Tensor | float,
    bias: torch.Tensor | None,
    causal: bool,
    safe: bool,
    logarithms: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(softmax, logarithm of the sum of exp) of each row; operands as they are computed with."""
    scores = query @ key.mT * float(scale)
    if bias is not None and bias.dtype == torch.bool:
        scores = scores.masked_fill(~bias, -torch.inf)
    elif bias is not None:
        scores = scores + bias
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    if logarithms is None:
        logarithms = torch.logsumexp(scores, -1)
        # of an infinite score softmax makes NaN, all along its row
        logarithms = logarithms.masked_fill(logarithms == torch.inf, torch.nan)
    column = logarithms.unsqueeze(-1)
    weights = torch.exp(scores - column)
    if safe:
        weights = torch.where(column == -torch.inf, 0.0, weights)
    return weights, logarithms


def kept_of(
    shape: tuple[int, ...], seed: torch.Tensor, probability: float, dtype: torch.dtype
) -> torch.Tensor:
    """Return the factor of each weight: 0, or 1 / (1 - probability)."""
    count = torch.Size(shape).numel()
    bits = random_bits(int(seed) & 0xFFFFFFFFFFFFFFFF, count, KEEP_BITS, 0)
    uniform = torch.from_numpy(bits).reshape(shape).float() * 2.0**-KEEP_BITS
    return (uniform >= torch.tensor(probability)).to(dtype) * (1 / (1 - probability))


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor as it is computed with; a mask stays one."""
    return x if x.dtype in (torch.bool, torch.float64) else x.float()


def _scores(
    query: torch.Tensor,
    key: torch.Tensor,
    scale: torch.Tensor,
    rest: Sequence[torch.Tensor],
    node: Node,
    logarithms: torch.Tensor | None = None,
) -> ReferenceScores:
    bias = _wide(rest[0]) if node.attr("biased") else None
    weights, logarithms = scores_of(
        query, key, scale, bias, node.attr("causal"), node.attr("safe"), logarithms
    )
    kept = None
    if node.attr("dropped"):
        kept = kept_of(weights.shape, rest[-2], float(rest[-1]), weights.dtype)
    return ReferenceScores(weights, logarithms, kept)


def attention(node: Node) -> Callable[..., Any]:
    order = node.attr("order")

    def compute(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: torch.Tensor,
        *rest: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        scores = _scores(_wide(query), _wide(key), scale, rest, node)
        weights = scores.weights if scores.kept is None else scores.weights * scores.kept
        result = (weights @ _wide(value)).to(query.dtype)
        return result.permute(order).contiguous(), scores.logarithms

    return compute


def attention_gradient(node: Node) -> Callable[..., Any]:
    orders = node.attr("orders")

    def compute(
        gradient: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        result: torch.Tensor,
        logarithms: torch.Tensor,
        scale: torch.Tensor,
        factor: torch.Tensor,
        *rest: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        g, q, k, v = map(_wide, (gradient, query, key, value))
        weights, _, kept = _scores(q, k, scale, rest, node, logarithms)
        used, to_weights = weights, g @ v.mT
        if kept is not None:
            used, to_weights = weights * kept, to_weights * kept
        along = (g * _wide(result)).sum(-1, keepdim=True)
        to_scores = weights * (to_weights - along)
        times = float(factor)
        wide = (to_scores @ k * times, to_scores.mT @ q * times, used.mT @ g)
        made = tuple(
            x.to(query.dtype).permute(order).contiguous() for x, order in zip(wide, orders)
        )
        return made + ((to_scores.to(query.dtype),) if node.attr("wants_bias") else ())

    return compute
