"""Kernels in the making, and where in them a value is read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

from ltc.ir.loop_nest import Affine, Guard
from ltc.ir.node import Node

# An index of each dimension, or one position where a reshape leaves no such index.
Index = tuple[Affine, ...] | Affine  # one of each dimension, or the place in memory


@dataclass(eq=False)
class Draft:
    """A kernel while nodes are still added to it.

    Attributes:
        depth: The first variable of its reductions, after its rows; None while it has none.
        members: Nodes computed in it -> the places (index, guards).
        stores: Nodes it puts in memory -> offset.
        reads: Nodes whose values it loads, or will compute itself.
        views: The views among `reads`, which it loads as they lie in memory: (node, offset,
        guards); other variables might read through them at elements that need not exist.
        whole: Nodes that it finds in memory at every place.
        passes: Number of reductions.
        product: The product of which this is the epilogue, or None.
        sums: Nodes that add up its values over some of its rows -> (offset, summand: a node, its
        index and guards).
    """

    space: tuple[int, ...]
    depth: int | None = None
    members: dict[Node, set[tuple[Any, ...]]] = field(default_factory=lambda: defaultdict(set))
    stores: dict[Node, Affine] = field(default_factory=dict)
    reads: set[Node] = field(default_factory=set)
    views: set[tuple[Any, ...]] = field(default_factory=set)
    whole: set[Node] = field(default_factory=set)
    passes: int = 0
    product: Node | None = None
    sums: dict[Node, tuple[Any, ...]] = field(default_factory=dict)

    def keep(self, node: Node) -> None:
        """Read the node from memory at every place."""
        self.reads.add(node)
        self.whole.add(node)


class ReadPlace:
    """The place where a node is read: in a draft, at an index, under guards."""

    __slots__ = ("draft", "index", "guards")

    def __init__(self, draft: Draft, index: Index, guards: tuple[Guard, ...]) -> None:
        self.draft, self.index, self.guards = draft, index, guards

    def key(self) -> tuple[Any, ...]:
        return id(self.draft), self.index, self.guards


def reaches(
    needs: Mapping[Draft | Node, set[Draft | Node]],
    start: Draft | Node,
    goals: Container[Draft | Node],
) -> bool:
    """Return True if a unit waits for one of others, be it by way of a third."""
    seen, waiting = {start}, [start]
    while waiting:
        unit = waiting.pop()
        if unit in goals:
            return True
        new = needs[unit] - seen
        seen |= new
        waiting.extend(new)
    return False
