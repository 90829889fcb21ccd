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

    depth    where its rows end and its reductions begin, or None while it has none
    members  nodes computed in it -> the places (index, guards) where
    stores   nodes it puts in memory -> offset
    reads    nodes whose values it loads, or will compute itself
    views    those of them that are views, which it loads as they lie in memory: (node, offset,
             guards); other variables might look through them, at what need not be there
    whole    nodes that it finds in memory whatever the place
    passes   how many reductions it has
    product  the product that this is the epilogue of, or None
    sums     nodes that add up what it computes, over some of its rows -> (offset, what: a node,
             its index and guards)
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
        """Reads what is in memory, whatever the place."""
        self.reads.add(node)
        self.whole.add(node)


class ReadPlace:
    """Where a node is read: in a draft, at an index, under guards."""

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
    """Whether a unit waits for one of others, be it by way of a third."""
    seen, waiting = {start}, [start]
    while waiting:
        unit = waiting.pop()
        if unit in goals:
            return True
        new = needs[unit] - seen
        seen |= new
        waiting.extend(new)
    return False
