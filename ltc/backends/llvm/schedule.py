"""The order of a program's steps: kernels where there are any, and the reference for the rest."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ltc.backends.llvm.program_plan import MAY_SHARE
from ltc.ir import ops
from ltc.ir.graph import Graph
from ltc.ir.loop_nest import READS, Kernel, Product, Unit, Value
from ltc.ir.node import Node
from ltc.ir.one_shot import sent_with
from ltc.ir.tensor_type import TensorType
from ltc.llvm.emit.dtype import FORMS
from ltc.llvm.emit.elementwise import can_compute
from ltc.llvm.emit.kernel_code import KernelCode
from ltc.llvm.loops.bounds_checks import faults_of
from ltc.llvm.loops.emitter import kernel_code
from ltc.llvm.loops.reduction_ops import can_reduce
from ltc.llvm.native.kernel_run import Fault
from ltc.llvm.ops.copying import copy_code, fill_code
from ltc.llvm.ops.dispatch import can_multiply, holds_epilogue, product_codes, takes_strides
from ltc.passes.fusion.fuse import fuse
from ltc.passes.fusion.in_place import in_place, stores_of
from ltc.passes.fusion.index_maps import LOOKUPS
from ltc.passes.fusion.partial_updates import changed_part, is_strided_insert
from ltc.support.sizes.choices import by_sample

STREAMED_BYTES = 16 << 20  # of an output: then a quarter to a half of its kernel's time is gained
LEFT_BYTES = 256 << 10  # of an output whose use is over: others gain its room in the caches
# An output so large, and so many times larger than what makes it, is made last.
LENDING_BYTES, LENDING_RATIO = 1 << 20, 4
_MOVES = frozenset(
    {ops.PERMUTE, ops.SLICE, ops.EXPAND, ops.RESHAPE, ops.FLIP, ops.BARRIER, ops.PAD, ops.CONCAT}
)


def is_native(node: Node) -> bool:
    """Return True if a generated kernel can compute the node."""
    types = [node.type, *[n.type for n in node.inputs]]
    if not all(isinstance(t, TensorType) and t.dtype in FORMS and t.size for t in types):
        return False
    if node.op in _MOVES or node.op in (ops.IOTA, ops.RANDOM_BITS, ops.TO_SYMMETRIC):
        return True
    if node.op in (ops.WRAP_INDEX, ops.CHECK) or node.op in LOOKUPS:
        return True
    if node.op is ops.INSERT:
        return not is_strided_insert(node)
    if node.op.kind == "elementwise":
        return can_compute(node)
    return node.op.kind == "reduce" and can_reduce(node)


def _is_made_alone(node: Node) -> bool:
    """Return True if kernels of its own are generated for a node."""
    if is_strided_insert(node):
        return all(n.dtype in FORMS and n.size for n in (node, *node.inputs))
    return can_multiply(node)


@dataclass(eq=False)
class ProgramStep:
    """A kernel, a product, or a node that the reference computes.

    Attributes:
        reads, writes: Nodes whose buffers it reads, or makes.
        codes: Its kernels, in order; the reference has none.
        overwrites: For a store of the kernel: the input whose buffer it takes.
    """

    unit: Unit
    reads: tuple[Node, ...]
    writes: tuple[Node, ...]
    codes: tuple[KernelCode, ...] = ()
    overwrites: dict[Node, Node] = field(default_factory=dict)
    _copies: tuple[KernelCode, ...] = ()  # what is left out where it lies over its base

    @property
    def is_native(self) -> bool:
        return not isinstance(self.unit, Node)

    def lies_over(self, target: Node) -> None:
        """Drop the copy: the kernel's initial content is there already if it lies over that value."""
        if isinstance(self.unit, Kernel) and self.unit.base is target:
            self._copies, self.codes = self.codes[:1], self.codes[1:]

    def lies_elsewhere(self, node: Node) -> None:
        """Store a node in memory of its own after all."""
        target = self.overwrites.pop(node)
        if isinstance(self.unit, Kernel) and self.unit.base is target:
            self.codes = self._copies + self.codes

    @property
    def may_fail(self) -> bool:
        if isinstance(self.unit, Node):
            return ops.may_fail(self.unit)
        return any(isinstance(n, Fault) for code in self.codes for n in code.nodes)


