"""scaled_dot_product_attention as one recorded call, and its gradient as another.

torch takes an outside device's attention apart into products and a softmax, which make a matrix of
scores.  Here the overload itself has a kernel for this device, which goes through torch's pair for
fused attention of such devices: that pair has the autograd formula, and its kernels record
ltc::attention and ltc::attention_gradient.  What these do not hold for is left to torch's formula.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend

from ltc.device.ops.sdpa_overloads import RECORDED, gradient_formula
from ltc.errors import InvalidGraph
from ltc.ir.infer import broadcast
from ltc.native.core import KERNEL_KEY
from ltc.support.torch_private import (
    DEVICE_TYPE,
    attention_chosen_for,
    below_autograd,
    dispatch_mode_depth,
    has_own_dispatch,
    is_forward_mode,
    is_transformed,
    plain_functions,
)
from ltc.tracebacks import entrance

aten = torch.ops.aten
_backward = aten._scaled_dot_product_fused_attention_overrideable_backward.default
FLOATS = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})

# --- what is recorded, and for which calls ------------------------------------------------------


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: Any,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
):
    """aten::scaled_dot_product_attention."""
    operands = (query, key, value) if attn_mask is None else (query, key, value, attn_mask)
    if attn_mask is not None and is_causal and _takes_both(operands, dropout_p, scale, enable_gqa):
        attn_mask, is_causal = _without_what_follows(attn_mask, query, key), False
        operands = (query, key, value, attn_mask)
    masked_and_causal = attn_mask is not None and is_causal
    if masked_and_causal or not 0 <= dropout_p < 1 or not _is_plain(operands, enable_gqa):
        return aten.scaled_dot_product_attention.default.decompose(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    return aten._scaled_dot_product_fused_attention_overrideable.default(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale
    )[0]


def _takes_both(
    operands: Sequence[torch.Tensor], dropout_p: float, scale: float | None, enable_gqa: bool
) -> bool:
    """Return True if the CPU takes a mask with is_causal: its flash kernel does, the other refuses."""
    like = [torch.empty(x.shape, dtype=x.dtype, device="cpu") for x in operands]
    for mine, theirs in zip(like, operands):
        mine.requires_grad_(theirs.requires_grad and torch.is_grad_enabled())
    chosen = attention_chosen_for(*like, dropout_p, True, scale=scale, enable_gqa=enable_gqa)
    return bool(chosen == SDPBackend.FLASH_ATTENTION.value)


def _without_what_follows(
    mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor:
    """The mask, with nothing seen of keys behind a query's own place."""
    seen = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=mask.device).tril()
    return mask & seen if mask.dtype is torch.bool else mask.masked_fill(~seen, -math.inf)


def _is_plain(operands: Sequence[Any], shares_heads: bool) -> bool:
    """Return True if the fused pair holds for these; it has no batching rules and no forward mode."""
    if is_transformed() or is_forward_mode():
        return False
    for x in operands:
        if x.is_nested or x.device.type != DEVICE_TYPE or has_own_dispatch(x):
            return False
    return _fit(tuple([(x.shape, x.dtype) for x in operands]), shares_heads)


@functools.lru_cache(maxsize=1024)
def _fit(types: tuple, shares_heads: bool) -> bool:
    (query, dtype), (key, _), (value, _), *bias = types
    if dtype not in FLOATS or any(d != dtype for _, d in types[:3]):
        return False
    if min(len(query), len(key), len(value)) < 2:
        return False
    if query[-1] != key[-1] or key[-2] != value[-2]:
        return False
    if shares_heads:
        if not len(query) == len(key) == len(value) >= 3 or key[:-2] != value[:-2]:
            return False
        if not key[-3] or query[-3] % key[-3]:
            return False
        key = (*key[:-3], query[-3], *key[-2:])
        value = (*value[:-3], query[-3], *value[-2:])
    try:
        batch = broadcast(tuple(query[:-2]), tuple(key[:-2]), tuple(value[:-2]))
        for shape, mask_dtype in bias:
            scores = (*batch, query[-2], key[-2])
            if len(shape) < 2:
                return False
            if mask_dtype not in (torch.bool, dtype) or broadcast(tuple(shape), scores) != scores:
                return False
    except InvalidGraph:
        return False
    return True


