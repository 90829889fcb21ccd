"""Rules of interpolation to another size, and of its gradients.

What is computed is as the CPU has it: positions of neighbours as formulas of whole numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ltc.aten.nn.interpolation import (
    Table,
    antialiased,
    cubic,
    keys,
    linear,
    nearest,
    nearest_center,
    triangle,
)
from ltc.aten.nn.resampling import resampled, transposed
from ltc.aten.promote import compute_dtype
from ltc.aten.registry import traces
from ltc.ir import build
from ltc.ir.node import Node

Sizes = Sequence[int]
Factor = float | None  # by which a dimension grows; None: as its sizes say

_TRIANGLES, _KEYS = antialiased(triangle, 1.0), antialiased(keys, 2.0)


def _resized(
    table: Table, x: Node, sizes: Sizes, aligned: bool, *factors: Factor, moves: bool = False
) -> Node:
    """`x` with other sizes of its last dimensions."""
    lead = x.shape[: -len(sizes)]
    if not moves and not x.dtype.is_floating_point:
        return NotImplemented
    if not x.size:
        return build.full((*lead, *sizes), 0, x.dtype)
    for dim, (size, factor) in enumerate(zip(sizes, factors, strict=True), len(lead)):
        if x.shape[dim] == 1:
            x = build.expand(x, (*x.shape[:dim], size, *x.shape[dim + 1 :]))
            continue
        taps = table(x.shape[dim], size, aligned, factor)
        x = x if taps is None else resampled(x, dim, taps)
    return x


def _resized_back(table: Table, grad: Node, shape: Sizes, aligned: bool, *factors: Factor) -> Node:
    """The gradient of an operand of that shape."""
    lead = len(shape) - len(factors)
    if not grad.dtype.is_floating_point:
        return NotImplemented
    if not grad.size:
        return build.full(tuple(shape), 0, grad.dtype)
    for dim, (size, factor) in enumerate(zip(shape[lead:], factors, strict=True), lead):
        if size == 1:
            grad = build.cast(grad, compute_dtype(grad.dtype))
            grad = build.sum_of(grad, dim, keepdim=True)
            continue
        taps = table(size, grad.shape[dim], aligned, factor)
        grad = grad if taps is None else resampled(grad, dim, transposed(taps))
    return grad


# --- nearest ---------------------------------------------------------------------------------------


def _nearest(x: Node, sizes: Sizes, *factors: Factor) -> Node:
    return _resized(nearest(0.0, _position_dtype(x)), x, sizes, False, *factors, moves=True)


def _nearest_exact(x: Node, sizes: Sizes, *factors: Factor) -> Node:
    return _resized(nearest_center(_position_dtype(x)), x, sizes, False, *factors, moves=True)


def _position_dtype(x: Node) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _nearest_back(grad: Node, shape: Sizes, shift: float, *factors: Factor) -> Node:
    """The CPU's positions are float32 here, whatever the gradient is."""
    return _resized_back(nearest(shift, torch.float32), grad, shape, False, *factors)


@traces("aten::upsample_nearest1d", static={"scales": None})
def upsample_nearest1d(x: Node, output_size: Sizes, scales: Factor = None) -> Node:
    return _nearest(x, output_size, scales)


@traces("aten::upsample_nearest1d_backward", static={"scales": None})
def upsample_nearest1d_backward(
    grad: Node, output_size: Sizes, input_size: Sizes, scales: Factor = None
) -> Node:
    return _nearest_back(grad, input_size, 0.0, scales)


@traces("aten::upsample_nearest2d", static={"scales_h": None, "scales_w": None})
def upsample_nearest2d(
    x: Node, output_size: Sizes, scales_h: Factor = None, scales_w: Factor = None
) -> Node:
    return _nearest(x, output_size, scales_h, scales_w)


