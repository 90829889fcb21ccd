"""A call run as its rule says: random numbers then are those of a compiled program.

The reference draws the same bits.  Integers, uniform numbers and masks are made of them by what rounds
nothing, or once.  Normal numbers are made by logarithms and cosines, which differ in the last place: a
compiled program makes those. The native core launches it, once it knows how.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ltc.aten.call import Call, CallResult, Numbering
from ltc.aten.expansion import expand_alone, values_read_by
from ltc.backends.capabilities import ComputationCapabilities
from ltc.backends.eager import EagerComputation
from ltc.ir import ops
from ltc.ir.graph import Graph, schedule
from ltc.ir.node import Node
from ltc.ir.tensor_type import TensorType

Compile = Callable[[Graph], Any]


class ByRule:
    """Runs a call by its rule, and every call that differs from it in operands and numbers alone."""

    def __init__(self, call: Call, compile: Compile) -> None:
        graph, _, _ = expand_alone(call)
        has_same_bits = call.seed is None or is_drawn_by_reference(graph)
        self._computation = (
            EagerComputation(graph, frozenset()) if has_same_bits else compile(graph)
        )
        self._slots = tuple(Numbering([call]).slots)

    def run(
        self, call: Call, values: Mapping[CallResult, torch.Tensor], numbers: Any
    ) -> list[torch.Tensor | None]:
        """Return the results of the call; `numbers`: of its scalars, by their slots."""
        operands = [values[one].resolve_neg().contiguous() for one in values_read_by(call)]
        scalars = [numbers[slot] for slot in self._slots]
        made = iter(self._computation.launch(operands, scalars))
        return [None if result is None else next(made) for result in call.results]

    def words_for_core(self) -> list[int]:
        """Return the bytes of the program's frame, and its kernels, then what an Exit of exits.h is made of.

        Of a program that makes one tensor of numbers alone, which stays where it is from now on; else none.
        """
        in_frame = ComputationCapabilities.of(self._computation).in_frame
        launch = None if in_frame is None else in_frame()
        if launch is None or launch.inputs or launch.outputs != (0,):
            return []
        _of_core.append(self._computation)
        cells = [(self._slots[slot], place, ord(letter)) for slot, letter, place in launch.cells]
        return [launch.frame, launch.kernels, *launch.exit_words((), (0,), cells)]


_of_core: list[Any] = []  # programs that the core launches; it keeps a few hundred
_ROUNDS_ONCE = frozenset({ops.MUL})
# Behind a product, one instruction may make both.
_ROUNDS_ONCE_ALONE = frozenset({ops.ADD, ops.SUB, ops.DIV})
_EXACT = frozenset(
    {
        ops.INPUT, ops.SCALAR, ops.CONSTANT, ops.IOTA, ops.RANDOM_BITS, ops.NEG, ops.ABS, ops.FLOOR,
        ops.CEIL, ops.TRUNC, ops.NOT, ops.AND, ops.OR, ops.XOR, ops.SHIFT_LEFT, ops.SHIFT_RIGHT,
        ops.EQ, ops.NE, ops.LT, ops.LE, ops.GT, ops.GE, ops.WHERE, ops.CAST, ops.BITCAST,
        ops.MAXIMUM, ops.MINIMUM, ops.MAX, ops.MIN, ops.ANY, ops.ALL_TRUE, ops.PERMUTE, ops.SLICE,
        ops.EXPAND, ops.RESHAPE, ops.FLIP, ops.PAD, ops.CONCAT, ops.INSERT, ops.TAKE, ops.GATHER,
        ops.BARRIER, ops.EXTERN, ops.GET, ops.CHECK,
    }
)  # fmt: skip
# The reference draws with NumPy, 27 ns a number.  To plan a program takes 3 ms; its kernel is found
# where it has been compiled before, at other sizes too.  One of attention is compiled for each size.
_FEW, _FEW_WEIGHTS = 1 << 16, 1 << 20


def is_drawn_by_reference(graph: Graph) -> bool:
    """Return True if the reference gives the very numbers that a compiled program does, and soon.

    Sums and products of integers are exact as well; a product of a product is not looked at, so one
    rounding of floats after another is taken for inexact only where something is added. Which
    weights of attention are kept is exact; what is computed of them is rounded as PyTorch does it.
    """
    return all(map(_is_drawn, schedule(*graph.outputs)))


def _is_drawn(node: Node) -> bool:
    if node.op is ops.ATTENTION:
        query, key = node.inputs[:2]
        return math.prod(query.shape[:-1]) * key.shape[-2] <= _FEW_WEIGHTS
    if node.op is ops.RANDOM_BITS and node.size > _FEW:
        return False
    return node.op in _EXACT or not _is_float(node) or _rounds_once(node)


def _rounds_once(node: Node) -> bool:
    if node.op in _ROUNDS_ONCE_ALONE:
        return not any([one.op in _ROUNDS_ONCE for one in node.inputs])
    return node.op in _ROUNDS_ONCE


def _is_float(node: Node) -> bool:
    """Return True if the node makes floats, or several values of any type."""
    several = not isinstance(node.type, TensorType)
    return several or bool(node.dtype.is_floating_point or node.dtype.is_complex)
