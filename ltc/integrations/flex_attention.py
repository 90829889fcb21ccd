"""`flex_attention` on the device, where torch knows only kernels for others: its dense form.

Scores are computed whole, changed by the user's function, masked, and weighed. That is what torch
itself does on the CPU without torch.compile; here it has a gradient too. Compiled calls take the
same way, outside of the graph that is compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from ltc.integrations.around import around
from ltc.support.torch_private import DEVICE_TYPE

# Which of (batch, head, query, key) runs over each of the nested vmaps, from the innermost out.
_OVER = ((None, None, None, 0), (None, None, 0, None), (None, 0, None, None), (0, None, None, None))


def install(flex: ModuleType) -> None:
    """Put the dense form around `torch.nn.attention.flex_attention.flex_attention`."""

    def attend(original: Callable, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if query.device.type != DEVICE_TYPE:
            return original(query, *args, **kwargs)
        return answer(flex, query, *args, **kwargs)

    around(flex, "flex_attention", attend)
    around(flex, "create_block_mask", _uncompiled)


def _uncompiled(original: Callable, *args: Any, **kwargs: Any) -> Any:
    """A mask of blocks; torch.compile's own backend, asked for by `_compile`, has no ltc device."""
    device = kwargs.get("device", args[5] if len(args) > 5 else None)
    if str(device).partition(":")[0] == DEVICE_TYPE and len(args) < 8:
        kwargs["_compile"] = False
    return original(*args, **kwargs)


@torch.compiler.disable
def answer(
    flex: ModuleType,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod: Callable | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """Return the results of torch's function: [B, H, Q, V], and those of `return_lse` or
    `return_aux`.

    Args:
        query: [B, H, Q, E]; key and value [B, K, S, E], of fewer heads K with `enable_gqa`.
    """
    if enable_gqa:
        heads = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(heads, dim=1) for x in (key, value))
    scores = scored(query, key, score_mod, block_mask, scale)
    most = scores.amax(-1)
    weights = torch.where(most[..., None] == -math.inf, 0.0, scores.softmax(-1))
    output = weights.to(value.dtype) @ value
    if return_aux is not None:
        lse = scores.logsumexp(-1) if return_aux.lse else None
        return output, flex.AuxOutput(lse=lse, max_scores=most if return_aux.max_scores else None)
    return (output, scores.logsumexp(-1)) if return_lse else output


def scored(
    query: torch.Tensor,
    key: torch.Tensor,
    score_mod: Callable | None,
    block_mask: Any,
    scale: float | None,
) -> torch.Tensor:
    """The scores [B, H, Q, S] in float32 or wider, minus infinity where they are masked."""
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    indices = [torch.arange(n, device=query.device) for n in scores.shape]
    if score_mod is not None:
        function = score_mod
        for over in _OVER:
            function = torch.vmap(function, in_dims=(0, *over))
        scores = function(scores, *indices)
    if block_mask is not None:
        kept = block_mask.mask_mod
        for over in _OVER:
            kept = torch.vmap(kept, in_dims=over)
        scores = torch.where(kept(*indices), scores, -math.inf)
    return scores
