"""The math of a cell on the sums of its gates, and its gradients; on vectors.

Source of the formulas: the documentation of torch.nn.LSTM, GRU and RNN.
"""

from __future__ import annotations

from ltc.llvm.emit import math_float
from ltc.llvm.emit.vectors import Vectors


def _function(v: Vectors, name: str, x: str) -> str:
    with v.builder.lanes(v.width):
        return math_float.call(v.builder, name, v.element, x)


def tanh(v: Vectors, x: str) -> str:
    return _function(v, "tanh", x)


def sigmoid(v: Vectors, x: str) -> str:
    return v.div(1.0, v.add(_function(v, "exp", v.negative(x)), 1.0))


def relu(v: Vectors, x: str) -> str:
    """NaN stays what it is."""
    return v.select(v.test("olt", x, 0.0), v.zero, x)


def rest(v: Vectors, x: str) -> str:
    """1 - x"""
    return v.sub(1.0, x)


def sigmoid_slope(v: Vectors, y: str) -> str:
    """Return the slope of sigmoid, from its result."""
    return v.mul(y, rest(v, y))


def tanh_slope(v: Vectors, y: str) -> str:
    """Return the slope of tanh, from its result."""
    return rest(v, v.mul(y, y))


def lstm(v: Vectors, sums: list[str], cell: str) -> tuple[str, str, list[str]]:
    """(hidden state, cell state, gates)"""
    i, f, o = (sigmoid(v, sums[k]) for k in (0, 1, 3))
    g = tanh(v, sums[2])
    cell = v.multiply_add(f, cell, v.mul(i, g))
    return v.mul(o, tanh(v, cell)), cell, [i, f, g, o]


def lstm_gradient(
    v: Vectors, gates: list[str], before: str, cell: str, of_hidden: str, of_cell: str
) -> tuple[list[str], str]:
    """(gradients of the sums, that of the cell state before)"""
    i, f, g, o = gates
    u = tanh(v, cell)
    of_cell = v.multiply_add(v.mul(of_hidden, o), tanh_slope(v, u), of_cell)
    of_gates = [
        v.mul(v.mul(of_cell, g), sigmoid_slope(v, i)),
        v.mul(v.mul(of_cell, before), sigmoid_slope(v, f)),
        v.mul(v.mul(of_cell, i), tanh_slope(v, g)),
        v.mul(v.mul(of_hidden, u), sigmoid_slope(v, o)),
    ]
    return of_gates, v.mul(of_cell, f)


def gru(
    v: Vectors, given: list[str], products: list[str], bias: str, hidden: str
) -> tuple[str, list[str]]:
    """(hidden state, gates); what the input gives and what the hidden state gives come apart"""
    r, z = (sigmoid(v, v.add(given[k], products[k])) for k in (0, 1))
    reset = v.add(products[2], bias)
    n = tanh(v, v.multiply_add(r, reset, given[2]))
    return v.multiply_add(z, v.sub(hidden, n), n), [r, z, n, reset]


def gru_gradient(
    v: Vectors, gates: list[str], before: str, of_hidden: str
) -> tuple[list[str], list[str], str]:
    """(gradients of what the input gives, of the products, of the hidden state before by itself)"""
    r, z, n, reset = gates
    of_new = v.mul(v.mul(of_hidden, rest(v, z)), tanh_slope(v, n))
    of_update = v.mul(v.mul(of_hidden, v.sub(before, n)), sigmoid_slope(v, z))
    of_reset = v.mul(v.mul(of_new, reset), sigmoid_slope(v, r))
    shared = [of_reset, of_update]
    return [*shared, of_new], [*shared, v.mul(of_new, r)], v.mul(of_hidden, z)


def elman_slope(v: Vectors, cell: str, output: str) -> str:
    """Return the slope of the function, from its result."""
    if cell == "tanh":
        return tanh_slope(v, output)
    return v.select(v.test("ole", output, 0.0), v.zero, v.constant(1.0))
