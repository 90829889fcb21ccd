"""Types of the results of attention and of its gradient."""

from __future__ import annotations

from typing import Any

import torch

from ltc.device.shapes.formulas.operands import (
    FLOATS,
    Shape,
    broadcast,
    is_value,
    of_one_dtype,
    type_of,
)
from ltc.device.shapes.formulas.table import Types, types_of


@types_of("ltc::attention")
def _attention(
    query: Any, key: Any, value: Any, bias: Any, causal: bool, scale: Any
) -> Types | None:
    """The result, and for each row the logarithm of its weights' sum."""
    if not of_one_dtype(FLOATS, query, key, value) or 0 in query.shape + key.shape + value.shape:
        return None
    batch, (rows, width) = query.shape[:-2], query.shape[-2:]
    if key.shape[-1:] != (width,) or value.shape[:-1] != key.shape[:-1]:
        return None
    if not _is_read_by(key.shape[:-2], batch):
        return None
    if bias is not None and not _is_bias(bias, query.dtype, (*batch, rows, key.shape[-2])):
        return None
    wide = torch.float64 if query.dtype is torch.float64 else torch.float32
    return ((*batch, rows, value.shape[-1]), query.dtype), ((*batch, rows), wide)


def _is_read_by(shared: Shape, batch: Shape) -> bool:
    """Whether each head of a query has its own, or as many have one in common."""
    if shared == batch:
        return True
    if len(shared) != len(batch) or shared[:-1] != batch[:-1]:
        return False
    return bool(batch[-1] % shared[-1] == 0)


def _is_bias(bias: Any, dtype: torch.dtype, scores: tuple[int, ...]) -> bool:
    if not is_value(bias) or bias.dtype not in (dtype, torch.bool):
        return False
    return broadcast(bias.shape, scores) == scores


@types_of("ltc::attention.dropout")
def _attention_with_dropout(
    query: Any, key: Any, value: Any, bias: Any, causal: bool, scale: Any, probability: Any
) -> Types | None:
    found = _attention(query, key, value, bias, causal, scale)
    return None if found is None else (*found, ((), torch.int64))


@types_of("ltc::attention_gradient")
def _gradient(
    gradient: Any,
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    result: Any,
    logarithms: Any,
    drawn: Any,
    causal: bool,
    scale: Any,
    probability: Any,
) -> Types | None:
    """Of query, key and value."""
    forward = _attention(query, key, value, bias, causal, scale)
    if drawn is not None and type_of(drawn) != ((), torch.int64):
        return None
    if forward != (type_of(result), type_of(logarithms)):
        return None
    if type_of(gradient) != type_of(result):
        return None
    return type_of(query), type_of(key), type_of(value)


@types_of("ltc::attention_gradient.bias")
def _gradient_and_bias(
    gradient: Any, query: Any, key: Any, value: Any, bias: Any, *rest: Any
) -> Types | None:
    """Of query, key, value and the bias."""
    found = _gradient(gradient, query, key, value, bias, *rest)
    return None if found is None else (*found, type_of(bias))
