"""From a recurrence in a program to its kernels: one packs the weight, one walks through the steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ltc.ir import ops
from ltc.ir.loop_nest import Product
from ltc.ir.node import Node
from ltc.ir.tensor_type import TensorType
from ltc.llvm.conv.geometry import KernelSequence
from ltc.llvm.emit.builder import Builder
from ltc.llvm.emit.dtype import BYTES
from ltc.llvm.emit.isa import Isa
from ltc.llvm.emit.kernel_code import KernelCode
from ltc.llvm.emit.vectors import Vectors
from ltc.llvm.recurrence.recurrent_shape import Recurrence, recurrence_of
from ltc.llvm.recurrence.scan_backward import scan_backward
from ltc.llvm.recurrence.scan_forward import scan_forward
from ltc.llvm.recurrence.weight_panels import (
    backward_panels,
    forward_panels,
    pack_backward,
    pack_forward,
    panel_bytes,
)

NAME = "kernel"
ROWS_OF_A_TASK = 8  # sequences: fewer read the whole weight for too little
MOST_TASKS = 64
WORK_OF_A_TASK = 400_000  # additions and multiplications; less is not worth a thread

_FORWARD = ("pre", "weight", "hidden")
_BACKWARD = ("gradient", "last", "weight", "hidden", "outputs")
_REST = {
    (ops.RECURRENCE, "lstm"): ("cell",),
    (ops.RECURRENCE, "gru"): ("bias",),
    (ops.RECURRENCE_GRADIENT, "lstm"): ("last_cell", "cell", "gates", "cells"),
    (ops.RECURRENCE_GRADIENT, "gru"): ("gates",),
}
_MADE = {
    (ops.RECURRENCE, "lstm"): ("last_cell", "gates", "cells"),
    (ops.RECURRENCE, "gru"): ("gates",),
    (ops.RECURRENCE_GRADIENT, "lstm"): ("of_cell",),
    (ops.RECURRENCE_GRADIENT, "gru"): ("of_products",),
}


def can_recur(node: Node, dtypes: frozenset[torch.dtype]) -> bool:
    """Whether kernels are generated for the node."""
    return node.inputs[0].dtype in dtypes and all(n.size > 0 for n in node.inputs)


def recurrence_codes(
    product: Product, isa: Isa, scratch: Callable[[str, int], Any]
) -> list[KernelCode]:
    """The kernels that compute a recurrence or its gradient, in order.

    scratch  (name, bytes) -> the buffer of that memory
    """
    node, where = product.node, _buffers(product)
    made = recurrence_kernels(node, tuple(where), isa)
    where |= {name: scratch(name, nbytes) for name, nbytes in made.scratch.items()}
    return [
        KernelCode(
            kernel.text, tuple(where[name] for name in kernel.arguments), kernel.tasks,
            numbers=kernel.numbers,
        )
        for kernel in made.kernels
    ]  # fmt: skip


def recurrence_kernels(node: Node, given: tuple[str, ...], isa: Isa) -> KernelSequence:
    """What packs the weight, and what walks through the steps.

    given  names of the operands, and of the results that are to be stored
    """
    r, is_forward = recurrence_of(node), node.op is ops.RECURRENCE
    hidden, rows = node.inputs[operand_names(node).index("hidden")], node.inputs[0].shape[0]
    batch = hidden.shape[0]
    scratch = _scratch_bytes(r, is_forward, batch, isa)
    if "outputs" not in given:  # nobody reads them but the next step
        scratch["outputs"] = rows * r.width * r.dtype.itemsize
    names = (*[name for name in given if name != "weight"], *scratch)
    pack, scan = (pack_forward, scan_forward) if is_forward else (pack_backward, scan_backward)
    walk = replace(
        scan(NAME, r, isa, names), tasks=_tasks(2 * rows * r.columns * r.width, batch),
        numbers=(batch, node.attr("steps"), rows),
    )  # fmt: skip
    return KernelSequence((pack(NAME, r, isa), walk), scratch)


def operand_names(node: Node) -> tuple[str, ...]:
    first = _FORWARD if node.op is ops.RECURRENCE else _BACKWARD
    sizes = ("sizes",) if node.attr("packed") else ()
    return (*first, *_REST.get((node.op, node.attr("cell")), ()), *sizes)


def result_names(node: Node) -> tuple[str, ...]:
    first = ("outputs", "last") if node.op is ops.RECURRENCE else ("of_pre", "of_hidden", "before")
    return (*first, *_MADE.get((node.op, node.attr("cell")), ()))


def _buffers(product: Product) -> dict[str, Any]:
    """Those of the operands, and of the results that somebody reads."""
    node = product.node
    assert not isinstance(node.type, TensorType)  # it has several results
    operands = zip(operand_names(node), product.operands, strict=True)
    where: dict[str, Any] = {name: access.node for name, access in operands}
    made = zip(result_names(node), product.results, strict=True)
    return where | {name: result for name, result in made if result is not None}


def _scratch_bytes(r: Recurrence, is_forward: bool, batch: int, isa: Isa) -> dict[str, int]:
    v = Vectors(Builder(), isa, r.dtype)
    panels = forward_panels(r, v) if is_forward else backward_panels(r, v)
    states = batch * panels.pitch * BYTES[v.element]
    memory = {"panels": panel_bytes(panels, v)}
    if is_forward:
        names = ("state", "cell_state") if r.cell == "lstm" else ("state",)
    else:
        names = ("carried", "cell_carried") if r.cell == "lstm" else ("carried",)
        memory["through"] = batch * r.columns * BYTES[v.element]
    return memory | dict.fromkeys(names, states)


def _tasks(work: int, batch: int) -> int:
    """Of the scan: a power of two, so that its parts are equal for most batches."""
    most = min(MOST_TASKS, batch // ROWS_OF_A_TASK, work // WORK_OF_A_TASK)
    return 1 << most.bit_length() - 1 if most > 1 else 1
