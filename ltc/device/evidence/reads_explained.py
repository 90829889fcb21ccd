"""Explain a read of a pending value, with the cure for the kind of loop in which it stands.

Marks and optimizer steps between two reads at one place tell the kinds apart: a training loop that marks
its steps, one that does not, and a loop that only reads, as sampling and evaluation do.
"""

from __future__ import annotations

import ast
import itertools
import linecache
from collections.abc import Iterator

from ltc.explaining.explanation import Explanation
from ltc.explaining.user_stack import UserFrame
from ltc.support.bounded_table import BoundedTable

BEFORE_THE_MARK = (
    "read it after ltm.mark_step() or in a step closure; decide on the device: torch.where, "
    "nn.utils.clip_grad_norm_"
)
BEHIND_THE_MARK = (
    "compute this value before ltm.mark_step(), and leave its read behind: the step then gives it"
)
NO_MARK = "call ltm.mark_step() after optimizer.step(), and read behind it"
READING_LOOP = (
    "add the values up on the device, mark each iteration, and read once behind the loop; if each "
    "iteration needs the value of the last, as in sampling, run this loop on the CPU"
)

_made = itertools.count(1)
_optimizer_steps = 0


def count_optimizer_step() -> None:
    """Note that an optimizer has made a step, on any device."""
    global _optimizer_steps
    _optimizer_steps = next(_made)


class ReadCut(Explanation):
    """A cut by a read; its cure is that of its latest event, found when it is asked for."""

    _progress: tuple[int, int] | None = None  # marks and optimizer steps at the latest event
    _between: tuple[int, int] | None = None  # and between the latest two

    def come(self, marks: int) -> None:
        """Note a read at this place.

        Args:
            marks: The number of step marks on the device so far.
        """
        before, now = self._progress, (marks, _optimizer_steps)
        if before is not None:
            self._between = now[0] - before[0], now[1] - before[1]
        self._progress = now

    @property
    def cure(self) -> str:
        if self._between is None:
            return BEFORE_THE_MARK
        marks, optimizer_steps = self._between
        if marks:
            behind = bool(self.stack) and is_behind_a_mark(self.stack[0])
            return BEHIND_THE_MARK if behind else BEFORE_THE_MARK
        return NO_MARK if optimizer_steps else READING_LOOP

    @cure.setter
    def cure(self, text: str) -> None:
        """Do nothing: it follows from what has come."""


# --- where the mark is ------------------------------------------------------------------------------

_MARKS = frozenset({"mark_step", "sync"})
_answers: BoundedTable[UserFrame, bool] = BoundedTable("ReadsBehindMarks", 256)


def is_behind_a_mark(place: UserFrame) -> bool:
    """Return True if a line of the loop in which a line stands, above it, marks the step."""
    known = _answers.get(place)
    return _answers.keep(place, _looked_up(place)) if known is None else known


def _looked_up(place: UserFrame) -> bool:
    try:
        tree = ast.parse("".join(linecache.getlines(place.file)))
    except (SyntaxError, ValueError):  # no source, or that of a notebook's magic
        return False
    loops = [one for one in _loops(tree) if one.lineno <= place.line <= (one.end_lineno or 0)]
    if not loops:
        return False
    innermost = max(loops, key=lambda loop: loop.lineno)
    return any(_is_mark(node) and node.lineno < place.line for node in _calls(innermost))


def _loops(tree: ast.AST) -> Iterator[ast.For | ast.While]:
    return (node for node in ast.walk(tree) if isinstance(node, (ast.For, ast.While)))


def _calls(tree: ast.For | ast.While) -> Iterator[ast.Call]:
    body = itertools.chain.from_iterable(map(ast.walk, tree.body))
    return (node for node in body if isinstance(node, ast.Call))


def _is_mark(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name == "optimizer_step":
        return any(keyword.arg == "barrier" for keyword in call.keywords)
    return name in _MARKS
