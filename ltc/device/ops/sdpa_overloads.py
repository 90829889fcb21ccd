"""The overloads of namespace ltc that record attention: schemas, result types, CPU formulas.

The rules of aten/nn/attention.py say what they compute; these formulas, in torch's own overloads,
are for calls without a recorder, and for gradients of gradients.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ltc.backends.reference.attention import kept_of
from ltc.device.recording.fast_path import lazily_built
from ltc.ir.infer import broadcast
from ltc.native.core import KERNEL_KEY

SCHEMAS = (
    "attention(Tensor query, Tensor key, Tensor value, Tensor? bias, bool causal, float? scale)"
    " -> (Tensor, Tensor)",
    "attention.dropout(Tensor query, Tensor key, Tensor value, Tensor? bias, bool causal,"
    " float? scale, float probability) -> (Tensor, Tensor, Tensor)",
    "attention_gradient(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor? bias,"
    " Tensor result, Tensor logarithms, Tensor? drawn, bool causal, float? scale,"
    " float? probability) -> (Tensor, Tensor, Tensor)",
    "attention_gradient.bias(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor? bias,"
    " Tensor result, Tensor logarithms, Tensor? drawn, bool causal, float? scale,"
    " float? probability) -> (Tensor, Tensor, Tensor, Tensor)",
    "attention_kept(Tensor drawn, Tensor like, float probability) -> Tensor",
)


# --- formulas -----------------------------------------------------------------------------------


def groups_of(query: torch.Tensor, key: torch.Tensor) -> int:
    """Return how many heads of the query read one head of the key."""
    if min(query.dim(), key.dim()) < 3:
        return 1
    heads, shared = query.shape[-3], key.shape[-3]
    return 1 if heads == 1 or shared in (0, 1) else heads // shared


def _repeated(groups: int, *operands: torch.Tensor):
    return tuple(x.repeat_interleave(groups, -3) if groups > 1 else x for x in operands)


def _scale(query: torch.Tensor, scale: float | None) -> float:
    extent = query.shape[-1]
    return scale if scale is not None else 1 / math.sqrt(extent) if extent else 1.0


def _scores(
    query: torch.Tensor, key: torch.Tensor, bias: torch.Tensor | None, causal: bool, factor: float
):
    scores = query @ key.mT * factor
    if bias is not None and bias.dtype == torch.bool:
        scores = scores.masked_fill(~bias, -math.inf)
    elif bias is not None:
        scores = scores + bias
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    return scores


def _kept(seed: torch.Tensor, weights: torch.Tensor, probability: float):
    """Return the factor of each weight."""
    kept = torch.ops.ltc.attention_kept(seed, weights.detach(), probability)
    return kept.to(weights.dtype) * (1 / (1 - probability))


def gradient_formula(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    seed: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    probability: float | None,
):
    """Return the gradients of query, key, value and a floating-point bias; all differentiable.

    Args:
        seed: The seed of dropout, which chooses the weights that stay; None without dropout.
    """
    groups, factor = groups_of(query, key), _scale(query, scale)
    k, v = _repeated(groups, key, value)
    weights = torch.ops.aten._safe_softmax(_scores(query, k, bias, causal, factor), -1)
    to_weights, used = gradient @ v.mT, weights
    if seed is not None and probability is not None:
        kept = _kept(seed, weights, probability)
        to_weights, used = to_weights * kept, weights * kept
    to_scores = weights * (to_weights - (weights * to_weights).sum(-1, keepdim=True))
    made = (to_scores @ k * factor, to_scores.mT @ query * factor, used.mT @ gradient)
    made = (
        made[0].sum_to_size(query.shape),
        _sum_to(made[1], key, groups),
        _sum_to(made[2], value, groups),
    )
    if bias is None or bias.dtype == torch.bool:
        return *made, None
    return *made, to_scores.sum_to_size(bias.shape)


def _sum_to(x: torch.Tensor, operand: torch.Tensor, groups: int):
    if groups > 1:
        x = x.unflatten(-3, (-1, groups)).sum(-3)
    return x.sum_to_size(operand.shape)


def _forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    seed: torch.Tensor | None = None,
    probability: float = 0.0,
):
    k, v = _repeated(groups_of(query, key), key, value)
    scores = _scores(query, k, bias, causal, _scale(query, scale))
    weights = torch.ops.aten._safe_softmax(scores, -1)
    if seed is not None:
        weights = weights * _kept(seed, weights, probability)
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    return weights @ v, torch.logsumexp(scores.to(wide), -1)


def _has_fused_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None
) -> bool:
    """Return True if torch's kernel that keeps no matrix of scores takes these."""
    if query.dim() != 4 or key.dim() != 4 or not query.numel() or not key.numel():
        return False
    if bias is not None and not (bias.dim() >= 2 and bias.dtype in (torch.bool, query.dtype)):
        return False
    same = query.shape[:2] == key.shape[:2] == value.shape[:2]
    return same and query.shape[-1] == value.shape[-1] == key.shape[-1]


