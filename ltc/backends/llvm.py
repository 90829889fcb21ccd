"""Graphs as native programs for this machine's CPU: kernels that LLVM compiles, one call for many.

What no kernel computes yet runs through the reference backend's row, counted as `extern.python`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ltc.backends.eager import LOWERING, EagerComputation
from ltc.backends.interface import DeviceInfo, NodeLowering, Target
from ltc.backends.undisturbed import Undisturbed
from ltc.debug import metrics
from ltc.ir import ops
from ltc.ir.graph import Graph, Origin
from ltc.ir.kernel import Kernel, Product, Unit
from ltc.ir.node import Node
from ltc.ir.tensor_type import TensorType
from ltc.llvm.code import KernelCode
from ltc.llvm.dtype import FORMS
from ltc.llvm.elementwise import can_compute
from ltc.llvm.loops import kernel_code
from ltc.llvm.products import ScratchBuffer, can_multiply, holds_epilogue, product_codes
from ltc.llvm.program import Frame, KernelRun
from ltc.llvm.reduction import can_reduce
from ltc.passes import memory
from ltc.passes.fuse import fuse
from ltc.passes.layout import layout
from ltc.passes.split import split_reductions

# The reference's result may lie in the memory of the first operand.
MAY_SHARE = frozenset(
    {ops.PERMUTE, ops.SLICE, ops.EXPAND, ops.RESHAPE, ops.BITCAST, ops.BARRIER, ops.CAST, ops.GET}
)
_MOVES = frozenset(
    {ops.PERMUTE, ops.SLICE, ops.EXPAND, ops.RESHAPE, ops.FLIP, ops.BARRIER, ops.PAD, ops.CONCAT}
)


def is_native(node: Node) -> bool:
    """Whether a generated kernel can compute the node."""
    types = [node.type, *[n.type for n in node.inputs]]
    if not all(isinstance(t, TensorType) and t.dtype in FORMS and t.size for t in types):
        return False
    if node.op in _MOVES or node.op is ops.IOTA or node.op is ops.RANDOM_BITS:
        return True
    if node.op is ops.INSERT:
        return all(step == 1 for step in node.attr("steps"))
    if node.op.kind == "elementwise":
        return not ops.may_fail(node) and can_compute(node)
    return node.op.kind == "reduce" and can_reduce(node)


# --- steps ---------------------------------------------------------------------------------------


@dataclass(eq=False)
class Step:
    """A kernel, a product, or a node that the reference computes.

    reads, writes  nodes whose buffers it reads, or makes
    overwrites     for a store of the kernel: the input whose buffer it takes
    """

    unit: Unit
    reads: tuple[Node, ...]
    writes: tuple[Node, ...]
    overwrites: dict[Node, Node]

    @property
    def is_native(self) -> bool:
        return not isinstance(self.unit, Node)

    @property
    def may_fail(self) -> bool:
        return isinstance(self.unit, Node) and ops.may_fail(self.unit)


def _steps(graph: Graph) -> list[Step]:
    steps = []
    for unit in fuse(graph, is_native, can_multiply, lambda node: node.op is ops.MATMUL):
        if isinstance(unit, Product) and unit.epilogue and not holds_epilogue(unit):
            alone = Product(unit.node, unit.operands, None, unit.results)
            units: tuple[Unit, ...] = (alone, unit.epilogue)
        else:
            units = (unit,)
        steps.extend(_step(one) for one in units)
    return steps


def _step(unit: Unit) -> Step:
    if isinstance(unit, Node):
        return Step(unit, unit.inputs, (unit,), {})
    return Step(unit, unit.reads(), unit.writes(), {})


def planned_steps(graph: Graph, donated: frozenset[int]) -> list[Step]:
    """What a program runs, in order."""
    return _choose_overwrites(_steps(graph), graph, donated)


def codes_of(step: Step) -> list[KernelCode]:
    """The kernels of a native step, in order."""
    if isinstance(step.unit, Product):
        return product_codes(step.unit)
    return [kernel_code(step.unit)]


def _choose_overwrites(steps: list[Step], graph: Graph, donated: frozenset[int]) -> list[Step]:
    """The steps in an order in which donated inputs can be written over, and those that are."""
    free = {n for n in graph.inputs if n.attr("index") in donated} - set(graph.outputs)
    outputs = set(graph.outputs)
    for step in steps:
        kernel = step.unit if isinstance(step.unit, Kernel) else None
        taken: set[Node] = set()
        if isinstance(step.unit, Product):
            kernel = step.unit.epilogue
            taken = {access.node for access in step.unit.operands}
        if kernel is not None:
            for store in kernel.stores:
                able = store.node in outputs and store.node not in step.overwrites
                target = _in_place(kernel, store, free - taken) if able else None
                if target is not None:
                    step.overwrites[store.node] = target
                    free.discard(target)
    shares = _memory_of(steps)
    while True:
        steps = _late_last(steps)
        wrong = _contradicted(steps, shares)
        if not wrong:
            return steps
        for step, node in wrong:
            del step.overwrites[node]


def _in_place(kernel: Kernel, store, free: set[Node]) -> Node | None:
    """A free input that the kernel reads nowhere but where it stores."""
    loads: dict[Node, bool] = {}
    for value in kernel.values():
        if value.kind == "load":
            node, offset = value.data
            same = offset == store.offset and not value.guards
            loads[node] = loads.get(node, True) and same
    for node, same in loads.items():
        if same and node in free and node.type == store.node.type:
            return node
    return None


def _late_last(steps: list[Step]) -> list[Step]:
    """Steps that write over an input, and what depends on them, after all the others."""
    late: set[Step] = set()
    made: set[Node] = set()
    for step in steps:
        if step.overwrites or any(n in made for n in step.reads):
            late.add(step)
            made.update(step.writes)
    return [s for s in steps if s not in late] + [s for s in steps if s in late]


def _contradicted(steps: list[Step], shares: dict[Node, Node]) -> list[tuple[Step, Node]]:
    """Overwrites after which something may fail, or reads what is no longer there."""
    wrong, written = [], {}
    for step in steps:
        if step.may_fail and written:
            return [(s, node) for s in steps for node in s.overwrites]
        for node in step.reads:
            where = written.get(shares.get(node, node))
            if where is not None:
                wrong.append(where)
        for node, target in step.overwrites.items():
            written[target] = (step, node)
    return list(dict.fromkeys(wrong))


def _memory_of(steps: Iterable[Step]) -> dict[Node, Node]:
    """For what the reference gives: the node whose memory it may lie in."""
    found: dict[Node, Node] = {}
    for step in steps:
        node = step.unit
        if isinstance(node, Node):
            shared = node.op in MAY_SHARE or node.op.kind == "reduce"
            found[node] = found.get(node.inputs[0], node.inputs[0]) if shared else node
    return found


# --- the reference's steps -----------------------------------------------------------------------


@dataclass(frozen=True)
class ReferenceStep:
    """One node through the reference.

    operands  slots of the values it takes
    result    the slot it fills
    address   whether kernels read the result
    dead      slots that nothing reads afterwards
    """

    compute: Any
    operands: tuple[int, ...]
    result: int
    address: bool
    dead: tuple[int, ...]
    origin: Origin | None
    counted: bool


@dataclass(frozen=True)
class Scratch:
    """A value in the program's block of memory, where the reference needs it as a tensor."""

    slot: int
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def tensor(self, block: torch.Tensor) -> torch.Tensor:
        part = block[self.offset : self.offset + self.nbytes]
        return part.view(self.dtype).view(self.shape)


