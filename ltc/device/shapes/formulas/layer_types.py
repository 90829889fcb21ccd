"""Types of what layers of networks compute: softmax, norms, dropout, losses; and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from ltc.device.shapes.formulas.operands import (
    FLOATS,
    NARROW,
    Shape,
    axis_of,
    broadcast,
    is_real,
    is_value,
    number_of,
    of_one_dtype,
    of_one_type,
    type_of,
)
from ltc.device.shapes.formulas.table import Formula, Types, add, types_of

# --- softmax ------------------------------------------------------------------------------------


@types_of("aten::_softmax", "aten::_log_softmax")
def _softmax(x: Any, dim: int, half_to_float: bool) -> Types | None:
    is_known = x.dtype in FLOATS and axis_of(dim, len(x.shape)) is not None
    return (type_of(x),) if is_known and not half_to_float else None


@types_of("aten::_safe_softmax")
def _safe_softmax(x: Any, dim: int, dtype: torch.dtype | None = None) -> Types | None:
    return _softmax(x, dim, False) if dtype is None else None


@types_of("aten::_softmax_backward_data", "aten::_log_softmax_backward_data")
def _softmax_backward(gradient: Any, y: Any, dim: int, input_dtype: torch.dtype) -> Types | None:
    if not of_one_type(FLOATS, gradient, y) or input_dtype is not y.dtype:
        return None
    return (type_of(y),) if axis_of(dim, len(y.shape)) is not None else None


# --- norms --------------------------------------------------------------------------------------


def _statistics_dtype(x: Any, *parameters: Any) -> torch.dtype | None:
    """What the statistics are kept in; None where the parameters are no match for the operand."""
    dtypes = {p.dtype for p in parameters if p is not None}
    if x.dtype not in FLOATS or not all(p is None or is_value(p) for p in parameters):
        return None
    if not dtypes or dtypes == {x.dtype}:
        dtype: torch.dtype = x.dtype
        return dtype
    return torch.float32 if x.dtype in NARROW and dtypes == {torch.float32} else None


def _are_of_shape(shape: Shape, *parameters: Any) -> bool:
    return all(p is None or p.shape == shape for p in parameters)


@types_of("aten::native_layer_norm")
def _layer_norm(
    x: Any, normalized_shape: Sequence[int], weight: Any, bias: Any, eps: Any
) -> Types | None:
    normalized = tuple(normalized_shape)
    outer = len(x.shape) - len(normalized)
    dtype = _statistics_dtype(x, weight, bias)
    if dtype is None or not normalized or outer < 0 or x.shape[outer:] != normalized:
        return None
    if 0 in x.shape or not _are_of_shape(normalized, weight, bias):
        return None
    kept = (*x.shape[:outer], *(1,) * len(normalized)), dtype
    return type_of(x), kept, kept


@types_of("aten::native_layer_norm_backward")
def _layer_norm_backward(
    gradient: Any,
    x: Any,
    normalized_shape: Sequence[int],
    mean: Any,
    rstd: Any,
    weight: Any,
    bias: Any,
    output_mask: Sequence[bool],
) -> Types | None:
    forward = _layer_norm(x, normalized_shape, weight, bias, 0.0)
    if forward != (type_of(gradient), type_of(mean), type_of(rstd)):
        return None
    return _norm_gradients(x, weight, bias, output_mask)


def _norm_gradients(x: Any, weight: Any, bias: Any, wanted: Sequence[bool]) -> Types | None:
    """Of the operand and its parameters; all of one dtype."""
    if (wanted[1] and weight is None) or (wanted[2] and bias is None):
        return None
    if any(p is not None and p.dtype is not x.dtype for p in (weight, bias)):
        return None
    return tuple(
        [type_of(v) if is_wanted else None for v, is_wanted in zip((x, weight, bias), wanted)]
    )


@types_of("aten::native_group_norm")
def _group_norm(
    x: Any, weight: Any, bias: Any, N: int, C: int, HxW: int, group: int, eps: Any
) -> Types | None:
    dtype = _statistics_dtype(x, weight, bias)
    if dtype is None or len(x.shape) < 2 or 0 in x.shape or group < 1 or C % group:
        return None
    if x.shape[:2] != (N, C) or prod(x.shape[2:]) != HxW or not _are_of_shape((C,), weight, bias):
        return None
    kept = (N, group), dtype
    return type_of(x), kept, kept


@types_of("aten::native_group_norm_backward")
def _group_norm_backward(
    gradient: Any,
    x: Any,
    mean: Any,
    rstd: Any,
    weight: Any,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: Sequence[bool],
) -> Types | None:
    forward = _group_norm(x, weight, None, N, C, HxW, group, 0.0)
    if forward != (type_of(gradient), type_of(mean), type_of(rstd)):
        return None
    return _norm_gradients(x, weight, weight, output_mask)


def _is_batch(x: Any, *parameters: Any) -> bool:
    """Whether it has channels with more than one number each, and these parameters fit."""
    if not of_one_dtype(FLOATS, x, *[p for p in parameters if p is not None]):
        return False
    shape = x.shape
    return len(shape) >= 2 and 0 not in shape and _are_of_shape(shape[1:2], *parameters)


def _varies(x: Any) -> bool:
    """Whether a channel has several numbers."""
    return prod(x.shape) > int(x.shape[1])


@types_of("aten::_native_batch_norm_legit")
def _batch_norm(
    x: Any, weight: Any, bias: Any, mean: Any, variance: Any, training: bool, *rates: Any
) -> Types | None:
    """The running statistics that it writes over come before its results."""
    if not _is_batch(x, weight, bias, mean, variance) or mean is None or variance is None:
        return None
    if training and not _varies(x):
        return None
    kept = (x.shape[1:2] if training else (0,)), x.dtype
    return type_of(mean), type_of(variance), type_of(x), kept, kept


@types_of("aten::_native_batch_norm_legit.no_stats")
def _batch_norm_without_running(
    x: Any, weight: Any, bias: Any, training: bool, *rates: Any
) -> Types | None:
    if not training or not _is_batch(x, weight, bias) or not _varies(x):
        return None
    kept = x.shape[1:2], x.dtype
    return type_of(x), kept, kept


@types_of("aten::native_batch_norm_backward")
def _batch_norm_backward(
    gradient: Any,
    x: Any,
    weight: Any,
    running_mean: Any,
    running_var: Any,
    save_mean: Any,
    save_invstd: Any,
    train: bool,
    eps: Any,
    output_mask: Sequence[bool],
) -> Types | None:
    kept = (save_mean, save_invstd) if train else (running_mean, running_var)
    statistics = (running_mean, running_var, save_mean, save_invstd)
    if None in kept or not _is_batch(x, weight, *(statistics if train else statistics[:2])):
        return None
    saved = [one for one in statistics[2:] if one is not None]
    if not train and any(type_of(one) != ((0,), x.dtype) for one in saved):
        return None
    if type_of(gradient) != type_of(x):
        return None
    return _norm_gradients(x, weight, weight, output_mask)


# --- dropout ------------------------------------------------------------------------------------


@types_of("aten::native_dropout")
def _dropout(x: Any, p: Any, train: bool | None) -> Types | None:
    if x.dtype not in FLOATS or not train or not is_real(p) or not 0 <= number_of(p) <= 1:
        return None
    return type_of(x), (x.shape, torch.bool)


@types_of("aten::native_dropout_backward")
def _dropout_backward(gradient: Any, mask: Any, scale: Any) -> Types | None:
    is_known = gradient.dtype in FLOATS and mask.dtype is torch.bool and is_real(scale)
    return (type_of(gradient),) if is_known and mask.shape == gradient.shape else None


# --- losses of classes --------------------------------------------------------------------------

_NONE, _MEAN, _SUM = 0, 1, 2  # torch's reductions


def _are_classes(x: Any, target: Any, weight: Any, dimensions: tuple[int, ...]) -> bool:
    """Whether x, of so many dimensions, has a number for every class of each target.

    Classes are its second dimension, or the only one.
    """
    if x.dtype not in FLOATS or target.dtype is not torch.int64 or not is_value(x, target):
        return False
    if len(x.shape) not in dimensions or 0 in x.shape:
        return False
    at = min(1, len(x.shape) - 1)
    if target.shape != (*x.shape[:at], *x.shape[at + 1 :]):
        return False
    return weight is None or type_of(weight) == (x.shape[at : at + 1], x.dtype)


def _nll_loss(*dimensions: int) -> tuple[Formula, Formula]:
    """Of the loss and of its gradient, for operands of so many dimensions."""

    def forward(
        x: Any, target: Any, weight: Any, reduction: int, ignore_index: int
    ) -> Types | None:
        is_known = reduction in (_NONE, _MEAN, _SUM)
        if not is_known or not _are_classes(x, target, weight, dimensions):
            return None
        return (target.shape if reduction == _NONE else (), x.dtype), ((), x.dtype)

    def backward(
        gradient: Any,
        x: Any,
        target: Any,
        weight: Any,
        reduction: int,
        ignore_index: int,
        total_weight: Any,
    ) -> Types | None:
        found = forward(x, target, weight, reduction, ignore_index)
        return (type_of(x),) if found == (type_of(gradient), type_of(total_weight)) else None

    return forward, backward


for _base, _formulas in (("nll_loss", _nll_loss(1, 2)), ("nll_loss2d", _nll_loss(4))):
    for _way, _formula in zip(("forward", "backward"), _formulas):
        add(_formula, f"aten::{_base}_{_way}")


# --- losses element by element ------------------------------------------------------------------


def _loss(x: Any, target: Any, reduction: int) -> Types | None:
    if not of_one_dtype(FLOATS, x, target) or reduction not in (_NONE, _MEAN, _SUM):
        return None
    shape = broadcast(x.shape, target.shape)
    return None if shape is None else ((shape if reduction == _NONE else (), x.dtype),)


@types_of("aten::mse_loss")
def _mse_loss(x: Any, target: Any, reduction: int = 1) -> Types | None:
    return _loss(x, target, reduction)


@types_of("aten::huber_loss", "aten::smooth_l1_loss")
def _loss_with_threshold(
    x: Any, target: Any, reduction: int = 1, threshold: Any = 1.0
) -> Types | None:
    return _loss(x, target, reduction) if is_real(threshold) and number_of(threshold) > 0 else None


@types_of("aten::mse_loss_backward")
@types_of("aten::huber_loss_backward", "aten::smooth_l1_loss_backward")
def _loss_backward(
    gradient: Any, x: Any, target: Any, reduction: int, *threshold: Any
) -> Types | None:
    if not of_one_type(FLOATS, x, target) or gradient.dtype is not x.dtype or 0 in x.shape:
        return None
    expected = x.shape if reduction == _NONE else ()
    return (type_of(x),) if gradient.shape == expected else None


@types_of("aten::binary_cross_entropy")
def _binary_cross_entropy(
    x: Any, target: Any, weight: Any = None, reduction: int = 1
) -> Types | None:
    return (
        _loss(x, target, reduction) if weight is None and of_one_type(FLOATS, x, target) else None
    )


@types_of("aten::binary_cross_entropy_backward")
def _binary_cross_entropy_backward(
    gradient: Any, x: Any, target: Any, weight: Any = None, reduction: int = 1
) -> Types | None:
    return _loss_backward(gradient, x, target, reduction) if weight is None else None


@types_of("aten::binary_cross_entropy_with_logits")
def _binary_cross_entropy_with_logits(
    x: Any, target: Any, weight: Any = None, pos_weight: Any = None, reduction: int = 1
) -> Types | None:
    if weight is not None or pos_weight is not None or not of_one_type(FLOATS, x, target):
        return None
    return _loss(x, target, reduction)


# --- losses over sequences ------------------------------------------------------------------------


@types_of("ltc::ctc_loss")
def _ctc_loss(
    log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, longest: int, *rest: Any
) -> Types:
    """Its kernel has looked at what it is given: see ops/ctc_loss.py."""
    (steps, batch, _), dtype = log_probs.shape, log_probs.dtype
    return ((batch,), dtype), ((batch, steps, 2 * longest + 1), dtype)


@types_of("ltc::ctc_loss_gradient")
def _ctc_loss_gradient(gradient: Any, log_probs: Any, *rest: Any) -> Types:
    return (type_of(log_probs),)
