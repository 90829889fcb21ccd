"""From a recurrence in a program to its kernels: one packs the weight, one walks through the steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch

from ltc.ir import ops
from ltc.ir.loop_nest import Product
from ltc.ir.node import Node
from ltc.ir.tensor_type import TensorType
from ltc.llvm.conv.geometry import KernelSequence
from ltc.llvm.emit.builder import Builder, function_text
from ltc.llvm.emit.dtype import BYTES
from ltc.llvm.emit.index import Index, least, most
from ltc.llvm.emit.isa import Isa
from ltc.llvm.emit.kernel_code import KernelCode
from ltc.llvm.emit.vectors import GeneratedKernel, Vectors, reserved
from ltc.llvm.recurrence import cell_math
from ltc.llvm.recurrence.recurrent_shape import Recurrence, recurrence_of
from ltc.llvm.recurrence.weight_panels import (
    StateProduct,
    backward_panels,
    forward_panels,
    mask_of,
    pack_backward,
    pack_forward,
    panel_bytes,
)

# The loop over the steps of a recurrence, whichever way they go, and which rows each step has.


class TimeStep(NamedTuple):
    """One step.

    Attributes:
        continued: The first sequence that the step before did not have; 0 for the first step.
        start: Its first row among the rows of all steps.
        end: The first one of this task's sequences that the step does not have.
        previous: The first row of the step that was computed before it.
    """

    start: Index
    end: Index
    previous: Index
    continued: Index


class TimeWalk:
    """A kernel of the sequences `low` up to `high`; its numbers are sequences, steps and rows.

    Attributes:
        is_backward: True if the last step is computed first.
        pitch: From one row to the next of what a step hands to the next one.
    """

    numbers, is_backward = 3, False
    pitch: int

    def __init__(self, r: Recurrence, isa: Isa, names: tuple[str, ...]):
        self.r, self.b, self.names = r, Builder(), names
        self.v = Vectors(self.b, isa, r.dtype)
        self.batch, self.steps, self.total = map(self.b.number, range(self.numbers))
        self.low, self.high = self.b.share(self.batch)

    def pointer(self, name: str) -> str:
        return f"%p{self.names.index(name)}"

    def has(self, name: str) -> bool:
        return name in self.names

    def kernel(self, name: str) -> GeneratedKernel:
        """The kernel; results that are not among the names of its pointers are not stored."""
        self._load()
        self._walk()
        self._store()
        text = function_text(name, len(self.names), self.b, self.numbers)
        return GeneratedKernel(name, text, self.names, 1, 0)

    def _carried(self) -> list[tuple[str, str, str]]:
        """(what the first step begins with, the memory of the present one, what the last one leaves)"""
        raise NotImplementedError

    def _step(self, step: TimeStep) -> None:
        raise NotImplementedError

    def _load(self) -> None:
        def vector(first: str, memory: str, row: Index, column: Index, mask: str | None) -> None:
            x = self.v.load(self.pointer(first), row * self.r.width + column, mask)
            self.v.store_computed(x, self.pointer(memory), row * self.pitch + column)

        for first, memory, _ in self._carried():
            self.each_vector(self.low, self.high, partial(vector, first, memory))

    def _store(self) -> None:
        def vector(memory: str, last: str, row: Index, column: Index, mask: str | None) -> None:
            x = self.v.load_computed(self.pointer(memory), row * self.pitch + column)
            self.v.store(x, self.pointer(last), row * self.r.width + column, mask)

        for _, memory, last in self._carried():
            if self.has(last):
                self.each_vector(self.low, self.high, partial(vector, memory, last))

    def _walk(self) -> None:
        """Each step in the order in which steps are computed, or from the last one back."""
        ascending = self.r.reverse == self.is_backward
        begin: Index = 0 if ascending else self.total

        def step(k: Index, carried: list) -> list[Index]:
            time = k if ascending else self.steps - 1 - k
            size = self._size(time)
            start = carried[0] if ascending else carried[0] - size
            before = self._step_before(time, start, size) if self.is_backward else (0, 0)
            self._step(TimeStep(start, least(self.high, size), *before))
            return [start + size if ascending else start]

        self.b.loop(0, self.steps, 1, [("i64", begin)], step)

    def _size(self, time: Index) -> Index:
        if not self.r.packed:
            return self.batch
        at = self.v.at(self.pointer("sizes"), time, "i64")
        return self.b.index(self.b.effect(f"load i64, ptr {at}"))

    def _step_before(self, time: Index, start: Index, size: Index) -> tuple[Index, Index]:
        """Return the first row of the step computed before, and how many sequences it has."""
        last = self.steps - 1
        first = last if self.r.reverse else 0
        is_first = self.b.value(f"icmp eq i64 {time}, {first}")
        near = least(time + 1, last) if self.r.reverse else most(time - 1, 0)
        before = self._size(near)
        row = start + size if self.r.reverse else start - before
        return row, self.b.where(is_first, 0, before)

    def each_vector(
        self, low: Index, high: Index, body: Callable[[Index, Index, str | None], None]
    ) -> None:
        """body(row, column, mask) for vectors of the states of rows from `low` up to `high`."""
        v, width = self.v, self.r.width

        def vector(row: Index, column: Index, _) -> None:
            mask = None if width % v.width == 0 else v.first(width - column)
            body(row, column, mask)

        self.b.nest([(low, high, 1), (0, width, v.width)], [], vector)

    def store_memory(self, value: str, pointer: str, offset: Index, mask: str | None) -> None:
        """Store a vector as it is computed."""
        at = self.v.at(pointer, offset, self.v.element)
        self.v.raw_store(value, at, mask, self.v.element, self.v.width)


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
    """Return True if kernels are generated for the node."""
    return node.inputs[0].dtype in dtypes and all(n.size > 0 for n in node.inputs)


def recurrence_codes(
    product: Product, isa: Isa, scratch: Callable[[str, int], Any]
) -> list[KernelCode]:
    """The kernels that compute a recurrence or its gradient, in order.

    Args:
        scratch: (name, bytes) -> the buffer of that memory.
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
    """Return the kernels that pack the weight and walk through the steps.

    Args:
        given: Names of the operands, and of the results that are to be stored.
    """
    r, is_forward = recurrence_of(node), node.op is ops.RECURRENCE
    hidden, rows = node.inputs[operand_names(node).index("hidden")], node.inputs[0].shape[0]
    batch = hidden.shape[0]
    scratch = _scratch_bytes(r, is_forward, batch, isa)
    if "outputs" not in given:  # nobody reads them but the next step
        scratch["outputs"] = rows * r.width * r.dtype.itemsize
    names = (*[name for name in given if name != "weight"], *scratch)
    pack, scan = (pack_forward, _ForwardScan) if is_forward else (pack_backward, _BackwardScan)
    walk = replace(
        scan(r, isa, names).kernel(NAME), tasks=_tasks(2 * rows * r.columns * r.width, batch),
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
    """Return the buffers of the operands, and of the results that are read."""
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
    """Return the tasks of the scan: a power of two, so that its parts are equal for most batches."""
    most = min(MOST_TASKS, batch // ROWS_OF_A_TASK, work // WORK_OF_A_TASK)
    return 1 << most.bit_length() - 1 if most > 1 else 1


# All steps of one direction of a layer: each task has sequences of its own, and waits for nobody.
# The hidden states that a step begins with lie in memory as they are computed. A panel of the
# weight has the columns of all gates that make the same numbers of the new states, so that a
# cell's formula follows its sums at once; the new states go to the outputs, and over the old ones
# after the step.


class _ForwardScan(TimeWalk):
    def __init__(self, r: Recurrence, isa: Isa, names: tuple[str, ...]):
        super().__init__(r, isa, names)
        self.panels = forward_panels(r, self.v)
        self.pitch = self.panels.pitch
        self.product = StateProduct(self.v, self.panels, self.pitch)
        size = self.product.height * self.panels.row
        self.sums = reserved(self.b, size, self.v.element)

    def _carried(self) -> list[tuple[str, str, str]]:
        hidden = ("hidden", "state", "last")
        cell = ("cell", "cell_state", "last_cell")
        return [hidden, cell] if self.r.cell == "lstm" else [hidden]

    # --- one step

    def _step(self, step: TimeStep) -> None:
        self.b.loop(0, self.panels.groups, 1, [], lambda group, _: self._group(step, group))

        def new_state(row: Index, column: Index, mask: str | None) -> None:
            at = (step.start + row) * self.r.width + column
            x = self.v.load(self.pointer("outputs"), at, mask)
            self.v.store_computed(x, self.pointer("state"), row * self.pitch + column)

        self.each_vector(self.low, step.end, new_state)

    def _group(self, step: TimeStep, group: Index) -> None:
        v = self.v
        panel = v.at(self.pointer("panels"), group * self.panels.size, v.element)
        columns = [group * self.panels.columns + j * v.width for j in range(self.panels.vectors)]

        def block(row: Index, count: Index) -> None:
            self.product.block(self.pointer("state"), row, count, panel, partial(self._keep, row))
            # A loop: a cell's formula is long, and its text is needed once.
            self.b.loop(0, count, 1, [], lambda number, _: self._row(step, row, number, columns))

        self.product.blocks(self.low, step.end, block)

    def _keep(self, first: Index, row: Index, rows: int, sums: list[str]) -> None:
        place = (row - first) * self.panels.row
        for k, value in enumerate(sums):
            self.v.store_computed(value, self.sums, place + k * self.v.width)

    def _row(self, step: TimeStep, first: Index, number: Index, columns: list[Index]) -> None:
        """Compute the cells of one row at the columns of a group."""
        v, panels = self.v, self.panels
        for j, column in enumerate(columns):
            mask = mask_of(v, panels, column)
            products = [
                v.load_computed(self.sums, number * panels.row + (g * panels.vectors + j) * v.width)
                for g in range(self.r.gates)
            ]
            _CELLS[self.r.cell](self, step, first + number, column, mask, products)

    # --- cells

    def given(self, place: Index, column: Index, mask: str | None) -> list[str]:
        """Return the input's part in the gates of a row."""
        at = place * self.r.columns + column
        starts = [at + g * self.r.width for g in range(self.r.gates)]
        return [self.v.load(self.pointer("pre"), start, mask) for start in starts]

    def store_gates(self, gates: list[str], place: Index, column: Index, mask: str | None) -> None:
        if self.has("gates"):
            for k, gate in enumerate(gates):
                at = place * (len(gates) * self.r.width) + (column + k * self.r.width)
                self.v.store(gate, self.pointer("gates"), at, mask)

    def store_row(self, x: str, name: str, place: Index, column: Index, mask: str | None) -> None:
        if self.has(name):
            self.v.store(x, self.pointer(name), place * self.r.width + column, mask)

    def lstm(
        self, step: TimeStep, row: Index, column: Index, mask: str | None, products: list[str]
    ) -> None:
        v, place, at = self.v, step.start + row, row * self.pitch + column
        sums = [v.add(x, y) for x, y in zip(self.given(place, column, mask), products)]
        before = v.load_computed(self.pointer("cell_state"), at)
        hidden, cell, gates = cell_math.lstm(v, sums, before)
        v.store_computed(cell, self.pointer("cell_state"), at)
        self.store_row(hidden, "outputs", place, column, mask)
        self.store_row(cell, "cells", place, column, mask)
        self.store_gates(gates, place, column, mask)

    def gru(
        self, step: TimeStep, row: Index, column: Index, mask: str | None, products: list[str]
    ) -> None:
        v, place = self.v, step.start + row
        before = v.load_computed(self.pointer("state"), row * self.pitch + column)
        bias = v.load(self.pointer("bias"), column, mask)
        given = self.given(place, column, mask)
        hidden, gates = cell_math.gru(v, given, products, bias, before)
        self.store_row(hidden, "outputs", place, column, mask)
        self.store_gates(gates, place, column, mask)

    def elman(
        self, step: TimeStep, row: Index, column: Index, mask: str | None, products: list[str]
    ) -> None:
        v, place = self.v, step.start + row
        function = cell_math.tanh if self.r.cell == "tanh" else cell_math.relu
        hidden = function(v, v.add(self.given(place, column, mask)[0], products[0]))
        self.store_row(hidden, "outputs", place, column, mask)


_CELLS: dict[str, Callable[..., None]] = {
    "lstm": _ForwardScan.lstm, "gru": _ForwardScan.gru, "tanh": _ForwardScan.elman, "relu": _ForwardScan.elman,
}  # fmt: skip


# All steps of one direction of a layer backwards: gradients of what its gates got from the input.
# What reaches the states of a step lies in memory as it is computed. A step makes the gradients
# of its gates from it, and these times the weight are what reaches the states before.


class _BackwardScan(TimeWalk):
    is_backward = True

    def __init__(self, r: Recurrence, isa: Isa, names: tuple[str, ...]):
        super().__init__(r, isa, names)
        self.panels = backward_panels(r, self.v)
        self.pitch = self.panels.pitch
        self.product = StateProduct(self.v, self.panels, r.columns)

    def _carried(self) -> list[tuple[str, str, str]]:
        hidden = ("last", "carried", "of_hidden")
        cell = ("last_cell", "cell_carried", "of_cell")
        return [hidden, cell] if self.r.cell == "lstm" else [hidden]

    # --- one step

    def _step(self, step: TimeStep) -> None:
        self.each_vector(self.low, step.end, partial(_CELL_GRADIENTS[self.r.cell], self, step))
        self.b.loop(0, self.panels.groups, 1, [], lambda group, _: self._group(step, group))

    def _group(self, step: TimeStep, group: Index) -> None:
        v = self.v
        panel = v.at(self.pointer("panels"), group * self.panels.size, v.element)
        target = v.at(self.pointer("carried"), group * self.panels.columns, v.element)

        def finish(row: Index, rows: int, sums: list[str]) -> None:
            for k, value in enumerate(sums):
                r, j = divmod(k, self.panels.vectors)
                at = (row + r) * self.pitch + j * v.width
                if self.r.cell == "gru":  # some of it reaches the state before by itself
                    value = v.add(value, v.load_computed(target, at))
                v.store_computed(value, target, at)

        self.product.blocks(self.low, step.end, lambda row, count: self.product.block(
            self.pointer("through"), row, count, panel, finish
        ))  # fmt: skip

    # --- what a cell reads and leaves

    def _before(
        self, step: TimeStep, row: Index, column: Index, mask: str | None, names: tuple[str, str]
    ) -> str:
        """A row of a state as the step began with it; `names` of all later ones, and of the first."""
        b, v, width = self.b, self.v, self.r.width
        later = v.at(self.pointer(names[0]), (step.previous + row) * width)
        first = v.at(self.pointer(names[1]), row * width)
        is_later = b.value(f"icmp slt i64 {row}, {step.continued}")
        chosen = b.value(f"select i1 {is_later}, ptr {later}, ptr {first}")
        return v.load(chosen, column, mask)

    def _hidden_before(self, step: TimeStep, row: Index, column: Index, mask: str | None) -> str:
        before = self._before(step, row, column, mask, ("outputs", "hidden"))
        if self.has("before"):
            place = (step.start + row) * self.r.width + column
            self.v.store(before, self.pointer("before"), place, mask)
        return before

    def _of_hidden(self, step: TimeStep, row: Index, column: Index, mask: str | None) -> str:
        """Return the gradient that reaches the state that the step has made."""
        v = self.v
        given = v.load(self.pointer("gradient"), (step.start + row) * self.r.width + column, mask)
        return v.add(given, v.load_computed(self.pointer("carried"), row * self.pitch + column))

    def _gates(self, place: Index, column: Index, mask: str | None) -> list[str]:
        v, width = self.v, self.r.width
        at = place * (4 * width) + column
        return [v.load(self.pointer("gates"), at + k * width, mask) for k in range(4)]

    def _leave(
        self, name: str, values: list[str], place: Index, column: Index, mask: str | None
    ) -> None:
        """Store gradients of all gates as a result."""
        if self.has(name):
            for k, value in enumerate(values):
                at = place * self.r.columns + (column + k * self.r.width)
                self.v.store(value, self.pointer(name), at, mask)

    def _pass_through(self, values: list[str], row: Index, column: Index, mask: str | None) -> None:
        """Store the values to multiply by the weight; the columns of gates follow each other."""
        for k, value in enumerate(values):
            at = row * self.r.columns + (column + k * self.r.width)
            self.store_memory(value, self.pointer("through"), at, mask)

    # --- cells

    def lstm(self, step: TimeStep, row: Index, column: Index, mask: str | None) -> None:
        v, place, at = self.v, step.start + row, row * self.pitch + column
        cell = v.load(self.pointer("cells"), place * self.r.width + column, mask)
        made, of_cell = cell_math.lstm_gradient(
            v, self._gates(place, column, mask),
            self._before(step, row, column, mask, ("cells", "cell")), cell,
            self._of_hidden(step, row, column, mask),
            v.load_computed(self.pointer("cell_carried"), at),
        )  # fmt: skip
        v.store_computed(of_cell, self.pointer("cell_carried"), at)
        self._hidden_before(step, row, column, mask)
        self._leave("of_pre", made, place, column, mask)
        self._pass_through(made, row, column, mask)

    def gru(self, step: TimeStep, row: Index, column: Index, mask: str | None) -> None:
        place = step.start + row
        before = self._hidden_before(step, row, column, mask)
        of_pre, of_products, by_itself = cell_math.gru_gradient(
            self.v, self._gates(place, column, mask), before,
            self._of_hidden(step, row, column, mask),
        )  # fmt: skip
        self._leave("of_pre", of_pre, place, column, mask)
        self._leave("of_products", of_products, place, column, mask)
        self._pass_through(of_products, row, column, mask)
        self.v.store_computed(by_itself, self.pointer("carried"), row * self.pitch + column)

    def elman(self, step: TimeStep, row: Index, column: Index, mask: str | None) -> None:
        v, place = self.v, step.start + row
        output = v.load(self.pointer("outputs"), place * self.r.width + column, mask)
        slope = cell_math.elman_slope(v, self.r.cell, output)
        made = [v.mul(self._of_hidden(step, row, column, mask), slope)]
        self._hidden_before(step, row, column, mask)
        self._leave("of_pre", made, place, column, mask)
        self._pass_through(made, row, column, mask)


_CELL_GRADIENTS: dict[str, Callable[..., None]] = {
    "lstm": _BackwardScan.lstm, "gru": _BackwardScan.gru, "tanh": _BackwardScan.elman,
    "relu": _BackwardScan.elman,
}  # fmt: skip
