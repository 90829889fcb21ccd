"""A traced torch.autograd.Function is applied by one class, where torch makes one for each call.

To make a class, and to interpret its graphs, takes torch longer than ltc to record them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ltc.support.torch_private import (
    dispatch_mode_depth,
    function_mode_depth,
    is_forward_mode,
    is_transformed,
)

_TOLD = frozenset({"dirty_idx", "non_differentiable_idx", "saved_for_backward_idx"})


def can_apply(told: dict[str, Any]) -> bool:
    """Whether torch tells of the function what `applied` knows: not torch 2.10, say."""
    return "saved_for_backward_idx" in told and told.keys() <= _TOLD


def applied(
    forward: fx.GraphModule,
    backward: fx.GraphModule,
    *operands: Any,
    non_differentiable_idx: Sequence[int],
    saved_for_backward_idx: Sequence[int],
    dirty_idx: Sequence[int] = (),
) -> Any:
    """What torch's autograd_function_apply gives, to which transforms and modes are left.

    forward, backward       of operands to (results, what to keep); of gradients and that: graphs as
                            nested_graphs.py makes them, of one call of code
    non_differentiable_idx  places among the results; so dirty_idx
    saved_for_backward_idx  places among what to keep: of what the user's code gave to
                            ctx.save_for_backward, so that writes to it are noticed, as without
                            torch.compile
    """
    if is_transformed() or is_forward_mode() or dispatch_mode_depth() or function_mode_depth():
        return torch.ops.higher_order.autograd_function_apply(
            forward,
            backward,
            *operands,
            non_differentiable_idx=non_differentiable_idx,
            saved_for_backward_idx=saved_for_backward_idx,
            dirty_idx=dirty_idx,
        )
    codes = forward.body.run, backward.body.run  # type: ignore[union-attr]  # see above
    places = frozenset(saved_for_backward_idx), non_differentiable_idx, dirty_idx
    return _Applied.apply(*codes, *places, *operands)


class _Applied(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        forward: Callable[..., Any],
        backward: Callable[..., Any],
        saved: frozenset[int],
        constants: Sequence[int],
        dirty: Sequence[int],
        *operands: Any,
    ) -> Any:
        results, kept = forward(*operands)
        ctx.backward_code = backward
        ctx.save_for_backward(*[x if place in saved else None for place, x in enumerate(kept)])
        ctx.others = [None if place in saved else x for place, x in enumerate(kept)]
        if dirty:
            ctx.mark_dirty(*_at(results, dirty))
        if constants:
            ctx.mark_non_differentiable(*_at(results, constants))
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        kept = [x if y is None else y for x, y in zip(ctx.others, ctx.saved_tensors, strict=True)]
        found = ctx.backward_code(*gradients, *kept)
        return (
            None,
            None,
            None,
            None,
            None,
            *(found if isinstance(found, (tuple, list)) else (found,)),
        )


def _at(results: Any, places: Sequence[int]) -> list[Any]:
    whole = results if isinstance(results, (tuple, list)) else (results,)
    return [whole[place] for place in dict.fromkeys(places)]
