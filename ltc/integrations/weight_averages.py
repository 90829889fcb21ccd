"""Averages of weights (`torch.optim.swa_utils`) of whole numbers, such as the counts of batch norm.

On a device with list kernels torch adds a quotient to such a list, which no kernel of its own does.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch

from ltc.device.recording.tensors import is_lazy
from ltc.integrations.around import around


def install(swa_utils: ModuleType) -> None:
    """Put `_averaging` around `get_swa_multi_avg_fn`."""
    around(swa_utils, "get_swa_multi_avg_fn", _averaging)


def _averaging(original: Callable[[], Callable]) -> Callable[..., None]:
    average = original()

    @functools.wraps(average)
    def update(averaged: list[torch.Tensor], current: list[torch.Tensor], count: Any) -> None:
        if not is_lazy(averaged[0]) or averaged[0].is_floating_point() or averaged[0].is_complex():
            average(averaged, current, count)
            return
        for old, new in zip(averaged, current):  # as torch does it one by one
            old.copy_(old + (new - old) / (count + 1))

    return update
