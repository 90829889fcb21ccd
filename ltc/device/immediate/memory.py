"""The memory that computed values lie in, and the buffers that they become."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any

import torch

from ltc.aten.call import CallResult
from ltc.backends.kernel_call import is_alone
from ltc.backends.plain_dispatch import PlainDispatch
from ltc.runtime.buffer import Buffer, input_key
from ltc.support.reference_counts import IN_ONE_LIST, reference_counts
from ltc.support.torch_private import storage_identity


def buffer_before(value: CallResult, owns_inputs: bool) -> Buffer | None:
    """Return the buffer that the value is in, where all that was done was to write into its memory.

    Args:
        owns_inputs: no program of another thread's may read it.
    """
    buffer: Buffer | None = getattr(value, "buffer", None)
    value.buffer = None  # one tensor's at most
    if buffer is None or not owns_inputs or buffer.handle is not value.tensor:
        return None
    return None if buffer.shared or buffer.failure() is not None else buffer


def buffer_of(value: CallResult, device: int) -> Buffer:
    """Return a new buffer of a computed value, whose memory it takes where nothing else lies there."""
    x = value.tensor
    if x.is_neg() or not fills_its_memory(x):
        with PlainDispatch():
            x = x.resolve_neg().clone(memory_format=torch.contiguous_format)
    return Buffer(input_key(value.shape, value.dtype), device, x)


def _bases_of_one_view(views: list[Any], *others: list[Any]) -> dict[int, Any]:
    """Return the bases, by identity, that nothing holds but a single one of these views.

    Args:
        others: the lists of states that the caller holds besides.
    """
    of_base = Counter([id(view.base) for view in views])
    held = of_base + Counter(map(id, chain(*others)))
    bases = list({id(view.base): view.base for view in views}.values())
    return {
        id(base): base
        for base, count in zip(bases, reference_counts(bases))
        if count == IN_ONE_LIST + held[id(base)] and of_base[id(base)] == 1
    }


def end_views(states: list[Any], mine: list[Any]) -> None:
    """Derive views again from their bases; a view alone on its base becomes a tensor of its
    own.

    So memory that no other tensor uses is freed.

    Args:
        mine: The states among them that have a value here.
    """
    views = [state for state in mine if state.base is not None]
    if not views:
        return
    only_viewed = _bases_of_one_view(views, states, mine)
    for view in views:
        base = only_viewed.get(id(view.base))
        if base is None or base.buffer is not None or hasattr(base, "number"):
            view.value = None
        else:
            view.leave_base()
            base.value = None


def lies_in(memory: int, value: Any) -> bool:
    """Return True if a computed value, or a tensor, lies in that memory."""
    x = tensor_of(value)
    return isinstance(x, torch.Tensor) and storage_identity(x.untyped_storage()) == memory


def tensor_of(value: Any) -> Any:
    return getattr(value, "tensor", value)


def fills_its_memory(x: torch.Tensor) -> bool:
    """Return True if it is contiguous, and neither another tensor nor anything else lies in its memory."""
    return is_alone(x) and x.untyped_storage().nbytes() == x.nbytes and x.is_contiguous()
