"""The rows of exchanges among replicas: part of the program, along the one axis of its mesh.

A start makes what its wait hands on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax

from ltc.backends.xla.elementwise_rows import Row, is_bool
from ltc.backends.xla.numbers import Array, wide
from ltc.backends.xla.placement import AXIS
from ltc.ir import ops
from ltc.ir.collective import Collective
from ltc.ir.graph import Graph, schedule
from ltc.ir.node import Node
from ltc.ir.ops import Op

Exchange = Callable[[Collective, Array], Array]


def _groups(collective: Collective) -> list[list[int]] | None:
    return [list(group) for group in collective.groups] or None


def _position(collective: Collective) -> Array:
    """The calling replica's place in its group."""
    own = lax.axis_index(AXIS)
    if not collective.groups:
        return own
    places = {one: place for group in collective.groups for place, one in enumerate(group)}
    return jnp.array([places[one] for one in range(len(places))])[own]


def _members(collective: Collective) -> int:
    return len(collective.groups[0]) if collective.groups else lax.axis_size(AXIS)


# --- reductions ----------------------------------------------------------------------------------

_OF_BOOL = {"sum": "or", "max": "or", "mul": "and", "min": "and"}
_BY_XLA = {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}
_OF_TWO = {"mul": lax.mul, "and": lax.bitwise_and, "or": lax.bitwise_or}


def _reduced(collective: Collective, x: Array) -> Array:
    """Sums of narrow floats are made in float32 and rounded once."""
    kind = collective.reduction
    if is_bool(x):
        kind = _OF_BOOL.get(kind, kind)
    if kind in ("min", "max"):
        return _ordered(kind, collective, x)
    if kind == "sum":
        return lax.psum(wide(x), AXIS, axis_index_groups=_groups(collective)).astype(x.dtype)
    parts = lax.all_gather(wide(x), AXIS, axis_index_groups=_groups(collective))
    return functools.reduce(_OF_TWO[kind], list(parts)).astype(x.dtype)


def _ordered(kind: str, collective: Collective, x: Array) -> Array:
    """A NaN of any member is the result, as PyTorch has it."""
    groups = _groups(collective)
    made = _BY_XLA[kind](x, AXIS, axis_index_groups=groups)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return made
    has_nan = lax.psum(jnp.isnan(x).astype(jnp.int32), AXIS, axis_index_groups=groups)
    return jnp.where(has_nan > 0, jnp.nan, made).astype(x.dtype)


def _scattered(collective: Collective, x: Array) -> Array:
    dim, count = collective.dim, _members(collective)
    if collective.reduction == "sum" and not is_bool(x):
        groups = _groups(collective)
        made = lax.psum_scatter(
            wide(x), AXIS, scatter_dimension=dim, axis_index_groups=groups, tiled=True
        )
        return made.astype(x.dtype)
    size = x.shape[dim] // count
    return lax.dynamic_slice_in_dim(
        _reduced(collective, x), _position(collective) * size, size, dim
    )


# --- others --------------------------------------------------------------------------------------


def _gathered(collective: Collective, x: Array) -> Array:
    return lax.all_gather(
        x, AXIS, axis=collective.dim, axis_index_groups=_groups(collective), tiled=True
    )


def _swapped(collective: Collective, x: Array) -> Array:
    split, join = collective.dim, collective.other_dim
    return lax.all_to_all(x, AXIS, split, join, axis_index_groups=_groups(collective), tiled=True)


def _permuted(collective: Collective, x: Array) -> Array:
    return lax.ppermute(x, AXIS, collective.pairs)


def _broadcast(collective: Collective, x: Array) -> Array:
    """The sum of the root's bits and of zeros: exact, whatever the others hold."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        parts = [_broadcast(collective, part) for part in (x.real, x.imag)]
        return lax.complex(*parts)
    bits = np.dtype(f"u{x.dtype.itemsize}")
    given = x.astype(bits) if is_bool(x) else lax.bitcast_convert_type(x, bits)
    own = jnp.where(_position(collective) == collective.root, given, lax.full_like(given, 0))
    made = lax.psum(own, AXIS, axis_index_groups=_groups(collective))
    return made.astype(bool) if is_bool(x) else lax.bitcast_convert_type(made, x.dtype)


KINDS: dict[str, Exchange] = {
    "all_reduce": _reduced,
    "reduce_scatter": _scattered,
    "all_gather": _gathered,
    "all_to_all": _swapped,
    "permute": _permuted,
    "broadcast": _broadcast,
}


def are_all_rows(graph: Graph) -> bool:
    """True if the graph exchanges in ways that have a row, and each start with its wait."""
    nodes = schedule(*graph.outputs)
    starts = [node for node in nodes if node.op is ops.COLLECTIVE_START]
    waits = [node for node in nodes if node.op is ops.COLLECTIVE_WAIT]
    return all(_has_row(node.attr("collective")) for node in starts) and all(
        node.inputs[0].op is ops.COLLECTIVE_START for node in waits
    )


def groups_of(graph: Graph) -> frozenset[tuple[tuple[int, ...], ...]]:
    """Return the ways in which a graph's exchanges divide the replicas; () is all together."""
    nodes = schedule(*graph.outputs)
    starts = [node for node in nodes if node.op is ops.COLLECTIVE_START]
    return frozenset(node.attr("collective").groups for node in starts)


def _has_row(collective: Collective) -> bool:
    """Return True if the devices exchange so: the host alone compares operands, and knows process groups."""
    return collective.kind in KINDS and not collective.channel and not collective.checked


def _start(node: Node, *operands: Array) -> Sequence[Array]:
    collective, count = node.attr("collective"), node.attr("count")
    return [KINDS[collective.kind](collective, x) for x in operands[len(operands) - count :]]


ROWS: dict[Op, Row] = {
    ops.COLLECTIVE_START: _start,
    ops.COLLECTIVE_WAIT: lambda node, made: made,
}
