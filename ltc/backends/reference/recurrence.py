"""The meaning of a recurrence: one step after the other, each over the sequences that it has.

The formulas take plain tensors, and are differentiable: gradients of gradients come from them.
States are rounded after every step; what is between is computed in float32 or float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ltc.ir.node import Node

Tensors = tuple[torch.Tensor, ...]
# Number of a step, and the states of its rows -> states after it, what is kept
Step = Callable[[int, list[torch.Tensor]], tuple[Tensors, Tensors]]


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _by_step(x: torch.Tensor, sizes: Sequence[int]) -> Tensors:
    """The rows of each step."""
    parts: Tensors = x.split(list(sizes))
    return parts


def _first(state: torch.Tensor, rows: int) -> torch.Tensor:
    return state if len(state) == rows else state[:rows]


def _replaced(state: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The state whose first rows are new."""
    return new if len(new) == len(state) else torch.cat([new, state[len(new) :]])


def _scan(
    sizes: Sequence[int], last_first: bool, states: Tensors, step: Step
) -> list[torch.Tensor]:
    """Return what the steps keep, in the order of time, then the last states.

    Args:
        sizes: The number of each step's rows.
        last_first: True if the steps are made in the opposite order.
    """
    kept, now = [], list(states)
    numbers = range(len(sizes))
    for number in reversed(numbers) if last_first else numbers:
        new, made = step(number, [_first(state, sizes[number]) for state in now])
        now = [_replaced(state, x) for state, x in zip(now, new)]
        kept.append(made)
    if last_first:
        kept.reverse()
    return [*[torch.cat(parts) for parts in zip(*kept)], *now]


def lstm(
    pre: torch.Tensor,
    weight: torch.Tensor,
    hidden: torch.Tensor,
    cell: torch.Tensor,
    sizes: Sequence[int],
    reverse: bool,
) -> Tensors:
    """Outputs, last hidden and cell state, gates, cell states.  Source: torch.nn.LSTM."""
    dtype, size, w = pre.dtype, hidden.shape[1], _wide(weight).T
    x = _by_step(_wide(pre), sizes)

    def step(number: int, states: list[torch.Tensor]) -> tuple[Tensors, Tensors]:
        h, c = states
        sums = torch.addmm(x[number], h, w)
        opened, g = sums.sigmoid(), sums[:, 2 * size : 3 * size].tanh()
        i, f, _, o = opened.chunk(4, 1)
        c = torch.addcmul(f * c, i, g)
        h = _wide((o * c.tanh()).to(dtype))
        return (h, c), (h, opened, g, c)

    made = _scan(sizes, reverse, (_wide(hidden), _wide(cell)), step)
    outputs, opened, g, cells, h, c = (one.to(dtype) for one in made)
    gates = torch.cat([opened[:, : 2 * size], g, opened[:, 3 * size :]], 1)
    return outputs, h, c, gates, cells


def gru(
    pre: torch.Tensor,
    weight: torch.Tensor,
    hidden: torch.Tensor,
    bias: torch.Tensor,
    sizes: Sequence[int],
    reverse: bool,
) -> Tensors:
    """Outputs, last hidden state, gates.  Source: torch.nn.GRU."""
    dtype, size, w, b = pre.dtype, hidden.shape[1], _wide(weight).T, _wide(bias)
    x = _by_step(_wide(pre), sizes)

    def step(number: int, states: list[torch.Tensor]) -> tuple[Tensors, Tensors]:
        (h,) = states
        now, of_hidden = x[number], h @ w
        opened = (now[:, : 2 * size] + of_hidden[:, : 2 * size]).sigmoid()
        r, z = opened.chunk(2, 1)
        hn = of_hidden[:, 2 * size :] + b
        n = torch.addcmul(now[:, 2 * size :], r, hn).tanh()
        h = _wide(torch.addcmul(n, z, h - n).to(dtype))
        return (h,), (h, opened, n, hn)

    made = _scan(sizes, reverse, (_wide(hidden),), step)
    outputs, *gates, h = (one.to(dtype) for one in made)
    return outputs, h, torch.cat(gates, 1)


def elman(
    pre: torch.Tensor,
    weight: torch.Tensor,
    hidden: torch.Tensor,
    function: str,
    sizes: Sequence[int],
    reverse: bool,
) -> Tensors:
    """Outputs and last hidden state; the function is "tanh" or "relu".  Source: torch.nn.RNN."""
    dtype, w, x = pre.dtype, _wide(weight).T, _by_step(_wide(pre), sizes)

    def step(number: int, states: list[torch.Tensor]) -> tuple[Tensors, Tensors]:
        h = _wide(getattr(torch, function)(torch.addmm(x[number], states[0], w)).to(dtype))
        return (h,), (h,)

    outputs, h = _scan(sizes, reverse, (_wide(hidden),), step)
    return outputs.to(dtype), h.to(dtype)


# --- gradients ----------------------------------------------------------------------------------


def states_before(
    states: torch.Tensor, first: torch.Tensor, sizes: Sequence[int], reverse: bool
) -> torch.Tensor:
    """The state that each row of each step began with."""
    after = _by_step(states, sizes)

    def step(number: int, now: list[torch.Tensor]) -> tuple[Tensors, Tensors]:
        return (after[number],), (now[0],)

    return _scan(sizes, reverse, (first,), step)[0]


