"""Rules of batch, layer and group normalization and of their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ltc.aten.promote import compute_dtype, to_dtype
from ltc.aten.registry import traces
from ltc.ir import build
from ltc.ir.node import Node, Operand, like
from ltc.support.sizes.extent import Extent, Size


def _computed(*operands: Node | None) -> tuple[Any, ...]:
    """Operands in the first one's compute dtype, or in a statistic's wider one; None stays."""
    wide = max((x.dtype for x in operands if x is not None), key=lambda dtype: dtype.itemsize)
    dtype = compute_dtype(wide)
    return tuple(to_dtype(x, dtype) for x in operands)


def _flat(operand: Node | None) -> Node | None:
    """One number for each channel in one dimension; torch takes it in any shape."""
    return operand if operand is None else build.reshape(operand, (-1,))


def _is_per_channel(channels: Size, *statistics: Node | None) -> bool:
    """Return True if each is [C], as torch's kernels want statistics to be."""
    return all(one is None or one.shape == (channels,) for one in statistics)


def _per_channel(statistic: Node, rank: int) -> Node:
    """[C] in a shape that broadcasts to [N, C, *spatial]."""
    return build.reshape(statistic, (1, -1, *(1,) * (rank - 2)))


def _over_batch(x: Node) -> list[int]:
    return [0, *range(2, len(x.shape))]


# --- batch normalization -------------------------------------------------------------------------


def _batch_statistics(x: Node, eps: Any) -> tuple[Node, Node, Node]:
    """(mean, variance, 1 / sqrt(variance + eps)) of each channel, the variance biased.

    The mean is rounded, so the distances' own mean is added to it: a channel of equal numbers is
    normalized to 0, and has no gradient.
    """
    dims = _over_batch(x)
    mean = build.mean_of(x, dims)
    distance = x - _per_channel(mean, len(x.shape))
    rest = build.mean_of(distance, dims)
    variance = build.maximum(build.mean_of(distance * distance, dims) - rest * rest, 0)
    return mean + rest, variance, 1.0 / build.sqrt(variance + eps)


def _normalized(x: Node, mean: Node, inverse: Node, weight: Node | None, bias: Node | None) -> Node:
    rank = len(x.shape)
    scale = inverse if weight is None else inverse * weight
    y = (x - _per_channel(mean, rank)) * _per_channel(scale, rank)
    return y if bias is None else y + _per_channel(bias, rank)


def _moved(running: Node | None, new: Node, momentum: Any) -> Node | None:
    """(1 - momentum) * running + momentum * new"""
    if running is None:
        return None
    m = like(momentum, new)
    return (1.0 - m) * build.cast(running, new.dtype) + m * new


def _batch_norm(
    x: Node,
    weight: Node | None,
    bias: Node | None,
    running_mean: Node | None,
    running_var: Node | None,
    training: bool,
    momentum: Operand,
    eps: Operand,
) -> tuple[Node | None, ...] | None:
    """(y, mean, inverse deviation, running mean, running variance)"""
    if not x.size or len(x.shape) < 2:
        return None
    weight, bias = _flat(weight), _flat(bias)
    if not _is_per_channel(x.shape[1], weight, bias, running_mean, running_var):
        return None
    x, weight, bias, old_mean, old_var = _computed(x, weight, bias, running_mean, running_var)
    if not training:
        inverse = 1.0 / build.sqrt(old_var + eps)
        return _normalized(x, old_mean, inverse, weight, bias), None, None, old_mean, old_var
    mean, variance, inverse = _batch_statistics(x, eps)
    y = _normalized(x, mean, inverse, weight, bias)
    count = build.count_of(x, _over_batch(x))
    unbiased = _unbiased(variance, count)
    new_mean, new_var = _moved(old_mean, mean, momentum), _moved(old_var, unbiased, momentum)
    return y, mean, inverse, new_mean, new_var


def _unbiased(variance: Node, count: Size) -> Node:
    """The variance of so many numbers, if it was divided by their number before."""
    if count <= 1:
        return variance * math.inf
    if isinstance(count, Extent):  # the quotient is no expression
        return variance * count / (count - 1)
    return variance * (count / (count - 1))


def _saved(statistic: Node | None, x: Node) -> Node:
    """A saved statistic, without elements where none is saved."""
    return build.full((0,), 0, x.dtype) if statistic is None else statistic