class _Blocks:
    """Scratch memory that programs share: one block for each that runs at the moment."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []  # append and pop are atomic: no lock to fork with

    def take(self, nbytes: int) -> torch.Tensor:
        block = _popped(self._free)
        if block is None or block.numel() < nbytes:
            block = torch.empty(nbytes, dtype=torch.uint8)
        return block

    def give_back(self, block: torch.Tensor) -> None:
        self._free.append(block)


def _popped(free: list[Any]) -> Any:
    """The last element, taken out; None where another thread left none."""
    try:
        return free.pop()
    except IndexError:
        return None


_blocks = _Blocks()


def _nbytes(type: TensorType) -> int:
    return type.size * type.dtype.itemsize


class LlvmComputation:
    """A graph as kernels and reference steps in order; its buffers are contiguous CPU tensors."""

    upload = staticmethod(EagerComputation.upload)
    download = staticmethod(EagerComputation.download)
    wait = staticmethod(EagerComputation.wait)

    def __init__(self, graph: Graph, donated: frozenset[int]):
        steps = planned_steps(graph, donated)
        self._codes = {step: codes_of(step) for step in steps if step.is_native}
        between = [n for codes in self._codes.values() for code in codes for n in code.nodes]
        nodes = dict.fromkeys(
            [n for s in steps for n in (*s.reads, *s.writes)] + between + list(graph.outputs)
        )
        self._slots = {node: slot for slot, node in enumerate(nodes)}
        self._inputs = [
            (n.attr("index"), s)
            for n, s in self._slots.items()
            if isinstance(n, Node) and n.op is ops.INPUT
        ]
        self._start: list[Any] = [None] * len(nodes)
        self._plan_leaves(steps, graph)
        self._plan_memory(steps, graph)
        self._plan_outputs(steps, graph)
        self._plan_steps(steps, graph)
        self._frames: list[_LaunchFrame] = []
        del self._slots, self._codes  # the nodes are not needed to launch

    # --- planning --------------------------------------------------------------------------------

    def _plan_leaves(self, steps: list[Step], graph: Graph) -> None:
        by_kernels = {n for s in steps if s.is_native for n in s.reads}
        by_reference = {n for s in steps if not s.is_native for n in s.reads}
        by_reference.update(graph.outputs)
        leaves = [n for n in self._slots if isinstance(n, Node)]
        scalars = [n for n in leaves if n.op is ops.SCALAR]
        self._cells = [
            (n.attr("slot"), self._slots[n], n.dtype) for n in scalars if n in by_kernels
        ]
        self._scalars = [
            (n.attr("slot"), self._slots[n], n.dtype) for n in scalars if n in by_reference
        ]
        for node in leaves:
            if node.op is ops.CONSTANT:
                self._start[self._slots[node]] = LOWERING.lower(node)()

    def _plan_memory(self, steps: list[Step], graph: Graph) -> None:
        """Offsets in the scratch block for what kernels make and nobody gets."""
        shares, last = _memory_of(steps), {}
        for position, step in enumerate(steps):
            for node in (*step.reads, *step.writes):
                last[shares.get(node, node)] = position
        outputs = {shares.get(n, n) for n in graph.outputs if n in shares}
        last.update(dict.fromkeys(outputs, len(steps)))
        lifetimes = [
            memory.Lifetime(node, _nbytes(node.type), position, last[node])
            for position, step in enumerate(steps)
            if step.is_native
            for node in step.writes
            if node not in graph.outputs
        ]
        for position, step in enumerate(steps):
            between = {n for code in self._codes.get(step, ()) for n in code.nodes}
            lifetimes.extend(
                memory.Lifetime(buffer, buffer.nbytes, position, position)
                for buffer in between
                if isinstance(buffer, ScratchBuffer)
            )
        offsets, self._scratch_bytes = memory.plan(lifetimes)
        self._scratch_slots = np.array([self._slots[n] for n in offsets], dtype=np.int64)
        self._scratch_offsets = np.array(list(offsets.values()), dtype=np.int64)
        by_reference = {n for s in steps if not s.is_native for n in s.reads}
        self._scratch_tensors = [
            Scratch(self._slots[n], offset, _nbytes(n.type), n.dtype, n.shape)
            for n, offset in offsets.items()
            if n in by_reference
        ]

    def _plan_outputs(self, steps: list[Step], graph: Graph) -> None:
        """How each output becomes a buffer of its own."""
        stored = {n: s for s in steps if s.is_native for n in s.writes}
        shares = _memory_of(steps)
        self._made, self._over, self._outputs = [], [], []
        seen: set[Node] = set()
        for node in graph.outputs:
            slot = self._slots[node]
            fresh = node not in seen
            seen.add(node)
            if node in stored and fresh:
                target = stored[node].overwrites.get(node)
                if target is None:
                    self._made.append((slot, node.shape, node.dtype))
                else:
                    self._over.append((slot, target.attr("index")))
                self._outputs.append((slot, _itself))
            else:
                own = fresh and shares.get(node) is node
                self._outputs.append((slot, _owned if own else _copied))

    def _plan_steps(self, steps: list[Step], graph: Graph) -> None:
        self._steps: list[KernelRun | ReferenceStep] = []
        reads_later = self._dead_after(steps, graph)
        by_kernels = {n for s in steps if s.is_native for n in s.reads}
        waiting: list[KernelCode] = []
        overwritten: list[int] = []

        def close() -> None:
            if waiting:
                self._steps.append(KernelRun(waiting, self._slots))
                waiting.clear()

        for step in steps:
            if step.is_native:
                waiting.extend(self._codes[step])
                overwritten.extend(n.attr("index") for n in step.overwrites.values())
                continue
            close()
            node = step.unit
            self._steps.append(
                ReferenceStep(
                    LOWERING.lower(node),
                    tuple(self._slots[n] for n in node.inputs),
                    self._slots[node],
                    node in by_kernels,
                    tuple(self._slots[n] for n in reads_later[step]),
                    graph.origins.get(node),
                    node.op not in MAY_SHARE,
                )
            )
        close()
        self.overwritten = tuple(overwritten)

    def _dead_after(self, steps: list[Step], graph: Graph) -> dict[Step, list[Node]]:
        """What the reference made, at the reference step after which no one reads it."""
        made = {n for s in steps if not s.is_native for n in s.writes}
        dead: dict[Step, list[Node]] = {step: [] for step in steps}
        seen = set(graph.outputs)
        following: Step | None = None
        for step in reversed(steps):
            if not step.is_native:
                following = step
            for node in step.reads:
                if node in made and node not in seen:
                    seen.add(node)
                    if following is not None:
                        dead[following].append(node)
        return dead

    # --- running ---------------------------------------------------------------------------------

    def launch(self, buffers: list[torch.Tensor], scalars: list[Any]) -> list[torch.Tensor]:
        with Undisturbed():
            frame = _popped(self._frames) or _LaunchFrame(self)
            block = _blocks.take(self._scratch_bytes)
            values = self._start.copy()
            try:
                self._begin(frame, block, values, buffers, scalars)
                self._run(frame, values)
                return [own(values[slot]) for slot, own in self._outputs]
            finally:
                _blocks.give_back(block)
                self._frames.append(frame)

    def _begin(self, frame: _LaunchFrame, block, values, buffers, scalars) -> None:
        addresses = frame.addresses
        for position, slot in self._inputs:
            values[slot] = buffers[position]
            addresses[slot] = buffers[position].data_ptr()
        for k, (position, _, dtype) in enumerate(self._cells):
            frame.write_cell(k, scalars[position], dtype)
        for position, slot, dtype in self._scalars:
            values[slot] = torch.as_tensor(scalars[position], dtype=dtype)
        for slot, shape, dtype in self._made:
            values[slot] = tensor = torch.empty(shape, dtype=dtype)
            addresses[slot] = tensor.data_ptr()
        for slot, position in self._over:
            values[slot] = buffers[position]
            addresses[slot] = buffers[position].data_ptr()
        addresses[self._scratch_slots] = self._scratch_offsets + block.data_ptr()
        for scratch in self._scratch_tensors:
            values[scratch.slot] = scratch.tensor(block)

    def _run(self, frame: _LaunchFrame, values: list[Any]) -> None:
        step = None
        try:
            for step, own in zip(self._steps, frame.frames):
                if isinstance(step, KernelRun):
                    step.launch(own, frame.addresses)
                else:
                    self._run_reference(step, values, frame.addresses)
        except Exception as error:
            if isinstance(step, ReferenceStep) and step.origin is not None:
                error.add_note(f"while running {step.origin}")
            # Writes over inputs come after all that can fail.
            error.overwritten = ()
            raise

    @staticmethod
    def _run_reference(step: ReferenceStep, values: list[Any], addresses: np.ndarray) -> None:
        if step.counted:
            metrics.count("extern.python")
        result = step.compute(*[values[slot] for slot in step.operands])
        if step.address:
            result = result.contiguous()
            addresses[step.result] = result.data_ptr()
        values[step.result] = result
        for slot in step.dead:
            values[slot] = None


class _LaunchFrame:
    """Memory of one launch; launches that overlap have one each."""

    def __init__(self, computation: LlvmComputation):
        self.addresses = np.zeros(len(computation._start), dtype=np.int64)
        self.frames: list[Frame | None] = [
            step.frame() if isinstance(step, KernelRun) else None for step in computation._steps
        ]
        self._cells = np.zeros(len(computation._cells), dtype=np.int64)
        self._as_double = self._cells.view(np.float64)
        for k, (_, slot, _) in enumerate(computation._cells):
            self.addresses[slot] = self._cells.ctypes.data + 8 * k
        for slot, value in enumerate(computation._start):
            if value is not None:
                self.addresses[slot] = value.data_ptr()

    def write_cell(self, k: int, number: Any, dtype: torch.dtype) -> None:
        if dtype == torch.float64:
            self._as_double[k] = number
        elif dtype == torch.int64 and not isinstance(number, torch.Tensor):
            self._cells[k] = number
        else:
            cell = torch.from_numpy(self._cells[k : k + 1]).view(dtype)
            cell[0] = torch.as_tensor(number, dtype=dtype)


def _itself(x: torch.Tensor) -> torch.Tensor:
    return x


def _copied(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _owned(x: torch.Tensor) -> torch.Tensor:
    """What the reference gave, as a buffer: contiguous and alone in its memory."""
    x = x.contiguous()
    return x.clone() if x.untyped_storage().nbytes() > x.nbytes else x


class LlvmBackend:
    """Compiles graphs for this machine's CPU."""

    name = "llvm"
    computation = LlvmComputation

    def __init__(self) -> None:
        # Every op runs: what has no kernel goes through the reference.
        self.lowering = NodeLowering(LOWERING.table)

    def devices(self) -> tuple[DeviceInfo, ...]:
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return (DeviceInfo("CPU", "this machine through LLVM", memory_bytes),)

    def target(self) -> Target:
        return Target(kind="cpu", lanes=64, fast_memory_bytes=1 << 20, tasks=os.cpu_count() or 1)

    def compile(self, graph: Graph, device: int, donated: frozenset[int]) -> LlvmComputation:
        return LlvmComputation(split_reductions(layout(graph)), donated)

    def prepare_to_exit(self) -> None:
        """Nothing runs between launches."""
