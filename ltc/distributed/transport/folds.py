"""The reductions a collective can do, on CPU tensors, in the order of the members."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

OPERATIONS: dict[str, Callable] = {
    "sum": torch.add,
    "mul": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
}
BITWISE = frozenset({"and", "or"})
ORDERED = frozenset({"min", "max"})
# Sums of these are held in float32 and rounded once.
_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def check_reduction(kind: str, dtype: torch.dtype) -> None:
    """Raise RuntimeError for a kind that does not exist, or not for this dtype."""
    if kind not in OPERATIONS:
        raise RuntimeError(
            f"Invalid reduce type: {kind}. There are {', '.join(sorted(OPERATIONS))}."
        )
    if kind in BITWISE and (dtype.is_floating_point or dtype.is_complex):
        raise RuntimeError(f"reduce type {kind!r} needs integers or bool, not {dtype}")
    if kind in ORDERED and dtype.is_complex:
        raise RuntimeError(f"reduce type {kind!r} needs numbers that have an order, not {dtype}")


class Fold:
    """A reduction of one range, operand by operand in member order.

    own       this member's operand
    target    where the result goes; may be `own` itself
    position  of `own` among the operands
    """

    def __init__(self, kind: str, own: torch.Tensor, target: torch.Tensor, position: int) -> None:
        self.operation, self.own, self.target = OPERATIONS[kind], own, target
        wide = _WIDE.get(own.dtype)
        # Where own is among the first two, the result is made in place, without a running copy.
        self.direct = wide is None and position < 2
        self.first = position == 0
        self.running: Any = None if self.direct else torch.empty_like(own, dtype=wide or own.dtype)
        self.count = 0

    def take(self, operand: torch.Tensor) -> None:
        """The next operand; not called for `own`, which `take_own` stands for."""
        operation, target = self.operation, self.target
        if not self.direct:
            self._run(operand)
        elif self.count >= 2:
            operation(target, operand, out=target)
        elif self.first:
            operation(self.own, operand, out=target)
        else:
            operation(operand, self.own, out=target)
        self.count += 1

    def take_own(self) -> None:
        if not self.direct:
            self._run(self.own)
        self.count += 1

    def _run(self, operand: torch.Tensor) -> None:
        if self.count == 0:
            self.running.copy_(operand)
        else:
            self.operation(self.running, operand, out=self.running)

    def finish(self) -> None:
        """Called after the last operand."""
        if not self.direct:
            self.target.copy_(self.running)
