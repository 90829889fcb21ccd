"""The function that JAX compiles: a graph's rows, the word of its faults, and what takes whose place.

A donated input is paired with an output of its type, whose memory XLA then makes of the input's. Where
a check can fail, such an output is the input's old value if one does: so a launch that fails gives
the old values back, and no device has to be asked before anything is written.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from ltc.backends.interface import LoweringContext
from ltc.backends.reference.donation import overwrites
from ltc.backends.xla import fault_word
from ltc.backends.xla.early_checks import EarlyChecks, early_checks
from ltc.backends.xla.lowering import TOGETHER
from ltc.backends.xla.numbers import DTYPES, Array
from ltc.backends.xla.packed_state import PackedGroup, packed_groups
from ltc.backends.xla.placement import OneDevice, ReplicaMesh
from ltc.backends.xla.product_rows import precision
from ltc.ir import ops
from ltc.ir.graph import Graph, schedule
from ltc.ir.node import Node
from ltc.support.bounded_table import BoundedTable
from ltc.support.shallow_copy import elements_at

# What PyTorch rounds stays rounded: XLA would leave out a cast to bfloat16 and back.
_OPTIONS = {"xla_allow_excess_precision": False}


class ScalarGroup:
    """Scalars that a launch hands over as one array: sending one takes as long as sending many.

    Of several dtypes their bits lie in integers as wide. Numbers that stay, as most learning rates do,
    are sent to the device once.
    """

    def __init__(self, slots: Mapping[np.dtype[Any], Sequence[int]], stays: bool) -> None:
        """Take the slots of each dtype.

        Args:
            stays: True if arrays that are handed over may lie on the device already.
        """
        self._slots, self._stays = dict(slots), stays
        self._readers = [(dtype, elements_at(chosen)) for dtype, chosen in slots.items()]
        self.dtype = _WORD if len(slots) > 1 else next(iter(slots))
        self.size = sum(map(len, slots.values()))
        codes = [_CODES.get(dtype.kind, "") * len(chosen) for dtype, chosen in slots.items()]
        self._pack = struct.Struct("".join(codes)).pack if all(codes) else None
        self._all = elements_at([slot for chosen in slots.values() for slot in chosen])
        self._last: tuple[bytes, Array | None] = b"", None

    def array(self, scalars: Sequence[Any]) -> Array:
        """The array of a launch's scalars: on the device, if they are those of the launch before."""
        if not self._stays:
            return self._made(scalars)
        bits, (last, there) = self._bits(scalars), self._last
        if bits != last:
            self._last = bits, None
            return self._made(scalars)
        if there is None:
            there = jax.device_put(self._made(scalars))
            self._last = bits, there
        return there

    def _bits(self, scalars: Sequence[Any]) -> bytes:
        """Return bytes that tell the numbers from others; packing takes less time than an array."""
        if self._pack is None:
            return self._made(scalars).tobytes()
        return self._pack(*self._all(scalars))

    def _made(self, scalars: Sequence[Any]) -> np.ndarray:
        parts = [np.array(read(scalars), dtype) for dtype, read in self._readers]
        return parts[0] if len(parts) == 1 else np.concatenate([part.view(_WORD) for part in parts])

    def by_slot(self, array: Array) -> Iterator[tuple[int, Array]]:
        """Yield each slot and its number."""
        at = 0
        for dtype, slots in self._slots.items():
            part = array[at : at + len(slots)]
            if dtype != self.dtype:
                part = lax.bitcast_convert_type(part, dtype)
            yield from ((slot, part[place]) for place, slot in enumerate(slots))
            at += len(slots)


_WORD = np.dtype(np.int64)
_CODES = {"f": "d", "V": "d", "i": "q", "u": "Q", "b": "?"}  # V: bfloat16; no complex ones
_HAVE_WIDE_BITS = (
    "cpu",
    "gpu",
)  # elsewhere a float64 may be two numbers, which have no bits as one


@dataclass(frozen=True)
class XlaProgram:
    """A compiled graph.

    Attributes:
        run: (kept buffers, donated buffers, arrays of packs, groups of scalars) -> results.
        kept, given: Take from a launch's buffers those that `run` reads, and those that it writes
            over.
        positions: Positions of the latter. Their outputs come next to those of packs among the
            results, in this order.
        packs: Buffers that it takes as one array; these come first among the results.
        groups: The scalars.
        has_tensors: True if some of them may come as CPU tensors.
        read: Positions of all buffers that it reads.
        alone: Positions of those that lie in no pack.
        written: Positions of those that it writes over, in the order of their outputs among the
            parts of packs and the other results.
        outputs: Takes the graph's outputs from the parts of packs and the other results, of which
            the word is the last.
        checked: The nodes that can fail.
        early: Their checks ahead of the program, where it need not run for them.
    """

    run: Any
    kept: Callable[[Any], Sequence[Array]]
    given: Callable[[Any], Sequence[Array]]
    positions: tuple[int, ...]
    packs: Sequence[PackedGroup]
    groups: tuple[ScalarGroup, ...]
    has_tensors: bool
    read: tuple[int, ...]
    alone: tuple[int, ...]
    written: tuple[int, ...]
    outputs: Callable[[Any], Sequence[Array]]
    checked: tuple[Node, ...]
    early: EarlyChecks | None

    def numbers(self, scalars: Sequence[Any]) -> list[Array]:
        """The groups of a launch's scalars."""
        if self.has_tensors:
            scalars = [one.item() if isinstance(one, torch.Tensor) else one for one in scalars]
        return [group.array(scalars) for group in self.groups]


_programs: BoundedTable[tuple[Any, ...], XlaProgram] = BoundedTable("XlaPrograms", 64)


