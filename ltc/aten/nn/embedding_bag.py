"""Rules of embedding bags: sums and means of a table's rows, over stretches of a list of indices.

    offsets  where in `indices` each bag begins; bags follow one another, and the last ends with the
             list, or where one more offset says

What the CPU's kernel notes for its backward depends on the way it took.  These rules need of it
how many rows a mean is over, and find out the rest from indices and offsets, so they never depend
on that way.  Sources: torch.nn.functional.embedding_bag's documentation; EmbeddingBag.cpp for what
happens at the edges.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ltc.aten.extern import made_by_kernel
from ltc.aten.promote import compute_dtype
from ltc.aten.registry import traces
from ltc.aten.rules.indexing import checked
from ltc.ir import build, ops
from ltc.ir.build import Shape
from ltc.ir.node import Node, make

SUM, MEAN = 0, 1
# Of these, and without padding, the CPU's kernel reads a bag no further than the last offset says.
_READ_BY_STRETCHES = frozenset({torch.float32, torch.float16, torch.bfloat16})


class _Bags(NamedTuple):
    """The bags to which some indices belong.

    Attributes:
        rows: i64 [indices]: the rows of the table, each inside it.
        bag: i64 [indices]: the bag of each.
        padding: Bool [indices]: True for the padding's; None if there is none.
        beyond: Bool [indices]: True if it lies behind the last bag's end; None if none can.
        count: The number of bags.
    """

    rows: Node
    bag: Node
    padding: Node | None
    beyond: Node | None
    count: int  # type: ignore[assignment]  # a tuple has a method of this name

    def of_members(self, values: Node) -> Node:
        """`values`, one line for each index, with zeros for those that are in no bag."""
        for left_out in (self.padding, self.beyond):
            if left_out is not None:
                shape = (*left_out.shape, *(1,) * (len(values.shape) - 1))
                values = build.where(build.reshape(left_out, shape), 0, values)
        return values


def _bags(
    indices: Node, offsets: Node, table_rows: int, count: int, dtype: torch.dtype, padding_idx: int
) -> _Bags:
    """The bags of a call on a table of `table_rows` rows of `dtype`."""
    length = indices.shape[0]
    offsets = _checked_offsets(offsets, length)
    rows = _checked_rows(indices, table_rows)
    padding = build.eq(rows, padding_idx) if padding_idx >= 0 else None
    beyond = None
    if offsets.shape[0] > count and padding is None and dtype in _READ_BY_STRETCHES:
        beyond = build.ge(build.iota(length), build.select(offsets, 0, count))
    return _Bags(rows, _bag_of_each(offsets, count, length), padding, beyond, count)


def _checked_rows(indices: Node, table_rows: int) -> Node:
    text = "embedding_bag: Expected idx >= 0 && idx < num_embeddings but found idx to be {}"
    return checked(indices, table_rows, text)


def _checked_offsets(offsets: Node, length: int) -> Node:
    first = checked(
        build.slice_dim(offsets, 0, 0, 1),
        1,
        "offsets[0] has to be 0, i.e., the first sequence in the mini-batch has to start from "
        "position 0. However, got {}",
    )
    rest = checked(
        build.slice_dim(offsets, 0, 1, offsets.shape[0]),
        length + 1,
        f"offsets[-1] can not be greater than input's length {length} but got offsets[-1] of {{}}",
    )
    return build.concat([first, rest], 0)


def _bag_of_each(offsets: Node, count: int, length: int) -> Node:
    """Return how many bags begin at or before each position, but for the first."""
    starts = build.slice_dim(offsets, 0, 0, count)
    zeros = build.full((length + 1,), 0, torch.int64)
    begun = make(ops.PUT, zeros, starts, build.full((count,), 1, torch.int64), dim=0, mode="add")
    return build.slice_dim(make(ops.CUMSUM, begun, dim=0), 0, 0, length) - 1


def _summed(values: Node, places: Node, count: int) -> Node:
    """Lines of `values` added up where `places` says: [count, ...]."""
    zeros = build.full((count, *values.shape[1:]), 0, values.dtype)
    return make(ops.PUT, zeros, places, values, dim=0, mode="add")


def _sizes(bags: _Bags) -> Node:
    """Return how many rows each bag holds, paddings left out."""
    ones = build.full(bags.bag.shape, 1, torch.int64)
    return _summed(bags._replace(beyond=None).of_members(ones), bags.bag, bags.count)


def noted_shapes(
    bags: Shape, dtype: torch.dtype, indices: Shape, offsets: Shape, mode: int, padding_idx: int,
    keeps_for_backward: bool,
) -> tuple[Shape, Shape, Shape]:  # fmt: skip
    """Shapes of what the CPU's kernel notes for the backward; they depend on how it computes.

    Args:
        bags: the shape of the bags' values, [count, width]
        dtype: theirs
        indices: the shape of the indices
        offsets: the shape of the offsets

    Returns:
        those of the bag of each index, the number of rows of each bag, the largest row of each.
    """
    count, width = bags
    by_stretches = dtype in _READ_BY_STRETCHES and padding_idx < 0
    noted = (0,) if mode == SUM and by_stretches else indices
    sizes = (count,) if keeps_for_backward or mode != SUM else offsets
    return noted, sizes, (count, width) if mode not in (SUM, MEAN) else sizes


@traces("aten::_embedding_bag")
def embedding_bag(*operands: Any) -> tuple[Node, Node, Node, Node]:
    return _embedding_bag(True, *operands)


@traces("aten::_embedding_bag_forward_only")
def embedding_bag_forward_only(*operands: Any) -> tuple[Node, Node, Node, Node]:
    return _embedding_bag(False, *operands)


def _embedding_bag(
    keeps_for_backward: bool,
    weight: Node,
    indices: Node,
    offsets: Node,
    scale_grad_by_freq: bool = False,
    mode: int = SUM,
    sparse: bool = False,
    per_sample_weights: Node | None = None,
    include_last_offset: bool = False,
    padding_idx: int = -1,
) -> tuple[Node, Node, Node, Node]:
    count = offsets.shape[0] - int(include_last_offset)
    if mode not in (SUM, MEAN) or not _has_bags(indices, count):
        return NotImplemented
    bags = _bags(indices, offsets, weight.shape[0], count, weight.dtype, padding_idx)
    dtype = compute_dtype(weight.dtype)
    rows = build.cast(build.take(weight, bags.rows, 0), dtype)
    if per_sample_weights is not None:
        rows = rows * build.unsqueeze(build.cast(per_sample_weights, dtype), -1)
    summed = _summed(bags.of_members(rows), bags.bag, bags.count)
    noted, counted, _ = noted_shapes(
        summed.shape, weight.dtype, indices.shape, offsets.shape, mode, padding_idx,
        keeps_for_backward,
    )  # fmt: skip
    sizes = build.full(counted, 0, torch.int64)
    if mode == MEAN:
        sizes = _sizes(bags)
        summed = summed / build.cast(build.unsqueeze(build.maximum(sizes, 1), -1), dtype)
    of_indices = build.full((0,), 0, torch.int64) if noted == (0,) else bags.bag
    return summed, of_indices, sizes, sizes


def _has_bags(indices: Node, count: int) -> bool:
    return len(indices.shape) == 1 and indices.shape[0] > 0 and count > 0


def _are_bags(grad: Node, indices: Node, offsets: Node, *others: Node | None) -> bool:
    """Return True if there are bags, all operands are flat, and `grad` has a row for each bag."""
    flat = [len(one.shape) == 1 for one in (indices, offsets, *others) if one is not None]
    if len(grad.shape) != 2 or not all(flat) or not _has_bags(indices, grad.shape[0]):
        return False
    return bool(offsets.shape[0] >= grad.shape[0])


@traces("aten::_embedding_bag_backward")
def embedding_bag_backward(
    grad: Node,
    indices: Node,
    offsets: Node,
    offset2bag: Node,
    bag_size: Node,
    maximum_indices: Node,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: Node | None,
    padding_idx: int = -1,
) -> Node:
    """Each row's gradient is the sum of those of the bags that it is in."""
    if (
        mode not in (SUM, MEAN)
        or sparse
        or not _are_bags(grad, indices, offsets, bag_size, per_sample_weights)
    ):
        return NotImplemented
    if scale_grad_by_freq:  # the CPU's kernel divides by how often another row is used
        indices = _checked_rows(indices, num_weights)  # and looks at none of them
        given = grad, indices, offsets, offset2bag, bag_size, maximum_indices, num_weights
        rest = scale_grad_by_freq, mode, sparse, per_sample_weights, padding_idx
        table = build.full((num_weights, grad.shape[1]), 0, grad.dtype)
        return made_by_kernel("aten::_embedding_bag_backward", table, *given, *rest)
    bags = _bags(indices, offsets, num_weights, grad.shape[0], grad.dtype, padding_idx)
    dtype = compute_dtype(grad.dtype)
    grad = build.cast(grad, dtype)
    if mode == MEAN:
        grad = grad / build.cast(build.unsqueeze(build.maximum(bag_size, 1), -1), dtype)
    lines = build.take(grad, bags.bag, 0)
    if per_sample_weights is not None:
        lines = lines * build.unsqueeze(build.cast(per_sample_weights, dtype), -1)
    return _summed(bags.of_members(lines), bags.rows, num_weights)


@traces("aten::_embedding_bag_per_sample_weights_backward")
def embedding_bag_per_sample_weights_backward(
    grad: Node,
    weight: Node,
    indices: Node,
    offsets: Node,
    offset2bag: Node,
    mode: int,
    padding_idx: int = -1,
) -> Node:
    """The gradient of each factor is its row times the gradient of its bag."""
    if mode != SUM or not _are_bags(grad, indices, offsets) or len(weight.shape) != 2:
        return NotImplemented
    bags = _bags(indices, offsets, weight.shape[0], grad.shape[0], weight.dtype, padding_idx)
    dtype = compute_dtype(grad.dtype)
    lines = build.take(build.cast(grad, dtype), bags.bag, 0)
    rows = build.cast(build.take(weight, bags.rows, 0), dtype)
    return bags.of_members(build.sum_of(lines * rows, 1))
