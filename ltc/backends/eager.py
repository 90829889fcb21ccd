"""The reference backend: one torch CPU call for each primitive.

It says what every op of ir/ops.py means, it is the oracle of the tests, and it is the page that a
vendor starts from: a table of rows, a loop that turns the graph into a list of steps, and a launch
that runs the list.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ltc.backends.collective_runner import start, wait
from ltc.backends.host_buffers import HostBuffers
from ltc.backends.host_memory import new_copy
from ltc.backends.interface import Computation, DeviceInfo, NodeLowering
from ltc.backends.plain_dispatch import PlainDispatch
from ltc.backends.reference import row_formulas
from ltc.backends.reference.attention import attention, attention_gradient
from ltc.backends.reference.donation import SHARES_MEMORY, memory_roots, overwrites, writes_last
from ltc.backends.reference.own_memory import copied, in_memory, made_by, owned
from ltc.backends.reference.philox import random_bits
from ltc.backends.reference.recurrence import recurrence, recurrence_gradient
from ltc.backends.reference.row_formulas import (
    average_pool,
    average_pool_gradient,
    convolution,
    convolution_input_gradient,
    convolution_weight_gradient,
    in_either_layout,
    max_pool,
    max_pool_gradient,
)  # fmt: skip
from ltc.backends.reference.torch_call import element, extern
from ltc.errors import OutOfRangeIndexError
from ltc.ir import ops
from ltc.ir.graph import Graph, Origin, schedule
from ltc.ir.node import Node, constant_value
from ltc.ir.ops import Op
from ltc.support.process import processors

# The reference's calls of torch's reductions and scans: over the dimensions that a node names.


def over_dims(function: Compute) -> Callable[[Node], Compute]:
    def row(node: Node) -> Compute:
        dims, dtype = node.attr("dims"), node.dtype
        if not dims:  # torch would reduce all of them
            return lambda x: x.to(dtype)
        return lambda x: function(x, dims)

    return row


def sum_of_dims(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    return torch.sum(x, dims, dtype=x.dtype)


def product_of_dims(x: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    for dim in reversed(dims):
        x = torch.prod(x, dim, dtype=x.dtype)
    return x


def along_dim(function: Compute) -> Callable[[Node], Compute]:
    def row(node: Node) -> Compute:
        dim = node.attr("dim")
        return lambda x: function(x, dim)

    return row


def scan(function: Compute) -> Callable[[Node], Compute]:
    def row(node: Node) -> Compute:
        dim, dtype = node.attr("dim"), node.dtype
        return lambda x: function(x, dim, dtype=dtype)

    return row


# --- Checks that raise if a value is not what it has to be ---------------------------------------


def wrap_index(node: Node) -> Compute:
    size, lowest, message = (node.attr(name) for name in ("size", "lowest", "message"))

    def compute(index: torch.Tensor) -> torch.Tensor:
        wrong = (index < lowest) | (index >= size)
        if wrong.any():
            raise OutOfRangeIndexError(message.format(index[wrong][0].item()))
        return torch.where(index < 0, index + size, index)

    return compute


def check(node: Node) -> Compute:
    message = node.attr("message")

    def compute(x: torch.Tensor, holds: torch.Tensor) -> torch.Tensor:
        if not holds.all():
            raise RuntimeError(message.format(x[~holds][0].item()))
        return x.clone()

    return compute


Compute = Callable[..., Any]

# --- the meaning of each op: a node -> what computes it from its operands ------------------------


def _calls(function: Compute) -> Callable[[Node], Compute]:
    """For an op without attributes."""

    def row(node: Node) -> Compute:
        return function

    return row


def _constant(node: Node) -> Compute:
    value = torch.tensor(constant_value(node), dtype=node.dtype, device="cpu")
    return lambda: value


def _iota(node: Node) -> Compute:
    size = node.attr("size")
    return lambda: torch.arange(size)


def _cast(node: Node) -> Compute:
    dtype = node.dtype
    return lambda x: x.to(dtype)


def _bitcast(node: Node) -> Compute:
    dtype = node.dtype
    return lambda x: x.contiguous().view(dtype)


def _random_bits(node: Node) -> Compute:
    shape, count = node.shape, node.size
    bits, stream = node.attr("bits"), node.attr("stream")

    def compute(seed: torch.Tensor) -> torch.Tensor:
        words = random_bits(int(seed.item()) & 0xFFFFFFFFFFFFFFFF, count, bits, stream)
        return torch.from_numpy(words).reshape(shape)

    return compute


def _collective_start(node: Node) -> Compute:
    collective, count = node.attr("collective"), node.attr("count")
    # The exchange reads its operands until the wait: one that lies in an input's memory, which the
    # program may write over, is copied.
    first = len(node.inputs) - count
    lasting = [_memory_root(operand).op not in LEAVES for operand in node.inputs[first:]]

    def compute(*inputs: torch.Tensor) -> torch.Tensor:
        sent = [x.contiguous() if own else new_copy(x) for x, own in zip(inputs[first:], lasting)]
        return start(collective, sent)

    return compute


def _memory_root(node: Node) -> Node:
    while node.op in SHARES_MEMORY:
        node = node.inputs[0]
    return node


def _get(node: Node) -> Compute:
    index = node.attr("index")
    return lambda results: element(results, index)


def _barrier(node: Node) -> Compute:
    return lambda x: x


# --- the table -----------------------------------------------------------------------------------

COMPUTE: dict[Op, Callable[[Node], Compute]] = {
    ops.CONSTANT: _constant,
    ops.IOTA: _iota,
    ops.NEG: _calls(torch.neg),
    ops.ABS: _calls(torch.abs),
    ops.SIGN: _calls(torch.sign),
    ops.EXP: _calls(torch.exp),
    ops.EXP2: _calls(torch.exp2),
    ops.EXPM1: _calls(torch.expm1),
    ops.LOG: _calls(torch.log),
    ops.LOG1P: _calls(torch.log1p),
    ops.LOG2: _calls(torch.log2),
    ops.LOG10: _calls(torch.log10),
    ops.SQRT: _calls(torch.sqrt),
    ops.RSQRT: _calls(torch.rsqrt),
    ops.SIN: _calls(torch.sin),
    ops.COS: _calls(torch.cos),
    ops.TAN: _calls(torch.tan),
    ops.ASIN: _calls(torch.asin),
    ops.ACOS: _calls(torch.acos),
    ops.ATAN: _calls(torch.atan),
    ops.SINH: _calls(torch.sinh),
    ops.COSH: _calls(torch.cosh),
    ops.TANH: _calls(torch.tanh),
    ops.ASINH: _calls(torch.asinh),
    ops.ACOSH: _calls(torch.acosh),
    ops.ATANH: _calls(torch.atanh),
    ops.ERF: _calls(torch.erf),
    ops.ERFC: _calls(torch.erfc),
    ops.ERFINV: _calls(torch.erfinv),
    ops.LGAMMA: _calls(torch.lgamma),
    ops.DIGAMMA: _calls(torch.digamma),
    ops.FLOOR: _calls(torch.floor),
    ops.CEIL: _calls(torch.ceil),
    ops.TRUNC: _calls(torch.trunc),
    ops.ROUND: _calls(torch.round),
    ops.NOT: _calls(torch.bitwise_not),
    ops.ADD: _calls(torch.add),
    ops.SUB: _calls(torch.sub),
    ops.MUL: _calls(torch.mul),
    ops.DIV: _calls(torch.div),
    ops.FLOOR_DIVIDE: _calls(torch.floor_divide),
    ops.TRUNC_DIVIDE: _calls(lambda x, y: torch.div(x, y, rounding_mode="trunc")),
    ops.REMAINDER: _calls(torch.remainder),
    ops.FMOD: _calls(torch.fmod),
    ops.POW: _calls(torch.pow),
    ops.ATAN2: _calls(torch.atan2),
    ops.HYPOT: _calls(torch.hypot),
    ops.NEXTAFTER: _calls(torch.nextafter),
    ops.COPYSIGN: _calls(torch.copysign),
    ops.MAXIMUM: _calls(torch.maximum),
    ops.MINIMUM: _calls(torch.minimum),
    ops.AND: _calls(torch.bitwise_and),
    ops.OR: _calls(torch.bitwise_or),
    ops.XOR: _calls(torch.bitwise_xor),
    ops.SHIFT_LEFT: _calls(torch.bitwise_left_shift),
    ops.SHIFT_RIGHT: _calls(torch.bitwise_right_shift),
    ops.EQ: _calls(torch.eq),
    ops.NE: _calls(torch.ne),
    ops.LT: _calls(torch.lt),
    ops.LE: _calls(torch.le),
    ops.GT: _calls(torch.gt),
    ops.GE: _calls(torch.ge),
    ops.WHERE: _calls(torch.where),
    ops.CAST: _cast,
    ops.BITCAST: _bitcast,
    ops.WRAP_INDEX: wrap_index,
    ops.CHECK: check,
    ops.SUM: over_dims(sum_of_dims),
    ops.PROD: over_dims(product_of_dims),
    ops.MAX: over_dims(torch.amax),
    ops.MIN: over_dims(torch.amin),
    ops.ANY: over_dims(torch.any),
    ops.ALL_TRUE: over_dims(torch.all),
    ops.ARGMAX: along_dim(torch.argmax),
    ops.ARGMIN: along_dim(torch.argmin),
    ops.CUMSUM: scan(torch.cumsum),
    ops.CUMPROD: scan(torch.cumprod),
    ops.PERMUTE: row_formulas.permute,
    ops.SLICE: row_formulas.slice_of,
    ops.EXPAND: row_formulas.expand,
    ops.RESHAPE: row_formulas.reshape,
    ops.FLIP: row_formulas.flip,
    ops.PAD: row_formulas.pad,
    ops.CONCAT: row_formulas.concat,
    ops.INSERT: row_formulas.insert,
    ops.TAKE: row_formulas.take,
    ops.PUT: row_formulas.put,
    ops.GATHER: row_formulas.gather,
    ops.SCATTER: row_formulas.scatter,
    ops.MATMUL: _calls(torch.matmul),
    ops.CONVOLUTION: in_either_layout(convolution, 0),
    ops.CONVOLUTION_INPUT_GRADIENT: in_either_layout(convolution_input_gradient, 0),
    ops.CONVOLUTION_WEIGHT_GRADIENT: in_either_layout(convolution_weight_gradient, 0, 1),
    ops.ATTENTION: attention,
    ops.ATTENTION_GRADIENT: attention_gradient,
    ops.RECURRENCE: recurrence,
    ops.RECURRENCE_GRADIENT: recurrence_gradient,
    ops.MAX_POOL: in_either_layout(max_pool, 0),
    ops.MAX_POOL_GRADIENT: in_either_layout(max_pool_gradient, 0, 1),
    ops.AVERAGE_POOL: in_either_layout(average_pool, 0),
    ops.AVERAGE_POOL_GRADIENT: in_either_layout(average_pool_gradient, 0),
    ops.RANDOM_BITS: _random_bits,
    ops.COLLECTIVE_START: _collective_start,
    ops.COLLECTIVE_WAIT: _calls(wait),
    ops.EXTERN: extern,
    ops.GET: _get,
    ops.BARRIER: _barrier,
    ops.TO_SYMMETRIC: _barrier,
}

# --- from a graph to a list of steps -------------------------------------------------------------

LEAVES = frozenset({ops.INPUT, ops.SCALAR, ops.CONSTANT})
TAKES_OUT = frozenset(
    {ops.ADD, ops.SUB, ops.MUL, ops.DIV, ops.NEG, ops.SQRT, ops.MAXIMUM, ops.MINIMUM, ops.EXP}
)


class ReferenceStep(NamedTuple):
    """One node made runnable.

    Attributes:
        compute: Called with the values in `operands`.
        result: The slot it fills.
        dead: Slots that nothing reads afterwards.
        writes: The position of the donated input it writes over, or None.
        origin: For the note on an error.
    """

    compute: Compute
    operands: tuple[int, ...]
    result: int
    dead: tuple[int, ...]
    writes: int | None
    origin: Origin | None


def _writing(compute: Compute, op: Op) -> Compute:
    """`compute` with its last operand taking the result."""
    if op in TAKES_OUT:
        return lambda *operands: compute(*operands[:-1], out=operands[-1])
    return lambda *operands: operands[-1].copy_(compute(*operands[:-1]))


class EagerComputation(HostBuffers):
    """A graph as a flat list of steps; its buffers are contiguous CPU tensors."""

    def __init__(self, graph: Graph, donated: frozenset[int]) -> None:
        order = schedule(*graph.outputs)
        order, overwritten = writes_last(order, overwrites(graph, order, donated))
        self._slots = {node: slot for slot, node in enumerate(order)}
        self._inputs = [(n.attr("index"), s) for n, s in self._slots.items() if n.op is ops.INPUT]
        self._scalars = [
            (n.attr("slot"), s, n.dtype) for n, s in self._slots.items() if n.op is ops.SCALAR
        ]
        self._start: list[Any] = [None] * len(order)
        self._outputs = self._ownership(graph.outputs, memory_roots(order))
        self._steps = self._make_steps(graph, order, overwritten)
        del self._slots  # the nodes are not needed to launch

    def _ownership(
        self, outputs: Sequence[Node], roots: Mapping[Node, Node]
    ) -> list[tuple[int, Compute]]:
        """For each output its slot, and how it becomes a buffer that shares nothing."""
        result, taken = [], set()
        for output in outputs:
            root = roots[output]
            fresh = root.op not in LEAVES and root not in taken
            taken.add(root)
            result.append((self._slots[output], in_memory(output, owned if fresh else copied)))
        return result

    def _make_steps(
        self, graph: Graph, order: list[Node], overwritten: Mapping[Node, Node]
    ) -> list[ReferenceStep]:
        last_reader: dict[Node, Node | None] = {n: node for node in order for n in node.inputs}
        last_reader.update({target: node for node, target in overwritten.items()})
        last_reader.update(dict.fromkeys(graph.outputs))
        steps = []
        for node in order:
            if node.op is ops.INPUT or node.op is ops.SCALAR:
                continue
            compute = made_by(node, LOWERING.lower(node))
            if node.op is ops.CONSTANT:
                self._start[self._slots[node]] = compute()
                continue
            operands, target = node.inputs, overwritten.get(node)
            if target is not None:
                compute, operands = _writing(compute, node.op), (*operands, target)
            dead = {n for n in operands if last_reader[n] is node and n.op is not ops.CONSTANT}
            steps.append(
                ReferenceStep(
                    compute,
                    tuple(self._slots[n] for n in operands),
                    self._slots[node],
                    tuple(self._slots[n] for n in dead),
                    None if target is None else target.attr("index"),
                    graph.origins.get(node),
                )
            )
        return steps

    def launch(self, buffers: list[torch.Tensor], scalars: list[Any]) -> list[torch.Tensor]:
        with PlainDispatch():
            values = self._start.copy()
            for position, slot in self._inputs:
                values[slot] = buffers[position]
            for position, slot, dtype in self._scalars:
                values[slot] = torch.as_tensor(scalars[position], dtype=dtype)
            self._run(values)
            return [own(values[slot]) for slot, own in self._outputs]

    def _run(self, values: list[Any]) -> None:
        number = 0
        try:
            for number, (compute, operands, result, dead, _, _) in enumerate(self._steps):
                values[result] = compute(*[values[slot] for slot in operands])
                for slot in dead:
                    values[slot] = None
        except BaseException as error:
            tried = self._steps[: number + 1]
            if tried and tried[-1].origin is not None and isinstance(error, Exception):
                error.add_note(f"while running {tried[-1].origin}")
            written = tuple(step.writes for step in tried if step.writes is not None)
            error.overwritten = written  # type: ignore[attr-defined]  # see Computation.launch
            raise


class EagerBackend:
    """Runs graphs on this machine's CPU through torch."""

    name = "eager"
    computation: type[Computation] = EagerComputation
    any_device = True  # see BackendCapabilities: all devices are this machine's memory

    def __init__(self) -> None:
        self.lowering = LOWERING

    def devices(self) -> tuple[DeviceInfo, ...]:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return (DeviceInfo("CPU", processors.name(), memory),)

    def compile(self, graph: Graph, device: int, donated: frozenset[int]) -> EagerComputation:
        return EagerComputation(graph, donated)

    def prepare_to_exit(self) -> None:
        """Nothing runs between launches."""


LOWERING = NodeLowering(COMPUTE)
