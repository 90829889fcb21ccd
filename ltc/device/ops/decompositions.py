"""Overloads that torch gives no CPU kernel, written with overloads that it does: packed sequences, the
pieces of SyncBatchNorm, and a batch norm whose schema says what it writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten


# --- packed sequences -------------------------------------------------------------------------


def pack_padded_sequence(x: torch.Tensor, lengths: torch.Tensor, batch_first: bool):
    """aten::_pack_padded_sequence: the steps of all sequences, longest sequence first.

    lengths  of the sequences, descending; PyTorch wants them on the CPU, and so are the batch
             sizes that come back: they decide the shape of what follows
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


KERNELS: dict[str, Callable[..., Any]] = {
    "_pack_padded_sequence": pack_padded_sequence,
    "native_batch_norm": native_batch_norm,
    "batch_norm_stats": batch_norm_stats,
    "batch_norm_gather_stats_with_counts": batch_norm_gather_stats_with_counts,
    "batch_norm_elemt": batch_norm_elemt,
    "batch_norm_backward_reduce": batch_norm_backward_reduce,
    "batch_norm_backward_elemt": batch_norm_backward_elemt,
}
