"""Overloads that torch gives no CPU kernel, written with overloads that it does: packed sequences, the
pieces of SyncBatchNorm, and a batch norm whose schema says what it writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ltc.device.recording.fast_path import lazily_built

aten = torch.ops.aten


# --- packed sequences -------------------------------------------------------------------------


def pack_padded_sequence(x: torch.Tensor, lengths: torch.Tensor, batch_first: bool):
    """aten::_pack_padded_sequence: the steps of all sequences, longest sequence first.

    Args:
        lengths: The sequences' lengths, descending. PyTorch wants them on the CPU, where the
            returned batch sizes are too: they decide later shapes.
    """
    if batch_first:
        x = x.transpose(0, 1)
    steps, batch = x.shape[:2]
    twin = torch.arange(steps * batch, device="cpu").view(steps, batch, 1)
    rows, batch_sizes = aten._pack_padded_sequence(twin, lengths.cpu(), False)
    flat = x.reshape(steps * batch, *x.shape[2:])
    return flat.index_select(0, rows.view(-1).to(x.device)), batch_sizes


# --- batch norm -------------------------------------------------------------------------------


def native_batch_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
):
    """aten::native_batch_norm, through the overload whose schema says that statistics change."""
    if running_mean is None:
        return aten._native_batch_norm_legit.no_stats(x, weight, bias, True, momentum, eps)
    if training:
        return aten._native_batch_norm_legit.default(
            x, weight, bias, running_mean, running_var, True, momentum, eps
        )
    return aten._native_batch_norm_legit_no_training.default(
        x, weight, bias, running_mean, running_var, momentum, eps
    )


def _per_channel(x: torch.Tensor, vector: torch.Tensor):
    return vector.view([1, -1] + [1] * (x.dim() - 2))


def _all_but_channel(x: torch.Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def batch_norm_stats(x: torch.Tensor, eps: float):
    """aten::batch_norm_stats: mean and 1/std of every channel."""
    dims = _all_but_channel(x)
    return x.mean(dims), torch.rsqrt(x.var(dims, unbiased=False) + eps)


def batch_norm_gather_stats_with_counts(
    x: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    momentum: float,
    eps: float,
    counts: torch.Tensor,
):
    """aten::batch_norm_gather_stats_with_counts: statistics of all replicas from those of each."""
    n = counts.view(-1, 1).to(mean.dtype)
    total = n.sum()
    all_mean = (mean * n).sum(0) / total
    variance = ((invstd.pow(-2) - eps + (mean - all_mean).pow(2)) * n).sum(0) / total
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_(all_mean * momentum)
    if running_var is not None:
        running_var.mul_(1 - momentum).add_(variance * total / (total - 1) * momentum)
    return all_mean, torch.rsqrt(variance + eps)


def batch_norm_elemt(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    eps: float,
):
    """aten::batch_norm_elemt: the normalisation itself."""
    y = (x - _per_channel(x, mean)) * _per_channel(x, invstd)
    if weight is not None:
        y = y * _per_channel(x, weight)
    if bias is not None:
        y = y + _per_channel(x, bias)
    return y


def batch_norm_backward_reduce(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: torch.Tensor | None,
    input_grad: bool,
    weight_grad: bool,
    bias_grad: bool,
):
    """aten::batch_norm_backward_reduce: sums of the gradient, per channel."""
    dims = _all_but_channel(x)
    sum_dy = grad.sum(dims)
    sum_dy_xmu = (grad * (x - _per_channel(x, mean))).sum(dims)
    grad_weight = sum_dy_xmu * invstd if weight_grad else None
    return sum_dy, sum_dy_xmu, grad_weight, sum_dy.clone() if bias_grad else None


def batch_norm_backward_elemt(
    grad: torch.Tensor,
    x: torch.Tensor,
    mean: torch.Tensor,
    invstd: torch.Tensor,
    weight: torch.Tensor | None,
    sum_dy: torch.Tensor,
    sum_dy_xmu: torch.Tensor,
    count: torch.Tensor,
):
    """aten::batch_norm_backward_elemt: the gradient of the input."""
    n = count.sum().to(x.dtype)
    centred = x - _per_channel(x, mean)
    slope = _per_channel(x, invstd * invstd * sum_dy_xmu / n)
    result = (grad - _per_channel(x, sum_dy / n) - centred * slope) * _per_channel(x, invstd)
    return result * _per_channel(x, weight) if weight is not None else result


def addbmm_(
    self: torch.Tensor,
    batch1: torch.Tensor,
    batch2: torch.Tensor,
    *,
    beta: float = 1,
    alpha: float = 1,
):
    """aten::addbmm_, which alone of its kind gives a smaller operand the shape of the result."""
    return torch.addbmm(self, batch1, batch2, beta=beta, alpha=alpha, out=self)


KERNELS: dict[str, Callable[..., Any]] = {
    "addbmm_": addbmm_,
    "_pack_padded_sequence": pack_padded_sequence,
    "native_batch_norm": native_batch_norm,
    "batch_norm_stats": batch_norm_stats,
    "batch_norm_gather_stats_with_counts": batch_norm_gather_stats_with_counts,
    "batch_norm_elemt": batch_norm_elemt,
    "batch_norm_backward_reduce": batch_norm_backward_reduce,
    "batch_norm_backward_elemt": batch_norm_backward_elemt,
}


# --- Histograms of integers, which the CPU's kernel refuses and CUDA's counts --------------------

# Models written for a GPU count with them how many tokens each of their experts gets. Floats go
# to the CPU's kernel.

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


HISTOGRAMS: dict[str, Callable[..., Any]] = {"histc": histc, "histc.out": histc_out}
