"""nn.LSTMCell and nn.GRUCell: what torch's fused kernels compute, written with other overloads.

For an outside device torch takes `lstm_cell` and `gru_cell` apart into products and a fused kernel. That
has no tangents, nor has ONNX or the CPU, where a trace may be loaded, such a kernel. So in forward mode
and while torch.jit traces the cells are written with other overloads, as on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from ltc.support.torch_private import (
    DispatchKey,
    is_forward_mode,
    kernel_of_key,
    plain_functions,
)
from ltc.tracebacks import entrance

aten = torch.ops.aten


def fused_lstm_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    cx: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
):
    """aten::_thnn_fused_lstm_cell.  Source: torch.nn.LSTM's documentation."""
    gates = input_gates + hidden_gates
    for bias in (input_bias, hidden_bias):
        if bias is not None:
            gates = gates + bias
    i, f, g, o = gates.chunk(4, 1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    cy = f * cx + i * g
    return o * cy.tanh(), cy, torch.cat([i, f, g, o], 1)


def fused_lstm_cell_backward(
    grad_hy: torch.Tensor,
    grad_cy: torch.Tensor | None,
    cx: torch.Tensor,
    cy: torch.Tensor,
    workspace: torch.Tensor,
    has_bias: bool,
):
    """aten::_thnn_fused_lstm_cell_backward_impl: gradients of the gates, of cx, of the bias."""
    if grad_hy is None and grad_cy is None:
        return None, None, None
    i, f, g, o = workspace.chunk(4, 1)
    if grad_hy is None:
        grad_c, through_o = grad_cy, torch.zeros_like(cy)
    else:
        tanh_cy = cy.tanh()
        grad_c = aten.tanh_backward(grad_hy * o, tanh_cy)
        grad_c = grad_c if grad_cy is None else grad_cy + grad_c
        through_o = aten.sigmoid_backward(grad_hy * tanh_cy, o)
    through_i = aten.sigmoid_backward(grad_c * g, i)
    through_f = aten.sigmoid_backward(grad_c * cx, f)
    through_g = aten.tanh_backward(grad_c * i, g)
    grad_gates = torch.cat([through_i, through_f, through_g, through_o], 1)
    return grad_gates, grad_c * f, grad_gates.sum(0) if has_bias else None


def fused_gru_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    hx: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
):
    """aten::_thnn_fused_gru_cell.  Source: torch.nn.GRU's documentation."""
    if input_bias is not None:
        input_gates = input_gates + input_bias
    if hidden_bias is not None:
        hidden_gates = hidden_gates + hidden_bias
    input_r, input_z, input_n = input_gates.chunk(3, 1)
    hidden_r, hidden_z, hidden_n = hidden_gates.chunk(3, 1)
    r, z = (input_r + hidden_r).sigmoid(), (input_z + hidden_z).sigmoid()
    n = (input_n + r * hidden_n).tanh()
    return n + z * (hx - n), torch.cat([r, z, n, hx, hidden_n], 1)


def fused_gru_cell_backward(grad_hy: torch.Tensor, workspace: torch.Tensor, has_bias: bool):
    """aten::_thnn_fused_gru_cell_backward: gradients of both gates, of hx, of both biases."""
    r, z, n, hx, hidden_n = workspace.chunk(5, 1)
    grad_z = aten.sigmoid_backward(grad_hy * (hx - n), z)
    grad_n = aten.tanh_backward(grad_hy * (1 - z), n)
    grad_r = aten.sigmoid_backward(grad_n * hidden_n, r)
    grad_input = torch.cat([grad_r, grad_z, grad_n], 1)
    grad_hidden = torch.cat([grad_r, grad_z, grad_n * r], 1)
    biases = (grad_input.sum(0), grad_hidden.sum(0)) if has_bias else (None, None)
    return grad_input, grad_hidden, grad_hy * z, *biases


def _lstm_cell(x: Any, hx: Sequence[Any], of_x: Any, of_hidden: Any, *biases: Any):
    hidden, cell = hx
    gates = F.linear(x, of_x), F.linear(hidden, of_hidden)
    return fused_lstm_cell(*gates, cell, *biases)[:2]


def _gru_cell(x: Any, hidden: Any, of_x: Any, of_hidden: Any, *biases: Any):
    return fused_gru_cell(F.linear(x, of_x), F.linear(hidden, of_hidden), hidden, *biases)[0]


def _fused_unless_followed(overload: Any, formula: Callable[..., Any]) -> Callable[..., Any]:
    """The formula in forward mode and in a trace, else what torch does."""

    def kernel(*operands: Any):
        if is_forward_mode() or torch.jit.is_tracing():
            with plain_functions():
                return formula(*operands)
        return kernel_of_key(overload)(DispatchKey.CompositeImplicitAutograd, *operands)

    return entrance(kernel)


KERNELS: dict[str, Callable[..., Any]] = {
    "_thnn_fused_lstm_cell": fused_lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": fused_lstm_cell_backward,
    "_thnn_fused_gru_cell": fused_gru_cell,
    "_thnn_fused_gru_cell_backward": fused_gru_cell_backward,
}


def install(library: torch.library.Library) -> None:
    """Put the cells in the place of torch's own formulas for this device."""
    for name, formula in (("lstm_cell", _lstm_cell), ("gru_cell", _gru_cell)):
        kernel = _fused_unless_followed(getattr(aten, name).default, formula)
        for key in ("PrivateUse1", "AutogradPrivateUse1"):
            library.impl(name, kernel, key)
