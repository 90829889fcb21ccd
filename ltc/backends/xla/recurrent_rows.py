"""The rows of recurrent layers: one lax.scan over the steps, each over all sequences.

Where sequences end early (`packed`), rows are spread to a step's full width and back; a step leaves
the states of sequences that it does not have as they were. The formulas are those of
backends/reference/recurrence.py, whose meaning this has: states are rounded after every step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax, nn

from ltc.backends.xla.elementwise_rows import Row
from ltc.backends.xla.numbers import Array, wide
from ltc.backends.xla.product_rows import precision
from ltc.ir import ops
from ltc.ir.node import Node
from ltc.ir.ops import Op

Arrays = tuple[Array, ...]
# (rows of a step, states) -> states after it, what is kept of each row
Step = Callable[[Arrays, Arrays], tuple[Arrays, Arrays]]


def _times(x: Array, y: Array) -> Array:
    return jnp.matmul(x, y, precision=precision())


class _StepRows:
    """The order of the rows of all steps: those of one step lie side by side."""

    def __init__(self, node: Node, operands: Sequence[Array]) -> None:
        self.steps, self.rows = node.attr("steps"), operands[0].shape[0]
        self.is_packed = node.attr("packed")
        hidden = node.inputs[2 if node.op is ops.RECURRENCE else 3]
        self.width = hidden.shape[0]
        if self.is_packed:
            self.sizes = operands[-1]
            starts = jnp.cumsum(self.sizes) - self.sizes
            sequence = jnp.arange(self.width)
            self._places = starts[:, None] + sequence
            self.has = sequence < self.sizes[:, None]
            row = jnp.arange(self.rows)
            self._step_of = jnp.searchsorted(starts, row, side="right") - 1
            self._sequence_of = row - starts[self._step_of]

    def spread(self, x: Array) -> Array:
        """[rows, n] -> [steps, width, n]"""
        if not self.is_packed:
            return x.reshape(self.steps, self.width, x.shape[1])
        return jnp.take(x, self._places, axis=0, mode="clip")

    def joined(self, x: Array) -> Array:
        """[steps, width, n] -> [rows, n]"""
        if not self.is_packed:
            return x.reshape(self.rows, x.shape[2])
        return x[self._step_of, self._sequence_of]

    def scan(self, rows: Arrays, states: Arrays, step: Step, backward: bool) -> list[Array]:
        """Return what the steps keep of each row, then the last states."""

        def one(now: Arrays, given: tuple[Arrays, Array]) -> tuple[Arrays, Arrays]:
            of_step, has = given
            new, kept = step(of_step, now)
            if self.is_packed:
                new = tuple(jnp.where(has[:, None], x, old) for x, old in zip(new, now))
            return new, kept

        spread = tuple(self.spread(x) for x in rows)
        has = self.has if self.is_packed else jnp.zeros((self.steps, 1), bool)
        last, kept = lax.scan(one, states, (spread, has), reverse=backward)
        return [*[self.joined(x) for x in kept], *last]


def _split(x: Array, parts: int) -> list[Array]:
    return jnp.split(x, parts, axis=1)


def recurrence(node: Node, *operands: Array) -> Arrays:
    layout, cell = _StepRows(node, operands), node.attr("cell")
    pre, weight, hidden, *rest = operands
    dtype, w = pre.dtype, wide(weight).T

    def rounded(x: Array) -> Array:
        return wide(x.astype(dtype))

    def lstm(rows: Arrays, states: Arrays) -> tuple[Arrays, Arrays]:
        (x,), (h, c) = rows, states
        i, f, g, o = _split(x + _times(h, w), 4)
        i, f, g, o = nn.sigmoid(i), nn.sigmoid(f), jnp.tanh(g), nn.sigmoid(o)
        c = f * c + i * g
        h = rounded(o * jnp.tanh(c))
        return (h, c), (h, jnp.concatenate([i, f, g, o], 1), c)

    def gru(rows: Arrays, states: Arrays) -> tuple[Arrays, Arrays]:
        (x,), (h,) = rows, states
        (xr, xz, xn), (hr, hz, hn) = _split(x, 3), _split(_times(h, w), 3)
        r, z, hn = nn.sigmoid(xr + hr), nn.sigmoid(xz + hz), hn + wide(rest[0])
        n = jnp.tanh(xn + r * hn)
        h = rounded(n + z * (h - n))
        return (h,), (h, jnp.concatenate([r, z, n, hn], 1))

    def elman(rows: Arrays, states: Arrays) -> tuple[Arrays, Arrays]:
        (x,), (h,) = rows, states
        sums = x + _times(h, w)
        h = rounded(jnp.tanh(sums) if cell == "tanh" else jnp.where(sums <= 0, 0, sums))
        return (h,), (h,)

    step: Step = {"lstm": lstm, "gru": gru}.get(cell, elman)
    states = (wide(hidden), wide(rest[0])) if cell == "lstm" else (wide(hidden),)
    made = layout.scan((wide(pre),), states, step, node.attr("reverse"))
    made = [x.astype(dtype) for x in made]
    if cell == "lstm":
        outputs, gates, cells, h, c = made
        return outputs, h, c, gates, cells
    if cell == "gru":
        outputs, gates, h = made
        return outputs, h, gates
    return tuple(made)


def _before(layout: _StepRows, states: Array, first: Array, reverse: bool) -> Array:
    """The state that each row of each step began with."""

    def step(rows: Arrays, now: Arrays) -> tuple[Arrays, Arrays]:
        return rows, now

    return layout.scan((states,), (first,), step, reverse)[0]


def recurrence_gradient(node: Node, *operands: Array) -> Arrays:
    layout, cell, reverse = _StepRows(node, operands), node.attr("cell"), node.attr("reverse")
    gradient, last, weight, hidden, outputs, *rest = operands
    dtype, w = gradient.dtype, wide(weight)
    previous = _before(layout, outputs, hidden, reverse)

    def lstm(rows: Arrays, states: Arrays) -> tuple[Arrays, Arrays]:
        (of_output, gates, c, before), (dh, dc) = rows, states
        i, f, g, o = _split(gates, 4)
        dh, u = dh + of_output, jnp.tanh(c)
        dc = dc + dh * o * (1 - u * u)
        parts = [dc * g * i * (1 - i), dc * before * f * (1 - f), dc * i * (1 - g * g)]
        through = jnp.concatenate([*parts, dh * u * o * (1 - o)], 1)
        return (_times(through, w), dc * f), (through,)

    def gru(rows: Arrays, states: Arrays) -> tuple[Arrays, Arrays]:
        (of_output, gates, before), (dh,) = rows, states
        r, z, n, hn = _split(gates, 4)
        dh = dh + of_output
        dn, dz = dh * (1 - z) * (1 - n * n), dh * (before - n) * z * (1 - z)
        dr = dn * hn * r * (1 - r)
        through = jnp.concatenate([dr, dz, dn * r], 1)
        kept = jnp.concatenate([dr, dz, dn], 1), through
        return (dh * z + _times(through, w),), kept

    def elman(rows: Arrays, states: Arrays) -> tuple[Arrays, Arrays]:
        (of_output, y), (dh,) = rows, states
        slope = 1 - y * y if cell == "tanh" else (~(y <= 0)).astype(y.dtype)
        through = (dh + of_output) * slope
        return (_times(through, w),), (through,)

    of_outputs: Any = wide(gradient)
    if cell == "lstm":
        last_cell, first_cell, gates, cells = rest[:4]
        before = wide(_before(layout, cells, first_cell, reverse))
        rows: Arrays = of_outputs, wide(gates), wide(cells), before
        made = layout.scan(rows, (wide(last), wide(last_cell)), lstm, not reverse)
        pre, dh, dc = (x.astype(dtype) for x in made)
        return pre, dh, previous, dc
    if cell == "gru":
        rows = of_outputs, wide(rest[0]), wide(previous)
        made = layout.scan(rows, (wide(last),), gru, not reverse)
        pre, through, dh = (x.astype(dtype) for x in made)
        return pre, dh, previous, through
    made = layout.scan((of_outputs, wide(outputs)), (wide(last),), elman, not reverse)
    pre, dh = (x.astype(dtype) for x in made)
    return pre, dh, previous


ROWS: dict[Op, Row] = {
    ops.RECURRENCE: recurrence,
    ops.RECURRENCE_GRADIENT: recurrence_gradient,
}
