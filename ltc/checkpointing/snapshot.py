"""Values held fast while a training goes on."""

from __future__ import annotations

from dataclasses import replace

import torch

from ltc.checkpointing.storage_sharing import StoredBytes
from ltc.device.recording.sync import ready_buffer
from ltc.device.recording.tensors import host_tensor, is_lazy, state_of, wrap_buffer
from ltc.utils.serialization import SavePlan


def frozen(plan: SavePlan) -> SavePlan:
    """A plan that writes today's values whenever it is carried out.

    A device's memory is not copied: the next step, which would overwrite it, takes new memory.
    """
    return replace(plan, entries=[_frozen(entry) for entry in plan.entries])


def _frozen(entry: StoredBytes) -> StoredBytes:
    kept = _kept(entry)
    return replace(entry, fetch=lambda: kept if kept.device.type == "cpu" else host_tensor(kept))


def _kept(entry: StoredBytes) -> torch.Tensor:
    tensor = entry.tensor
    if tensor is not None and is_lazy(tensor) and state_of(tensor).base is None:
        state = state_of(tensor)
        buffer = ready_buffer(state)
        buffer.shared = True  # then no program may write into it
        return wrap_buffer(buffer, state.device)
    return entry.fetch().clone()