# --- the fused pair -----------------------------------------------------------------------------


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: Any,
    attn_bias: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
):
    """aten::_scaled_dot_product_fused_attention_overrideable."""
    seed = None
    if dropout_p == 0:
        result, logarithms = RECORDED["attention"](query, key, value, attn_bias, is_causal, scale)
    else:
        result, logarithms, seed = RECORDED["attention.dropout"](
            query, key, value, attn_bias, is_causal, scale, dropout_p
        )
    rows, columns = query.shape[-2], key.shape[-2]
    return result, logarithms, None, None, rows, columns, seed, None, None


def fused_attention_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: Any,
    attn_bias: torch.Tensor | None,
    grad_input_mask: Sequence[bool],
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    cum_seq_q: torch.Tensor | None,
    cum_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: torch.Tensor,
    philox_offset: torch.Tensor,
    *,
    scale: float | None = None,
):
    """aten::_scaled_dot_product_fused_attention_overrideable_backward."""
    wants_bias = attn_bias is not None and grad_input_mask[3]
    probability = dropout_p if dropout_p else None
    kernel = RECORDED["attention_gradient.bias" if wants_bias else "attention_gradient"]
    made = kernel(
        grad_out,
        query,
        key,
        value,
        attn_bias,
        out,
        logsumexp,
        philox_seed if dropout_p else None,
        is_causal,
        scale,
        probability,
    )
    return (*made, None) if len(made) == 3 else made


def differentiable_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: Any,
    attn_bias: torch.Tensor | None,
    grad_input_mask: Sequence[bool],
    *rest: Any,
    scale: float | None = None,
):
    """Return the gradients by torch's own overloads, which can be differentiated themselves.

    Args:
        rest: The arguments of fused_attention_backward from `out` on.
    """
    inputs = (grad_out, query, key, value, attn_bias)
    operands = [x for x in inputs if x is not None]
    if not torch.is_grad_enabled() or not any(x.requires_grad for x in operands):
        with below_autograd():
            # a dispatch mode sees what goes through the dispatcher: make_fx writes no other call down
            backward = _backward if dispatch_mode_depth() else fused_attention_backward
            return backward(*inputs, grad_input_mask, *rest, scale=scale)
    *_, dropout_p, is_causal, philox_seed, _ = rest
    seed = philox_seed if dropout_p else None
    made = gradient_formula(*inputs, seed, is_causal, scale, dropout_p)
    wants_bias = attn_bias is not None and grad_input_mask[3]
    return made if wants_bias else (*made[:3], None)


def is_left_aligned(x: torch.Tensor, mask: torch.Tensor | None) -> bool:
    """aten::_nested_tensor_from_mask_left_aligned: nn.TransformerEncoder makes a nested tensor of
    rows whose mask is, and ltc devices hold none."""
    return False


KERNELS: dict[str, Callable[..., Any]] = {
    "_nested_tensor_from_mask_left_aligned": is_left_aligned,
    "_scaled_dot_product_fused_attention_overrideable": fused_attention,
    "_scaled_dot_product_fused_attention_overrideable_backward": fused_attention_backward,
}


def install(library: torch.library.Library) -> None:
    """Put the kernels in the place of torch's own formula for this device."""

    def without_modes(kernel: Callable[..., Any]):
        @functools.wraps(kernel)
        def guarded(*args: Any, **kwargs: Any):
            with plain_functions():
                return kernel(*args, **kwargs)

        return entrance(guarded)

    attention = without_modes(scaled_dot_product_attention)
    for key in (KERNEL_KEY, f"Autograd{KERNEL_KEY}"):
        library.impl("scaled_dot_product_attention", attention, key)
    library.impl(
        "_scaled_dot_product_fused_attention_overrideable_backward",
        without_modes(differentiable_backward),
        f"Autograd{KERNEL_KEY}",
    )
