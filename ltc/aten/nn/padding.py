"""Rules of padding by what is there, mirrored or repeated, and of its gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from ltc.aten.promote import compute_dtype
from ltc.aten.registry import traces
from ltc.ir import build
from ltc.ir.node import Node

# One dimension padded by (dim, low, high), or its gradient by these and the extent that was padded.
Pad = Callable[[Node, int, int, int], Node]
PadBack = Callable[[Node, int, int, int, int], Node]


def _amounts(rank: int, padding: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(dim, low, high) of each padded dimension, the first one first; `padding` has the last first."""
    for k in reversed(range(len(padding) // 2)):
        yield rank - 1 - k, padding[2 * k], padding[2 * k + 1]


def _padded(x: Node, padding: Sequence[int], pad: Pad) -> Node:
    """A negative amount cuts elements off."""
    for dim, low, high in _amounts(len(x.shape), padding):
        if low > 0 or high > 0:
            x = pad(x, dim, max(low, 0), max(high, 0))
        x = build.slice_dim(x, dim, max(-low, 0), x.shape[dim] - max(-high, 0))
    return x


def _padded_back(grad: Node, x: Node, padding: Sequence[int], pad_back: PadBack) -> Node:
    amounts = {dim: low + high for dim, low, high in _amounts(len(x.shape), padding)}
    padded = tuple(extent + amounts.get(dim, 0) for dim, extent in enumerate(x.shape))
    if not x.size or grad.shape != padded:
        return NotImplemented
    grad = build.cast(grad, compute_dtype(grad.dtype))
    for dim, low, high in _amounts(len(x.shape), padding):
        cut = [(0, 0)] * len(x.shape)
        cut[dim] = max(-low, 0), max(-high, 0)
        grad = build.pad(grad, [a for a, _ in cut], [b for _, b in cut])
        if low > 0 or high > 0:
            grad = pad_back(grad, dim, max(low, 0), max(high, 0), x.shape[dim])
    return grad


def _at(x: Node, dim: int, start: int, extent: int) -> Node:
    """Zeros, with `x` from `start` on along one dimension of that extent."""
    low, high = [0] * len(x.shape), [0] * len(x.shape)
    low[dim], high[dim] = start, extent - start - x.shape[dim]
    return build.pad(x, low, high)


def _joined(parts: Sequence[Node], dim: int) -> Node:
    return build.concat([part for part in parts if part.shape[dim]], dim)


# --- mirrored at the border --------------------------------------------------------------------------


def _mirrored(x: Node, dim: int, low: int, high: int) -> Node:
    last = x.shape[dim] - 1
    before = build.flip(build.slice_dim(x, dim, 1, 1 + low), [dim])
    behind = build.flip(build.slice_dim(x, dim, last - high, last), [dim])
    return _joined([before, x, behind], dim)


def _mirrored_back(grad: Node, dim: int, low: int, high: int, extent: int) -> Node:
    total = build.slice_dim(grad, dim, low, low + extent)
    if low:
        before = build.flip(build.slice_dim(grad, dim, 0, low), [dim])
        total = total + _at(before, dim, 1, extent)
    if high:
        behind = build.flip(build.slice_dim(grad, dim, low + extent, grad.shape[dim]), [dim])
        total = total + _at(behind, dim, extent - 1 - high, extent)
    return total


@traces(
    "aten::reflection_pad1d", "aten::reflection_pad2d", "aten::reflection_pad3d", moves=True
)  # fmt: skip
def reflection_pad(x: Node, padding: Sequence[int]) -> Node:
    return _padded(x, padding, _mirrored) if x.size else NotImplemented


@traces(
    "aten::reflection_pad1d_backward", "aten::reflection_pad2d_backward",
    "aten::reflection_pad3d_backward",
)  # fmt: skip
def reflection_pad_backward(grad: Node, x: Node, padding: Sequence[int]) -> Node:
    return _padded_back(grad, x, padding, _mirrored_back)


# --- the border repeated -----------------------------------------------------------------------------


def _repeated(x: Node, dim: int, low: int, high: int) -> Node:
    extent = x.shape[dim]
    first, last = build.slice_dim(x, dim, 0, 1), build.slice_dim(x, dim, extent - 1, extent)
    return _joined([_times(first, dim, low), x, _times(last, dim, high)], dim)


def _times(x: Node, dim: int, count: int) -> Node:
    return build.expand(x, (*x.shape[:dim], count, *x.shape[dim + 1 :]))


def _repeated_back(grad: Node, dim: int, low: int, high: int, extent: int) -> Node:
    total = build.slice_dim(grad, dim, low, low + extent)
    if low:
        before = build.slice_dim(grad, dim, 0, low)
        total = total + _at(build.sum_of(before, dim, keepdim=True), dim, 0, extent)
    if high:
        behind = build.slice_dim(grad, dim, low + extent, grad.shape[dim])
        total = total + _at(build.sum_of(behind, dim, keepdim=True), dim, extent - 1, extent)
    return total


@traces(
    "aten::replication_pad1d", "aten::replication_pad2d", "aten::replication_pad3d", moves=True
)  # fmt: skip
def replication_pad(x: Node, padding: Sequence[int]) -> Node:
    return _padded(x, padding, _repeated) if x.size else NotImplemented


@traces(
    "aten::replication_pad1d_backward", "aten::replication_pad2d_backward",
    "aten::replication_pad3d_backward",
)  # fmt: skip
def replication_pad_backward(grad: Node, x: Node, padding: Sequence[int]) -> Node:
    return _padded_back(grad, x, padding, _repeated_back)