def lstm_gradient(
    gradient: torch.Tensor,
    last: torch.Tensor,
    weight: torch.Tensor,
    hidden: torch.Tensor,
    outputs: torch.Tensor,
    last_cell: torch.Tensor,
    cell: torch.Tensor,
    gates: torch.Tensor,
    cells: torch.Tensor,
    sizes: Sequence[int],
    reverse: bool,
) -> Tensors:
    """Gradients of `pre` and of the hidden state, hidden states before, the cell state's."""
    dtype, w = gradient.dtype, _wide(weight)
    before, u = _wide(states_before(cells, cell, sizes, reverse)), _wide(cells).tanh()
    i, f, g, o = _wide(gates).chunk(4, 1)
    slopes = torch.cat([g * i * (1 - i), before * f * (1 - f), i * (1 - g * g), u * o * (1 - o)], 1)
    parts = _wide(gradient), o * (1 - u * u), slopes, f
    of_outputs, of_cells, of_gates, kept = (_by_step(part, sizes) for part in parts)

    def step(number: int, now: list[torch.Tensor]) -> tuple[Tensors, Tensors]:
        dh = now[0] + of_outputs[number]
        dc = torch.addcmul(now[1], dh, of_cells[number])
        through = torch.cat([dc, dc, dc, dh], 1) * of_gates[number]
        return (through @ w, dc * kept[number]), (through,)

    pre, dh, dc = _scan(sizes, not reverse, (_wide(last), _wide(last_cell)), step)
    previous = states_before(outputs, hidden, sizes, reverse)
    return pre.to(dtype), dh.to(dtype), previous, dc.to(dtype)


def gru_gradient(
    gradient: torch.Tensor,
    last: torch.Tensor,
    weight: torch.Tensor,
    hidden: torch.Tensor,
    outputs: torch.Tensor,
    gates: torch.Tensor,
    sizes: Sequence[int],
    reverse: bool,
) -> Tensors:
    """Gradients of `pre` and of the hidden state, hidden states before, that of weight @ state."""
    dtype, w = gradient.dtype, _wide(weight)
    previous = states_before(outputs, hidden, sizes, reverse)
    r, z, n, hn = _wide(gates).chunk(4, 1)
    of_n, of_z = (1 - z) * (1 - n * n), (_wide(previous) - n) * z * (1 - z)
    of_r = of_n * hn * r * (1 - r)
    parts = _wide(gradient), torch.cat([of_r, of_z, of_n * r], 1), z
    of_outputs, slopes, kept = (_by_step(part, sizes) for part in parts)

    def step(number: int, now: list[torch.Tensor]) -> tuple[Tensors, Tensors]:
        dh = now[0] + of_outputs[number]
        through = dh.repeat(1, 3) * slopes[number]
        return (torch.addmm(dh * kept[number], through, w),), (dh, through)

    of_states, through, dh = _scan(sizes, not reverse, (_wide(last),), step)
    pre = of_states.repeat(1, 3) * torch.cat([of_r, of_z, of_n], 1)
    return pre.to(dtype), dh.to(dtype), previous, through.to(dtype)


def elman_gradient(
    gradient: torch.Tensor,
    last: torch.Tensor,
    weight: torch.Tensor,
    hidden: torch.Tensor,
    outputs: torch.Tensor,
    function: str,
    sizes: Sequence[int],
    reverse: bool,
) -> Tensors:
    """Gradients of `pre` and of the hidden state, hidden states before."""
    dtype, w = gradient.dtype, _wide(weight)
    y, of_outputs = _wide(outputs), _by_step(_wide(gradient), sizes)
    slopes = _by_step(1 - y * y if function == "tanh" else (~(y <= 0)).to(y.dtype), sizes)

    def step(number: int, now: list[torch.Tensor]) -> tuple[Tensors, Tensors]:
        through = (now[0] + of_outputs[number]) * slopes[number]
        return (through @ w,), (through,)

    pre, dh = _scan(sizes, not reverse, (_wide(last),), step)
    return pre.to(dtype), dh.to(dtype), states_before(outputs, hidden, sizes, reverse)


# --- rows of the reference ----------------------------------------------------------------------


def _with_sizes(node: Node, formula: Callable[..., Tensors]) -> Callable[..., Any]:
    steps, reverse, cell = node.attr("steps"), node.attr("reverse"), node.attr("cell")
    function = () if cell in ("lstm", "gru") else (cell,)
    rows = node.inputs[0].shape[0]

    def compute(*operands: torch.Tensor) -> Tensors:
        if node.attr("packed"):
            return formula(*operands[:-1], *function, operands[-1].tolist(), reverse)
        return formula(*operands, *function, [rows // steps] * steps, reverse)

    return compute


_FORMULAS: dict[str, Callable[..., Tensors]] = {
    "lstm": lstm, "gru": gru, "tanh": elman, "relu": elman,
}  # fmt: skip
_GRADIENTS: dict[str, Callable[..., Tensors]] = {
    "lstm": lstm_gradient, "gru": gru_gradient, "tanh": elman_gradient, "relu": elman_gradient,
}  # fmt: skip


def recurrence(node: Node) -> Callable[..., Any]:
    return _with_sizes(node, _FORMULAS[node.attr("cell")])


def recurrence_gradient(node: Node) -> Callable[..., Any]:
    return _with_sizes(node, _GRADIENTS[node.attr("cell")])
