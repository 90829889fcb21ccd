"""Rules of rounding to the steps of integers in training, and of where that left the range.

Each gives what PyTorch's CPU kernels give to the last bit: in which precision they multiply and add is
theirs.
"""

from __future__ import annotations

import torch

from ltc.aten.promote import compute_dtype, to_dtype
from ltc.aten.registry import traces
from ltc.ir import build
from ltc.ir.build import where
from ltc.ir.node import Node, Operand

_EXACT = 1 << 22  # differences of whole numbers up to it are exact in float32
_LONGEST = 2.0**63  # from there on C++ makes the least int64 of a float
_OUTSIDE = "`zero_point` must be between `quant_min` and `quant_max`."

_Parts = tuple[Node, Node]  # (the rounded values, whether each was in the range)


def _exact_dtype(x: Node, low: int, high: int) -> torch.dtype:
    """Return the dtype that holds each difference of two whole numbers from `low` to `high`."""
    is_narrow = low >= -_EXACT and high <= _EXACT and x.dtype != torch.float64
    return torch.float32 if is_narrow else torch.float64


def _within(q: Node, low: int, high: int) -> Node:
    return (q >= float(low)) & (q <= float(high))


def _clamped(q: Node, low: int, high: int) -> Node:
    """Clamp to the range; NaN becomes the least."""
    return where(q >= float(low), where(q <= float(high), q, float(high)), float(low))


def _clamped_integers(q: Node, low: int, high: int) -> Node:
    """The same where q becomes an int64 before."""
    return _clamped(where(q < _LONGEST, q, float(low)), low, high)


def _of_a_tensor(x: Node, scale: Node, zero: Operand, low: int, high: int) -> _Parts:
    """`scale` is a float32, of whatever dtype x is."""
    dtype, exact = compute_dtype(x.dtype), _exact_dtype(x, low, high)
    steps = build.cast(x, dtype) * build.cast(1.0 / scale, dtype)
    q = build.round_half_even(steps) + to_dtype(zero, dtype)
    difference = _clamped(build.cast(q, exact), low, high) - to_dtype(zero, exact)
    return build.cast(difference, torch.float32) * scale, _within(q, low, high)


@traces("aten::fake_quantize_per_tensor_affine_cachemask")
def of_a_tensor(x: Node, scale: Operand, zero_point: int, quant_min: int, quant_max: int) -> _Parts:
    return _of_a_tensor(x, to_dtype(scale, torch.float32), zero_point, quant_min, quant_max)


@traces("aten::_fake_quantize_per_tensor_affine_cachemask_tensor_qparams")
def of_a_tensor_by_tensors(
    x: Node,
    scale: Node,
    zero_point: Node,
    fake_quant_enabled: Node,
    quant_min: int,
    quant_max: int,
) -> _Parts:
    single, zero = build.reshape(scale, ()), build.reshape(zero_point, ())
    y, mask = _of_a_tensor(x, build.cast(single, torch.float32), zero, quant_min, quant_max)
    is_off = build.eq(build.reshape(fake_quant_enabled, ()), 0)
    return where(is_off, x, build.cast(y, x.dtype)), mask | is_off


@traces("aten::fake_quantize_per_channel_affine_cachemask")
def of_each_channel(
    x: Node, scale: Node, zero_point: Node, axis: int, quant_min: int, quant_max: int
) -> _Parts:
    of_channels = [1] * len(x.shape)
    of_channels[axis] = x.shape[axis]
    scale, zero = build.reshape(scale, of_channels), build.reshape(zero_point, of_channels)
    dtype, exact = compute_dtype(x.dtype), _exact_dtype(x, quant_min, quant_max)
    steps = build.cast(x, dtype) * build.cast(1.0 / scale, dtype)
    if zero.dtype.is_floating_point:
        exact = torch.float64  # the zero point need not be whole
        moved = build.cast(zero, dtype) + steps
        q = build.round_half_even(build.cast(moved, torch.float32)) + 0.0  # an integer: no -0.0
    else:
        zero = build.check(zero, (zero >= quant_min) & (zero <= quant_max), _OUTSIDE)
        q = build.cast(zero, dtype) + build.round_half_even(steps)
    difference = _clamped_integers(build.cast(q, exact), quant_min, quant_max)
    y = (difference - build.cast(zero, exact)) * build.cast(scale, exact)
    return y, _within(q, quant_min, quant_max)
