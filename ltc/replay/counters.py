"""Step counts that an optimizer keeps as one small CPU tensor for each parameter, counted together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.utils.weak import WeakIdKeyDictionary

_homes = WeakIdKeyDictionary()  # counter -> (vector that it is an element of, its place there)


class Counters:
    """Some 0-dim CPU tensors that a call adds to.

    They are made elements of one vector, so that reading and counting all is one operation each;
    they stay the tensors that they are.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], growth: Sequence[float]) -> None:
        """growth  what a call adds to each"""
        for dtype in {tensor.dtype for tensor in tensors}:
            _bring_together([t for t in tensors if t.dtype is dtype and t not in _homes])
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._places: list[tuple[int, int]] = []
        vectors: list[torch.Tensor] = []
        for tensor in tensors:
            vector, place = _homes[tensor]
            if not any(vector is one for one in vectors):
                vectors.append(vector)
            number = next(n for n, one in enumerate(vectors) if one is vector)
            self._places.append((number, place))
        for number, vector in enumerate(vectors):
            added = torch.zeros_like(vector)
            for (one, place), by in zip(self._places, growth):
                if one == number:
                    added[place] = by
            self._parts.append((vector, added))
        self._in_order = self._places == [(0, place) for place in range(len(tensors))]

    def values(self) -> list[float]:
        """Of each, in order."""
        lists = [vector.tolist() for vector, _ in self._parts]
        if self._in_order and len(lists[0]) == len(self._places):
            return lists[0]
        return [lists[number][place] for number, place in self._places]

    def grow(self) -> None:
        for vector, added in self._parts:
            vector.add_(added)


def _bring_together(tensors: Sequence[torch.Tensor]) -> None:
    if not tensors:
        return
    vector = torch.stack([tensor.detach() for tensor in tensors])
    for place, tensor in enumerate(tensors):
        tensor.data = vector[place]
        _homes[tensor] = vector, place
