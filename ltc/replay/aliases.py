"""The memory that tensors lie in: which of them share it, and how a view is derived from its base.

Two calls are alike where their tensors lie in one another's memory alike: what is read and written
there is the same then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ltc.device.recording.state import State
from ltc.device.torch_device import storage_of


class MemoryLayout(NamedTuple):
    """The layout of some tensors in memory; equal if they lie in one another's memory alike.

    Attributes:
        places: For each tensor the number of its base, or its own; for a view with its derivation.
        objects: For each tensor the place of the first tensor that is the same object.
    """

    places: list[Any]
    objects: list[int]

    @property
    def roots(self) -> list[int]:
        """Return the number of the base of each tensor; a tensor that is no view is its own base."""
        return [place[0] if isinstance(place, tuple) else place for place in self.places]

    def has_twins(self, count: int) -> bool:
        """Return True if a tensor behind the first `count` is the same memory as an earlier one."""
        return any(self.places.index(one) < n for n, one in enumerate(self.places) if n >= count)

    def told(self, place: int, name: Callable[[int], str], base_types: Sequence[tuple]) -> str:
        """Return in words how a tensor lies in the memory of others."""
        found = self.places[place]
        if isinstance(found, tuple):
            steps = ", ".join(map(_step, found[1]))
            return f"{name(place)} is a view by {steps} of {self.told_root(found[0], name, base_types)}"
        first = self.places.index(found)
        told = "a tensor of its own" if first == place else f"the memory of {name(first)}"
        return f"{name(place)} is {told}"

    def told_root(self, root: int, name: Callable[[int], str], base_types: Sequence[tuple]) -> str:
        if root in self.places:
            return name(self.places.index(root))
        return f"a tensor of {tuple(base_types[root][0])}"


def layout_of(tensors: Sequence[torch.Tensor]) -> tuple[dict[State, int], MemoryLayout]:
    """Return the numbers of the bases of some tensors on a device, and their layout."""
    numbers, places = places_of(tensors, {})
    return numbers, MemoryLayout(places, same_objects(tensors))


def places_of(
    tensors: Sequence[torch.Tensor], bases: Mapping[State, int]
) -> tuple[dict[State, int], list[Any]]:
    """Return the numbers of all bases, and the places of the tensors.

    Args:
        tensors: on a device, each with a state.
        bases: the numbers of the bases of other tensors, which come before.
    """
    numbers = dict(bases)
    places: list[Any] = []
    for tensor in tensors:
        state = storage_of(tensor).lazy
        base = state.base
        if base is None:
            places.append(numbers.setdefault(state, len(numbers)))
        else:
            places.append((numbers.setdefault(base, len(numbers)), state.chain))
    return numbers, places


def same_objects(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return for each tensor the place of the first that is this very object."""
    first: dict[int, int] = {}
    return [first.setdefault(id(tensor), place) for place, tensor in enumerate(tensors)]


def same_memory(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return for each CPU tensor the place of the first that has the same elements in memory."""
    firsts: dict[Any, int] = {}
    return [firsts.setdefault(address(tensor), place) for place, tensor in enumerate(tensors)]


def address(tensor: torch.Tensor) -> Any:
    """Return a key that is equal for tensors with the same elements in memory."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _step(link: tuple) -> str:
    """Return the text of a call by which a view is derived, such as slice(0, 3, 6)."""
    overload, args, kwargs, index = link
    given = [*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())]
    part = "" if index is None else f"[{index}]"
    return f"{overload.overloadpacket.__name__}({', '.join(given)}){part}"