@traces("aten::_native_batch_norm_legit_functional")
def batch_norm_functional(
    x: Node,
    weight: Node | None,
    bias: Node | None,
    running_mean: Node,
    running_var: Node,
    training: bool,
    momentum: Operand,
    eps: Operand,
) -> tuple[Node | None, Node, Node, Node | None, Node | None]:
    made = _batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps)
    if made is None:
        return NotImplemented
    y, mean, inverse, new_mean, new_var = made
    return y, _saved(mean, x), _saved(inverse, x), new_mean, new_var


@traces("aten::_native_batch_norm_legit")
def batch_norm_updating(
    x: Node,
    weight: Node | None,
    bias: Node | None,
    running_mean: Node,
    running_var: Node,
    training: bool,
    momentum: Operand,
    eps: Operand,
) -> tuple[Node | None, Node | None, Node | None, Node, Node]:
    """The running statistics come first: they are arguments that the overload writes to."""
    made = _batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps)
    if made is None:
        return NotImplemented
    y, mean, inverse, new_mean, new_var = made
    return new_mean, new_var, y, _saved(mean, x), _saved(inverse, x)


@traces("aten::_native_batch_norm_legit.no_stats")
def batch_norm_without_statistics(
    x: Node, weight: Node | None, bias: Node | None, training: bool, momentum: Operand, eps: Operand
) -> tuple[Node | None, ...]:
    made = _batch_norm(x, weight, bias, None, None, True, momentum, eps)
    return NotImplemented if made is None else made[:3]


@traces("aten::_native_batch_norm_legit_no_training")
def batch_norm_evaluating(
    x: Node,
    weight: Node | None,
    bias: Node | None,
    running_mean: Node,
    running_var: Node,
    momentum: Operand,
    eps: Operand,
) -> tuple[Node | None, Node, Node]:
    made = _batch_norm(x, weight, bias, running_mean, running_var, False, momentum, eps)
    if made is None:
        return NotImplemented
    return made[0], _saved(None, x), _saved(None, x)


@traces("aten::native_batch_norm")
def native_batch_norm(
    x: Node,
    weight: Node | None,
    bias: Node | None,
    running_mean: Node | None,
    running_var: Node | None,
    training: bool,
    momentum: Operand,
    eps: Operand,
) -> tuple[Node | None, Node, Node]:
    """The overload without statistics to update; with them, another one is recorded."""
    if training and running_mean is not None:
        return NotImplemented
    made = _batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps)
    if made is None:
        return NotImplemented
    return made[0], _saved(made[1], x), _saved(made[2], x)


@traces("aten::native_batch_norm_backward", alike=("grad", "x"))
def native_batch_norm_backward(
    grad: Node,
    x: Node,
    weight: Node | None,
    running_mean: Node | None,
    running_var: Node | None,
    save_mean: Node | None,
    save_invstd: Node | None,
    train: bool,
    eps: Operand,
    output_mask: Sequence[bool],
) -> tuple[Node | None, ...]:
    """With h the normalized x: dx = scale * (g - mean(g) - h * mean(g * h)).

    Source: Ioffe and Szegedy, arXiv:1502.03167, section 3.
    """
    if not x.size or len(x.shape) < 2:
        return NotImplemented
    if not train:
        save_mean, save_invstd = running_mean, None
    weight, variance = _flat(weight), None if train else running_var
    if not _is_per_channel(x.shape[1], weight, save_mean, save_invstd, variance):
        return NotImplemented
    grad, x, weight, mean, inverse, variance = _computed(
        grad, x, weight, save_mean, save_invstd, variance
    )
    if not train:
        inverse = 1.0 / build.sqrt(variance + eps)
    rank, dims = len(x.shape), _over_batch(x)
    h = (x - _per_channel(mean, rank)) * _per_channel(inverse, rank)
    grad_sum, grad_dot = build.sum_of(grad, dims), build.sum_of(grad * h, dims)
    scale = _per_channel(inverse if weight is None else inverse * weight, rank)
    if train:
        count = build.count_of(x, dims)
        drift = _per_channel(grad_sum / count, rank) + h * _per_channel(grad_dot / count, rank)
        dx = (grad - drift) * scale
    else:
        dx = grad * scale
    gradients = (dx, grad_dot, grad_sum)
    return tuple(g if wanted else None for g, wanted in zip(gradients, output_mask))


# --- layer normalization -------------------------------------------------------------------------


def _are_of(shape: tuple[int, ...], *parameters: Node | None) -> bool:
    return all(p is None or p.shape == shape for p in parameters)


