"""Statistics that torch's decomposition of a batch norm keeps on ltc: as on the CPU.

`torch.export.draft_export` holds it against what the device gives. For any device but the CPU torch
says what CUDA keeps; ltc keeps what the CPU does.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from ltc.integrations.around import around
from ltc.support.torch_private import DEVICE_TYPE

_NARROW = (torch.bfloat16, torch.float16)


def install(decompositions: ModuleType) -> None:
    """Put `_as_on_cpu` around `native_batch_norm_helper`."""
    around(decompositions, "native_batch_norm_helper", _as_on_cpu)


def _as_on_cpu(
    original: Callable[..., tuple],
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    *settings: Any,
) -> tuple:
    found = original(input, weight, bias, running_mean, running_var, training, *settings)
    if input.device.type != DEVICE_TYPE:
        return found
    output, mean, root, *running = found
    is_mixed = input.dtype in _NARROW and weight is not None and weight.dtype not in _NARROW
    dtype = weight.dtype if is_mixed and weight is not None else input.dtype
    if not training:  # a norm with running statistics alone keeps none
        mean, root = input.new_zeros((0,)), input.new_zeros((0,))
    return (output, mean.to(dtype), root.to(dtype), *running)