def planned_steps(
    graph: Graph, donated: frozenset[int], written: Callable[[str], None] = lambda text: None
) -> list[ProgramStep]:
    """Return the steps of a program, in order.

    Args:
        donated: Positions of the inputs that may be written over.
        written: Called with the text of each kernel as soon as it is sure to be one of the
            program's.
    """
    steps, outputs = [], set(graph.outputs)
    kernels = EqualKernels(may_measure=not graph.reproducible)
    for unit in units_of(graph):
        steps.append(step := _step(unit, kernels))
        for code in () if _may_stream(step, outputs) else step.codes:
            written(code.text)
    shares = memory_of(steps)
    _choose_overwrites(steps, graph, donated, shares)
    _stream_past_caches(steps, graph, kernels)
    return _Order(steps, shares, _recorded_positions(steps, graph)).steps


def units_of(graph: Graph) -> Iterator[Unit]:
    """Kernels, products and nodes for the reference, in an order in which they may run."""
    for unit in fuse(graph, is_native, _is_made_alone, takes_strides):
        if isinstance(unit, Product) and unit.epilogue and not holds_epilogue(unit):
            yield changed_part(Product(unit.node, unit.operands, None, unit.results))
            yield changed_part(_beside(unit.node, unit.epilogue))
        else:
            yield changed_part(unit)


def _beside(product: Node, epilogue: Kernel) -> Kernel:
    """An epilogue as a kernel of its own, which reads what the product has stored."""
    stores = tuple(store for store in epilogue.stores if store.node is not product)
    return replace(epilogue, stores=stores)


def _step(unit: Unit, kernels: EqualKernels) -> ProgramStep:
    if isinstance(unit, Node):
        return ProgramStep(unit, unit.inputs, (unit,))
    codes = kernels.product(unit) if isinstance(unit, Product) else _kernel_codes(unit, kernels)
    return ProgramStep(unit, unit.reads(), unit.writes(), _settled(codes))


def _settled(codes: Iterable[KernelCode]) -> tuple[KernelCode, ...]:
    """With numbers for sizes that stand in a text: see support/sizes/."""
    return tuple(code.settled() for code in codes)


def _kernel_codes(kernel: Kernel, kernels: EqualKernels) -> list[KernelCode]:
    """The kernel, behind one that copies its base."""
    code = kernels.code(kernel)
    if kernel.base is None:
        return [code]
    (node,) = kernel.writes()
    begin = fill_code if kernel.base.op is ops.CONSTANT else copy_code
    return [begin(kernel.base, node, node.size, node.dtype), code]


def memory_of(steps: Iterable[ProgramStep]) -> dict[Node, Node]:
    """For what the reference gives: the node whose memory it may lie in."""
    found: dict[Node, Node] = {}
    for step in steps:
        node = step.unit
        if isinstance(node, Node):
            shared = node.op in MAY_SHARE or node.op.kind == "reduce"
            found[node] = found.get(node.inputs[0], node.inputs[0]) if shared else node
    return found


# --- writing past the caches ---------------------------------------------------------------------


def _stream_past_caches(steps: list[ProgramStep], graph: Graph, kernels: EqualKernels) -> None:
    """Large outputs that the program does not read again are stored to memory itself.

    A line of them is not fetched before it is written, and what the caches hold stays there.
    """
    read = {node for step in steps for node in step.reads}
    last = {n for n in graph.outputs if n not in read and _can_stream(n)}
    for step in steps:
        made = last.intersection(step.writes).difference(step.overwrites)
        if isinstance(step.unit, Kernel) and step.unit.base is None:
            if streamed := {n for n in made if _nbytes(n) >= STREAMED_BYTES}:
                step.codes = _settled([kernels.code(step.unit, frozenset(streamed))])
        elif isinstance(step.unit, Product) and step.unit.node.op is ops.MATMUL:
            if streamed := {n for n in made & _used_up(step.unit) if _nbytes(n) >= LEFT_BYTES}:
                step.codes = _settled(kernels.product(step.unit, frozenset(streamed)))


def _may_stream(step: ProgramStep, outputs: set[Node]) -> bool:
    """Return True if `_stream_past_caches` may write the step's kernels anew."""
    least = STREAMED_BYTES
    if isinstance(step.unit, Product):
        least = LEFT_BYTES
        if step.unit.node.op is not ops.MATMUL:
            return False
    return any(_nbytes(n) >= least for n in outputs.intersection(step.writes))


def _can_stream(node: Node) -> bool:
    return isinstance(node.type, TensorType) and node.op.kind != "reduce"


def _used_up(product: Product) -> set[Node]:
    """Return values that the epilogue stores and also reads: the gradient beside the update."""
    stores = product.epilogue.stores if product.epilogue is not None else ()
    operands = {value for store in stores for value in store.value.made_from()}
    return {store.node for store in stores if store.value in operands}


