"""Rules of convolution and its gradients.

A transposed convolution is the gradient of an ordinary one with respect to its input, so its own
gradients are an ordinary convolution and the weight gradient with the operands exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ltc.aten.registry import traces
from ltc.ir import build, ops
from ltc.ir.infer import window_extent
from ltc.ir.node import Node, make
from ltc.ir.tensor_type import TensorType


def _each(values: Any, rank: int) -> tuple[int, ...]:
    """One number for each spatial dimension."""
    values = (values,) if isinstance(values, int) else tuple(values)
    return values * rank if len(values) == 1 else values


def _geometry(
    weight: Node,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> dict[str, Any]:
    rank = len(weight.shape) - 2
    return {
        "stride": _each(stride, rank),
        "padding": _each(padding, rank),
        "dilation": _each(dilation, rank),
        "groups": groups,
    }


def _has_windows(
    wide: tuple[Any, ...], weight: Node, narrow: tuple[Any, ...], geometry: dict[str, Any]
) -> bool:
    """Whether convolving `wide` gives as many windows as `narrow` has: an output padding beyond
    the stride makes room for more."""
    windows = tuple(
        window_extent(extent, kernel, s, p, p, d)
        for extent, kernel, s, p, d in zip(
            wide[2:], weight.shape[2:], geometry["stride"], geometry["padding"],
            geometry["dilation"],
        )
    )  # fmt: skip
    return windows == tuple(narrow[2:])


@traces("aten::convolution", "aten::convolution_overrideable")
def convolution(
    x: Node,
    weight: Node,
    bias: Node | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    *,
    results: Sequence[TensorType],
) -> Node:
    if not x.dtype.is_floating_point or not (x.size and weight.size and results[0].size):
        return NotImplemented
    if len(x.shape) != len(weight.shape):
        return NotImplemented
    geometry = _geometry(weight, stride, padding, dilation, groups)
    if transposed:
        shape = results[0].shape
        if not _has_windows(shape, weight, x.shape, geometry):
            return NotImplemented
        y = make(ops.CONVOLUTION_INPUT_GRADIENT, x, weight, shape=shape, **geometry)
    else:
        y = make(ops.CONVOLUTION, x, weight, **geometry)
    if bias is None:
        return y
    return y + build.reshape(bias, (-1, *(1,) * (len(y.shape) - 2)))


@traces("aten::_convolution")
def convolution_with_flags(
    x: Node,
    weight: Node,
    bias: Node | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    *flags: Any,
    results: Sequence[TensorType],
) -> Node:
    return convolution(
        x, weight, bias, stride, padding, dilation, transposed, output_padding, groups,
        results=results,
    )  # fmt: skip


@traces("aten::convolution_backward", "aten::convolution_backward_overrideable")
def convolution_backward(
    grad: Node, x: Node, weight: Node, bias_sizes: Sequence[int] | None, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], transposed: bool,
    output_padding: Sequence[int], groups: int, output_mask: Sequence[bool],
) -> tuple[Node | None, ...]:  # fmt: skip
    if not grad.size or not x.size or not weight.size:
        return NotImplemented
    geometry = _geometry(weight, stride, padding, dilation, groups)
    if transposed:
        if not _has_windows(grad.shape, weight, x.shape, geometry):
            return NotImplemented
        input_gradient = make(ops.CONVOLUTION, grad, weight, **geometry)
        pair = (x, grad)
    else:
        input_gradient = make(
            ops.CONVOLUTION_INPUT_GRADIENT, grad, weight, shape=x.shape, **geometry
        )
        pair = (grad, x)
    weight_gradient = make(ops.CONVOLUTION_WEIGHT_GRADIENT, *pair, shape=weight.shape, **geometry)
    bias_gradient = build.sum_of(grad, [0, *range(2, len(grad.shape))])
    gradients = (input_gradient, weight_gradient, bias_gradient)
    return tuple(g if wanted else None for g, wanted in zip(gradients, output_mask))
