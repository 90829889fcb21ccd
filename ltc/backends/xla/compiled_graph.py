"""The function that JAX compiles: a graph's rows, the word of its faults, and what takes whose place.

A donated input is paired with an output of its type, whose memory XLA then makes of the input's. Where
a check can fail, such an output is the input's old value if one does: so a launch that fails gives
the old values back, and no device has to be asked before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from ltc.backends.interface import LoweringContext
from ltc.backends.reference.donation import overwrites
from ltc.backends.xla import fault_word
from ltc.backends.xla.early_checks import EarlyChecks, early_checks
from ltc.backends.xla.lowering import TOGETHER
from ltc.backends.xla.numbers import DTYPES, Array
from ltc.backends.xla.placement import OneDevice, ReplicaMesh
from ltc.backends.xla.product_rows import precision
from ltc.ir import ops
from ltc.ir.graph import Graph, schedule
from ltc.ir.node import Node
from ltc.support.bounded_table import BoundedTable
from ltc.support.shallow_copy import elements_at

# What PyTorch rounds stays rounded: XLA would leave out a cast to bfloat16 and back.
_OPTIONS = {"xla_allow_excess_precision": False}


@dataclass(frozen=True)
class ScalarGroup:
    """The scalars of one dtype, which a launch hands over as one array."""

    dtype: np.dtype[Any]
    slots: tuple[int, ...]


@dataclass(frozen=True)
class XlaProgram:
    """A compiled graph.

    Attributes:
        run: (kept buffers, donated buffers, groups of scalars) -> results.
        kept, given: Take from a launch's buffers those that `run` reads, and those that it writes
            over.
        positions: Positions of the latter. Their outputs come first among the results, in this order.
        groups: The scalars.
        read: Positions of all buffers that it reads.
        outputs: Takes the graph's outputs from the results, of which the word is the last.
        checked: The nodes that can fail.
        early: Their checks ahead of the program, where it need not run for them.
    """

    run: Any
    kept: Callable[[Any], Sequence[Array]]
    given: Callable[[Any], Sequence[Array]]
    positions: tuple[int, ...]
    groups: tuple[ScalarGroup, ...]
    read: tuple[int, ...]
    outputs: Callable[[Any], Sequence[Array]]
    checked: tuple[Node, ...]
    early: EarlyChecks | None

    def numbers(self, scalars: Sequence[Any]) -> list[np.ndarray]:
        """The groups of a launch's scalars."""
        return [
            np.array([_number(scalars[slot]) for slot in group.slots], group.dtype)
            for group in self.groups
        ]


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
    given = list(pairs.values())
    kept = [node for node in graph.inputs if node not in pairs.values()]
    groups = _groups(graph)
    first = [*pairs, *[p for p in range(len(graph.outputs)) if p not in pairs]]
    checked = fault_word.checked(order)
    tokens = [p for p, node in enumerate(graph.outputs) if node.op is ops.COLLECTIVE_START]

    def function(kept_arrays: Any, given_arrays: Any, numbers: Any) -> Any:
        known = dict(zip(kept, kept_arrays)) | dict(zip(given, given_arrays))
        known |= _scalars(graph, groups, numbers)
        context = LoweringContext(TOGETHER, known)
        values = list(context.lower(*graph.outputs))
        for position in tokens:  # which order what has its order here
            values[position] = jnp.zeros((), jnp.int64)
        results: list[Array] = [values[position] for position in first]
        word = fault_word.word(checked, context.lowered)
        if checked:
            for at, old in enumerate(given):
                results[at] = jnp.where(word[0] == 0, results[at], known[old])
        return [*results, word]

    most = max([node.attr("index") for node in graph.inputs], default=-1)
    structs: list[Any] = [None] * (most + 1)  # as a launch's buffers
    for node in graph.inputs:
        structs[node.attr("index")] = place.struct(node.shape, DTYPES[node.dtype])
    positions = tuple(node.attr("index") for node in given)
    kept_of, given_of = elements_at([node.attr("index") for node in kept]), elements_at(positions)
    ranks = [len(graph.outputs[position].shape) for position in first]
    with jax.enable_x64(True):
        numbers = [place.host_struct(len(one.slots), one.dtype) for one in groups]
        arguments = kept_of(structs), given_of(structs), numbers
        mapped = place.mapped(function, arguments, [*ranks, 1])
        run = jax.jit(mapped, donate_argnums=1, compiler_options=_OPTIONS)
        run.lower(*arguments).compile()  # `run` finds it later
        early = early_checks(checked, given, place) if isinstance(place, OneDevice) else None
    outputs = elements_at([first.index(position) for position in range(len(first))])
    read = tuple(node.attr("index") for node in graph.inputs)
    return XlaProgram(run, kept_of, given_of, positions, groups, read, outputs, tuple(checked), early)


def _number(scalar: Any) -> Any:
    return scalar.item() if isinstance(scalar, torch.Tensor) else scalar


def _groups(graph: Graph) -> tuple[ScalarGroup, ...]:
    slots: dict[np.dtype[Any], list[int]] = {}
    for node in graph.scalars:
        slots.setdefault(DTYPES[node.dtype], []).append(node.attr("slot"))
    return tuple(ScalarGroup(dtype, tuple(found)) for dtype, found in slots.items())


def _scalars(
    graph: Graph, groups: Sequence[ScalarGroup], numbers: Sequence[Array]
) -> dict[Node, Array]:
    places = {
        slot: (group, place)
        for group, one in enumerate(groups)
        for place, slot in enumerate(one.slots)
    }
    found = {node: places[node.attr("slot")] for node in graph.scalars}
    return {node: numbers[group][place] for node, (group, place) in found.items()}
