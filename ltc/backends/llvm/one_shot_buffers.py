"""The places of a program's one-shot sums: words in the frame, operands in symmetric memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ltc.ir import ops
from ltc.ir.collective import Collective
from ltc.ir.loop_nest import Product
from ltc.ir.node import Node
from ltc.ir.one_shot import is_one_shot, sent_with
from ltc.ir.tensor_type import TensorType
from ltc.llvm.native.kernel_run import WORD
from ltc.llvm.ops.one_shot_sync import MEMBERS, OWN, Words, word_count
from ltc.passes.memory_planner import ALIGNMENT


@dataclass(frozen=True)
class PlannedSum:
    """One one-shot sum.

    Attributes:
        types: The types of each member's operands.
        words: The number of its words in the frame.
        is_awaited: True if the program waits for it; otherwise its results are not read.
    """

    collective: Collective
    types: tuple[TensorType, ...]
    words: int
    is_awaited: bool


class PlannedSums:
    """All one-shot sums of a program, in the order in which they begin.

    The object itself is the key of what is prepared for them: see OneShotReducer.begin.

    Attributes:
        words: The number of words in the frame of all of them.
    """

    def __init__(self, sums: tuple[PlannedSum, ...] = ()) -> None:
        self.all = sums
        self.words = sum(one.words for one in sums)


class SumPlaces:
    """The places of the one-shot sums of a program's steps in the frame and in shared memory.

    Attributes:
        planned: All of them.
    """

    def __init__(self, steps: Iterable[Any]) -> None:
        nodes = [step.unit.node for step in steps if isinstance(step.unit, Product)]
        self._starts = [node for node in nodes if node.op is ops.COLLECTIVE_START]
        awaited = {node.inputs[0] for node in nodes if node.op is ops.COLLECTIVE_WAIT}
        self._number = {node: number for number, node in enumerate(self._starts)}
        self._parts = [
            n for step in steps for n in step.writes if n.op is ops.GET and is_one_shot(n.inputs[0])
        ]
        self.planned = PlannedSums(
            tuple(
                PlannedSum(
                    node.attr("collective"),
                    _types(node),
                    word_count(node),
                    node in awaited,
                )
                for node in self._starts
            )
        )

    def awaited_by(self, step: Any) -> int:
        """The number of the sum that a step waits for, or -1."""
        node = step.unit.node if isinstance(step.unit, Product) else None
        if node is None or node.op is not ops.COLLECTIVE_WAIT:
            return -1
        return self._number[node.inputs[0]]

    def places(self, first: int, frame: int) -> dict[Any, tuple[int, int]]:
        """Return (word of the frame that holds an address, bytes to add) for each buffer.

        Args:
            first: The first word of the sums in the frame.
            frame: The value that is the frame.
        """
        found: dict[Any, tuple[int, int]] = {}
        firsts: dict[Node, int] = {}
        for start, one in zip(self._starts, self.planned.all):
            firsts[start] = first
            found[Words(start)] = (frame, WORD * first)
            for node, offset in zip(sent_with(start), _offsets(one.types)):
                found[node] = (first + OWN, offset)
            first += one.words
        for part in self._parts:
            start = part.inputs[0].inputs[0]
            member, index = divmod(part.attr("index"), start.attr("count"))
            sharers, types = start.attr("collective").sharers, _types(start)
            word = firsts[start] + MEMBERS + sharers + member
            found[part] = (word, _offsets(types)[index])
        return found


def _types(start: Node) -> tuple[TensorType, ...]:
    return tuple(TensorType(n.dtype, n.shape) for n in sent_with(start))


def _offsets(types: Iterable[TensorType]) -> list[int]:
    """Return where each operand lies, one after the other."""
    sizes = [-(-t.size * t.dtype.itemsize // ALIGNMENT) * ALIGNMENT for t in types]
    return [0, *accumulate(sizes)][:-1]
