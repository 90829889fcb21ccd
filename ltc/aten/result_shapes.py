"""The shapes of a call's results as its rule tells them: numbers, or expressions of symbols.

PyTorch says once whether it takes a call, and of which types its results are.  What the shapes are at
other sizes follows from the rule, which has to be right about them anyway.  A rule that decides by
sizes what it computes, and an overload that has none, state their shapes in stated_shapes.py.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch

from ltc.aten.call import Call, CallResult, Scalar
from ltc.aten.expansion import OF_SHAPES, apply, is_real
from ltc.aten.registry import rule_of
from ltc.aten.stated_shapes import STATED
from ltc.aten.unnamed_dtype import lowering
from ltc.errors import Unsupported
from ltc.ir import ops
from ltc.ir.node import make
from ltc.ir.tensor_type import TensorType

Shape = tuple[Any, ...]


def result_shapes(call: Call, dtypes: Sequence[torch.dtype | None]) -> tuple[Shape | None, ...]:
    """The shapes of a call's results, from those of its operands.

    Args:
        call: a call that PyTorch takes at some sizes; its results are not looked at
        dtypes: of its results, in their order; None for an undefined tensor

    Returns:
        a shape for each dtype; None for None.

    Raises:
        Unsupported: where neither a rule nor a stated shape tells.
    """
    stated = STATED.get(call.name)
    try:
        with lowering(call):
            shapes = _by_rule(call, dtypes) if stated is None else stated(*call.args, **call.kwargs)
    except OF_SHAPES as error:
        raise Unsupported(f"{call.name} is refused at these sizes: {error}") from error
    if shapes is None or len(shapes) != len(dtypes):
        raise Unsupported(f"no rule gives the sizes of the results of {call.name}")
    return tuple([None if d is None else tuple(s) for s, d in zip(shapes, dtypes)])


@functools.cache
def is_told(overload: str) -> bool:
    """Return True if ltc states the shapes of an overload's results from those of its operands."""
    return overload in STATED or rule_of(overload) is not None


def _by_rule(call: Call, dtypes: Sequence[torch.dtype | None]) -> list[Shape] | None:
    rule = rule_of(call.name)
    if rule is None:
        return None
    leaves = _Leaves()
    args = [leaves.of(argument) for argument in call.args]
    kwargs = {name: leaves.of(argument) for name, argument in call.kwargs.items()}
    results: Any = [None if d is None else TensorType(_as_real(d), None) for d in dtypes]  # type: ignore[arg-type]  # no shape: who looks at it fails
    made = apply(rule, call.name, args, kwargs, results, leaves.seed())
    return None if made is None else [() if node is None else node.shape for node in made]


class _Leaves:
    """Nodes that stand for the operands of one call."""

    def __init__(self) -> None:
        self._of: dict[CallResult, Any] = {}
        self._slots = itertools.count()

    def of(self, argument: Any) -> Any:
        """The argument with a node for each value and number in it."""
        if isinstance(argument, CallResult):
            if argument not in self._of:
                self._of[argument] = self._input(argument)
            return self._of[argument]
        if isinstance(argument, Scalar):
            wrapped, dtype = bool(argument.wrapped), _as_real(argument.dtype)
            return make(ops.SCALAR, slot=next(self._slots), dtype=dtype, wrapped=wrapped)
        if isinstance(argument, (list, tuple)):
            return [self.of(part) for part in argument]
        return argument.real if isinstance(argument, complex) else argument

    def seed(self) -> Any:
        """Return the seed of a random call."""
        return make(ops.SCALAR, slot=next(self._slots), dtype=torch.int64, wrapped=True)

    def _input(self, value: CallResult) -> Any:
        dtype = _as_real(value.dtype)
        return make(ops.INPUT, index=len(self._of), dtype=dtype, shape=tuple(value.shape))


def _as_real(dtype: torch.dtype) -> torch.dtype:
    """A dtype that rules know: shapes are the same for complex numbers."""
    return dtype if is_real(dtype) else torch.float64