# --- writing over inputs -------------------------------------------------------------------------


def _choose_overwrites(
    steps: list[ProgramStep], graph: Graph, donated: frozenset[int], shares: dict[Node, Node]
) -> None:
    """For every output that a kernel can store in place: the donated input it is stored over."""
    outputs = set(graph.outputs)
    kept = {shares.get(n, n) for n in outputs}
    free = {n for n in graph.inputs if n.attr("index") in donated} - kept
    for step in steps:
        if step.may_fail:
            continue  # half an update would be left behind
        kernel, taken = stores_of(step.unit)
        if kernel is None:
            continue
        for store in kernel.stores:
            able = store.node in outputs and store.node not in step.overwrites
            target = in_place(kernel, store, free - taken) if able else None
            if target is not None:
                step.overwrites[store.node] = target
                step.lies_over(target)
                free.discard(target)


def _recorded_positions(
    steps: list[ProgramStep], graph: Graph
) -> dict[ProgramStep, tuple[int, int]]:
    """Return each step's position in the recording, and among the given steps: it runs in that
    order.

    Calls recorded close to each other use the same values; in another order these would live
    longer. Three kinds of steps run as early as they can: one of which no call is known; an update
    in place, since it frees the gradient; and the start of a collective, whose operands then travel
    while later steps run.
    """
    maker = {node: step for step in steps for node in step.writes}
    found: dict[ProgramStep, tuple[int, int]] = {}
    for number, step in enumerate(steps):
        operands = [found[maker[n]][0] for n in step.reads if maker.get(n) in found]
        known = [found[maker[n]][0] for n in sent_by(step.unit) if maker.get(n) in found]
        if not known and step.overwrites and isinstance(step.unit, Kernel):
            known = operands
        if not known:
            made = _made_by(step)
            known = [graph.origins[n].position for n in made if n in graph.origins]
        if not known:
            known = operands
        found[step] = (max(known, default=0), number)
    last = max((position for position, _ in found.values()), default=0)
    found.update({step: (last + 1, found[step][1]) for step in _lenders(steps, graph)})
    return found


def _lenders(steps: list[ProgramStep], graph: Graph) -> Iterator[ProgramStep]:
    """Steps whose outputs are large and of no use to the others: their buffers can lend room.

    A buffer is there from the launch on. Until it is written, what dies before may lie in it: the
    gradients of a network's last weights, made at the end, hold what its first layers have kept.
    """
    read = {node for step in steps for node in step.reads}
    made = {node for step in steps for node in step.writes}
    outputs = set(graph.outputs)
    for step in steps:
        if not step.is_native or read.intersection(step.writes):
            continue
        lent = sum(_nbytes(n) for n in step.writes if n in outputs and n not in step.overwrites)
        held = sum(_nbytes(n) for n in made.intersection(step.reads))
        with by_sample(lent, held):  # any order is right
            is_lender = bool(lent >= max(LENDING_BYTES, LENDING_RATIO * held))
        if is_lender:
            yield step


def _nbytes(node: Node) -> int:
    return node.size * node.type.dtype.itemsize if isinstance(node.type, TensorType) else 0


def _made_by(step: ProgramStep) -> tuple[Node, ...]:
    """Return the purpose of a step: of a product that goes into an update, the product.

    Updates were recorded after all gradients: what makes these would have to live until then.
    """
    if isinstance(step.unit, Product) and step.overwrites:
        return (step.unit.node,)
    return step.writes


def sent_by(unit: Unit) -> tuple[Node, ...]:
    """Return the operands that a collective's start sends: its inputs but for the token; else ()."""
    node = unit.node if isinstance(unit, Product) else unit
    if not isinstance(node, Node) or node.op is not ops.COLLECTIVE_START:
        return ()
    return sent_with(node)