@traces("aten::upsample_nearest2d_backward", static={"scales_h": None, "scales_w": None})
def upsample_nearest2d_backward(
    grad: Node,
    output_size: Sizes,
    input_size: Sizes,
    scales_h: Factor = None,
    scales_w: Factor = None,
) -> Node:
    return _nearest_back(grad, input_size, 0.0, scales_h, scales_w)


@traces("aten::upsample_nearest3d", static={"scales_d": None, "scales_h": None, "scales_w": None})
def upsample_nearest3d(
    x: Node,
    output_size: Sizes,
    scales_d: Factor = None,
    scales_h: Factor = None,
    scales_w: Factor = None,
) -> Node:
    return _nearest(x, output_size, scales_d, scales_h, scales_w)


@traces(
    "aten::upsample_nearest3d_backward",
    static={"scales_d": None, "scales_h": None, "scales_w": None},
)
def upsample_nearest3d_backward(
    grad: Node,
    output_size: Sizes,
    input_size: Sizes,
    scales_d: Factor = None,
    scales_h: Factor = None,
    scales_w: Factor = None,
) -> Node:
    return _nearest_back(grad, input_size, 0.0, scales_d, scales_h, scales_w)


@traces("aten::_upsample_nearest_exact1d", static={"scales": None})
def upsample_nearest_exact1d(x: Node, output_size: Sizes, scales: Factor = None) -> Node:
    return _nearest_exact(x, output_size, scales)


@traces("aten::_upsample_nearest_exact1d_backward", static={"scales": None})
def upsample_nearest_exact1d_backward(
    grad: Node, output_size: Sizes, input_size: Sizes, scales: Factor = None
) -> Node:
    return _nearest_back(grad, input_size, 0.5, scales)


@traces("aten::_upsample_nearest_exact2d", static={"scales_h": None, "scales_w": None})
def upsample_nearest_exact2d(
    x: Node, output_size: Sizes, scales_h: Factor = None, scales_w: Factor = None
) -> Node:
    return _nearest_exact(x, output_size, scales_h, scales_w)


@traces("aten::_upsample_nearest_exact2d_backward", static={"scales_h": None, "scales_w": None})
def upsample_nearest_exact2d_backward(
    grad: Node,
    output_size: Sizes,
    input_size: Sizes,
    scales_h: Factor = None,
    scales_w: Factor = None,
) -> Node:
    return _nearest_back(grad, input_size, 0.5, scales_h, scales_w)


@traces(
    "aten::_upsample_nearest_exact3d", static={"scales_d": None, "scales_h": None, "scales_w": None}
)
def upsample_nearest_exact3d(
    x: Node,
    output_size: Sizes,
    scales_d: Factor = None,
    scales_h: Factor = None,
    scales_w: Factor = None,
) -> Node:
    return _nearest_exact(x, output_size, scales_d, scales_h, scales_w)


@traces(
    "aten::_upsample_nearest_exact3d_backward",
    static={"scales_d": None, "scales_h": None, "scales_w": None},
)
def upsample_nearest_exact3d_backward(
    grad: Node,
    output_size: Sizes,
    input_size: Sizes,
    scales_d: Factor = None,
    scales_h: Factor = None,
    scales_w: Factor = None,
) -> Node:
    return _nearest_back(grad, input_size, 0.5, scales_d, scales_h, scales_w)


# --- weighted sums ---------------------------------------------------------------------------------


@traces("aten::upsample_linear1d", static={"scales": None})
def upsample_linear1d(
    x: Node, output_size: Sizes, align_corners: bool, scales: Factor = None
) -> Node:
    return _resized(linear, x, output_size, align_corners, scales)


@traces("aten::upsample_linear1d_backward", static={"scales": None})
def upsample_linear1d_backward(
    grad: Node, output_size: Sizes, input_size: Sizes, align_corners: bool, scales: Factor = None
) -> Node:
    return _resized_back(linear, grad, input_size, align_corners, scales)


