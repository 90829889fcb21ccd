"""lstm, gru, rnn_tanh and rnn_relu: each direction of a layer is one recorded call, and its
gradient another.

torch takes these overloads apart into some calls for each step.  Here the input's part of the gates
is one product over all steps, ltc::recurrence does the steps, and the weights' gradients are products
over all steps again.  What this does not hold for is left to torch's formula.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from ltc.backends.reference import recurrence as formulas
from ltc.device.ops.recurrence_overloads import RECORDED, all_sizes
from ltc.ir.infer import GATES
from ltc.native.core import CORE, KERNEL_KEY
from ltc.support.torch_private import (
    DEVICE_TYPE,
    DispatchKey,
    dispatch_mode_depth,
    has_own_dispatch,
    is_batched,
    is_forward_mode,
    is_transformed,
    kernel_of_key,
    plain_functions,
)
from ltc.tracebacks import entrance

# What torch's fused kernels of cells compute, written with other overloads: it calls them where it takes
# a layer apart for an outside device.


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


# nn.LSTMCell and nn.GRUCell. For an outside device torch would take them apart into products and a fused
# kernel, which has no tangents; nor has ONNX, or the CPU, where a trace may be loaded, such a kernel. So
# they are written with other overloads, as on the CPU: linear.cpp has the same.


def _check_sizes(x: torch.Tensor, hidden: torch.Tensor, of_x: Any, of_hidden: Any) -> None:
    """Raise RuntimeError, with torch's words, where an operand is not of the cell's size."""
    for name, operand, weight, separator in (
        ("input has inconsistent input_size", x, of_x, ""),
        ("hidden0 has inconsistent hidden_size", hidden, of_hidden, ","),
    ):
        if operand.shape[1] != weight.shape[1]:
            raise RuntimeError(
                f"{name}: got {operand.shape[1]}{separator} expected {weight.shape[1]}"
            )


def _lstm_cell(
    x: torch.Tensor, hx: Sequence[torch.Tensor], of_x: Any, of_hidden: Any, *biases: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    hidden, cell = hx
    _check_sizes(x, hidden, of_x, of_hidden)
    of_input, bias = biases or (None, None)
    gates = F.linear(x, of_x, of_input) + F.linear(hidden, of_hidden, bias)
    i, f, g, o = gates.chunk(4, 1)
    cell = torch.addcmul(f.sigmoid() * cell, i.sigmoid(), g.tanh())
    return o.sigmoid() * cell.tanh(), cell


def _gru_cell(
    x: torch.Tensor, hidden: torch.Tensor, of_x: Any, of_hidden: Any, *biases: Any
) -> torch.Tensor:
    _check_sizes(x, hidden, of_x, of_hidden)
    of_input, bias = biases or (None, None)
    input_r, input_z, input_n = F.linear(x, of_x, of_input).chunk(3, 1)
    hidden_r, hidden_z, hidden_n = F.linear(hidden, of_hidden, bias).chunk(3, 1)
    r, z = (input_r + hidden_r).sigmoid(), (input_z + hidden_z).sigmoid()
    n = torch.addcmul(input_n, r, hidden_n).tanh()
    return torch.addcmul(n, z, hidden - n)


def _in_calls(formula: Callable[..., Any]) -> Callable[..., Any]:
    """The formula, whose calls no mode of the user's sees."""

    def kernel(*operands: Any):
        with plain_functions():
            return formula(*operands)

    return entrance(kernel)


KERNELS: dict[str, Callable[..., Any]] = {
    "_thnn_fused_lstm_cell": fused_lstm_cell,
    "_thnn_fused_lstm_cell_backward_impl": fused_lstm_cell_backward,
    "_thnn_fused_gru_cell": fused_gru_cell,
    "_thnn_fused_gru_cell_backward": fused_gru_cell_backward,
}


def install_cells(library: torch.library.Library) -> None:
    """Put the cells in the place of torch's own formulas for this device; the core has them in C++."""
    if CORE is not None:
        return
    for name, formula in (("lstm_cell", _lstm_cell), ("gru_cell", _gru_cell)):
        kernel = _in_calls(formula)
        for key in (KERNEL_KEY, f"Autograd{KERNEL_KEY}"):
            library.impl(name, kernel, key)


