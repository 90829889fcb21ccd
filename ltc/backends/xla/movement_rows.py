"""The rows that move elements: views, joins, and lookups by index.

What an index outside its dimension gives is not defined (see ir/ops.py): lookups take the nearest
element then, writes are dropped.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from jax import lax

from ltc.backends.xla.elementwise_rows import Row
from ltc.backends.xla.numbers import Array
from ltc.ir import ops
from ltc.ir.node import Node
from ltc.ir.ops import Op


def slice_of(node: Node, x: Array) -> Array:
    return lax.slice(x, node.attr("starts"), node.attr("limits"), node.attr("steps"))


def expand(node: Node, x: Array) -> Array:
    return jnp.broadcast_to(x, node.shape)


def pad(node: Node, x: Array, value: Array) -> Array:
    return lax.pad(x, value, [(a, b, 0) for a, b in zip(node.attr("low"), node.attr("high"))])


def insert(node: Node, base: Array, new: Array) -> Array:
    """Without indices: a slice with steps is spread over the base's shape, beside a mask."""
    starts, steps = node.attr("starts"), node.attr("steps")
    if new.size == 0:
        return base
    if set(steps) <= {1}:
        return lax.dynamic_update_slice(base, new, [np.int64(start) for start in starts])
    ends = [start + (n - 1) * step + 1 for start, step, n in zip(starts, steps, new.shape)]
    places = [(a, n - b, s - 1) for a, b, s, n in zip(starts, ends, steps, base.shape)]
    spread = lax.pad(new, np.zeros((), base.dtype), places)
    is_new = lax.pad(jnp.ones(new.shape, bool), np.zeros((), bool), places)
    return lax.select(is_new, spread, base)


def take(node: Node, x: Array, index: Array) -> Array:
    dim = node.attr("dim")
    if x.shape[dim] == 0:
        return jnp.zeros(node.shape, x.dtype)
    return jnp.take(x, index, axis=dim, mode="clip")


def gather(node: Node, x: Array, index: Array) -> Array:
    dim = node.attr("dim")
    if x.shape[dim] == 0 or index.size == 0:
        return jnp.zeros(node.shape, x.dtype)
    limits = [x.shape[d] if d == dim else n for d, n in enumerate(index.shape)]
    seen = lax.slice(x, [0] * len(limits), limits)
    return jnp.take_along_axis(seen, index, axis=dim, mode="clip")


_WRITES = {
    "set": "set", "add": "add", "multiply": "multiply", "maximum": "max", "minimum": "min",
}  # fmt: skip


def _written(base: Array, places: tuple[Array, ...], new: Array, mode: str) -> Array:
    if new.size == 0 or base.size == 0:
        return base
    return getattr(base.at[places], _WRITES[mode])(new, mode="drop")


def put(node: Node, base: Array, index: Array, new: Array) -> Array:
    dim = node.attr("dim")
    rows = new.reshape(*base.shape[:dim], index.size, *base.shape[dim + 1 :])
    first = jnp.moveaxis(base, dim, 0)
    made = _written(first, (index.reshape(-1),), jnp.moveaxis(rows, dim, 0), node.attr("mode"))
    return jnp.moveaxis(made, 0, dim)


def scatter(node: Node, base: Array, index: Array, new: Array) -> Array:
    dim = node.attr("dim")
    places = [lax.broadcasted_iota(jnp.int64, index.shape, d) for d in range(index.ndim)]
    places[dim] = index
    return _written(base, tuple(places), new, node.attr("mode"))


ROWS: dict[Op, Row] = {
    ops.PERMUTE: lambda node, x: lax.transpose(x, node.attr("dims")),
    ops.SLICE: slice_of,
    ops.EXPAND: expand,
    ops.RESHAPE: lambda node, x: lax.reshape(x, node.shape),
    ops.FLIP: lambda node, x: lax.rev(x, node.attr("dims")),
    ops.PAD: pad,
    ops.CONCAT: lambda node, *parts: lax.concatenate(parts, node.attr("dim")),
    ops.INSERT: insert,
    ops.TAKE: take,
    ops.GATHER: gather,
    ops.PUT: put,
    ops.SCATTER: scatter,
    ops.GET: lambda node, results: results[node.attr("index")],
    # what is behind it is computed again, not kept: XLA would join the two
    ops.BARRIER: lambda node, x: lax.optimization_barrier(x),
}
