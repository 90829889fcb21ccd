"""Small values that a program writes over, side by side in one array.

The host's time of a launch grows with its buffers, by some microseconds each; parameters and states of
optimizers are hundreds of them, and mostly small. A program takes those of one dtype together, as a
pack, and gives them back so: the next launch of the same step finds the pack as it is. Any other
reader gets an array of each part, which one launch makes when the first is asked for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ltc.backends.xla.numbers import DTYPES, Array
from ltc.ir.node import Node
from ltc.support.observation import metrics
from ltc.support.shallow_copy import elements_at

MAX_PART_BYTES = 1 << 19  # above, moving it takes longer than the host does with a buffer
FEWEST_PARTS, MOST_PARTS = 8, 64  # of a pack, whose every element is looked for among its parts


@dataclass(frozen=True)
class PackLayout:
    """The values of a pack, one behind the other."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: np.dtype[Any]

    @cached_property
    def places(self) -> tuple[int, ...]:
        return tuple(range(len(self.shapes)))

    @cached_property
    def _ends(self) -> list[int]:
        return np.cumsum([np.prod(shape, dtype=int) for shape in self.shapes]).tolist()

    @property
    def size(self) -> int:
        return self._ends[-1]

    def parts_of(self, array: Array) -> list[Array]:
        bounds = zip([0, *self._ends], self._ends, self.shapes)
        return [array[begin:end].reshape(shape) for begin, end, shape in bounds]

    def joined(self, arrays: Sequence[Array]) -> Array:
        return jnp.concatenate([array.reshape(-1) for array in arrays])

    @cached_property
    def unpack(self) -> Any:
        return jax.jit(self.parts_of)

    @cached_property
    def pack(self) -> Any:
        return jax.jit(self.joined)


class Pack:
    """The array that values lie in.

    Attributes:
        array: The latest one: a launch that writes over it gives another.
    """

    __slots__ = ("layout", "array", "_apart")

    def __init__(self, layout: PackLayout, array: Array) -> None:
        self.layout = layout
        self.replace(array)

    def replace(self, array: Array) -> None:
        self.array = array
        self._apart: list[Array] | None = None

    def apart(self) -> list[Array]:
        """An array of each value."""
        apart = self._apart
        if apart is None:
            apart = self._apart = self.layout.unpack(self.array)
        return apart


class PackedPart:
    """The handle of a value that lies in a pack."""

    __slots__ = ("pack", "place")

    def __init__(self, pack: Pack, place: int) -> None:
        self.pack, self.place = pack, place


def as_array(handle: Any) -> Any:
    """The array of a handle; other handles as they are."""
    if handle.__class__ is not PackedPart:
        return handle
    with jax.enable_x64(True):
        return handle.pack.apart()[handle.place]


def unpacked(handles: Sequence[Any], positions: Sequence[int]) -> Sequence[Any]:
    """The handles, with arrays at these positions."""
    if PackedPart not in set(map(type, handles)):
        return handles
    found = list(handles)
    for position in positions:
        found[position] = as_array(found[position])
    return found


TakenPack = tuple[Pack, Sequence[PackedPart]]  # with its parts


class PackedGroup:
    """Inputs of a program that it takes as one pack, and writes over.

    Attributes:
        positions: Among a launch's buffers.
        nodes: The inputs.
        outputs: Positions of the outputs that take their places.
        layout: Theirs.
    """

    def __init__(self, outputs: Sequence[int], nodes: Sequence[Node]) -> None:
        self.outputs, self.nodes = tuple(outputs), tuple(nodes)
        self.positions = tuple(node.attr("index") for node in nodes)
        self.layout = PackLayout(tuple(node.shape for node in nodes), DTYPES[nodes[0].dtype])
        self._read = elements_at(self.positions)

    def taken(self, handles: Sequence[Any]) -> TakenPack:
        """Return the pack of a launch's buffers, and its parts: a new one, if they lie otherwise."""
        parts = self._read(handles)
        if set(map(type, parts)) == {PackedPart}:
            pack = parts[0].pack
            is_whole = pack.layout == self.layout and set(map(_PACK, parts)) == {pack}
            if is_whole and tuple(map(_PLACE, parts)) == self.layout.places:
                return pack, parts
        metrics.count("XlaPacks")
        pack = Pack(self.layout, self.layout.pack([as_array(part) for part in parts]))
        return pack, [PackedPart(pack, place) for place in self.layout.places]


_PACK, _PLACE = attrgetter("pack"), attrgetter("place")


def packed_groups(pairs: Mapping[int, Node], device: jax.Device) -> list[PackedGroup]:
    """Return the groups that are worth it.

    Args:
        pairs: Output position -> the input that it takes the place of.
    """
    found: dict[Any, list[int]] = defaultdict(list)
    for output, node in pairs.items():
        if 0 < node.size * DTYPES[node.dtype].itemsize <= largest_part(device):
            found[node.dtype].append(output)
    groups = [
        outputs[at : at + MOST_PARTS]
        for outputs in found.values()
        for at in range(0, len(outputs), MOST_PARTS)
    ]
    return [
        PackedGroup(outputs, [pairs[output] for output in outputs])
        for outputs in groups
        if len(outputs) >= FEWEST_PARTS
    ]


def largest_part(device: jax.Device) -> int:
    """Bytes of the largest value that lies in a pack; 0 where the host moves it itself."""
    return 0 if device.platform == "cpu" else MAX_PART_BYTES
