"""The places where a node's operands are read, if it is computed at an index: views are index maps."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from ltc.ir import ops
from ltc.ir.loop_nest import ZERO, Affine, Guard, flattened, split, variable
from ltc.ir.node import Node
from ltc.passes.fusion.draft import Draft, Index

VIEWS = frozenset({ops.PERMUTE, ops.SLICE, ops.EXPAND, ops.RESHAPE, ops.FLIP, ops.BARRIER})
LOOKUPS = frozenset({ops.TAKE, ops.GATHER})  # of what is in memory, at an index that is computed


def behind_barrier(node: Node) -> bool:
    return node.op is ops.BARRIER


_Dims = tuple[Affine, ...]
Place = tuple[Node, Index, tuple[Guard, ...]]


def _by_dims(index: Index) -> _Dims:
    """The index of a node that is no view: only those are read at a place in memory."""
    return cast(_Dims, index)


def offset_of(node: Node, index: Index) -> Affine:
    return index if isinstance(index, Affine) else flattened(index, node.shape)


def operand_places(
    node: Node, index: Index, guards: tuple[Guard, ...], draft: Draft
) -> list[Place]:
    """Each operand with where it is read when the node is computed at `index`."""
    if node.op.kind == "reduce":
        return [(node.inputs[0], _reduced_index(node, _by_dims(index), draft), guards)]
    if node.op is ops.PAD:
        return _padded(node, _by_dims(index), guards)
    if node.op is ops.CONCAT:
        return _joined(node, _by_dims(index), guards)
    if node.op is ops.INSERT:
        return _inserted(node, _by_dims(index), guards)
    if node.op in VIEWS:
        return [(node, index, guards)]
    if node.op is ops.RANDOM_BITS:
        return [(node.inputs[0], (), guards)]
    if node.op in LOOKUPS:
        return [(node.inputs[1], _index_of_index(node, _by_dims(index)), guards)]
    return [(n, _broadcast_index(n, index, node), guards) for n in node.inputs]


def _broadcast_index(operand: Node, index: Index, node: Node) -> Index:
    if isinstance(index, Affine):
        return index if operand.shape == node.shape else tuple(ZERO for _ in operand.shape)
    used = index[len(index) - len(operand.shape) :]
    return tuple(ZERO if extent == 1 else i for i, extent in zip(used, operand.shape))


def _reduced_index(node: Node, index: tuple[Affine, ...], draft: Draft) -> tuple[Affine, ...]:
    dims, shape = node.attr("dims"), node.inputs[0].shape
    assert draft.depth is not None  # its rows are open where it has a reduction
    kept, inner = list(index), draft.depth
    result: list[Affine] = []
    for d, extent in enumerate(shape):
        if d in dims:
            result.append(variable(inner, extent))
            inner += 1
        else:
            result.append(kept.pop(0))
    return tuple(result)


def _padded(node: Node, index: _Dims, guards: tuple[Guard, ...]) -> list[Place]:
    x, value = node.inputs
    moved = tuple(i.shifted(-low) for i, low in zip(index, node.attr("low")))
    sides = zip(moved, x.shape, node.attr("low"), node.attr("high"))
    inside = tuple(Guard(i, 0, n) for i, n, low, high in sides if low or high)
    return [(x, moved, guards + inside), (value, (), guards)]


def _joined(node: Node, index: _Dims, guards: tuple[Guard, ...]) -> list[Place]:
    result: list[Place] = []
    before, dim = 0, node.attr("dim")
    for part in node.inputs:
        moved = list(index)
        moved[dim] = index[dim].shifted(-before)
        inside = Guard(moved[dim], 0, part.shape[dim])
        result.append((part, tuple(moved), (*guards, inside)))
        before += part.shape[dim]
    return result


def _inserted(node: Node, index: _Dims, guards: tuple[Guard, ...]) -> list[Place]:
    base, new = node.inputs
    moved = tuple(i.shifted(-start) for i, start in zip(index, node.attr("starts")))
    sides = zip(moved, new.shape, base.shape)
    inside = tuple(Guard(i, 0, n) for i, n, extent in sides if n != extent)
    return [(base, index, guards), (new, moved, guards + inside)]


def _index_of_index(node: Node, index: tuple[Affine, ...]) -> tuple[Affine, ...]:
    """Return where a lookup finds its index."""
    if node.op is ops.GATHER:
        return index
    dim = node.attr("dim")
    return index[dim : dim + len(node.inputs[1].shape)]


def looked_up(node: Node, index: Index, draft: Draft) -> tuple[Node, Affine, int]:
    """Return where a lookup reads: (a node in memory, its element at index 0, elements to the
    next).
    """
    x, dim = node.inputs[0], node.attr("dim")
    width = 1 if node.op is ops.GATHER else len(node.inputs[1].shape)
    found = len(draft.space)  # a variable that stands for the index, whatever it is
    dims = _by_dims(index)
    looked = (*dims[:dim], Affine(0, ((found, 1),)), *dims[dim + width :])
    space = (*draft.space, x.shape[dim])
    base, place = through_views(x, looked, space, lambda view, _: view in draft.whole)
    offset = offset_of(base, place)
    rest = Affine(offset.constant, tuple(term for term in offset.terms if term[0] != found))
    return (base.inputs[0] if behind_barrier(base) else base), rest, offset.coefficient(found)


def through_views(
    node: Node,
    index: Index,
    space: tuple[int, ...],
    stays: Callable[[Node, Index], bool] = lambda node, index: False,
) -> tuple[Node, Index]:
    """The node that the views lead to, and its index; views that have none stay.

    Args:
        stays: True if a view is not to be looked through.
    """
    while node.op in VIEWS and node.op is not ops.BARRIER and not stays(node, index):
        x = node.inputs[0]
        if node.op is ops.RESHAPE:
            flat = offset_of(node, index)
            parts = split(flat, x.shape, space)
            index = flat if parts is None else parts
        elif isinstance(index, Affine):
            return node, index
        else:
            index = _viewed(node, index, x.shape)
        node = x
    return node, index


def _viewed(node: Node, index: tuple[Affine, ...], shape: tuple[int, ...]) -> tuple[Affine, ...]:
    if node.op is ops.PERMUTE:
        result: list[Affine] = [ZERO] * len(shape)
        for position, d in enumerate(node.attr("dims")):
            result[d] = index[position]
        return tuple(result)
    if node.op is ops.SLICE:
        starts, steps = node.attr("starts"), node.attr("steps")
        return tuple(i.times(s).shifted(a) for i, a, s in zip(index, starts, steps))
    if node.op is ops.EXPAND:
        used = index[len(index) - len(shape) :]
        return tuple(ZERO if extent == 1 else i for i, extent in zip(used, shape))
    assert node.op is ops.FLIP, node.op
    flipped = node.attr("dims")
    return tuple(
        i.times(-1).shifted(extent - 1) if d in flipped else i
        for d, (i, extent) in enumerate(zip(index, shape))
    )
