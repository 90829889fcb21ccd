"""The meaning of a recurrence: one step after the other, each over the sequences that it has.

The formulas take plain tensors, and are differentiable: gradients of gradients come from them.
States are rounded after every step; what is between is computed in float32 or float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ltc.ir.node import Node

Tensors = tuple[torch.Tensor, ...]
# (first row, count of rows) of a step, and the states of these rows -> states after it, what is kept
Step = Callable[[slice, list[torch.Tensor]], tuple[Tensors, Tensors]]


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _rows(sizes: Sequence[int], reverse: bool) -> list[slice]:
    """The rows of each step, in the order in which steps are computed."""
    first, made = 0, []
    for size in sizes:
        made.append(slice(first, first + size))
        first += size
    return made[::-1] if reverse else made


def _replaced(state: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """The state whose first rows are new."""
    return new if len(new) == len(state) else torch.cat([new, state[len(new) :]])


def _scan(rows: Iterable[slice], backward: bool, states: Tensors, step: Step) -> list[torch.Tensor]:
    """Return what the steps keep, in the order of time, then the last states.

    Args:
        backward: True if the steps come last one first.
    """
    kept, now = [], list(states)
    for one in rows:
        new, made = step(one, [state[: one.stop - one.start] for state in now])
        now = [_replaced(state, x) for state, x in zip(now, new)]
        kept.append(made)
    if backward:
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
    dtype, w, x = pre.dtype, _wide(weight), _wide(pre)

    def step(rows: slice, states: list[torch.Tensor]) -> tuple[Tensors, Tensors]:
        h, c = states
        i, f, g, o = (x[rows] + h @ w.T).chunk(4, 1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        c = f * c + i * g
        h = _wide((o * c.tanh()).to(dtype))
        return (h, c), (h, torch.cat([i, f, g, o], 1), c)

    made = _scan(_rows(sizes, reverse), reverse, (_wide(hidden), _wide(cell)), step)
    outputs, gates, cells, h, c = (one.to(dtype) for one in made)
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
    dtype, w, x, b = pre.dtype, _wide(weight), _wide(pre), _wide(bias)

    def step(rows: slice, states: list[torch.Tensor]) -> tuple[Tensors, Tensors]:
        (h,) = states
        (xr, xz, xn), (hr, hz, hn) = x[rows].chunk(3, 1), (h @ w.T).chunk(3, 1)
        r, z, hn = (xr + hr).sigmoid(), (xz + hz).sigmoid(), hn + b
        n = (xn + r * hn).tanh()
        h = _wide((n + z * (h - n)).to(dtype))
        return (h,), (h, torch.cat([r, z, n, hn], 1))

    made = _scan(_rows(sizes, reverse), reverse, (_wide(hidden),), step)
    outputs, gates, h = (one.to(dtype) for one in made)
    return outputs, h, gates


def elman(
    pre: torch.Tensor,
    weight: torch.Tensor,
    hidden: torch.Tensor,
    function: str,
    sizes: Sequence[int],
    reverse: bool,
) -> Tensors:
    """Outputs and last hidden state; the function is "tanh" or "relu".  Source: torch.nn.RNN."""
    dtype, w, x = pre.dtype, _wide(weight), _wide(pre)

    def step(rows: slice, states: list[torch.Tensor]) -> tuple[Tensors, Tensors]:
        h = _wide(getattr(torch, function)(x[rows] + states[0] @ w.T).to(dtype))
        return (h,), (h,)

    outputs, h = _scan(_rows(sizes, reverse), reverse, (_wide(hidden),), step)
    return outputs.to(dtype), h.to(dtype)


# --- gradients ----------------------------------------------------------------------------------


def states_before(
    states: torch.Tensor, first: torch.Tensor, sizes: Sequence[int], reverse: bool
) -> torch.Tensor:
    """The state that each row of each step began with."""

    def step(rows: slice, now: list[torch.Tensor]) -> tuple[Tensors, Tensors]:
        return (states[rows],), (now[0],)

    return _scan(_rows(sizes, reverse), reverse, (first,), step)[0]


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
    before = _wide(states_before(cells, cell, sizes, reverse))
    of_outputs, all_gates, all_cells = map(_wide, (gradient, gates, cells))

    def step(rows: slice, now: list[torch.Tensor]) -> tuple[Tensors, Tensors]:
        i, f, g, o = all_gates[rows].chunk(4, 1)
        dh, u = now[0] + of_outputs[rows], all_cells[rows].tanh()
        dc = now[1] + dh * o * (1 - u * u)
        made = [dc * g * i * (1 - i), dc * before[rows] * f * (1 - f), dc * i * (1 - g * g)]
        through = torch.cat([*made, dh * u * o * (1 - o)], 1)
        return (through @ w, dc * f), (through,)

    backwards = _rows(sizes, reverse)[::-1]
    pre, dh, dc = _scan(backwards, not reverse, (_wide(last), _wide(last_cell)), step)
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
    of_outputs, all_gates, before = map(_wide, (gradient, gates, previous))

    def step(rows: slice, now: list[torch.Tensor]) -> tuple[Tensors, Tensors]:
        r, z, n, hn = all_gates[rows].chunk(4, 1)
        dh = now[0] + of_outputs[rows]
        dn, dz = dh * (1 - z) * (1 - n * n), dh * (before[rows] - n) * z * (1 - z)
        dr = dn * hn * r * (1 - r)
        through = torch.cat([dr, dz, dn * r], 1)
        return (dh * z + through @ w,), (torch.cat([dr, dz, dn], 1), through)

    backwards = _rows(sizes, reverse)[::-1]
    pre, through, dh = _scan(backwards, not reverse, (_wide(last),), step)
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
    of_outputs, y = _wide(gradient), _wide(outputs)
    slope = 1 - y * y if function == "tanh" else (~(y <= 0)).to(y.dtype)

    def step(rows: slice, now: list[torch.Tensor]) -> tuple[Tensors, Tensors]:
        through = (now[0] + of_outputs[rows]) * slope[rows]
        return (through @ w,), (through,)

    pre, dh = _scan(_rows(sizes, reverse)[::-1], not reverse, (_wide(last),), step)
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
