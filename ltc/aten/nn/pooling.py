"""Rules of pooling over windows and of its gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ltc.aten.nn.interpolation import averages
from ltc.aten.nn.resampling import resampled, transposed
from ltc.aten.promote import compute_dtype
from ltc.aten.registry import traces
from ltc.ir import build, ops
from ltc.ir.node import Node, make
from ltc.ir.tensor_type import TensorType


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


def _max_pool(rank: int, x: Node, window: dict[Any, Any], results: Any) -> Any:
    if not x.size or not results[0].size or not x.dtype.is_floating_point:
        return NotImplemented
    batched = _batched(x, rank)
    shape = (*batched.shape[:2], *results[0].shape[-rank:])
    pooled = make(ops.MAX_POOL, batched, shape=shape, **window)
    return tuple(build.reshape(build.get(pooled, i), results[0].shape) for i in (0, 1))


@traces("aten::max_pool2d_with_indices")
def max_pool2d(
    x: Node,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    *,
    results: Sequence[TensorType],
) -> Node:
    return _max_pool(2, x, _window(2, kernel_size, stride, padding, dilation), results)


@traces("aten::max_pool3d_with_indices")
def max_pool3d(
    x: Node,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    *,
    results: Sequence[TensorType],
) -> Node:
    return _max_pool(3, x, _window(3, kernel_size, stride, padding, dilation), results)


def _max_pool_backward(rank: int, grad: Node, x: Node, indices: Node) -> Any:
    if not x.size or not grad.size:
        return NotImplemented
    shape = _batched(x, rank).shape
    grad = build.cast(grad, compute_dtype(grad.dtype))
    made = make(ops.MAX_POOL_GRADIENT, _batched(grad, rank), _batched(indices, rank), shape=shape)
    return build.reshape(made, x.shape)


@traces("aten::max_pool2d_with_indices_backward")
def max_pool2d_backward(
    grad: Node,
    x: Node,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Node,
) -> Node:
    return _max_pool_backward(2, grad, x, indices)


@traces("aten::max_pool3d_with_indices_backward")
def max_pool3d_backward(
    grad: Node,
    x: Node,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
    indices: Node,
) -> Node:
    return _max_pool_backward(3, grad, x, indices)


def _average_attributes(count_include_pad: bool, divisor_override: int | None) -> dict[Any, Any]:
    return {"count_padding": bool(count_include_pad), "divisor": divisor_override or 0}


def _average_pool(
    rank: int, x: Node, window: dict[Any, Any], options: dict[Any, Any], results: Any
) -> Any:
    if not x.size or not x.dtype.is_floating_point:
        return NotImplemented
    batched = _batched(x, rank)
    shape = (*batched.shape[:2], *results[0].shape[-rank:])
    pooled = make(ops.AVERAGE_POOL, batched, shape=shape, **window, **options)
    return build.reshape(pooled, results[0].shape)


@traces("aten::avg_pool2d")
def avg_pool2d(
    x: Node, kernel_size: Sequence[int], stride: Sequence[int] = (),
    padding: int | Sequence[int] = 0, ceil_mode: bool = False, count_include_pad: bool = True,
    divisor_override: int | None = None, *, results: Sequence[TensorType],
) -> Node:  # fmt: skip
    window = _window(2, kernel_size, stride, padding)
    options = _average_attributes(count_include_pad, divisor_override)
    return _average_pool(2, x, window, options, results)


@traces("aten::avg_pool3d")
def avg_pool3d(
    x: Node, kernel_size: Sequence[int], stride: Sequence[int] = (),
    padding: int | Sequence[int] = 0, ceil_mode: bool = False, count_include_pad: bool = True,
    divisor_override: int | None = None, *, results: Sequence[TensorType],
) -> Node:  # fmt: skip
    window = _window(3, kernel_size, stride, padding)
    options = _average_attributes(count_include_pad, divisor_override)
    return _average_pool(3, x, window, options, results)


def _average_pool_backward(
    rank: int, grad: Node, x: Node, window: dict[Any, Any], options: dict[Any, Any]
) -> Any:
    if not x.size or not grad.size:
        return NotImplemented
    shape = _batched(x, rank).shape
    grad = build.cast(grad, compute_dtype(grad.dtype))
    made = make(ops.AVERAGE_POOL_GRADIENT, _batched(grad, rank), shape=shape, **window, **options)
    return build.reshape(made, x.shape)


@traces("aten::avg_pool2d_backward")
def avg_pool2d_backward(
    grad: Node,
    x: Node,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Node:
    options = _average_attributes(count_include_pad, divisor_override)
    return _average_pool_backward(2, grad, x, _window(2, kernel_size, stride, padding), options)


@traces("aten::avg_pool3d_backward")
def avg_pool3d_backward(
    grad: Node,
    x: Node,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
) -> Node:
    options = _average_attributes(count_include_pad, divisor_override)
    return _average_pool_backward(3, grad, x, _window(3, kernel_size, stride, padding), options)


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
def adaptive_avg_pool(
    x: Node, output_size: Sequence[int], *, results: Sequence[TensorType]
) -> Node:
    """Means over windows that cover each dimension, with as little overlap as can be."""
    if not x.size or not results[0].size or not x.dtype.is_floating_point:
        return NotImplemented
    shape = results[0].shape
    sizes = shape[-len(output_size) :]
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
