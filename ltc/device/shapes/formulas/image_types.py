"""Types of what resizes, samples, pads and unfolds images, and of the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from ltc.device.shapes.formulas.operands import (
    FLOATS,
    FULL,
    MOST_ELEMENTS,
    Shape,
    is_value,
    of_one_dtype,
    type_of,
)
from ltc.device.shapes.formulas.table import Formula, Types, add, types_of

# --- other sizes --------------------------------------------------------------------------------


def _resized(axes: int) -> Formula:
    """For images of so many axes, with a batch and channels in front."""

    def formula(x: Any, output_size: Sequence[int], *settings: Any) -> Types | None:
        if not is_value(x) or x.dtype not in FLOATS or len(x.shape) != axes + 2 or 0 in x.shape:
            return None
        shape = (*x.shape[:2], *output_size)
        if len(output_size) != axes or min(output_size) < 1 or prod(shape) > MOST_ELEMENTS:
            return None
        return ((shape, x.dtype),)

    return formula


def _resized_gradient(axes: int) -> Formula:
    def formula(
        gradient: Any, output_size: Sequence[int], input_size: Sequence[int], *settings: Any
    ) -> Types | None:
        if not is_value(gradient) or gradient.dtype not in FLOATS or len(input_size) != axes + 2:
            return None
        if len(output_size) != axes or min(*input_size, *output_size) < 1:
            return None
        is_known = gradient.shape == (*input_size[:2], *output_size)
        return ((tuple(input_size), gradient.dtype),) if is_known else None

    return formula


_WAYS = (
    (1, ("upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_linear1d")),
    (2, ("upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_bilinear2d")),
    (2, ("upsample_bicubic2d",)),
    (3, ("upsample_nearest3d", "_upsample_nearest_exact3d", "upsample_trilinear3d")),
)
for _axes, _bases in _WAYS:
    for _base in _bases:
        add(_resized(_axes), f"aten::{_base}")
        add(_resized_gradient(_axes), f"aten::{_base}_backward")


@types_of("aten::_upsample_bilinear2d_aa", "aten::_upsample_bicubic2d_aa")
def _smoothly_resized(x: Any, *settings: Any) -> Types | None:
    return _resized(2)(x, *settings) if x.dtype in FULL else None


@types_of("aten::_upsample_bilinear2d_aa_backward", "aten::_upsample_bicubic2d_aa_backward")
def _smoothly_resized_gradient(gradient: Any, *settings: Any) -> Types | None:
    return _resized_gradient(2)(gradient, *settings) if gradient.dtype in FULL else None


# --- numbers at places between pixels -------------------------------------------------------------

_CUBIC = 2


def _sampled(axes: int) -> Formula:
    def formula(
        x: Any, grid: Any, interpolation_mode: int, padding_mode: int, *settings: Any
    ) -> Types | None:
        if not of_one_dtype(FULL, x, grid) or len(x.shape) != axes + 2 or 0 in x.shape:
            return None
        places = grid.shape
        if len(places) != axes + 2 or places[0] != x.shape[0] or places[-1] != axes:
            return None
        if 0 in places or not (0 <= interpolation_mode <= _CUBIC and 0 <= padding_mode <= 2):
            return None
        if axes == 3 and interpolation_mode == _CUBIC:
            return None
        return (((*x.shape[:2], *places[1:-1]), x.dtype),)

    return formula


def _sampled_gradient(axes: int) -> Formula:
    forward = _sampled(axes)

    def formula(gradient: Any, x: Any, grid: Any, *settings: Any) -> Types | None:
        *same, output_mask = settings
        if not is_value(gradient) or forward(x, grid, *same) != (type_of(gradient),):
            return None
        if axes == 3 and not all(output_mask):
            return None  # its kernel makes one that is not wanted, where Meta's does not
        wanted = zip((x, grid), output_mask)
        return tuple([type_of(one) if is_wanted else None for one, is_wanted in wanted])

    return formula


for _axes in (2, 3):
    add(_sampled(_axes), f"aten::grid_sampler_{_axes}d")
    add(_sampled_gradient(_axes), f"aten::grid_sampler_{_axes}d_backward")


@types_of("aten::affine_grid_generator")
def _affine_grid(theta: Any, size: Sequence[int], align_corners: bool) -> Types | None:
    axes = len(size) - 2
    if not is_value(theta) or theta.dtype not in FULL or axes not in (2, 3) or min(size) < 1:
        return None
    if theta.shape != (size[0], axes, axes + 1):
        return None
    return (((size[0], *size[2:], axes), theta.dtype),)


# --- channels and patches -------------------------------------------------------------------------


def _is_image(x: Any) -> bool:
    return is_value(x) and x.dtype in FLOATS and len(x.shape) >= 3 and 0 not in x.shape


@types_of("aten::pixel_shuffle")
def _pixels_of_channels(x: Any, upscale_factor: int) -> Types | None:
    if not _is_image(x) or upscale_factor < 1 or x.shape[-3] % upscale_factor**2:
        return None
    *batch, channels, height, width = x.shape
    far = upscale_factor
    return (((*batch, channels // far**2, height * far, width * far), x.dtype),)


@types_of("aten::pixel_unshuffle")
def _channels_of_pixels(x: Any, downscale_factor: int) -> Types | None:
    far = downscale_factor
    if not _is_image(x) or far < 1 or x.shape[-2] % far or x.shape[-1] % far:
        return None
    *batch, channels, height, width = x.shape
    return (((*batch, channels * far**2, height // far, width // far), x.dtype),)


@types_of("aten::channel_shuffle", "aten::native_channel_shuffle")
def _channels_in_turns(x: Any, groups: int) -> Types | None:
    if not _is_image(x) or groups < 1 or x.shape[1] % groups:
        return None
    return (type_of(x),)


@types_of("aten::max_unpool2d")
def _unpooled(x: Any, indices: Any, output_size: Sequence[int]) -> Types | None:
    if not _is_image(x) or len(x.shape) > 4 or len(output_size) != 2 or min(output_size) < 1:
        return None
    if not is_value(indices) or type_of(indices) != (x.shape, torch.int64):
        return None
    return (((*x.shape[:-2], *output_size), x.dtype),)


def _windows(
    size: Sequence[int],
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> int | None:
    """How many windows of two axes there are; None where torch may refuse them."""
    if not all(len(numbers) == 2 for numbers in (size, kernel, dilation, padding, stride)):
        return None
    if min(*size, *kernel, *dilation, *stride) < 1 or min(padding) < 0:
        return None
    each = [
        (extent + 2 * p - d * (k - 1) - 1) // s + 1
        for extent, k, d, p, s in zip(size, kernel, dilation, padding, stride)
    ]
    return prod(each) if min(each) >= 1 else None


@types_of("aten::im2col")
def _patches(x: Any, kernel_size: Sequence[int], *settings: Sequence[int]) -> Types | None:
    if not _is_image(x) or len(x.shape) > 4:
        return None
    *batch, channels, height, width = x.shape
    windows = _windows((height, width), kernel_size, *settings)
    return (
        None if windows is None else (((*batch, channels * prod(kernel_size), windows), x.dtype),)
    )


@types_of("aten::col2im")
def _image_of_patches(
    x: Any, output_size: Sequence[int], kernel_size: Sequence[int], *settings: Sequence[int]
) -> Types | None:
    if not is_value(x) or x.dtype not in FLOATS or len(x.shape) not in (2, 3) or 0 in x.shape:
        return None
    windows = _windows(output_size, kernel_size, *settings)
    *batch, columns, count = x.shape
    if windows != count or columns % prod(kernel_size):
        return None
    shape: Shape = (*batch, columns // prod(kernel_size), *output_size)
    return ((shape, x.dtype),)


# --- borders -----------------------------------------------------------------------------------------


def _continued(axes: int, *, mirrored: bool) -> Formula:
    """Padding of the last axes by what lies at the edge, or by what lies inside, mirrored."""

    def formula(x: Any, padding: Sequence[int]) -> Types | None:
        if x.dtype not in FLOATS or len(x.shape) not in (axes + 1, axes + 2) or 0 in x.shape:
            return None
        if len(padding) != 2 * axes or min(padding) < 0:
            return None
        shape = list(x.shape)
        for axis in range(axes):
            before, after = padding[2 * axis : 2 * axis + 2]
            if mirrored and not (before < shape[-1 - axis] and after < shape[-1 - axis]):
                return None
            shape[-1 - axis] = shape[-1 - axis] + before + after
        return ((tuple(shape), x.dtype),)

    return formula


def _continued_gradient(forward: Formula) -> Formula:
    def formula(gradient: Any, x: Any, padding: Sequence[int]) -> Types | None:
        return (type_of(x),) if forward(x, padding) == (type_of(gradient),) else None

    return formula


for _axes in (1, 2, 3):
    for _kind in ("reflection", "replication"):
        _formula = _continued(_axes, mirrored=_kind == "reflection")
        add(_formula, f"aten::{_kind}_pad{_axes}d")
        add(_continued_gradient(_formula), f"aten::{_kind}_pad{_axes}d_backward")
