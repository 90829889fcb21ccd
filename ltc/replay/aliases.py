"""Which memory the tensors lie in that a call can use, and where in it.

A view is known by its base and by how it is derived from that.  Two calls are alike where their
tensors lie in one another's memory alike: what is read and written there is the same then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ltc.device.recording.state import State
from ltc.device.recording.tensors import state_of
from ltc.replay.conditions import FoundTensor


class Place(NamedTuple):
    """Where a tensor lies.

    root    the number of its base, or of itself where it is no view: in the order of the tensors
    chain   how a view is derived from its base; () of what is no view
    object  the place of the first tensor that is this very object
    """

    root: int
    chain: tuple[Any, ...]
    object: int


class TensorPlaces:
    """Of the tensors on a device, in their order.

    places  where each lies
    states  what each is; none once the call is over
    roots   the bases; none once the call is over
    types   shape, dtype and number of the device of each
    types_of_roots  of each base
    """

    def __init__(self, tensors: Sequence[Any]) -> None:
        self.states: list[State] = [state_of(tensor) for tensor in tensors]
        self.roots: list[State] = []
        self.places: list[Place] = []
        numbers: dict[int, int] = {}
        objects: dict[int, int] = {}
        for place, (tensor, state) in enumerate(zip(tensors, self.states)):
            root = root_of(state)
            number = numbers.setdefault(id(root), len(self.roots))
            if number == len(self.roots):
                self.roots.append(root)
            chain = state.chain if state.base is not None else ()
            self.places.append(Place(number, chain, objects.setdefault(id(tensor), place)))
        self.types = [(tuple(x.shape), x.dtype, x.get_device()) for x in tensors]
        self.types_of_roots = [root.type for root in self.roots]

    def situation(self) -> int:
        return hash(tuple((root, repr(chain), one) for root, chain, one in self.places))

    def numbers(self) -> dict[int, int]:
        """Of the bases, by their states."""
        return {id(root): number for number, root in enumerate(self.roots)}

    def moved(self, tensors: Sequence[Any]) -> int | None:
        """The place of one that lies elsewhere now, such as behind `x.data = y`."""
        for place, (tensor, state) in enumerate(zip(tensors, self.states)):
            if state_of(tensor) is not state or root_of(state) is not self.root_at(place):
                return place
        return None

    def root_at(self, place: int) -> State:
        return self.roots[self.places[place].root]

    def first_at(self, root: int) -> int:
        """The place of the first tensor that lies there, of those that are no views if there are any."""
        there = [place for place, one in enumerate(self.places) if one.root == root]
        return next((place for place in there if not self.places[place].chain), there[0])

    def let_go(self) -> None:
        self.states, self.roots = [], []

    # --- in words

    def told(self, place: int, name: Callable[[int], str]) -> str:
        """How a tensor lies in another one's memory, or that it does not."""
        root, chain, _ = self.places[place]
        first = self.first_at(root)
        if chain:
            steps = ", ".join(map(_step, chain))
            return f"{name(place)} is a view by {steps} of {self.told_root(root, name)}"
        if first == place:
            return f"{name(place)} is a tensor of its own"
        return f"{name(place)} is the memory of {name(first)}"

    def told_root(self, root: int, name: Callable[[int], str]) -> str:
        first = self.first_at(root)
        if self.places[first].chain:
            return f"a tensor of {tuple(self.types_of_roots[root][0])}"
        return name(first)


def same_memory(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Of CPU tensors, the place of the first that is the same elements in memory: mostly its own."""
    firsts: dict[Any, int] = {}
    return [firsts.setdefault(_address(tensor), place) for place, tensor in enumerate(tensors)]


def _address(tensor: torch.Tensor) -> Any:
    """Equal for tensors of the same elements in memory; its own for one that has none."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def root_of(state: State) -> State:
    """The base of a view; any other state itself."""
    return state if state.base is None else state.base


def _step(link: tuple) -> str:
    """One by which a view is derived: slice(0, 3, 6)."""
    overload, args, kwargs, index = link
    given = [*map(repr, args), *(f"{key}={value!r}" for key, value in kwargs.items())]
    part = "" if index is None else f"[{index}]"
    return f"{overload.overloadpacket.__name__}({', '.join(given)}){part}"


# --- the guard ----------------------------------------------------------------------------------


def lines_of_roots(
    places: Sequence[Place],
    found: Sequence[FoundTensor],
    used: Sequence[int],
    names: dict[str, Any],
) -> Iterator[str]:
    """Code that gives each base its name, r0, r1, …, where all tensors lie as they did.

    used   the numbers of those that the program is given, or writes to
    names  of what the code knows; what it needs besides is put there
    """
    fixed = {root: one for root, one in _fixed_roots(places, found).items() if root in used}
    met: set[int] = set()
    for number, (one, (root, chain, first)) in enumerate(zip(found, places)):
        memory = f"s{number}.base" if chain else f"s{number}"
        yield f"    s{number} = storage_of({one.expression}).lazy"
        conditions = []
        if chain:
            names[f"chain{number}"] = chain
            conditions.append(f"s{number}.chain == chain{number}")
        if root in met:
            conditions += [f"{memory} is r{root}", *_same_object(number, first, places, found)]
            if not chain:
                conditions.append(f"s{number}.base is None")
        else:
            yield f"    r{root} = {memory}"
            conditions += _conditions_of_root(root, fixed, root in used, names)
            met.add(root)
        yield f"    if not ({' and '.join(conditions)}): raise Changed"
    yield from _lines_of_difference(
        [root for root in sorted(met) if root not in fixed], fixed, names
    )


def _fixed_roots(places: Sequence[Place], found: Sequence[FoundTensor]) -> dict[int, State]:
    """Those of tensors that are themselves part of the guard."""
    return {
        place.root: root_of(state_of(one.tensor))
        for one, place in reversed([*zip(found, places)])
        if one.is_fixed
    }


def _conditions_of_root(
    root: int, fixed: Mapping[int, State], is_used: bool, names: dict[str, Any]
) -> Iterator[str]:
    if root in fixed:
        names[f"fixed{root}"] = fixed[root]
        yield f"r{root} is fixed{root}"
        return
    yield f"r{root}.base is None"
    if is_used:
        yield f"r{root}.device is device"


def _same_object(
    number: int, first: int, places: Sequence[Place], found: Sequence[FoundTensor]
) -> Iterator[str]:
    """Gradients are the object's: two of one memory may have different ones."""
    mine = found[number].expression
    if first != number:
        yield f"{mine} is {found[first].expression}"
        return
    for other, (root, chain, original) in enumerate(places[:number]):
        if (root, chain) == places[number][:2] and original == other:
            yield f"{mine} is not {found[other].expression}"


def _lines_of_difference(
    moving: Sequence[int], fixed: Mapping[int, State], names: dict[str, Any]
) -> Iterator[str]:
    """No two bases are one."""
    if moving:
        names["fixed_roots"] = frozenset(fixed.values())
        yield f"    moving = {{{', '.join(f'r{root}' for root in moving)}}}"
        yield (
            f"    if len(moving) != {len(moving)} or not fixed_roots.isdisjoint(moving): "
            f"raise Changed"
        )
