"""Step counts that an optimizer keeps as one small CPU tensor for each parameter, counted together.

A counter is added to, the same in each call, or multiplied by a number that was computed on the way.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch
from torch.utils.weak import WeakIdKeyDictionary

_homes = WeakIdKeyDictionary()  # counter -> (vector that it is an element of, its place there)


class Counters:
    """Some 0-dim CPU tensors that a call adds to.

    They are made elements of one vector, so that reading and counting all is one operation each;
    they stay the tensors that they are.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], growth: Sequence[float | None]) -> None:
        """growth  what a call adds to each; None where it gives it another value"""
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
                if one == number and by is not None:
                    added[place] = by
            self._parts.append((vector, added))
        given = [place for place, by in zip(self._places, growth) if by is None]
        self._given: list[tuple[torch.Tensor, torch.Tensor, list[int]]] = []
        for number, vector in enumerate(vectors):
            positions = [k for k, (one, _) in enumerate(given) if one == number]
            if positions:
                index = torch.tensor([given[k][1] for k in positions], device="cpu")
                self._given.append((vector, index, positions))
        self._in_order = self._places == [(0, place) for place in range(len(tensors))]

    def values(self) -> list[float]:
        """Of each, in order."""
        lists = [vector.tolist() for vector, _ in self._parts]
        if self._in_order and len(lists[0]) == len(self._places):
            return lists[0]
        return [lists[number][place] for number, place in self._places]

    def grow(self, given: Sequence[float]) -> None:
        """`given`: the new values of those that are given one, in order."""
        for vector, added in self._parts:
            vector.add_(added)
        for vector, index, positions in self._given:
            values = [given[k] for k in positions]
            vector.index_copy_(0, index, torch.tensor(values, dtype=vector.dtype, device="cpu"))


def _bring_together(tensors: Sequence[torch.Tensor]) -> None:
    if not tensors:
        return
    vector = torch.stack([tensor.detach() for tensor in tensors])
    for place, tensor in enumerate(tensors):
        tensor.data = vector[place]
        _homes[tensor] = vector, place


# --- what a counter is multiplied by ------------------------------------------------------------


def single(x: float) -> float:
    """The float32 nearest to a number."""
    return ctypes.c_float(x).value


_ROUNDINGS: dict[torch.dtype, Callable[[float], float]] = {
    torch.float32: single,
    torch.float64: float,
}


def product_of(dtype: torch.dtype, before: str, factor: str) -> str:
    """The expression of what the CPU makes of a counter, as `multipliers` computes it."""
    return (
        f"single({before} * single({factor}))" if dtype is torch.float32 else f"{before} * {factor}"
    )


def multipliers(
    dtype: torch.dtype, before: float, after: float, numbers: Sequence[object]
) -> frozenset[int]:
    """The places of the numbers by which a counter may have been multiplied."""
    rounded = _ROUNDINGS.get(dtype)
    if rounded is None:
        return frozenset()
    return frozenset(
        place
        for place, number in enumerate(numbers)
        if isinstance(number, float) and rounded(before * rounded(number)) == after
    )