aten = torch.ops.aten
FLOATS = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})


class Layers(NamedTuple):
    """The arguments of the overloads besides tensors.

    Attributes:
        cell: "lstm", "gru", "tanh" or "relu".
        sizes: The number of sequences in each step of packed ones; empty if each has all.
    """

    cell: str
    sizes: tuple[int, ...]
    has_biases: bool
    depth: int
    dropout: float
    train: bool
    bidirectional: bool

    @property
    def directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def of_direction(self) -> int:
        """Parameters of each direction of a layer."""
        return 4 if self.has_biases else 2


# --- one direction of one layer, and its gradient -----------------------------------------------


class _Recurrence(torch.autograd.Function):
    """apply(cell, sizes, reverse, pre, weight, hidden, *rest): outputs, then the last states."""

    @staticmethod
    def forward(ctx: Any, cell: str, sizes: tuple[int, ...], reverse: bool, *operands: Any):
        name, function = (cell, ()) if cell in _FORMULAS else ("elman", (cell,))
        made = RECORDED[f"recurrence.{name}"](*operands, *function, sizes, reverse)
        states = 2 if cell == "lstm" else 1
        ctx.name, ctx.order, ctx.count = name, (*function, sizes, reverse), len(operands)
        ctx.save_for_backward(*operands, made[0], *made[1 + states :])
        return made[: 1 + states]

    @staticmethod
    def backward(ctx: Any, *gradients: Any):
        operands = ctx.saved_tensors[: ctx.count]
        if torch.is_grad_enabled() or is_transformed() or any(map(is_batched, gradients)):
            return None, None, None, *_by_formula(ctx, operands, gradients)
        return None, None, None, *_GRADIENTS[ctx.name](ctx, gradients)


