"""Checks of what a program is given: a small program of their own says ahead whether all hold.

Labels and tokens are checked in most training steps. Without this each launch would be waited for: its
program tells at its end what it refuses. Buffers that were found right once are not asked again, as
long as no program writes over them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence, Set
from typing import Any

import jax
import numpy as np

from ltc.backends.interface import LoweringContext
from ltc.backends.xla import fault_word
from ltc.backends.xla.lowering import LOWERING
from ltc.backends.xla.numbers import DTYPES, Array
from ltc.backends.xla.placement import OneDevice
from ltc.ir import ops
from ltc.ir.graph import schedule
from ltc.ir.node import Node
from ltc.support.bounded_table import BoundedTable
from ltc.support.shallow_copy import elements_at

MAX_NODES = 256  # what is computed twice is to be small beside the program
_KINDS = frozenset({"leaf", "view", "elementwise"})

Arrays = Sequence[Array]


class EarlyChecks:
    """The checks of one program, and the buffers that they hold for."""

    def __init__(self, run: Any, read: Callable[[Any], Arrays]) -> None:
        """Take the compiled checks.

        Args:
            run: (buffers) -> the word: see fault_word.py.
            read: Takes from a launch's buffers those that `run` is given.
        """
        self._run, self._read = run, read
        self._known: BoundedTable[tuple[int, ...], list[weakref.ref[Array]]]
        self._known = BoundedTable("XlaChecked", 256)

    def begun(self, buffers: Arrays) -> BegunChecks:
        """Have the device begin, before the program that the checks are of."""
        arrays = self._read(buffers)
        known = self._known.get(tuple(map(id, arrays)))
        if known is not None and all([seen() is one for seen, one in zip(known, arrays)]):
            return BegunChecks(self, arrays, None)
        return BegunChecks(self, arrays, self._run(arrays))

    def note(self, arrays: Arrays) -> None:
        key = tuple(map(id, arrays))
        self._known.pop(key, None)  # of buffers that are gone
        self._known.keep(key, [weakref.ref(one) for one in arrays])


class BegunChecks:
    """The checks of one launch."""

    def __init__(self, checks: EarlyChecks, arrays: Arrays, word: Array | None) -> None:
        """`word`: None where the buffers are known to be right."""
        self._checks, self._arrays, self._word = checks, arrays, word

    def holds(self) -> bool:
        """Wait for the word, and return True if it names no check."""
        if self._word is None:
            return True
        if np.asarray(self._word)[0]:
            return False
        self._checks.note(self._arrays)
        return True


def early_checks(
    checked: Sequence[Node], written: Set[Node], place: OneDevice
) -> EarlyChecks | None:
    """Compile the checks of a program; None where there are none, or values are computed for them.

    Args:
        checked: The nodes that can fail.
        written: The inputs that the program writes over.
    """
    order = schedule(*checked)
    if not checked or len(order) > MAX_NODES:
        return None
    if any(node.op.kind not in _KINDS or node.op is ops.SCALAR for node in order):
        return None
    inputs = [node for node in order if node.op is ops.INPUT]
    if not written.isdisjoint(inputs):
        return None

    def function(arrays: Arrays) -> Array:
        context = LoweringContext(LOWERING, dict(zip(inputs, arrays)))
        context.lower(*checked)
        return fault_word.word(checked, context.lowered)

    structs = {n.attr("index"): place.struct(n.shape, DTYPES[n.dtype]) for n in inputs}
    read = elements_at([*structs])
    run = jax.jit(function)
    with jax.enable_x64(True):
        as_buffers = [structs.get(index) for index in range(max(structs, default=-1) + 1)]
        run.lower(read(as_buffers)).compile()  # `run` finds it later
    return EarlyChecks(run, read)
