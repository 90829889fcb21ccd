"""What a call that has run has made, and the states that hold it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import ref

import torch

from ltc.aten.call import Call, CallResult

_RUN = Call("ltc::run", (), {})  # what every computed value names as its call: none was recorded
_FEW = 128  # references that are not worth looking through


def computed(recorder: Any, tensor: torch.Tensor) -> CallResult:
    """A value that is there: what a call, in the recording of `recorder`, has made.

    tensor  on the CPU, of any strides; others may lie in its memory
    """
    value = CallResult(recorder, _RUN, 0, tuple(tensor.shape), tensor.dtype)
    value.tensor = tensor.resolve_conj() if value.dtype.is_complex else tensor
    return value


class LivingStates:
    """The states that calls have made, as far as anybody holds them: what nobody holds is freed.

    made  how many there were
    """

    def __init__(self) -> None:
        self._references: list[ref[Any]] = []
        self._most, self._forgotten = _FEW, 0

    def append(self, state: Any) -> None:
        self._references.append(ref(state))
        if len(self._references) > self._most:
            self._forget_dead()

    def _forget_dead(self) -> None:
        known = len(self._references)
        self._references = [one for one in self._references if one() is not None]
        self._forgotten += known - len(self._references)
        self._most = max(_FEW, 2 * len(self._references))

    @property
    def made(self) -> int:
        return self._forgotten + len(self._references)

    def __iter__(self) -> Iterator[Any]:
        for reference in self._references:
            state = reference()
            if state is not None:
                yield state