def _by_formula(ctx: Any, operands: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
    """The gradients where they may be differentiated again, or where there is a batch of each."""
    *function, sizes, reverse = ctx.order
    whole = all_sizes(operands[0].shape[0], operands[2].shape[0], sizes)
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        made = _FORMULAS[ctx.name](*operands, *function, whole, reverse)[: len(gradients)]
    wanted = [x for x in operands if x.requires_grad]
    found = torch.autograd.grad(made, wanted, gradients, create_graph=again, allow_unused=True)
    each = iter(found)
    return [next(each) if x.requires_grad else None for x in operands]


def _lstm_gradients(ctx: Any, gradients: Sequence[Any]) -> tuple[Any, ...]:
    _, weight, hidden, cell, outputs, gates, cells = ctx.saved_tensors
    pre, of_hidden, before, of_cell = RECORDED["recurrence_gradient.lstm"](
        gradients[0], gradients[1], weight, hidden, outputs, gradients[2], cell, gates, cells,
        *ctx.order,
    )  # fmt: skip
    return pre, pre.t() @ before, of_hidden, of_cell


def _gru_gradients(ctx: Any, gradients: Sequence[Any]) -> tuple[Any, ...]:
    _, weight, hidden, bias, outputs, gates = ctx.saved_tensors
    pre, of_hidden, before, products = RECORDED["recurrence_gradient.gru"](
        *gradients, weight, hidden, outputs, gates, *ctx.order
    )
    of_bias = products[:, -len(bias) :].sum(0) if ctx.needs_input_grad[6] else None
    return pre, products.t() @ before, of_hidden, of_bias


def _elman_gradients(ctx: Any, gradients: Sequence[Any]) -> tuple[Any, ...]:
    _, weight, hidden, outputs = ctx.saved_tensors
    pre, of_hidden, before = RECORDED["recurrence_gradient.elman"](
        *gradients, weight, hidden, outputs, *ctx.order
    )
    return pre, pre.t() @ before, of_hidden


_FORMULAS: dict[str, Callable[..., Any]] = {
    "lstm": formulas.lstm,
    "gru": formulas.gru,
    "elman": formulas.elman,
}
_GRADIENTS: dict[str, Callable[..., Any]] = {
    "lstm": _lstm_gradients,
    "gru": _gru_gradients,
    "elman": _elman_gradients,
}


def _direction(
    layers: Layers, x: torch.Tensor, states: Sequence[Any], parameters: Sequence[Any], reverse: bool
) -> tuple[Any, ...]:
    """Outputs [rows, H] and the last states of rows [rows, inputs]."""
    weight, recurrent, *biases = parameters
    bias, operands = None, [*states]
    if layers.cell == "gru":
        width = recurrent.shape[1]
        operands.append(biases[1][-width:] if biases else recurrent.new_zeros(width))
        if biases:
            bias = biases[0] + F.pad(biases[1][:-width], (0, width))
    elif biases:
        bias = biases[0] + biases[1]
    pre = F.linear(x, weight, bias)
    if pre.dtype != recurrent.dtype or pre.dtype != states[0].dtype:
        pre, recurrent, *operands = _as_autocast(layers.cell, pre, recurrent, *operands)
    return _Recurrence.apply(layers.cell, layers.sizes, reverse, pre, recurrent, *operands)


def _as_autocast(
    cell: str, pre: torch.Tensor, recurrent: torch.Tensor, hidden: torch.Tensor, *rest: torch.Tensor
) -> list[torch.Tensor]:
    """The operands in one dtype: products are of autocast's, states keep theirs.

    In torch's formulas the states of tanh and relu are what a product gives, those of the other
    cells are sums of themselves and of gates.
    """
    dtype = hidden.dtype if cell in _FORMULAS else pre.dtype
    return [x.to(dtype) for x in (pre, recurrent.to(pre.dtype), hidden, *rest)]


def _all_layers(
    layers: Layers, x: torch.Tensor, states: Sequence[torch.Tensor], parameters: Sequence[Any]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Outputs [rows, directions * H] of the last layer, and the last states, each of all layers."""
    first = list(zip(*[state.unbind(0) for state in states]))
    last, each = [], layers.of_direction
    for layer in range(layers.depth):
        outputs = []
        for direction in range(layers.directions):
            k = layer * layers.directions + direction
            own = parameters[k * each : (k + 1) * each]
            made = _direction(layers, x, first[k], own, bool(direction))
            outputs.append(made[0])
            last.append(made[1:])
        x = torch.cat(outputs, 1) if layers.bidirectional else outputs[0]
        if layers.dropout and layers.train and layer < layers.depth - 1:
            x = torch.dropout(x, layers.dropout, True)
    return x, [torch.stack(of_all, 0) for of_all in zip(*last)]


# --- for which calls ----------------------------------------------------------------------------


def _is_plain(layers: Layers, operands: Sequence[Any], state_count: int) -> bool:
    """Return True if the recorded pair holds for these; it has no batching rules and no forward
    mode.
    """
    if is_transformed() or is_forward_mode() or dispatch_mode_depth():
        return False
    for x in operands:
        if x.is_nested or x.device.type != DEVICE_TYPE or has_own_dispatch(x):
            return False
    types = tuple([(tuple(x.shape), x.dtype) for x in operands])
    if torch.is_autocast_enabled(DEVICE_TYPE):
        types = _under_autocast(types, state_count)
    return _fit(layers._replace(dropout=0.0), types, state_count)


def _under_autocast(types: tuple, state_count: int) -> tuple:
    """The types as if nothing had autocast's dtype yet; none where torch has results of others."""
    chosen = torch.get_autocast_dtype(DEVICE_TYPE)
    dtypes = {dtype for _, dtype in types}
    is_usual = len({d for _, d in types[1 : 1 + state_count]}) == 1
    if not is_usual or not (dtypes == {torch.float64} or dtypes <= {torch.float32, chosen}):
        return ()
    return tuple([(x, torch.float32 if d is chosen else d) for x, d in types])


@functools.lru_cache(maxsize=1024)
def _fit(layers: Layers, types: tuple, state_count: int) -> bool:
    if not types:
        return False
    (x, dtype), *_ = types
    states, parameters = types[1 : 1 + state_count], types[1 + state_count :]
    if dtype not in FLOATS or any(d != dtype for _, d in types) or 0 in x:
        return False
    if len(x) != (2 if layers.sizes else 3):
        return False
    batch = layers.sizes[0] if layers.sizes else x[1]
    if layers.sizes and (sum(layers.sizes) != x[0] or list(layers.sizes) != _falling(layers.sizes)):
        return False
    number = layers.depth * layers.directions
    if (
        number < 1
        or state_count != (2 if layers.cell == "lstm" else 1)
        or len(states[0][0]) != 3
        or len(parameters) != number * layers.of_direction
    ):
        return False
    width = states[0][0][2]
    if not width or any(shape != (number, batch, width) for shape, _ in states):
        return False
    gates, inputs, expected = GATES[layers.cell] * width, x[-1], []
    for _ in range(layers.depth):
        one = [(gates, inputs), (gates, width), (gates,), (gates,)][: layers.of_direction]
        expected += one * layers.directions
        inputs = width * layers.directions
    return [shape for shape, _ in parameters] == expected


def _falling(sizes: tuple[int, ...]) -> list[int]:
    return sorted((size for size in sizes if size > 0), reverse=True)


def _has_stand_ins(argument: Any) -> bool:
    parts = argument if isinstance(argument, (list, tuple)) else (argument,)
    return any(isinstance(x, torch.Tensor) and has_own_dispatch(x) for x in parts)


def _by_torch(overload: Any, *arguments: Any) -> Any:
    """By torch's own formula.

    That in C++ has its errors. That in Python has tangents, and asks nothing but Meta kernels where
    the operands are stand-ins of a tracer.
    """
    if is_forward_mode() or any(map(_has_stand_ins, arguments)):
        return overload.decompose(*arguments)
    return kernel_of_key(overload)(DispatchKey.CompositeImplicitAutograd, *arguments)


# --- the overloads ------------------------------------------------------------------------------


def _padded(overload: Any, cell: str) -> Callable[..., Any]:
    """The overload whose input is one tensor, [steps, batch, inputs] or with the batch first."""

    def kernel(
        x: Any,
        hx: Any,
        params: Sequence[Any],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ):
        layers = Layers(cell, (), has_biases, num_layers, dropout, train, bidirectional)
        states = hx if cell == "lstm" else [hx]
        steps_first = x.transpose(0, 1) if batch_first and x.dim() == 3 else x
        if not _is_plain(layers, (steps_first, *states, *params), len(states)):
            return _by_torch(
                overload,
                x,
                hx,
                params,
                has_biases,
                num_layers,
                dropout,
                train,
                bidirectional,
                batch_first,
            )
        steps, batch, inputs = steps_first.shape
        rows = steps_first.reshape(steps * batch, inputs)
        outputs, last = _all_layers(layers, rows, states, params)
        whole = outputs.reshape(steps, batch, -1)
        return whole.transpose(0, 1) if batch_first else whole, *last

    return kernel


def _packed(overload: Any, cell: str) -> Callable[..., Any]:
    """The overload whose input is the rows of all steps; `batch_sizes` says how many each has."""

    def kernel(
        data: Any,
        batch_sizes: torch.Tensor,
        hx: Any,
        params: Sequence[Any],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
    ):
        is_usual = batch_sizes.dim() == 1 and batch_sizes.dtype == torch.int64
        sizes = tuple(batch_sizes.tolist()) if is_usual else ()
        layers = Layers(cell, sizes, has_biases, num_layers, dropout, train, bidirectional)
        states = hx if cell == "lstm" else [hx]
        if not sizes or not _is_plain(layers, (data, *states, *params), len(states)):
            return _by_torch(
                overload,
                data,
                batch_sizes,
                hx,
                params,
                has_biases,
                num_layers,
                dropout,
                train,
                bidirectional,
            )
        outputs, last = _all_layers(layers, data, states, params)
        return outputs, *last

    return kernel


NAMES = {"lstm": "lstm", "gru": "gru", "rnn_tanh": "tanh", "rnn_relu": "relu"}


def install(library: torch.library.Library) -> None:
    """Put the kernels in the place of torch's own formulas for this device."""

    def without_modes(kernel: Callable[..., Any]):
        @functools.wraps(kernel)
        def guarded(*args: Any, **kwargs: Any):
            with plain_functions():
                return kernel(*args, **kwargs)

        return entrance(guarded)

    for name, cell in NAMES.items():
        packet = getattr(aten, name)
        padded = without_modes(_padded(packet.input, cell))
        packed = without_modes(_packed(packet.data, cell))
        for key in (KERNEL_KEY, "AutogradPrivateUse1"):
            library.impl(f"{name}.input", padded, key)
            library.impl(f"{name}.data", packed, key)
