"""Convolutions and what lies between them on [N, *spatial, C], where the backend prefers that.

Each node may have a channels-last form.  What reads the form of an operand element by element has
one as well; anything else reads it through a permutation.  Weights stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable

from ltc.ir import ops
from ltc.ir.graph import Graph, schedule
from ltc.ir.node import Node, make
from ltc.ir.tensor_type import TensorType

POOLS = frozenset({ops.MAX_POOL, ops.AVERAGE_POOL, ops.MAX_POOL_GRADIENT,
                   ops.AVERAGE_POOL_GRADIENT})  # fmt: skip
REDUCTIONS = frozenset({ops.SUM, ops.PROD, ops.MAX, ops.MIN, ops.ANY, ops.ALL_TRUE})
# An attribute of these has one number for each dimension.
BY_DIMENSION = {ops.SLICE: ("starts", "limits", "steps"), ops.PAD: ("low", "high")}


def channels_last(graph: Graph, prefers: Callable[[Node], bool]) -> Graph:
    """The graph with the convolutions on channels last for which `prefers(such a node)` holds."""
    return _ChannelsLast(graph, prefers).run()


def last_of(rank: int) -> tuple[int, ...]:
    """The dimensions of [N, C, *spatial] in the order of [N, *spatial, C]."""
    return (0, *range(2, rank), 1)


def second_of(rank: int) -> tuple[int, ...]:
    """The dimensions of [N, *spatial, C] in the order of [N, C, *spatial]."""
    return (0, rank - 1, *range(1, rank - 1))


def channels_last_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(shape[d] for d in last_of(len(shape)))


def permuted(node: Node, dims: tuple[int, ...]) -> Node:
    """The node's dimensions in another order; a reshape where no element moves."""
    if node.op is ops.PERMUTE:
        inner = node.attr("dims")
        node, dims = node.inputs[0], tuple(inner[d] for d in dims)
    if dims == tuple(range(len(dims))):
        return node
    moving = [d for d in dims if node.shape[d] != 1]
    if moving == sorted(moving):
        return _reshaped(node, tuple(node.shape[d] for d in dims))
    return make(ops.PERMUTE, node, dims=dims)


def _reshaped(node: Node, shape: tuple[int, ...]) -> Node:
    while node.op is ops.RESHAPE:
        node = node.inputs[0]
    return node if node.shape == shape else make(ops.RESHAPE, node, shape=shape)


