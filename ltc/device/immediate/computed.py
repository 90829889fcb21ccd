"""The results of a call that has run, and the states that hold them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from weakref import ref

import torch

from ltc.aten.call import Call, CallResult

_RUN = Call("ltc::run", (), {})  # what every computed value names as its call: none was recorded
_new = object.__new__
FEW = 128  # references that are not worth looking through


class ComputedValue(CallResult):
    """A value that is there: what a call has made.

    A call has two things to set: the rest is the same for all, or the tensor says it.

    Attributes:
        tensor: On the CPU, of any strides; others may lie in its memory.
    """

    __slots__ = ()
    call, index = _RUN, 0
    shape: Any = property(lambda self: tuple(self.tensor.shape))
    dtype: Any = property(lambda self: self.tensor.dtype)

    def as_operand(self) -> CallResult:
        """The same, as a `Call` names what it reads."""
        operand = CallResult(self.recorder, self.call, self.index, self.shape, self.dtype)
        operand.tensor = self.tensor
        return operand


def computed(recorder: Any, tensor: torch.Tensor, noted: CallResult | None = None) -> ComputedValue:
    """Return the value that a call, in the recording of `recorder`, has made.

    Args:
        noted: the result of the noted call; None if the call was not noted.
    """
    value = _new(ComputedValue)  # kernels spell this out
    value.recorder, value.noted = recorder, noted
    value.tensor = tensor.resolve_conj() if tensor.dtype.is_complex else tensor
    return value


class LivingStates:
    """The states that calls have made and that are still referenced; the others are freed.

    Attributes:
        refer: Adds a weak reference to one.
    """

    def __init__(self) -> None:
        self._references: list[ref[Any]] = []
        self.refer, self._forgotten = self._references.append, 0

    def append(self, state: Any) -> None:
        self.refer(ref(state))
        if not len(self._references) % FEW:
            self.forget_dead()

    def extend(self, states: Iterable[Any]) -> None:
        for state in states:
            self.append(state)

    def forget_dead(self) -> int:
        """Drop the dead states and return the number of living ones."""
        known = self._references
        living = [one for one in known if one() is not None]
        self._forgotten += len(known) - len(living)
        known[:] = living
        return len(living)

    @property
    def made(self) -> int:
        """Return how many states were ever made."""
        return self._forgotten + len(self._references)

    def __iter__(self) -> Iterator[Any]:
        return iter(
            [
                state
                for one in self._references
                if (state := one()) is not None and not state.is_in_core
            ]
        )
