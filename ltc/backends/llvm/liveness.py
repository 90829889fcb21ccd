"""The liveness of kernels' results: the steps that need them, and the memory they may lie in.

Some values take the place of another that dies where they are made: a kernel that reads an element
only where it stores one of the same type may store it there.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from ltc.backends.llvm.schedule import ProgramStep, sent_by
from ltc.ir import ops
from ltc.ir.graph import Graph
from ltc.ir.node import Node
from ltc.llvm.ops.dispatch import ScratchBuffer
from ltc.passes.fusion.in_place import in_place, stores_of
from ltc.passes.memory_planner import Lifetime, OutputBuffer


def nbytes_of(node: Node) -> int:
    return node.size * node.dtype.itemsize


class Lifetimes:
    """The lifetimes of a program's values that are neither inputs nor outputs.

    Attributes:
        over: Value -> the one whose memory it takes; that one is no other's.
        values: All of them.
    """

    def __init__(
        self, steps: list[ProgramStep], graph: Graph, shares: dict[Node, Node],
        placed: Container[Node], fixed: Container[Node],
    ) -> None:  # fmt: skip
        """Compute the lifetimes.

        Args:
            shares: Result of the reference -> the node whose memory it may lie in.
            placed: Nodes that have their memory already.
            fixed: Nodes that must lie in the block.
        """
        self._steps, self._shares, self._fixed = steps, shares, fixed
        self._last = self._last_readers(graph)
        self._first = {
            node: position
            for position, step in enumerate(steps)
            if step.is_native
            for node in step.writes
            if node not in placed
        }
        self.values = frozenset(self._first)
        self.over: dict[Node, Node] = {}
        for position, step in enumerate(steps):
            self._choose_places(position, step)

    def all(self) -> list[Lifetime]:
        values = [
            Lifetime(node, nbytes_of(node), first, self._last[node], in_block=node in self._fixed)
            for node, first in self._first.items()
            if node not in self.over
        ]
        for position, step in enumerate(self._steps):
            between = dict.fromkeys(n for code in step.codes for n in code.nodes)
            values.extend(
                Lifetime(buffer, buffer.nbytes, position, position)
                for buffer in between
                if isinstance(buffer, ScratchBuffer)
            )
        return values

    def hosts(self, made: Iterable[Node]) -> list[OutputBuffer]:
        """The buffers that a launch makes for outputs, until the steps that fill them."""
        wanted = set(made)
        return [
            OutputBuffer(node, nbytes_of(node), position)
            for position, step in enumerate(self._steps)
            for node in step.writes
            if node in wanted
        ]

    def _last_readers(self, graph: Graph) -> dict[Node, int]:
        last: dict[Node, int] = {}
        for position, step in enumerate(self._steps):
            for node in (*step.reads, *step.writes):
                last[self._shares.get(node, node)] = position
        ends = len(self._steps)
        last.update({self._shares[n]: ends for n in graph.outputs if n in self._shares})
        for node, position in self._sent_until(ends):
            last[node] = max(last[node], position)
        return last

    def _sent_until(self, ends: int) -> Iterable[tuple[Node, int]]:
        """Give the operands of exchanges, and the step until which they are read: the wait, if any."""
        units = [step.unit for step in self._steps]
        waits = {
            unit.inputs[0]: position
            for position, unit in enumerate(units)
            if isinstance(unit, Node) and unit.op is ops.COLLECTIVE_WAIT
        }
        for unit in units:
            for node in sent_by(unit):
                until = waits.get(unit, ends) if isinstance(unit, Node) else ends
                yield self._shares.get(node, node), until

    def _choose_places(self, position: int, step: ProgramStep) -> None:
        """Each value that may: in the place of one that this step reads as the last one."""
        kernel, operands = stores_of(step.unit)
        dying = {
            node
            for node in step.reads
            if node in self._first
            and node not in self._fixed
            and node not in operands
            and self._last[self.over.get(node, node)] == position
        }
        if kernel is None or not dying:
            return
        for store in kernel.stores:
            if store.node in self._first and store.node not in self._fixed:
                target = in_place(kernel, store, dying)
                if target is not None:
                    dying.discard(target)
                    step.lies_over(target)
                    self.over[store.node] = target = self.over.get(target, target)
                    self._last[target] = self._last[store.node]