@traces("aten::upsample_bilinear2d", static={"scales_h": None, "scales_w": None})
def upsample_bilinear2d(
    x: Node,
    output_size: Sizes,
    align_corners: bool,
    scales_h: Factor = None,
    scales_w: Factor = None,
) -> Node:
    return _resized(linear, x, output_size, align_corners, scales_h, scales_w)


@traces("aten::upsample_bilinear2d_backward", static={"scales_h": None, "scales_w": None})
def upsample_bilinear2d_backward(
    grad: Node,
    output_size: Sizes,
    input_size: Sizes,
    align_corners: bool,
    scales_h: Factor = None,
    scales_w: Factor = None,
) -> Node:
    return _resized_back(linear, grad, input_size, align_corners, scales_h, scales_w)


@traces("aten::upsample_trilinear3d", static={"scales_d": None, "scales_h": None, "scales_w": None})
def upsample_trilinear3d(
    x: Node,
    output_size: Sizes,
    align_corners: bool,
    scales_d: Factor = None,
    scales_h: Factor = None,
    scales_w: Factor = None,
) -> Node:
    return _resized(linear, x, output_size, align_corners, scales_d, scales_h, scales_w)


@traces(
    "aten::upsample_trilinear3d_backward",
    static={"scales_d": None, "scales_h": None, "scales_w": None},
)
def upsample_trilinear3d_backward(
    grad: Node,
    output_size: Sizes,
    input_size: Sizes,
    align_corners: bool,
    scales_d: Factor = None,
    scales_h: Factor = None,
    scales_w: Factor = None,
) -> Node:
    return _resized_back(linear, grad, input_size, align_corners, scales_d, scales_h, scales_w)


@traces("aten::upsample_bicubic2d", static={"scales_h": None, "scales_w": None})
def upsample_bicubic2d(
    x: Node,
    output_size: Sizes,
    align_corners: bool,
    scales_h: Factor = None,
    scales_w: Factor = None,
) -> Node:
    return _resized(cubic, x, output_size, align_corners, scales_h, scales_w)


@traces("aten::upsample_bicubic2d_backward", static={"scales_h": None, "scales_w": None})
def upsample_bicubic2d_backward(
    grad: Node,
    output_size: Sizes,
    input_size: Sizes,
    align_corners: bool,
    scales_h: Factor = None,
    scales_w: Factor = None,
) -> Node:
    return _resized_back(cubic, grad, input_size, align_corners, scales_h, scales_w)


@traces("aten::_upsample_bilinear2d_aa", static={"scales_h": None, "scales_w": None})
def upsample_bilinear2d_aa(
    x: Node,
    output_size: Sizes,
    align_corners: bool,
    scales_h: Factor = None,
    scales_w: Factor = None,
) -> Node:
    return _resized(_TRIANGLES, x, output_size, align_corners, scales_h, scales_w)


@traces("aten::_upsample_bilinear2d_aa_backward", static={"scales_h": None, "scales_w": None})
def upsample_bilinear2d_aa_backward(
    grad: Node,
    output_size: Sizes,
    input_size: Sizes,
    align_corners: bool,
    scales_h: Factor = None,
    scales_w: Factor = None,
) -> Node:
    return _resized_back(_TRIANGLES, grad, input_size, align_corners, scales_h, scales_w)


@traces("aten::_upsample_bicubic2d_aa", static={"scales_h": None, "scales_w": None})
def upsample_bicubic2d_aa(
    x: Node,
    output_size: Sizes,
    align_corners: bool,
    scales_h: Factor = None,
    scales_w: Factor = None,
) -> Node:
    return _resized(_KEYS, x, output_size, align_corners, scales_h, scales_w)


@traces("aten::_upsample_bicubic2d_aa_backward", static={"scales_h": None, "scales_w": None})
def upsample_bicubic2d_aa_backward(
    grad: Node,
    output_size: Sizes,
    input_size: Sizes,
    align_corners: bool,
    scales_h: Factor = None,
    scales_w: Factor = None,
) -> Node:
    return _resized_back(_KEYS, grad, input_size, align_corners, scales_h, scales_w)
