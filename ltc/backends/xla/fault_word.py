"""Checks of values: a word beside a program's outputs says which one has failed, and by what.

The reference's rows raise as they find a wrong value; a program for a device tells it at its end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from ltc.backends.xla.numbers import Array
from ltc.errors import OutOfRangeIndexError
from ltc.ir import ops
from ltc.ir.graph import Origin
from ltc.ir.node import Node


def _outside(node: Node, index: Array) -> tuple[Array, Array]:
    return (index < node.attr("lowest")) | (index >= node.attr("size")), index


def _zero(node: Node, x: Array, y: Array) -> tuple[Array, Array]:
    return y == 0, y


# node, operands -> where they are wrong, and what is told of them
_WRONG: dict[ops.Op, Callable[..., tuple[Array, Array]]] = {
    ops.WRAP_INDEX: _outside,
    ops.CHECK: lambda node, x, holds: (~holds, x),
    **dict.fromkeys((ops.FLOOR_DIVIDE, ops.TRUNC_DIVIDE, ops.REMAINDER, ops.FMOD), _zero),
}


def checked(order: Sequence[Node]) -> list[Node]:
    """The nodes that can fail, in the order of a schedule."""
    return [node for node in order if node.op in _WRONG and ops.may_fail(node)]


def word(nodes: Sequence[Node], lowered: Mapping[Node, Array]) -> Array:
    """i64[2]: the number of the first node that fails, from 1; its first wrong value.  Else zeros."""
    found = []
    for node in nodes:
        wrong, values = _WRONG[node.op](node, *[lowered[n] for n in node.inputs])
        if wrong.size:
            wrong, values = wrong.reshape(-1), jnp.broadcast_to(values, wrong.shape).reshape(-1)
            first = values[jnp.argmax(wrong)]
            is_number = jnp.issubdtype(first.dtype, jnp.integer)
            told = first.astype(jnp.int64) if is_number else jnp.zeros((), jnp.int64)
            found.append((jnp.any(wrong), told))
        else:
            found.append((jnp.zeros((), bool), jnp.zeros((), jnp.int64)))
    if not found:
        return np.zeros(2, np.int64)
    fails = jnp.stack([one for one, _ in found])
    first = jnp.argmax(fails)
    value = jnp.stack([told for _, told in found])[first]
    number = jnp.where(fails[first], first + 1, 0)
    return jnp.stack([number.astype(jnp.int64), value])


class Check(NamedTuple):
    """One check of a program: its node's kind, the text of its error, and the recorded call."""

    op: ops.Op
    message: str
    origin: Origin | None

    @classmethod
    def of(cls, node: Node, origin: Origin | None) -> Check:
        is_told = node.op in (ops.WRAP_INDEX, ops.CHECK)
        return cls(node.op, node.attr("message") if is_told else "ZeroDivisionError", origin)

    def error(self, value: int) -> Exception:
        kind = OutOfRangeIndexError if self.op is ops.WRAP_INDEX else RuntimeError
        error = kind(self.message.format(value))
        if self.origin is not None:
            error.add_note(f"while running {self.origin}")
        return error
