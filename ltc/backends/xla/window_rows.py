"""The rows of poolings, with the channels second or last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ltc.backends.xla.elementwise_rows import Row, is_float
from ltc.backends.xla.numbers import Array, wide
from ltc.ir import ops
from ltc.ir.node import Node, is_channels_last
from ltc.ir.ops import Op

_NO_PLACE = np.iinfo(np.int64).max  # of padding: behind every element


def _spatial(node: Node, shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(shape[1:-1] if is_channels_last(node) else shape[2:])


def _over_all(node: Node, of_spatial: Sequence[Any], of_others: Any) -> tuple[Any, ...]:
    """One entry for each dimension."""
    if is_channels_last(node):
        return (of_others, *of_spatial, of_others)
    return (of_others, of_others, *of_spatial)


def _geometry(node: Node, operand: Sequence[int], result: Sequence[int]) -> dict[str, Any]:
    """The arguments by which lax.reduce_window goes from an operand's shape to a result's.

    A result of torch's ceil_mode has windows that lie partly behind the padding.
    """
    kernel, stride, padding = (node.attr(name) for name in ("kernel", "stride", "padding"))
    dilation = node.attr("dilation")
    sizes = zip(kernel, stride, padding, dilation, _spatial(node, operand), _spatial(node, result))
    padded = [
        (p, max((windows - 1) * s + d * (k - 1) + 1 - n - p, 0)) for k, s, p, d, n, windows in sizes
    ]
    return {
        "window_dimensions": _over_all(node, kernel, 1),
        "window_strides": _over_all(node, stride, 1),
        "window_dilation": _over_all(node, dilation, 1),
        "padding": _over_all(node, padded, (0, 0)),
    }


# --- maxima --------------------------------------------------------------------------------------


def _lowest(x: Array) -> np.ndarray:
    if is_float(x):
        return np.array(-np.inf, x.dtype)
    return np.array(jnp.iinfo(x.dtype).min, x.dtype)


def _greater(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return one of two (value, place): the first of the largest; the last NaN, if there is any."""
    (x, i), (y, j) = a, b
    nan_x, nan_y = x != x, y != y
    earlier = jnp.where(nan_x & nan_y, i > j, i < j)
    equal = (nan_x & nan_y) | (x == y)
    first = jnp.where(equal, earlier, (x > y) | (nan_x & ~nan_y))
    return jnp.where(first, x, y), jnp.where(first, i, j)


def max_pool(node: Node, x: Array) -> tuple[Array, Array]:
    """Values, and where they stand among an image's elements."""
    shape = node.attr("shape")
    if 0 in shape:
        return jnp.zeros(shape, x.dtype), jnp.zeros(shape, jnp.int64)
    extents = _spatial(node, x.shape)
    place = lax.iota(jnp.int64, int(np.prod(extents))).reshape(_over_all(node, extents, 1))
    places = jnp.broadcast_to(place, x.shape)
    geometry = _geometry(node, x.shape, shape)
    initial = _lowest(x), np.int64(_NO_PLACE)
    made = lax.reduce_window((x, places), initial, _greater, **geometry)
    return made[0], made[1]


def max_pool_gradient(node: Node, grad: Array, indices: Array) -> Array:
    if node.size == 0 or grad.size == 0:
        return jnp.zeros(node.shape, grad.dtype)
    if is_channels_last(node):
        grad, indices = jnp.moveaxis(grad, -1, 1), jnp.moveaxis(indices, -1, 1)
    images = grad.shape[0] * grad.shape[1]
    image = lax.broadcasted_iota(jnp.int64, (images, grad.size // images), 0)
    size = int(np.prod(_spatial(node, node.shape)))
    zeros = jnp.zeros((images, size), grad.dtype)
    places = image, indices.reshape(image.shape)
    made = zeros.at[places].add(grad.reshape(image.shape), mode="drop")
    made = made.reshape(*grad.shape[:2], *_spatial(node, node.shape))
    return jnp.moveaxis(made, 1, -1) if is_channels_last(node) else made


# --- averages ------------------------------------------------------------------------------------


def _divisors(node: Node, operand: Sequence[int], result: Sequence[int]) -> np.ndarray:
    """Return what the sum of each window is divided by.  Source: PyTorch's AvgPoolKernel.cpp."""
    if node.attr("divisor"):
        return np.array(float(node.attr("divisor")))
    whole = np.ones((), np.float64)
    sizes = zip(
        node.attr("kernel"), node.attr("stride"), node.attr("padding"),
        _spatial(node, operand), _spatial(node, result),
    )  # fmt: skip
    for k, s, p, n, windows in sizes:
        start = np.arange(windows) * s - p
        stop = np.minimum(start + k, n + p)
        if not node.attr("count_padding"):
            start, stop = np.maximum(start, 0), np.minimum(stop, n)
        whole = whole[..., None] * np.maximum(stop - start, 1)
    return whole[..., None] if is_channels_last(node) else whole


def _summed(node: Node, operand: Sequence[int], result: Sequence[int], x: Array) -> Array:
    return lax.reduce_window(x, np.zeros((), x.dtype), lax.add, **_geometry(node, operand, result))


def average_pool(node: Node, x: Array) -> Array:
    if node.size == 0:
        return jnp.zeros(node.shape, x.dtype)
    total = _summed(node, x.shape, node.shape, wide(x))
    divisors = _divisors(node, x.shape, node.shape).astype(total.dtype)
    return (total / divisors).astype(x.dtype)


def average_pool_gradient(node: Node, grad: Array) -> Array:
    if node.size == 0 or grad.size == 0:
        return jnp.zeros(node.shape, grad.dtype)
    part = wide(grad)
    part = part / _divisors(node, node.shape, grad.shape).astype(part.dtype)
    like = jax.ShapeDtypeStruct(node.shape, part.dtype)
    spread = jax.linear_transpose(lambda x: _summed(node, node.shape, grad.shape, x), like)
    return spread(part)[0].astype(grad.dtype)


ROWS: dict[Op, Row] = {
    ops.MAX_POOL: max_pool,
    ops.MAX_POOL_GRADIENT: max_pool_gradient,
    ops.AVERAGE_POOL: average_pool,
    ops.AVERAGE_POOL_GRADIENT: average_pool_gradient,
}
