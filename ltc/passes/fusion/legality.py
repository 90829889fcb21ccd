"""Whether a node may be computed where it is read, and how often that would be."""

from __future__ import annotations

from collections.abc import Container, Iterable
from math import prod

import torch

from ltc.ir import ops
from ltc.ir.loop_nest import Affine, flattened, identity
from ltc.ir.node import Node
from ltc.ir.tensor_type import LOW_PRECISION
from ltc.passes.fusion.draft import Draft, ReadPlace
from ltc.passes.fusion.index_maps import VIEWS, offset_of
from ltc.support.sizes.choices import by_sample
from ltc.support.sizes.marks import is_symbolic

LEAVES = frozenset({ops.INPUT, ops.SCALAR, ops.CONSTANT})
COSTLY = frozenset(
    op for op in ops.ALL.values() if op.infer is ops.EXP.infer and op.kind == "elementwise"
) - {ops.FLOOR, ops.CEIL, ops.TRUNC, ops.ROUND, ops.COPYSIGN}

FLOAT32 = torch.float32
MOST_MEMBERS = 160  # nodes of one kernel: code grows with them, and registers do not
MOST_PASSES = 6  # reductions of one kernel: each recomputes what it reads
FEWEST_ROWS = 16  # below this a kernel that reduces inside its rows keeps too few threads busy
SMALL_SPACE = 4096  # elements that one thread is done with before a second has begun


def base_of(node: Node) -> Node:
    while node.op in VIEWS:
        node = node.inputs[0]
    return node


def fits(node: Node, place: ReadPlace) -> bool:
    """Whether the index map of every operand, and each number, can be written down at this place."""
    if place.draft.product is not None and computes_with_size(node):
        return False
    if isinstance(place.index, Affine):
        if node.op is ops.RANDOM_BITS:
            return True
        return node.op.kind == "elementwise" and all(
            n.shape == node.shape or n.size == 1 for n in node.inputs
        )
    return True


def computes_with_size(node: Node) -> bool:
    """Whether one of its operands is a number that is a size: the text of an epilogue has no such."""
    numbers = [one for one in map(base_of, (node, *node.inputs)) if one.op is ops.CONSTANT]
    return any(is_symbolic(one.attr("literal")) for one in numbers)


def times_computed(place: ReadPlace) -> int:
    """How often the loops around a value compute it: it moves out of those it does not read."""
    forms = [place.index] if isinstance(place.index, Affine) else list(place.index)
    forms.extend(guard.form for guard in place.guards)
    last = max((v for form in forms for v, _ in form.terms), default=-1)
    return prod(place.draft.space[: last + 1])


def is_cheap(node: Node) -> bool:
    """A number, positions, or a wider copy: what every kernel may compute for itself."""
    if node.op is ops.IOTA:
        return True
    if node.op is ops.CAST and node.inputs[0].dtype in LOW_PRECISION and node.dtype is FLOAT32:
        return True
    if node.size != 1 or node.op.kind not in ("elementwise", "view"):
        return False
    return all(base_of(n).op in LEAVES for n in node.inputs)


def is_light(node: Node) -> bool:
    """One or two instructions on what is in memory anyway."""
    is_simple = node.op.kind in ("elementwise", "leaf") and node.op not in COSTLY
    return is_simple and all(base_of(n).op in LEAVES for n in node.inputs)


def covers(node: Node, place: ReadPlace) -> bool:
    """Whether the place sees every element of the node exactly once, in order."""
    if place.guards:
        return False
    space, depth = place.draft.space, place.draft.depth
    offset = offset_of(node, place.index)
    if _are_as_many(node, space) and offset == flattened(identity(space), space):
        return True
    rows = space[:depth] if depth is not None else None
    return (
        rows is not None and _are_as_many(node, rows) and offset == flattened(identity(rows), rows)
    )


def _are_as_many(node: Node, space: tuple[int, ...]) -> bool:
    """Whether the node has an element for each point; that it has not is decided by no guard.

    Who does not see that a place covers a node is right as well, at sizes where it happens to.
    """
    with by_sample(node.size, *space):
        if node.size != prod(space):
            return False
    return bool(node.size == prod(space))


def has_many_rows(rows: tuple[int, ...]) -> bool:
    """Whether they keep the threads busy; a guess that is right at any sizes."""
    with by_sample(*rows):
        return bool(prod(rows) >= FEWEST_ROWS)


def may_reduce_in(node: Node, place: ReadPlace) -> bool:
    """Whether each row of the draft can hold this reduction."""
    draft = place.draft
    if place.guards or isinstance(place.index, Affine) or draft.passes >= MOST_PASSES:
        return False
    if draft.product is not None:
        return False
    k = _rows_used(place, node)
    if k is None:
        return False
    reduced = tuple(node.inputs[0].shape[d] for d in node.attr("dims"))
    rows, rest = draft.space[:k], draft.space[k:]
    with by_sample(*rows, *reduced):  # either way is right
        if prod(rows) < FEWEST_ROWS and prod(rows) * prod(reduced) > SMALL_SPACE:
            return False
    if draft.depth is None:
        return rest == reduced or not rest
    return k == draft.depth and rest == reduced


def _rows_used(place: ReadPlace, node: Node) -> int | None:
    """How many leading variables the node's index is, each for one dimension in turn."""
    offset = offset_of(node, place.index)
    space = place.draft.space
    candidates = [place.draft.depth] if place.draft.depth is not None else range(len(space) + 1)
    for k in candidates:
        rows = space[:k]
        if prod(rows) == node.size and offset == flattened(identity(rows), rows):
            if k < len(space) and space[k] == 1 and place.draft.depth is None:
                continue  # a later k says the same and leaves what is reduced
            return k
    return None


def open_rows(node: Node, place: ReadPlace) -> None:
    draft = place.draft
    if draft.depth is None:
        reduced = tuple(node.inputs[0].shape[d] for d in node.attr("dims"))
        k = _rows_used(place, node)
        draft.depth = k
        if k == len(draft.space):
            draft.space = (*draft.space, *reduced)


def reduced_for(nodes: Iterable[Node], draft: Draft, native: Container[Node]) -> set[Node]:
    """The reductions of the draft's rows that the nodes are made of, or are.

    native  the nodes that kernels can compute
    """
    rows, waiting = draft.space[: draft.depth], list(nodes)
    seen: set[Node] = set()
    while waiting and len(seen) < MOST_MEMBERS:
        node = waiting.pop()
        is_made = node.op.kind in ("elementwise", "reduce") or node.op in VIEWS
        if is_made and node in native and node not in seen:
            seen.add(node)
            waiting.extend(node.inputs)
    return {node for node in seen if node.op.kind == "reduce" and node.shape == rows}