@traces("aten::native_layer_norm")
def native_layer_norm(
    x: Node, normalized_shape: Sequence[int], weight: Node | None, bias: Node | None, eps: Operand
) -> tuple[Node, Node, Node]:
    """(y, mean, inverse deviation) over the last dimensions.  Source: arXiv:1607.06450."""
    split, normalized = len(x.shape) - len(normalized_shape), tuple(normalized_shape)
    if not x.size or x.shape[split:] != normalized or not _are_of(normalized, weight, bias):
        return NotImplemented
    x, weight, bias = _computed(x, weight, bias)
    dims = range(split, len(x.shape))
    mean = build.mean_of(x, dims, keepdim=True)
    distance = x - mean
    inverse = 1.0 / build.sqrt(build.mean_of(distance * distance, dims, keepdim=True) + eps)
    y = distance * inverse
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias), mean, inverse


@traces("aten::native_layer_norm_backward", alike=("grad", "x"))
def native_layer_norm_backward(
    grad: Node,
    x: Node,
    normalized_shape: Sequence[int],
    mean: Node,
    rstd: Node,
    weight: Node | None,
    bias: Node | None,
    output_mask: Sequence[bool],
) -> tuple[Node | None, ...]:
    """With h the normalized x, g its gradient: dx = rstd * (g - mean(g) - h * mean(g * h))."""
    split, normalized = len(x.shape) - len(normalized_shape), tuple(normalized_shape)
    kept = (*x.shape[:split], *(1,) * len(normalized))
    if x.shape[split:] != normalized or not _are_of(normalized, weight, bias):
        return NotImplemented
    if not x.size or mean.shape != kept or rstd.shape != kept:
        return NotImplemented
    grad, x, mean, rstd, weight = _computed(grad, x, mean, rstd, weight)
    inner, outer = range(split, len(x.shape)), range(split)
    h = (x - mean) * rstd
    g = grad if weight is None else grad * weight
    drift = build.mean_of(g, inner, keepdim=True)
    drift = drift + h * build.mean_of(g * h, inner, keepdim=True)
    dx = (g - drift) * rstd
    dweight = build.sum_of(grad * h, outer) if split else grad * h
    dbias = build.sum_of(grad, outer) if split else grad
    gradients = (dx, dweight, dbias)
    return tuple(g if wanted else None for g, wanted in zip(gradients, output_mask))


# --- group normalization -------------------------------------------------------------------------


@traces("aten::native_group_norm")
def native_group_norm(
    x: Node,
    weight: Node | None,
    bias: Node | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: Operand,
) -> tuple[Node, Node, Node]:
    """(y, mean, inverse deviation) over the channels of a group.  Source: arXiv:1803.08494."""
    shape = x.shape
    if not x.size or shape[:2] != (N, C) or not _is_per_channel(C, weight, bias):
        return NotImplemented
    x, weight, bias = _computed(x, weight, bias)
    grouped = build.reshape(x, (N, group, -1))
    mean = build.mean_of(grouped, -1, keepdim=True)
    distance = grouped - mean
    inverse = 1.0 / build.sqrt(build.mean_of(distance * distance, -1, keepdim=True) + eps)
    y = build.reshape(distance * inverse, shape)
    y = y if weight is None else y * _per_channel(weight, len(shape))
    y = y if bias is None else y + _per_channel(bias, len(shape))
    return y, build.reshape(mean, (N, group)), build.reshape(inverse, (N, group))


@traces("aten::native_group_norm_backward", alike=("grad", "x"))
def native_group_norm_backward(
    grad: Node,
    x: Node,
    mean: Node,
    rstd: Node,
    weight: Node | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: Sequence[bool],
) -> tuple[Node | None, ...]:
    """Compute as for a layer norm over each group, the weight being one of each channel."""
    shape, rank = x.shape, len(x.shape)
    if not x.size or shape[:2] != (N, C) or not _is_per_channel(C, weight):
        return NotImplemented
    if mean.shape != (N, group) or rstd.shape != (N, group):
        return NotImplemented
    grad, x, mean, rstd, weight = _computed(grad, x, mean, rstd, weight)
    g = grad if weight is None else grad * _per_channel(weight, rank)
    g, x = build.reshape(g, (N, group, -1)), build.reshape(x, (N, group, -1))
    mean, rstd = build.unsqueeze(mean, -1), build.unsqueeze(rstd, -1)
    h = (x - mean) * rstd
    drift = build.mean_of(g, -1, keepdim=True) + h * build.mean_of(g * h, -1, keepdim=True)
    dx = build.reshape((g - drift) * rstd, shape)
    dims = _over_batch(grad)
    dweight = build.sum_of(grad * build.reshape(h, shape), dims)
    gradients = (dx, dweight, build.sum_of(grad, dims))
    return tuple(g if wanted else None for g, wanted in zip(gradients, output_mask))
