"""Long reductions in pieces: work for every thread, and sums that stay near the exact ones.

The pieces are fixed by the shape alone, so that no result depends on the number of threads.
"""

from __future__ import annotations

import torch

from ltc.ir import ops
from ltc.ir.graph import Graph
from ltc.ir.node import Node, make
from ltc.ir.tensor_type import LOW_PRECISION
from ltc.passes.rewrite import rewrite
from ltc.support.sizes.choices import by_sample
from ltc.support.sizes.extent import Extent, Size, number_now

MOST_PIECES = 64
FEWEST_ROWS = 16  # from here on the rows themselves keep the threads busy
LONG = 1 << 15  # elements of all rows together, below which one thread is quick enough
FEW_RESULTS = 1 << 9  # elements of a product that no two threads would divide
LONG_PRODUCT = 1 << 18  # multiplications, below which one thread is quick enough
SHORTEST_PRODUCT = 256  # additions of each piece of a product
FEWEST_PRODUCTS, MOST_PRODUCTS = 4, 16
SUMMED_EXACTLY = (torch.float32, torch.float64)  # the others would round each piece
LONGEST_CHAIN = 256  # additions one after the other; more of them lose accuracy


def split_reductions(graph: Graph) -> Graph:
    """The graph with every long reduction as one of pieces, and one of their results.

    A product of few elements and a long sum is one as well.
    """
    rules = (in_pieces,)
    splittable = (ops.SUM, ops.PROD, ops.MAX, ops.MIN, ops.ANY, ops.ALL_TRUE)
    return rewrite(graph, dict.fromkeys(splittable, rules) | {ops.MATMUL: (product_in_pieces,)})


def in_pieces(node: Node) -> Node | None:
    """reduce(x[n, ...]) -> reduce(reduce(x[pieces, n / pieces, ...]))"""
    (x,), dims = node.inputs, node.attr("dims")
    if not dims or x.size == 0:
        return None
    with by_sample():  # any number of pieces is right
        d = max(dims, key=lambda d: x.shape[d])
    pieces = _pieces(node, x, dims, x.shape[d])
    if pieces < 2:
        return None
    dtype = node.dtype
    if dtype in LOW_PRECISION and node.op in (ops.SUM, ops.PROD):
        x = make(ops.CAST, x, dtype=torch.float32)
    shape = (*x.shape[:d], pieces, x.shape[d] // pieces, *x.shape[d + 1 :])
    parts = make(ops.RESHAPE, x, shape=shape)
    inner = tuple(e if e < d else e + 1 for e in dims)
    parts = make(node.op, parts, dims=inner)
    where = d - sum(1 for e in dims if e < d)
    result = make(node.op, parts, dims=(where,))
    return result if result.dtype == dtype else make(ops.CAST, result, dtype=dtype)


def product_in_pieces(node: Node) -> Node | None:
    """x[m, k] @ y[k, n] -> sum(x[pieces, m, k / pieces] @ y[pieces, k / pieces, n])"""
    x, y = node.inputs
    k = x.shape[-1]
    if len(node.shape) != 2 or node.dtype not in SUMMED_EXACTLY or isinstance(k, Extent):
        return None
    with by_sample():  # any number of pieces is right
        if node.size > FEW_RESULTS or node.size * k < LONG_PRODUCT:
            return None
    pieces = _divisor_up_to(k, min(MOST_PRODUCTS, k // SHORTEST_PRODUCT))
    if pieces < FEWEST_PRODUCTS:
        return None
    (m, n), part = node.shape, k // pieces
    left = make(ops.PERMUTE, make(ops.RESHAPE, x, shape=(m, pieces, part)), dims=(1, 0, 2))
    right = make(ops.RESHAPE, y, shape=(pieces, part, n))
    return make(ops.SUM, make(ops.MATMUL, left, right), dims=(0,))


def _pieces(node: Node, x: Node, dims: tuple[int, ...], extent: int) -> int:
    if isinstance(extent, Extent):
        return 1  # what divides it at all sizes is not known; its loop adds in blocks
    rows = node.size
    wanted = 1
    with by_sample():
        are_few = bool(rows < FEWEST_ROWS and x.size >= LONG)
    if are_few:
        wanted = MOST_PIECES
    elif len(x.shape) - 1 not in dims and x.size // rows > LONGEST_CHAIN:
        wanted = _enough(-(-2 * x.size // (rows * LONGEST_CHAIN)))
    most = min(extent, MOST_PIECES)
    if wanted >= most:
        return _divisor_up_to(extent, most)
    return next((p for p in range(wanted, most + 1) if extent % p == 0), 1)


def _enough(wanted: Size) -> int:
    """Return a symbolic count's bound that will do at greater sizes too; other counts as they are."""
    if not isinstance(wanted, Extent):
        return wanted
    power = 2 << (number_now(wanted) - 1).bit_length()  # room for sizes twice as great
    return power if wanted <= power else number_now(wanted)


def _divisor_up_to(extent: int, most: int) -> int:
    return next(p for p in range(most, 0, -1) if extent % p == 0)


# A concatenation of many parts as one of concatenations of some, each of which is in memory. A
# kernel asks of every element which part it is of, one part after the other: it is as long as
# there are parts, and takes as much longer.

MOST_PARTS = 32  # of one kernel: from here on a copy of its own takes less time


def split_concats(graph: Graph) -> Graph:
    """The graph with no concatenation of more than MOST_PARTS."""
    return rewrite(graph, {ops.CONCAT: (concat_in_groups,)})


def concat_in_groups(node: Node) -> Node | None:
    """concat(a, b, c, d, ...) -> concat(concat(a, b), concat(c, d), ...)"""
    parts, dim = node.inputs, node.attr("dim")
    if len(parts) <= MOST_PARTS:
        return None
    groups = -(-len(parts) // MOST_PARTS)
    each = -(-len(parts) // groups)  # all of one length but the last: their kernels are alike
    return make(
        ops.CONCAT,
        *[_joined(parts[first : first + each], dim) for first in range(0, len(parts), each)],
        dim=dim,
    )


def _joined(parts: tuple[Node, ...], dim: int) -> Node:
    whole = parts[0] if len(parts) == 1 else make(ops.CONCAT, *parts, dim=dim)
    return make(ops.BARRIER, whole)
