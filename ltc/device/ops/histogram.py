"""Histograms of integers, which the CPU's kernel refuses and CUDA's counts.

Models written for a GPU count with them how many tokens each of their experts gets.  Floats go to
the CPU's kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ltc.device.recording.fast_path import lazily_built

INTEGERS = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})
_of_any, _of_any_into = lazily_built("aten::histc"), lazily_built("aten::histc.out")


def histc(self: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0):
    """aten::histc: how many elements lie in each of `bins` equal parts of [min, max].

    Without a range it is that of the elements; one without extent reaches 1 to either side.
    """
    if self.dtype not in INTEGERS:
        return _of_any(self, bins, min, max)
    low, high = _range(self, int(min), int(max))
    _check(bins, low, high)
    x = self.reshape(-1).to(torch.int64)
    part = torch.div((x - low) * bins, high - low, rounding_mode="trunc").clamp(0, bins - 1)
    counted = ((x >= low) & (x <= high)).to(torch.int64)
    counts = torch.zeros(bins, dtype=torch.int64, device=self.device)
    return counts.scatter_add(0, part, counted).to(self.dtype)


def _range(x: torch.Tensor, low: int, high: int) -> tuple[Any, Any]:
    """Numbers where the caller gave a range, else 0-dim tensors: nothing is read."""
    if low != high:
        return low, high
    if x.numel() == 0:
        return low - 1, high + 1
    least, most = x.amin().to(torch.int64), x.amax().to(torch.int64)
    none = (least == most).to(torch.int64)
    return least - none, most + none


def _check(bins: int, low: Any, high: Any) -> None:
    if bins <= 0:
        raise RuntimeError(f"torch.histc(): bins must be > 0, but got {bins}")
    if isinstance(low, int) and low > high:
        raise RuntimeError("torch.histc: max must be larger than min")


def histc_out(
    self: torch.Tensor, bins: int = 100, min: float = 0, max: float = 0, *, out: torch.Tensor
):
    """aten::histc.out"""
    if self.dtype not in INTEGERS:
        return _of_any_into(self, bins, min, max, out=out)
    found = histc(self, bins, min, max)
    if out.dtype is not found.dtype:
        raise RuntimeError(
            f"torch.histc: input tensor and out tensor should have the same dtype, but got "
            f"{found.dtype} and {out.dtype}. Pass an out tensor of {found.dtype}."
        )
    out.resize_(found.shape)
    return out.copy_(found)


KERNELS: dict[str, Callable[..., Any]] = {"histc": histc, "histc.out": histc_out}