def program_of(graph: Graph, place: OneDevice | ReplicaMesh, donated: frozenset[int]) -> XlaProgram:
    """Return the program of a graph; equal graphs share one."""
    key = graph.inputs, graph.scalars, graph.outputs, place, donated, precision()
    return _programs.get(key) or _programs.keep(key, _compiled(graph, place, donated))


def _paired(graph: Graph, order: list[Node], donated: frozenset[int]) -> dict[int, Node]:
    """Output position -> the donated input of its type whose memory it takes."""
    chosen = overwrites(graph, order, donated)
    pairs: dict[int, Node] = {}
    for position, output in enumerate(graph.outputs):
        if output in chosen and chosen[output] not in pairs.values():
            pairs[position] = chosen[output]
    taken = set(pairs.values())
    free = [n for n in graph.inputs if n.attr("index") in donated and n not in taken]
    for position, output in enumerate(graph.outputs):
        found = next((n for n in free if n.type == output.type), None)
        if position not in pairs and found is not None:
            free.remove(found)
            pairs[position] = found
    return pairs


def _compiled(graph: Graph, place: OneDevice | ReplicaMesh, donated: frozenset[int]) -> XlaProgram:
    order = schedule(*graph.outputs)
    pairs = _paired(graph, order, donated)
    packs = packed_groups(pairs, place.device) if isinstance(place, OneDevice) else []
    packed = [position for group in packs for position in group.outputs]
    written = set(pairs.values())
    kept = [node for node in graph.inputs if node not in written]
    for position in packed:
        del pairs[position]
    given = list(pairs.values())
    groups = _groups(graph, place)
    first = [*packed, *pairs]
    first += [position for position in range(len(graph.outputs)) if position not in set(first)]
    checked = fault_word.checked(order)
    tokens = [p for p, node in enumerate(graph.outputs) if node.op is ops.COLLECTIVE_START]

    def function(kept_arrays: Any, given_arrays: Any, pack_arrays: Any, numbers: Any) -> Any:
        known = dict(zip(kept, kept_arrays)) | dict(zip(given, given_arrays))
        for group, array in zip(packs, pack_arrays):
            known |= zip(group.nodes, group.layout.parts_of(array))
        known |= _scalars(graph, groups, numbers)
        context = LoweringContext(TOGETHER, known)
        values = list(context.lower(*graph.outputs))
        for position in tokens:  # which order what has its order here
            values[position] = jnp.zeros((), jnp.int64)
        results: list[Array] = [
            group.layout.joined([values[position] for position in group.outputs]) for group in packs
        ]
        results += [values[position] for position in first[len(packed) :]]
        word = fault_word.word(checked, context.lowered)
        if checked:
            for at, old in enumerate([*pack_arrays, *given_arrays]):
                results[at] = jnp.where(word[0] == 0, results[at], old)
        return [*results, word]

    most = max([node.attr("index") for node in graph.inputs], default=-1)
    structs: list[Any] = [None] * (most + 1)  # as a launch's buffers
    for node in graph.inputs:
        structs[node.attr("index")] = place.struct(node.shape, DTYPES[node.dtype])
    positions = tuple(node.attr("index") for node in given)
    kept_of, given_of = elements_at([node.attr("index") for node in kept]), elements_at(positions)
    ranks = [len(graph.outputs[position].shape) for position in first[len(packed) :]]
    ranks = [1 for _ in packs] + ranks
    with jax.enable_x64(True):
        numbers = [place.host_struct(one.size, one.dtype) for one in groups]
        arrays = [place.struct((one.layout.size,), one.layout.dtype) for one in packs]
        arguments = kept_of(structs), given_of(structs), arrays, numbers
        mapped = place.mapped(function, arguments, [*ranks, 1])
        run = jax.jit(mapped, donate_argnums=(1, 2), compiler_options=_OPTIONS)
        run.lower(*arguments).compile()  # `run` finds it later
        early = early_checks(checked, written, place) if isinstance(place, OneDevice) else None
    outputs = elements_at([first.index(position) for position in range(len(first))])
    read = tuple(node.attr("index") for node in graph.inputs)
    in_packs = [position for group in packs for position in group.positions]
    alone = tuple(position for position in read if position not in set(in_packs))
    has_tensors = not all(node.attr("wrapped") for node in graph.scalars)
    return XlaProgram(
        run, kept_of, given_of, positions, packs, groups, has_tensors, read, alone,
        (*in_packs, *positions), outputs, tuple(checked), early,
    )  # fmt: skip


def _groups(graph: Graph, place: OneDevice | ReplicaMesh) -> tuple[ScalarGroup, ...]:
    by_dtype: dict[np.dtype[Any], list[int]] = {}
    for node in graph.scalars:
        by_dtype.setdefault(DTYPES[node.dtype], []).append(node.attr("slot"))
    if not isinstance(place, OneDevice):
        return tuple(ScalarGroup({dtype: slots}, False) for dtype, slots in by_dtype.items())
    groups: dict[Any, dict[np.dtype[Any], list[int]]] = {}
    has_wide_bits = place.device.platform in _HAVE_WIDE_BITS
    for dtype, slots in by_dtype.items():
        is_word = has_wide_bits and dtype.itemsize == _WORD.itemsize
        groups.setdefault(_WORD if is_word else dtype, {})[dtype] = slots
    stays = place.device == jax.local_devices()[0]  # where an array lies that is sent nowhere
    return tuple(ScalarGroup(one, stays) for one in groups.values())


def _scalars(
    graph: Graph, groups: Sequence[ScalarGroup], numbers: Sequence[Array]
) -> dict[Node, Array]:
    found = {
        slot: number for one, array in zip(groups, numbers) for slot, number in one.by_slot(array)
    }
    return {node: found[node.attr("slot")] for node in graph.scalars}
