"""From a product to the text of its kernels: matrix products, convolutions, poolings, epilogues."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from math import prod
from typing import Any

from ltc.ir import ops
from ltc.ir.loop_nest import Affine, Kernel, Product, Store, Value, flattened, identity
from ltc.ir.node import Node, is_channels_last
from ltc.ir.tensor_type import TensorType
from ltc.llvm.attention.lower import attention_codes, can_attend
from ltc.llvm.compiler import llvm_binding
from ltc.llvm.emit.builder import Builder
from ltc.llvm.emit.dtype import BYTES, FORMS
from ltc.llvm.emit.elementwise import rounded
from ltc.llvm.emit.index import Index
from ltc.llvm.emit.isa import Isa, host_isa
from ltc.llvm.emit.kernel_code import KernelCode
from ltc.llvm.gemm.blocking import Matrix, Shape
from ltc.llvm.gemm.kernel import matmul
from ltc.llvm.loop_schedule.iteration_space import nest_of
from ltc.llvm.loop_schedule.loop_schedule import schedule_of
from ltc.llvm.loops.context import LoopContext, context_of
from ltc.llvm.loops.emitter import locate
from ltc.llvm.loops.loads import prefetch
from ltc.llvm.loops.stores import store
from ltc.llvm.loops.values import lanes_of
from ltc.llvm.native.kernel_run import Fault
from ltc.llvm.ops.conv_and_pool import FLOATS, dtypes, kernels_of
from ltc.llvm.ops.primitives import PRIMITIVES
from ltc.llvm.ops.product_call import called_product
from ltc.llvm.ops.product_choice import is_call_faster
from ltc.llvm.recurrence.recurrence_codes import can_recur, recurrence_codes


@functools.cache
def isa() -> Isa:
    return host_isa(llvm_binding.has_feature)


@dataclass(frozen=True)
class ScratchBuffer:
    """Memory that the kernels of one product pass from one to the next."""

    owner: Product
    name: str
    nbytes: int


def product_codes(
    product: Product, streamed: frozenset[Node] = frozenset(), may_measure: bool = False
) -> list[KernelCode]:
    """The kernels that compute a product, in order.

    Args:
        streamed: The nodes that the epilogue of a matrix product writes past the caches.
        may_measure: True if PyTorch's kernel is called where it was measured to be faster.
    """
    if product.node.op in PRIMITIVES:
        return PRIMITIVES[product.node.op].codes(product)
    if product.node.op is ops.MATMUL:
        return _matmul(product, streamed, may_measure)
    if product.node.op.kind == "attention":
        return attention_codes(product, isa(), functools.partial(ScratchBuffer, product))
    if product.node.op.kind == "recurrence":
        return recurrence_codes(product, isa(), functools.partial(ScratchBuffer, product))
    return _from_library(product, may_measure)


def _row_variables(node: Node, epilogue: Kernel) -> int:
    """Return how many leading variables of its epilogue number the rows that the epilogue gets."""
    if node.op is ops.CONVOLUTION_WEIGHT_GRADIENT:
        return 1
    if node.op is ops.MATMUL or is_channels_last(node):
        return len(epilogue.space) - 1
    return 2


def holds_epilogue(product: Product) -> bool:
    """Return True if the columns of the result are one variable of its epilogue, and can be stored."""
    kernel, node = product.epilogue, product.node
    able = WITH_EPILOGUE | CHANNELS_LAST_WITH_EPILOGUE if is_channels_last(node) else WITH_EPILOGUE
    if kernel is None or node.op not in able:
        return False
    nest = nest_of(kernel, boundary=_row_variables(node, kernel))
    columns = nest.extents[nest.depth :]
    return len(columns) == 1 and any(s.node.dtype == node.dtype for s in kernel.stores)


class _Epilogue:
    """The epilogue of a product, applied to each vector of results.

    Attributes:
        nodes: The nodes whose buffers its pointers %p3 and on are.
        main: The store that the product itself makes.
        streamed: The nodes that the other stores write past the caches.
    """

    def __init__(self, product: Product, streamed: frozenset[Node] = frozenset()):
        self.node, self.kernel, self.streamed = product.node, product.epilogue, streamed
        self._context: LoopContext | None = None
        if self.kernel is None:
            self.main: Any = product.results[0]
            self.others: list[Store] = []
            self.nodes: tuple[Node, ...] = ()
            return
        self.rows = _row_variables(self.node, self.kernel)
        stores = list(self.kernel.stores)
        able = [s for s in stores if s.node.dtype == self.node.dtype]
        main: Store = min(able, key=lambda store: store.node in streamed)
        self.main, self.value = main.node, main.value
        self.others = [store for store in stores if store is not main]
        read = tuple(n for n in self.kernel.reads() if n is not self.node)
        self.nodes = (*read, *[store.node for store in self.others])

    @property
    def function(self):
        return None if self.kernel is None else self

    def _at_vector(self, b: Builder, row: Index, column: Index, mask: str | None) -> LoopContext:
        """At a vector of results, of which nothing is known yet."""
        if self._context is None or self._context.b is not b:
            self._context = self._begin(b)
        ctx = self._context
        ctx.known, ctx.variables, ctx.mask = [{}], {}, mask
        locate(ctx, range(ctx.nest.depth), row)
        ctx.variables[ctx.schedule.vector] = column
        return ctx

    def _begin(self, b: Builder) -> LoopContext:
        """The beginning of a function, in which the pointers of the product come first."""
        nest = nest_of(self.kernel, self.rows)
        schedule = schedule_of(nest, b.width, is_epilogue=True, streamed=self.streamed)
        ctx = context_of(schedule, b)
        first = FIRST_OPERAND.get(self.node.op, 3)
        ctx.pointers = ctx.targets = {node: f"%p{first + k}" for k, node in enumerate(self.nodes)}
        return ctx

    def __call__(self, b: Builder, value: str, row: Index, column: Index, mask: str | None) -> str:
        ctx = self._at_vector(b, row, column, mask)
        form = FORMS[self.node.dtype]
        for load in ctx.nest.loads():
            if load.data[0] is self.node:
                ctx.known[-1][load] = rounded(b, form, value)
        result = lanes_of(ctx, self.value, b.width)
        for one in self.others:  # a store may be to the memory of what another still reads
            lanes_of(ctx, one.value, b.width)
        for one in self.others:
            store(ctx, one)
        return result

    def fetch(self, b: Builder, row: Index, column: Index) -> None:
        """Asks memory for what a vector of results will meet there."""
        ctx = self._at_vector(b, row, column, None)
        for value in ctx.nest.order:
            if self._differs_by_row(value):
                prefetch(ctx, value)

    @property
    def fetches(self) -> bool:
        """Return True if there is memory to prefetch; values that all rows read stay in the caches."""
        return self.kernel is not None and any(map(self._differs_by_row, self.kernel.values()))

    def _differs_by_row(self, value: Value) -> bool:
        if value.kind != "load" or value.data[0] is self.node:
            return False
        _, offset = value.data
        return any(offset.coefficient(variable) for variable in range(self.rows))


def _matmul(product: Product, streamed: frozenset[Node], may_measure: bool) -> list[KernelCode]:
    node, epilogue = product.node, _Epilogue(product, streamed)
    *batch, m, n = node.shape
    k = node.inputs[0].shape[-1]
    left, right = (_matrix(access.offset, len(node.shape)) for access in product.operands)
    result = _matrix(flattened(identity(node.shape), node.shape), len(node.shape))
    shape = Shape(tuple(batch), m, n, k, left, right, Matrix(n, 1, result.batch))
    fused = epilogue.function, len(epilogue.nodes)
    if may_measure and is_call_faster(node.dtype, shape, isa()):
        kernel = called_product(node.dtype, shape, isa(), *fused)
    else:
        kernel = matmul(
            "kernel", node.dtype, shape.batch, (m, n, k), left, right, shape.result, isa(), *fused
        )
    shifts = tuple(access.offset.constant * node.dtype.itemsize for access in product.operands)
    nodes = (*[access.node for access in product.operands], epilogue.main, *epilogue.nodes)
    return [KernelCode(kernel.text, nodes, kernel.tasks, shifts, kernel.numbers, kernel.is_call)]


def _matrix(offset: Affine, rank: int) -> Matrix:
    *batch, row, column = (offset.coefficient(v) for v in range(rank))
    return Matrix(row, column, tuple(batch))


def _from_library(product: Product, may_measure: bool) -> list[KernelCode]:
    node, epilogue = product.node, _Epilogue(product)
    made = kernels_of(node, isa(), epilogue.function, len(epilogue.nodes), may_measure)
    assert made is not None  # it was asked before: can_multiply
    named: dict[str, Any] = {}
    for name, nbytes in made.scratch.items():
        named[name] = ScratchBuffer(product, name, nbytes)
    named["fault"] = _fault_of(product)
    where = {operand: access.node for operand, access in zip(node.inputs, product.operands)}
    named.update((f"read{k}", where[n]) for k, n in enumerate(made.reads))
    named.update((f"operand{k}", n) for k, n in enumerate(epilogue.nodes))
    results = (epilogue.main,) if product.epilogue else product.results
    types = (node.type,) if isinstance(node.type, TensorType) else node.type
    for k, (result, type) in enumerate(zip(results, types)):
        unread = ScratchBuffer(product, f"result{k}", type.size * type.dtype.itemsize)
        named[f"result{k}"] = unread if result is None else result
    return [
        KernelCode(
            kernel.text,
            tuple(named[name] for name in names),
            kernel.tasks,
            numbers=kernel.numbers,
            is_call=kernel.is_call,
        )
        for kernel, names in zip(made.kernels, made.pointers)
    ]


def _fault_of(product: Product) -> Fault | ScratchBuffer:
    """Return where a kernel notes an index out of bounds.

    Indices of a max_pool of the same program are right: their note is never read.
    """
    node = product.node
    if node.op is not ops.MAX_POOL_GRADIENT or _has_own_indices(node):
        return ScratchBuffer(product, "fault", 8)
    size = prod(node.shape[2:])
    text = f"index {{value}} is out of bounds for a plane of size {size}"
    return Fault(node, "RuntimeError", text)


FROM_LIBRARY = frozenset(
    {
        ops.CONVOLUTION, ops.CONVOLUTION_INPUT_GRADIENT, ops.CONVOLUTION_WEIGHT_GRADIENT,
        ops.MAX_POOL, ops.MAX_POOL_GRADIENT, ops.AVERAGE_POOL, ops.AVERAGE_POOL_GRADIENT,
    }
)  # fmt: skip
WITH_EPILOGUE = frozenset({ops.MATMUL, ops.CONVOLUTION})
CHANNELS_LAST_WITH_EPILOGUE = frozenset(
    {ops.CONVOLUTION_INPUT_GRADIENT, ops.CONVOLUTION_WEIGHT_GRADIENT, ops.MAX_POOL_GRADIENT}
)
FIRST_OPERAND = {ops.CONVOLUTION_WEIGHT_GRADIENT: 2}  # the pointer that an epilogue reads first
FEW_CHANNELS = 8  # fewer of a group would leave most lanes of a vector empty
FEWEST_OUTPUTS = (
    4  # of a weight's gradient: its rows are channels and taps, of which there are more
)


def prefers_channels_last(node: Node) -> bool:
    """Return True if a convolution or pooling whose channels are last has a kernel worth the
    turning.
    """
    if node.op.kind == "window":
        return can_multiply(node)
    is_weight_gradient = node.op is ops.CONVOLUTION_WEIGHT_GRADIENT
    outputs, channels, *_ = node.shape if is_weight_gradient else node.inputs[1].shape
    groups = node.attr("groups")
    is_depthwise = groups == outputs and channels == 1 and groups >= FEW_CHANNELS
    each = outputs // groups
    if is_weight_gradient:  # the other layout has sums of single weights alone
        enough = each >= (FEWEST_OUTPUTS if groups == 1 else FEW_CHANNELS)
    else:
        enough = each >= FEW_CHANNELS and (groups == 1 or channels >= FEW_CHANNELS)
        enough = enough or (groups == 1 and channels >= FEW_CHANNELS and _fills_lanes(node))
    return (enough or is_depthwise) and can_multiply(node)


def _fills_lanes(node: Node) -> bool:
    """Return True if the channels of a result fill a third of a vector, or more.

    The other layout has the positions of a line in its vectors, but reads all channels for each output.
    """
    lanes = isa().lanes(BYTES[FORMS[node.dtype].computed])
    return 3 * node.shape[-1] >= lanes


def takes_strides(node: Node) -> bool:
    """Return True if the operands may be views of values in memory."""
    return node.op is ops.MATMUL or node.op.kind == "attention"


def can_multiply(node: Node) -> bool:
    """Return True if kernels of their own are generated for a node of these dtypes and shapes."""
    if node.op in PRIMITIVES:
        return PRIMITIVES[node.op].supports(node)
    if node.op is ops.MATMUL:
        return all(n.dtype in FLOATS and n.size for n in (node, *node.inputs))
    if node.op.kind == "attention":
        return can_attend(node, isa(), dtypes(isa()))
    if node.op.kind == "recurrence":
        return can_recur(node, dtypes(isa()))
    if node.op not in FROM_LIBRARY or any(n.size == 0 for n in node.inputs):
        return False
    if node.op is ops.MAX_POOL_GRADIENT and not _has_own_indices(node) and is_channels_last(node):
        return False  # its kernel looks for an index where a window would have it
    return kernels_of(node, isa()) is not None


def _has_own_indices(node: Node) -> bool:
    """Return True if the indices are those of a max_pool of the shape that the gradient has."""
    indices = node.inputs[1]
    if indices.op is not ops.GET or indices.inputs[0].op is not ops.MAX_POOL:
        return False
    return indices.inputs[0].inputs[0].shape == node.shape and can_multiply(indices.inputs[0])