class _ChannelsLast:
    def __init__(self, graph: Graph, prefers: Callable[[Node], bool]) -> None:
        self.graph, self.prefers = graph, prefers
        self.plain_forms: dict[Node, Node] = {}
        self.channels_last_forms: dict[Node, Node] = {}

    def run(self) -> Graph:
        order = schedule(*self.graph.outputs)
        if not any(node.op.kind == "convolution" for node in order):
            return self.graph
        origins = dict(self.graph.origins)
        for node in order:
            made = self._convert(node)
            if made is None:
                made = self.plain_forms[node] = self._rebuilt(node)
            if node in self.graph.origins:
                origins.setdefault(made, self.graph.origins[node])
        outputs = [self._plain(node) for node in self.graph.outputs]
        return self.graph.with_outputs(outputs, origins)

    # --- the two forms ----------------------------------------------------------------------------

    def _plain(self, node: Node) -> Node:
        """The node as it was, made of what its operands have become."""
        if node not in self.plain_forms:
            form = self.channels_last_forms[node]
            self.plain_forms[node] = permuted(form, second_of(len(node.shape)))
        return self.plain_forms[node]

    def _channels_last(self, node: Node) -> Node:
        """The node with its channels last."""
        if node not in self.channels_last_forms:
            rank = len(node.shape)
            if node.op is ops.EXPAND:
                x = self._channels_last_of_rank(node.inputs[0], rank)
                made = make(ops.EXPAND, x, shape=channels_last_shape(node.shape))
            else:
                made = permuted(self._plain(node), last_of(rank))
            self.channels_last_forms[node] = made
        return self.channels_last_forms[node]

    def _channels_last_of_rank(self, node: Node, rank: int) -> Node:
        """An operand that broadcasts to so many dimensions, with its channels last."""
        if len(node.shape) == rank:
            return self._channels_last(node)
        if not node.shape:
            return self._plain(node)
        shape = (*(1,) * (rank - len(node.shape)), *node.shape)
        return permuted(_reshaped(self._plain(node), shape), last_of(rank))

    def _rebuilt(self, node: Node) -> Node:
        inputs = tuple(self._plain(n) for n in node.inputs)
        if inputs == node.inputs:
            return node
        return make(node.op, *inputs, **dict(node.attrs))

    # --- conversion -------------------------------------------------------------------------------

    def _convert(self, node: Node) -> Node | None:
        """What takes the place of a node that has, or reads, such a form; None to leave it."""
        if node.op.kind == "convolution":
            return self._convolution(node)
        if not any(n in self.channels_last_forms for n in node.inputs):
            return None
        if node.op in POOLS:
            return self._pool(node)
        if node.op is ops.GET:
            return self._keep(
                node, make(ops.GET, self._channels_last(node.inputs[0]), **dict(node.attrs))
            )
        if not isinstance(node.type, TensorType):
            return None
        if node.op in REDUCTIONS:
            return self._reduction(node)
        rank = len(node.shape)
        if node.op.kind == "elementwise" or node.op is ops.BARRIER:
            if any(n in self.channels_last_forms and n.shape == node.shape for n in node.inputs):
                inputs = [self._channels_last_of_rank(n, rank) for n in node.inputs]
                return self._keep(node, make(node.op, *inputs, **dict(node.attrs)))
        if node.op in BY_DIMENSION:
            x, *others = node.inputs
            attrs = {name: channels_last_shape(node.attr(name)) for name in BY_DIMENSION[node.op]}
            others = [self._plain(n) for n in others]
            return self._keep(node, make(node.op, self._channels_last(x), *others, **attrs))
        if node.op is ops.CONCAT:
            inputs = [self._channels_last(n) for n in node.inputs]
            dim = last_of(rank).index(node.attr("dim"))
            return self._keep(node, make(ops.CONCAT, *inputs, dim=dim))
        return None

    def _keep(self, node: Node, form: Node) -> Node:
        self.channels_last_forms[node] = form
        return form

    def _convolution(self, node: Node) -> Node | None:
        attrs = dict(node.attrs, channels_last=True)
        x, other = node.inputs
        if node.op is ops.CONVOLUTION_WEIGHT_GRADIENT:
            made = make(node.op, self._channels_last(x), self._channels_last(other), **attrs)
            if self.prefers(made):
                self.plain_forms[node] = made
                return made
            return None
        if node.op is ops.CONVOLUTION_INPUT_GRADIENT:
            attrs["shape"] = channels_last_shape(node.shape)
        made = make(node.op, self._channels_last(x), self._plain(other), **attrs)
        return self._keep(node, made) if self.prefers(made) else None

    def _pool(self, node: Node) -> Node | None:
        attrs = dict(node.attrs, channels_last=True)
        attrs["shape"] = channels_last_shape(node.attr("shape"))
        made = make(node.op, *[self._channels_last(n) for n in node.inputs], **attrs)
        return self._keep(node, made) if self.prefers(made) else None

    def _reduction(self, node: Node) -> Node:
        rank, dims = len(node.inputs[0].shape), node.attr("dims")
        order = last_of(rank)
        where = tuple(sorted(order.index(d) for d in dims))
        attrs = dict(node.attrs, dims=where)
        made = make(node.op, self._channels_last(node.inputs[0]), **attrs)
        kept = [d for d in order if d not in dims]
        made = permuted(made, tuple(kept.index(d) for d in sorted(kept)))
        self.plain_forms[node] = made
        return made
