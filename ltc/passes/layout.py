"""Values in the order in which their readers want them in memory."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable

from ltc.ir import ops
from ltc.ir.graph import Graph, schedule
from ltc.ir.node import Node, is_channels_last, make
from ltc.ir.tensor_type import TensorType


def layout(graph: Graph) -> Graph:
    """The graph with each product made in the order in which it is read.

    A product that is only read transposed, as the gradient of a linear layer's weight is, is the
    product of its transposed operands: permute(x @ y) -> permute(y) @ permute(x).
    """
    order = schedule(*graph.outputs)
    readers = Counter(n for node in order for n in node.inputs)
    readers.update(graph.outputs)
    replaced: dict[Node, Node] = {}
    origins = dict(graph.origins)
    for node in order:
        if _transposes_a_product(node) and readers[node.inputs[0]] == 1:
            x, y = (_transposed(replaced[n]) for n in node.inputs[0].inputs)
            result = make(ops.MATMUL, y, x)
        else:
            inputs = tuple(replaced[n] for n in node.inputs)
            same = inputs == node.inputs
            result = node if same else make(node.op, *inputs, **dict(node.attrs))
        replaced[node] = result
        if node in graph.origins:
            origins.setdefault(result, graph.origins[node])
    return graph.with_outputs([replaced[n] for n in graph.outputs], origins)


def _last_two_swapped(rank: int) -> tuple[int, ...]:
    return (*range(rank - 2), rank - 1, rank - 2)


def _transposes_a_product(node: Node) -> bool:
    is_transposition = node.op is ops.PERMUTE and len(node.shape) >= 2
    if not is_transposition or node.attr("dims") != _last_two_swapped(len(node.shape)):
        return False
    return node.inputs[0].op is ops.MATMUL


def _transposed(node: Node) -> Node:
    dims = _last_two_swapped(len(node.shape))
    if node.op is ops.PERMUTE and node.attr("dims") == dims:
        return node.inputs[0]
    return make(ops.PERMUTE, node, dims=dims)


# --- Attention's results in the order of dimensions in which they are read -----------------------

READ_THROUGH_STRIDES = frozenset({ops.ATTENTION, ops.ATTENTION_GRADIENT})


def order_attention(graph: Graph) -> Graph:
    """The graph with each result of an attention made as its readers permute it.

    permute(get(attention, i)) -> get(attention with that order, i); a gradient, which reads the
    result through strides, reads it permuted back.
    """
    order = schedule(*graph.outputs)
    readers: dict[Node, list[Node]] = defaultdict(list)
    for node in order:
        for operand in node.inputs:
            readers[operand].append(node)
    kept = set(graph.outputs)
    wanted = {
        node: dims
        for node in order
        if node.op is ops.GET and node.inputs[0].op in READ_THROUGH_STRIDES and node not in kept
        if (dims := _order_read(node, readers[node])) is not None
    }
    if not wanted:
        return graph
    return _Reordered(graph, order, wanted).graph()


def _order_read(result: Node, readers: list[Node]) -> tuple[int, ...] | None:
    """The one permutation through which all but attentions read a result."""
    whole, index = result.inputs[0], result.attr("index")
    if index not in ((0,) if whole.op is ops.ATTENTION else (0, 1, 2)):
        return None
    dims: set[tuple[int, ...] | None] = {
        n.attr("dims") if n.op is ops.PERMUTE else None
        for n in readers
        if n.op not in READ_THROUGH_STRIDES
    }
    order = dims.pop() if len(dims) == 1 else None
    if order is None:
        return None
    return order if order[-1] == len(order) - 1 else None  # rows stay rows of vectors


class _Reordered:
    """The graph made again; `wanted` is the order of each result that gets another one."""

    def __init__(
        self, graph: Graph, order: list[Node], wanted: dict[Node, tuple[int, ...]]
    ) -> None:
        self.graph_before, self.wanted = graph, wanted
        self.orders: dict[Node, dict[int, tuple[int, ...]]] = defaultdict(dict)
        for result, dims in wanted.items():
            self.orders[result.inputs[0]][result.attr("index")] = dims
        self.made: dict[Node, Node] = {}
        for node in order:
            self.made[node] = self._make(node)

    def graph(self) -> Graph:
        before = self.graph_before
        origins = dict(before.origins)
        for node, made in self.made.items():
            if node in before.origins:
                origins.setdefault(made, before.origins[node])
        return before.with_outputs([self.made[n] for n in before.outputs], origins)

    def _make(self, node: Node) -> Node:
        if node.op is ops.PERMUTE and node.inputs[0] in self.wanted:
            return self.made[node.inputs[0]]
        inputs = tuple(self._plain(n) for n in node.inputs)
        attrs = dict(node.attrs)
        chosen = self.orders.get(node, {})
        if node.op is ops.ATTENTION:
            attrs["order"] = chosen.get(0, attrs["order"])
        elif node.op is ops.ATTENTION_GRADIENT:
            attrs["orders"] = tuple(chosen.get(i, o) for i, o in enumerate(attrs["orders"]))
        return make(node.op, *inputs, **attrs) if inputs != node.inputs or chosen else node

    def _plain(self, operand: Node) -> Node:
        """An operand with its dimensions as they were."""
        made, dims = self.made[operand], self.wanted.get(operand)
        if dims is None:
            return made
        back = tuple(dims.index(d) for d in range(len(dims)))
        return make(ops.PERMUTE, made, dims=back)


# Convolutions and what lies between them on [N, *spatial, C], where the backend prefers that.
# Each node may have a channels-last form. What reads the form of an operand element by element
# has one as well; anything else reads it through a permutation. Weights stay as they are.

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
        """Return the replacement of a node that has, or reads, such a form; None to leave it."""
        if is_channels_last(node):  # a part of a graph that was converted before
            return None
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
