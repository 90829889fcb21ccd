"""Rules of the overloads that write diagonals."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ltc.aten.registry import traces
from ltc.aten.rules.movement import View, _put_back_by_position
from ltc.ir import build
from ltc.ir.node import Node
from ltc.ir.tensor_type import TensorType


def _written(base: Node, new: Node, offset: int, dim1: int, dim2: int) -> Node:
    step: View = (torch.ops.aten.diagonal.default, (offset, dim1, dim2), {}, None)
    return _put_back_by_position(base, new, [step])


@traces("aten::diagonal_scatter", moves=True)
def diagonal_scatter(x: Node, src: Node, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Node:
    return _written(x, src, offset, dim1, dim2)


@traces("aten::diagonal_backward", moves=True)
def diagonal_backward(
    grad: Node, input_sizes: Sequence[int], offset: int, dim1: int, dim2: int
) -> Node:
    return _written(build.full(tuple(input_sizes), 0, grad.dtype), grad, offset, dim1, dim2)


@traces("aten::diag_embed", moves=True)
def diag_embed(
    x: Node, offset: int = 0, dim1: int = -2, dim2: int = -1, *, results: Sequence[TensorType]
) -> Node:
    """x[..., i] at column i + offset of row i, or at row i - offset of column i; else 0."""
    rank = len(x.shape) + 1
    dim1, dim2 = dim1 % rank, dim2 % rank
    size = x.shape[-1] + abs(offset)
    x = build.pad(x, [0] * (rank - 1), [0] * (rank - 2) + [abs(offset)])
    x = build.unsqueeze(x, -1 if offset >= 0 else -2)
    matrix = (size, size)
    on_it = build.eq(build.iota_along(matrix, 1), build.iota_along(matrix, 0) + offset)
    made = build.where(on_it, x, 0)
    rest = [d for d in range(rank) if d not in (dim1, dim2)]
    order = [*rest, dim1, dim2]
    return build.permute(made, [order.index(d) for d in range(rank)])
