"""Types of what is rounded to the steps of integers in training: no Meta kernel tells them."""

from __future__ import annotations

from typing import Any

import torch

from ltc.device.shapes.formulas.operands import (
    FLOATS,
    INDICES,
    WHOLE,
    is_real,
    is_value,
    of_one_dtype,
    of_one_type,
    type_of,
)
from ltc.device.shapes.formulas.table import Types, types_of

_ZERO_POINTS = frozenset({torch.int32, torch.float32, torch.float16})


def _with_mask(x: Any) -> Types:
    return type_of(x), (x.shape, torch.bool)


@types_of("aten::fake_quantize_per_tensor_affine_cachemask")
def _of_a_tensor(x: Any, scale: Any, zero_point: int, low: int, high: int) -> Types | None:
    is_known = x.dtype in FLOATS and is_real(scale) and low <= zero_point <= high
    return _with_mask(x) if is_known else None


@types_of("aten::_fake_quantize_per_tensor_affine_cachemask_tensor_qparams")
def _of_a_tensor_by_tensors(
    x: Any, scale: Any, zero_point: Any, enabled: Any, low: int, high: int
) -> Types | None:
    if not is_value(x, scale, zero_point, enabled) or low > high:
        return None
    if x.dtype not in FLOATS or scale.dtype not in FLOATS or enabled.dtype not in WHOLE:
        return None
    are_single = all(operand.shape in ((), (1,)) for operand in (scale, zero_point, enabled))
    return _with_mask(x) if are_single and zero_point.dtype in INDICES else None


@types_of("aten::fake_quantize_per_channel_affine_cachemask")
def _of_each_channel(
    x: Any, scale: Any, zero_point: Any, axis: int, low: int, high: int
) -> Types | None:
    if x.dtype not in FLOATS or low > high or not _are_of_channels(x, scale, zero_point, axis):
        return None
    is_known = scale.dtype is torch.float32 and zero_point.dtype in _ZERO_POINTS
    return _with_mask(x) if is_known else None


def _are_of_channels(x: Any, scale: Any, zero_point: Any, axis: int) -> bool:
    if not 0 <= axis < len(x.shape) or 0 in x.shape or not is_value(scale, zero_point):
        return False
    of_channels = (x.shape[axis],)
    return bool(scale.shape == of_channels and zero_point.shape == of_channels)


# --- whose steps are learned --------------------------------------------------------------------


@types_of("aten::_fake_quantize_learnable_per_tensor_affine")
def _learned(
    x: Any, scale: Any, zero_point: Any, low: int, high: int, factor: Any = 1.0
) -> Types | None:
    types = _learned_back(x, x, scale, zero_point, low, high, factor)
    return None if types is None else (type_of(x),)


@types_of("aten::_fake_quantize_learnable_per_tensor_affine_backward")
def _learned_back(
    gradient: Any, x: Any, scale: Any, zero_point: Any, low: int, high: int, factor: Any = 1.0
) -> Types | None:
    if not _can_learn(gradient, x, scale, zero_point, low, high):
        return None
    if scale.shape != (1,) or zero_point.shape != (1,):
        return None
    return type_of(x), type_of(scale), type_of(zero_point)


@types_of("aten::_fake_quantize_learnable_per_channel_affine")
def _learned_of_each_channel(
    x: Any, scale: Any, zero_point: Any, axis: int, low: int, high: int, factor: Any = 1.0
) -> Types | None:
    types = _learned_of_each_channel_back(x, x, scale, zero_point, axis, low, high, factor)
    return None if types is None else (type_of(x),)


@types_of("aten::_fake_quantize_learnable_per_channel_affine_backward")
def _learned_of_each_channel_back(
    gradient: Any, x: Any, scale: Any, zero_point: Any, axis: int, low: int, high: int,
    factor: Any = 1.0,
) -> Types | None:  # fmt: skip
    if not _can_learn(gradient, x, scale, zero_point, low, high):
        return None
    if not _are_of_channels(x, scale, zero_point, axis):
        return None
    return type_of(x), type_of(scale), type_of(zero_point)


def _can_learn(gradient: Any, x: Any, scale: Any, zero_point: Any, low: int, high: int) -> bool:
    floats = frozenset({torch.float32})
    are_floats = of_one_type(floats, gradient, x) and of_one_dtype(floats, x, scale, zero_point)
    return are_floats and low <= 0 <= high and 0 not in x.shape
