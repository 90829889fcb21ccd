"""The rows of reductions and scans: narrow floats are added in float32 and rounded once."""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from ltc.backends.xla.elementwise_rows import Row
from ltc.backends.xla.numbers import DTYPES, Array, wide
from ltc.ir import ops
from ltc.ir.node import Node
from ltc.ir.ops import Op


def over_dims(function: Callable[..., Array]) -> Row:
    def row(node: Node, x: Array) -> Array:
        dims = node.attr("dims")
        return function(wide(x), axis=dims, dtype=wide(x).dtype).astype(x.dtype) if dims else x

    return row


def choice_over_dims(function: Callable[..., Array]) -> Row:
    return lambda node, x: function(x, axis=node.attr("dims")) if node.attr("dims") else x


def place_of(function: Callable[..., Array]) -> Row:
    return lambda node, x: function(x, node.attr("dim"), DTYPES[node.dtype])


def scan(function: Callable[..., Array]) -> Row:
    def row(node: Node, x: Array) -> Array:
        return function(wide(x), axis=node.attr("dim"), dtype=wide(x).dtype).astype(x.dtype)

    return row


ROWS: dict[Op, Row] = {
    ops.SUM: over_dims(jnp.sum),
    ops.PROD: over_dims(jnp.prod),
    ops.MAX: choice_over_dims(jnp.max),
    ops.MIN: choice_over_dims(jnp.min),
    ops.ANY: choice_over_dims(jnp.any),
    ops.ALL_TRUE: choice_over_dims(jnp.all),
    ops.ARGMAX: place_of(lax.argmax),
    ops.ARGMIN: place_of(lax.argmin),
    ops.CUMSUM: scan(jnp.cumsum),
    ops.CUMPROD: scan(jnp.cumprod),
}
