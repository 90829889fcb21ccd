"""What is computed again by each reader, or waited for by none, in place of being stored."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from math import prod

from ltc.ir import ops
from ltc.ir.node import Node
from ltc.passes.fusion.draft import ReadPlace
from ltc.passes.fusion.index_maps import VIEWS
from ltc.passes.fusion.legality import COSTLY, base_of
from ltc.support.sizes.choices import by_sample

_SAME_SIZE = VIEWS - {ops.BARRIER}  # where they do not repeat or leave out elements

LONGEST_REPEATED = 24  # nodes of a formula that every reader computes again: gelu's has ten
MOST_COSTLY_REPEATED = 2  # functions among them: one takes as long as storing and loading
SMALL_BESIDE = 8  # a value this many times smaller is no burden to read again


def is_awaited(node: Node, places: Iterable[ReadPlace]) -> bool:
    """Whether a large kernel waits for a number that is soon added up: it waits for no more."""
    if node.op.kind != "reduce" or node.size != 1:
        return False
    size = SMALL_BESIDE * node.inputs[0].size
    return any(prod(place.draft.space) >= size for place in places)


def has_one_source(node: Node, position: Mapping[Node, int], native: Container[Node]) -> bool:
    """Whether a short formula makes the node of one value, and of what is small beside it.

    position  of every node in the graph's order
    native    the nodes that kernels can compute
    """
    frontier, costly = {node}, 0
    for _ in range(LONGEST_REPEATED):
        latest = max(frontier, key=position.__getitem__, default=node)
        if (len(frontier) == 1 and latest is not node) or not frontier:
            return True
        costly += latest.op in COSTLY
        same = latest.op in _SAME_SIZE and latest.size == latest.inputs[0].size
        is_step = latest.op.kind == "elementwise" or same
        if not is_step or latest not in native or costly > MOST_COSTLY_REPEATED:
            return False
        frontier.remove(latest)
        frontier.update(_large_operands(latest, node))
    return False


def is_narrowest_draw(node: Node) -> bool:
    """Whether a chain makes the node of random bits alone, and nothing in it is as narrow.

    A mask of dropout: its random numbers take eight times its memory, and more to make again.
    """
    latest = node
    for _ in range(LONGEST_REPEATED):
        if latest.op.kind != "elementwise":  # what others read may be several tensors at once
            return False
        large = _large_operands(latest, node)
        if len(large) != 1:
            return False
        (latest,) = large
        if latest.dtype.itemsize <= node.dtype.itemsize:
            return False
        if latest.op is ops.RANDOM_BITS:
            return True
    return False


def _large_operands(latest: Node, node: Node) -> list[Node]:
    """The operands of one node of a formula that are not small beside its result."""
    with by_sample():  # what is computed again is right, small or not
        return [n for n in latest.inputs if SMALL_BESIDE * base_of(n).size > node.size]