def _added_to_scores(query: torch.Tensor, key: torch.Tensor, bias: torch.Tensor | None):
    """Return what the mask adds to each score; None where there is none."""
    if bias is None:
        return None
    if bias.dtype is torch.bool:
        bias = torch.zeros_like(bias, dtype=query.dtype).masked_fill_(~bias, -math.inf)
    return bias.expand(*query.shape[:3], key.shape[2])


def _with_dense_rows(*operands: torch.Tensor) -> list[torch.Tensor]:
    """Return the operands as torch's fused kernel reads them: the elements of a row side by side."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in operands]


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    causal: bool,
    scale: float | None,
):
    if _has_fused_kernel(query, key, value, bias):
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *_with_dense_rows(query, key, value),
            0.0,
            causal,
            attn_mask=_added_to_scores(query, key, bias),
            scale=scale,
        )
    return _forward(query, key, value, bias, causal, scale)


def _attention_with_dropout(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    probability: float,
):
    seed = torch.randint(2**62, ())
    return *_forward(query, key, value, bias, causal, scale, seed, probability), seed


def _gradient_and_bias(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    result: torch.Tensor,
    logarithms: torch.Tensor,
    seed: torch.Tensor | None,
    *rest: Any,
):
    return gradient_formula(gradient, query, key, value, bias, seed, *rest)


def _gradient(*operands: Any):
    gradient, query, key, value, bias, result, logarithms, seed, causal, scale, _ = operands
    if seed is None and _has_fused_kernel(query, key, value, bias):
        dense = _with_dense_rows(gradient, query, key, value, result)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *dense,
            logarithms.contiguous(),
            0.0,
            causal,
            attn_mask=_added_to_scores(query, key, bias),
            scale=scale,
        )
    return _gradient_and_bias(*operands)[:3]


def _attention_kept(seed: torch.Tensor, like: torch.Tensor, probability: float):
    return kept_of(like.shape, seed, probability, torch.float32) > 0


# --- result types -------------------------------------------------------------------------------


def _results(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor):
    groups, batches = groups_of(query, key), [tuple(query.shape[:-2])]
    for x in (key, value):
        heads = (x.shape[-3] * groups,) if x.dim() > 2 else ()
        batches.append((*x.shape[:-3], *heads))
    shape = (*broadcast(*batches), query.shape[-2])
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    return query.new_empty((*shape, value.shape[-1])), query.new_empty(shape, dtype=wide)


def _types_of_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any):
    return _results(query, key, value)


def _types_with_dropout(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any):
    return *_results(query, key, value), query.new_empty((), dtype=torch.int64)


def _types_of_gradient(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: Any
):
    return tuple(torch.empty_like(x) for x in (query, key, value))


def _types_with_bias(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor,
    *rest: Any,
):
    return tuple(torch.empty_like(x) for x in (query, key, value, bias))


def _types_of_kept(seed: torch.Tensor, like: torch.Tensor, probability: float):
    return torch.empty_like(like, dtype=torch.bool)


# name -> (result types, formula)
OVERLOADS = {
    "attention": (_types_of_attention, _attention),
    "attention.dropout": (_types_with_dropout, _attention_with_dropout),
    "attention_gradient": (_types_of_gradient, _gradient),
    "attention_gradient.bias": (_types_with_bias, _gradient_and_bias),
    "attention_kept": (_types_of_kept, _attention_kept),
}


# overload -> the kernel that records it
RECORDED = {name: lazily_built(f"ltc::{name}") for name in OVERLOADS}


def define(library: torch.library.Library) -> None:
    """Define the overloads, each with a kernel that records it."""
    for schema in SCHEMAS:
        random = schema.startswith("attention.dropout")
        library.define(schema, tags=(torch.Tag.nondeterministic_seeded,) if random else ())
    for name, (types, formula) in OVERLOADS.items():
        library.impl(name, types, "Meta")
        library.impl(name, formula, "CPU")
        library.impl(name, RECORDED[name], KERNEL_KEY)