class _Order:
    """The steps as recorded, but each that writes over an input after two kinds of others.

    Those that read the old value must come first, and those that may fail: a program that fails
    leaves its inputs as they were.  Where data flow has it otherwise, the input is not written over.
    """

    def __init__(
        self,
        given: list[ProgramStep],
        shares: dict[Node, Node],
        position: dict[ProgramStep, tuple[Any, ...]],
    ) -> None:
        self.steps: list[ProgramStep] = []
        self._given, self._position = sorted(given, key=position.__getitem__), position
        maker = {node: step for step in given for node in step.writes}
        self._operands = {s: {maker[n] for n in s.reads if n in maker} for s in given}
        self._readers: dict[Node, set[ProgramStep]] = defaultdict(set)
        for step in given:
            for node in step.reads:
                self._readers[shares.get(node, node)].add(step)
        self._failing = {step for step in given if step.may_fail}
        self._done: set[ProgramStep] = set()
        self._run()

    def _before(self, step: ProgramStep) -> set[ProgramStep]:
        """The steps that must be over when this one runs."""
        before = set(self._operands[step])
        for target in step.overwrites.values():
            before |= self._readers[target]
        if step.overwrites:
            before |= self._failing
        before.discard(step)
        return before

    def _run(self) -> None:
        waits = {step: self._before(step) for step in self._given}
        followers: dict[ProgramStep, list[ProgramStep]] = defaultdict(list)
        for step, before in waits.items():
            for other in before:
                followers[other].append(step)
        ready = [self._position[step] for step in self._given if not waits[step]]
        heapq.heapify(ready)
        by_position = {position: step for step, position in self._position.items()}
        while len(self.steps) < len(self._given):
            if not ready:
                blocked = self._first_blocked(waits)
                waits[blocked].clear()
                ready.append(self._position[blocked])
            step = by_position[heapq.heappop(ready)]
            self.steps.append(step)
            self._done.add(step)
            for other in followers[step]:
                if waits[other]:
                    waits[other].discard(step)
                    if not waits[other]:
                        heapq.heappush(ready, self._position[other])

    def _first_blocked(self, waits: dict[ProgramStep, set[ProgramStep]]) -> ProgramStep:
        """A step that only its overwrites hold back: it runs now, without the impossible ones."""
        for step in self._given:
            if waits[step] and self._operands[step] <= self._done:
                may_fail_later = bool(self._failing - self._done - {step})
                for node, target in list(step.overwrites.items()):
                    if may_fail_later or self._readers[target] - self._done - {step}:
                        step.lies_elsewhere(node)
                return step
        raise AssertionError("steps that wait for one another")


# --- Kernels that differ in nothing but their buffers are written once ---------------------------


class EqualKernels:
    """The kernels of one program: an optimizer has one for each parameter, few of them different.

    Args:
        may_measure: True if products may be computed in the way that was measured to be faster.
    """

    def __init__(self, may_measure: bool = False) -> None:
        self._codes: dict[Hashable, KernelCode] = {}
        self._may_measure = may_measure

    def product(
        self, product: Product, streamed: frozenset[Node] = frozenset()
    ) -> list[KernelCode]:
        """Return the codes that `product_codes` gives under the program's rule."""
        return product_codes(product, streamed, self._may_measure)

    def code(self, kernel: Kernel, streamed: frozenset[Node] = frozenset()) -> KernelCode:
        """Return code as `kernel_code` does; the text is that of an equal kernel, if there was one."""
        form = form_of(kernel), tuple([node in streamed for node in kernel.writes()])
        code = self._codes.get(form)
        if code is None:
            code = self._codes[form] = kernel_code(kernel, streamed)
        return replace(code, nodes=(*kernel.reads(), *kernel.writes(), *faults_of(kernel)))


# --- the form of a kernel: all that it is but for its buffers ---------------------------------


def form_of(kernel: Kernel) -> Hashable:
    """Equal for kernels that do the same in the same order, with buffers of the same types.

    A buffer is called by the number of its first use: one that is read and written is one.
    """
    buffers: dict[Node, int] = {}
    numbers: dict[Value, int] = {}
    rows: list[Hashable] = []
    for value in kernel.values():
        numbers[value] = len(numbers)
        operands = tuple([numbers[x] for x in value.operands])
        data = _data(value, buffers)
        rows.append((value.kind, value.dtype, operands, value.op, data, value.guards))
    for store in kernel.stores:
        place = buffers.setdefault(store.node, len(buffers))
        rows.append((place, numbers[store.value], store.offset, store.sums))
    base = None if kernel.base is None else buffers.setdefault(kernel.base, len(buffers))
    return kernel.space, kernel.depth, tuple(rows), base, tuple([node.type for node in buffers])


def _data(value: Value, buffers: dict[Node, int]) -> Hashable:
    if value.kind in READS:
        node, *rest = value.data
        return buffers.setdefault(node, len(buffers)), *rest
    if isinstance(value.data, Node):  # what a check reports is named after its node
        return value.data
    if value.kind == "cell":
        return _attributes(value.data)
    data: Hashable = value.data
    return data


def _attributes(attrs: tuple[tuple[str, Any], ...]) -> Hashable:
    """With the types of the values: 1, 1.0 and True are equal."""
    return attrs, tuple([value.__class__ for _, value in attrs])
