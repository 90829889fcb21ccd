"""Rules of pooling over windows and of its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ltc.aten.nn.resampling import resampled, transposed
from ltc.aten.nn.upsampling import averages
from ltc.aten.promote import compute_dtype
from ltc.aten.registry import traces
from ltc.ir import build, ops
from ltc.ir.infer import window_extent
from ltc.ir.node import Node, make


def _each(values: Any, rank: int) -> tuple[int, ...]:
    values = (values,) if isinstance(values, int) else tuple(values)
    return values * rank if len(values) == 1 else values


def _window(rank: int, kernel: Any, stride: Any, padding: Any, dilation: Any = 1) -> dict[Any, Any]:
    kernel = _each(kernel, rank)
    return {
        "kernel": kernel,
        "stride": _each(stride, rank) if stride not in ((), [], None) else kernel,
        "padding": _each(padding, rank),
        "dilation": _each(dilation, rank),
    }


def _batched(x: Node, rank: int) -> Node:
    """[N, C, *spatial], with a batch of one where there is none."""
    return x if len(x.shape) == rank + 2 else build.unsqueeze(x, 0)


def _pooled_shape(x: Node, window: dict[Any, Any], ceil_mode: bool) -> tuple[Any, ...]:
    """The shape of what windows give of an operand, with a batch or without one.

    With `ceil_mode` the last window may reach beyond the padded operand; it begins inside.
    """
    rank = len(window["kernel"])
    shape = list(x.shape[:-rank])
    dilation = window.get("dilation", (1,) * rank)
    each = zip(x.shape[-rank:], window["kernel"], window["stride"], window["padding"], dilation)
    for extent, k, s, p, d in each:
        windows = window_extent(extent, k, s, p, p + (s - 1 if ceil_mode else 0), d)
        if ceil_mode and (windows - 1) * s >= extent + p:
            windows -= 1
        shape.append(windows)
    return tuple(shape)


def _are_pooled(x: Node, window: dict[Any, Any], ceil_mode: bool, *others: Node) -> bool:
    """Return True if the others have the shape of the pooled x."""
    ranks = {len(x.shape), *[len(other.shape) for other in others]}
    shape = _pooled_shape(x, window, ceil_mode)
    return len(ranks) == 1 and all(other.shape == shape for other in others)


def _traces_ranks(*overloads: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make the function below, whose first argument is the rank, the rule for 2 and 3 dimensions."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for rank, overload in enumerate(overloads, 2):
            traces(overload)(_at_rank(function, rank))
        return function

    return register


def _at_rank(function: Callable[..., Any], rank: int) -> Callable[..., Any]:
    return lambda *given, **named: function(rank, *given, **named)


@_traces_ranks("aten::max_pool2d_with_indices", "aten::max_pool3d_with_indices")
def max_pool(
    rank: int,
    x: Node,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
) -> Any:
    window = _window(rank, kernel_size, stride, padding, dilation)
    shape = _pooled_shape(x, window, ceil_mode)
    if not x.size or not all(n > 0 for n in shape) or not x.dtype.is_floating_point:
        return NotImplemented
    batched = _batched(x, rank)
    pooled = make(ops.MAX_POOL, batched, shape=(*batched.shape[:2], *shape[-rank:]), **window)
    return tuple(build.reshape(build.get(pooled, i), shape) for i in (0, 1))


@_traces_ranks("aten::max_pool2d_with_indices_backward", "aten::max_pool3d_with_indices_backward")
def max_pool_backward(
    rank: int,
    grad: Node,
    x: Node,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Node,
) -> Any:
    window = _window(rank, kernel_size, stride, padding, dilation)
    if not x.size or not grad.size or not _are_pooled(x, window, ceil_mode, grad, indices):
        return NotImplemented
    shape = _batched(x, rank).shape
    grad = build.cast(grad, compute_dtype(grad.dtype))
    made = make(ops.MAX_POOL_GRADIENT, _batched(grad, rank), _batched(indices, rank), shape=shape)
    return build.reshape(made, x.shape)


def _average_attributes(count_include_pad: bool, divisor_override: int | None) -> dict[Any, Any]:
    return {"count_padding": bool(count_include_pad), "divisor": divisor_override or 0}


@_traces_ranks("aten::avg_pool2d", "aten::avg_pool3d")
def average_pool(
    rank: int, x: Node, kernel_size: Sequence[int], stride: Sequence[int] = (),
    padding: int | Sequence[int] = 0, ceil_mode: bool = False, count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:  # fmt: skip
    window = _window(rank, kernel_size, stride, padding)
    options = _average_attributes(count_include_pad, divisor_override)
    if not x.size or not x.dtype.is_floating_point:
        return NotImplemented
    batched, shape = _batched(x, rank), _pooled_shape(x, window, ceil_mode)
    if not all(n > 0 for n in shape):
        return NotImplemented
    of_batch = (*batched.shape[:2], *shape[-rank:])
    pooled = make(ops.AVERAGE_POOL, batched, shape=of_batch, **window, **options)
    return build.reshape(pooled, shape)


@_traces_ranks("aten::avg_pool2d_backward", "aten::avg_pool3d_backward")
def average_pool_backward(
    rank: int,
    grad: Node,
    x: Node,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Any:
    options = _average_attributes(count_include_pad, divisor_override)
    window = _window(rank, kernel_size, stride, padding)
    if not x.size or not grad.size or not _are_pooled(x, window, ceil_mode, grad):
        return NotImplemented
    shape = _batched(x, rank).shape
    grad = build.cast(grad, compute_dtype(grad.dtype))
    made = make(ops.AVERAGE_POOL_GRADIENT, _batched(grad, rank), shape=shape, **window, **options)
    return build.reshape(made, x.shape)


def _without_overlap(x: Node, sizes: Sequence[int]) -> Node:
    """Each dimension that the windows divide as (windows, elements of one), for each of `sizes`."""
    lead = len(x.shape) - len(sizes)
    shape = [*x.shape[:lead]]
    for n, m in zip(x.shape[lead:], sizes):
        shape += (m, n // m) if n % m == 0 else (n, 1)
    return build.reshape(x, shape)


def _inner_dims(rank: int, sizes: Sequence[int]) -> list[int]:
    """The elements of one window, as `_without_overlap` has them."""
    lead = rank - len(sizes)
    return [lead + 2 * k + 1 for k in range(len(sizes))]


@traces("aten::_adaptive_avg_pool2d", "aten::_adaptive_avg_pool3d")
def adaptive_avg_pool(x: Node, output_size: Sequence[int]) -> Node:
    """Means over windows that cover each dimension, with as little overlap as can be."""
    if not x.size or not all(output_size) or not x.dtype.is_floating_point:
        return NotImplemented
    sizes = tuple(output_size)
    shape = (*x.shape[: -len(sizes)], *sizes)
    x = build.cast(x, compute_dtype(x.dtype))
    x = build.mean_of(_without_overlap(x, sizes), _inner_dims(len(x.shape), sizes))
    for dim, m in enumerate(shape):
        if x.shape[dim] != m:
            x = resampled(x, dim, averages(x.shape[dim], m))
    return x


@traces("aten::_adaptive_avg_pool2d_backward", "aten::_adaptive_avg_pool3d_backward")
def adaptive_avg_pool_backward(grad: Node, x: Node) -> Node:
    if not x.size or not grad.size:
        return NotImplemented
    if len(grad.shape) != len(x.shape) or grad.shape[0] != x.shape[0]:
        return NotImplemented
    grad = build.cast(grad, compute_dtype(grad.dtype))
    divisor = 1
    for dim, (n, m) in enumerate(zip(x.shape, grad.shape)):
        if n % m:
            grad = resampled(grad, dim, transposed(averages(n, m)))
        else:
            divisor *= n // m
    shares = [k for n, m in zip(x.shape, grad.shape) for k in (m, 1)]
    shape = [k for n, m in zip(x.shape, grad.shape) for k in (m, n // m)]
    grad = build.reshape(grad / float(divisor), shares)
    return build.reshape(build.expand(grad, tuple(shape)), x.shape)
