"""Attention as its formula says it, row by row: what a row does not see takes no part."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

ATTENTION = F.scaled_dot_product_attention
plain_softmax = functools.partial(torch.softmax, dim=-1)


class AttentionByRows(TorchFunctionMode):
    """Calls of scaled_dot_product_attention inside are computed by `attended`."""

    def __torch_function__(self, function, types, arguments=(), named=None):
        return (attended if function is ATTENTION else function)(*arguments, **(named or {}))


def attended(query, key, value, attn_mask=None, is_causal=False, softmax: Callable = plain_softmax):
    """Of [..., L, E], [..., S, E] and [..., S, V]: [..., L, V], in the operands' dtype."""
    if not is_causal:
        return _seen(softmax, query, key, value, attn_mask)
    rows = range(query.shape[-2])
    seen = [_seen(softmax, query[..., i : i + 1, :], *_up_to(i + 1, key, value)) for i in rows]
    return torch.cat(seen, -2) if seen else F.scaled_dot_product_attention(query, key, value)


def _up_to(count: int, *rows: torch.Tensor) -> list[torch.Tensor]:
    return [x[..., :count, :] for x in rows]


def _seen(softmax, query, key, value, mask=None):
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    return softmax(scores if mask is None else scores + mask) @ value
