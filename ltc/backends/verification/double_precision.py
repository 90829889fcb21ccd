"""Nodes' values as exactly as double precision gives them: each rounded once to its own type.

This is what a backend's values are judged by. The reference in a node's own type would not do: it
has rounding errors of its own, and other ones than the backend's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from ltc.backends.eager import LOWERING
from ltc.ir import ops
from ltc.ir.node import Node, make
from ltc.ir.tensor_type import TensorType

# What is defined by the bits of its operands, or steps where their rounding decides.
IN_OWN_TYPE = frozenset({
    ops.BITCAST, ops.NEXTAFTER, ops.EXTERN, ops.FLOOR_DIVIDE, ops.TRUNC_DIVIDE, ops.REMAINDER,
    ops.FMOD, ops.CONSTANT, ops.IOTA, ops.RANDOM_BITS,
})  # fmt: skip

# (node, its value, its operands, what computes it) -> the value with an error in it
Perturb = Callable[[Node, Any, list[Any], Callable[..., Any]], Any]


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which values of that type are computed."""
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


class Formula:
    """The derivation of some nodes from known values.

    Attributes:
        results: The computed nodes.
        operands: The known nodes that it is computed from.
        scalars: The scalars that it is computed from.
        nodes: The nodes computed on the way, and the results, in order.
    """

    def __init__(self, results: Iterable[Node], known: Collection[Node]) -> None:
        """`known`: the nodes of which a value is there; none that leads to one of them is used."""
        self.results = tuple(dict.fromkeys(results))
        order = _back_to(self.results, known)
        self.operands = tuple(n for n in order if n in known)
        self.scalars = tuple(n for n in order if n.op is ops.SCALAR and n not in known)
        given = {*self.operands, *self.scalars}
        self.nodes = tuple(n for n in order if n not in given)
        self._steps = [(node, _widened(node)) for node in self.nodes]
        self._dead = _dead_after(self.nodes, self.results)

    def values(
        self,
        known: Mapping[Node, torch.Tensor],
        scalars: Sequence[Any],
        perturb: Perturb | None = None,
        rounded: bool = True,
    ) -> list[torch.Tensor]:
        """Return the values of the results; floats in double precision.

        Args:
            perturb: A change made to each value before it is rounded.
            rounded: False: round to nothing but double.
        """
        found: dict[Node, Any] = {n: widen(known[n]) for n in self.operands}
        for node in self.scalars:
            number = torch.as_tensor(scalars[node.attr("slot")], dtype=node.dtype)
            found[node] = widen(number)
        for (node, compute), dead in zip(self._steps, self._dead):
            operands = [found[n] for n in node.inputs]
            value = compute(*operands)
            if perturb is not None:
                value = perturb(node, value, operands, compute)
            found[node] = _settled(value, node.type, rounded)
            for operand in dead:
                found.pop(operand, None)
        return [found[node] for node in self.results]


def widen(x: torch.Tensor) -> torch.Tensor:
    return x.to(wide(x.dtype))


def _back_to(results: tuple[Node, ...], known: Collection[Node]) -> list[Node]:
    """Return the nodes from known ones to the results, operands first; none behind a known one."""
    ends = {n for n in known if n not in results}
    order: list[Node] = []
    placed: set[Node] = set()
    waiting = [(node, False) for node in reversed(results)]
    while waiting:
        node, operands_done = waiting.pop()
        if node in placed:
            continue
        if operands_done or node in ends or not node.inputs:
            placed.add(node)
            order.append(node)
        else:
            waiting.append((node, True))
            waiting.extend((n, False) for n in node.inputs if n not in placed)
    return order


def _dead_after(nodes: tuple[Node, ...], results: tuple[Node, ...]) -> list[list[Node]]:
    """For each node, what is not read after it."""
    seen: set[Node] = set(results)
    dead = []
    for node in reversed(nodes):
        dead.append([n for n in dict.fromkeys(node.inputs) if n not in seen])
        seen.update(node.inputs)
    return dead[::-1]


def _widened(node: Node) -> Callable[..., Any]:
    """Return the function that computes the node from widened operands."""
    if node.op is ops.CHECK:
        return lambda x, holds: x  # of an operand with an error in it, it need not hold
    if node.op in IN_OWN_TYPE:
        return _in_own_type(node)
    attrs = dict(node.attrs)
    if node.op is ops.CAST:
        attrs["dtype"] = wide(node.dtype)
    compute: Callable[..., Any]
    if node.op is ops.GET:  # its operand is no tensor
        compute = LOWERING.lower(node)
        return compute
    operands = [
        make(ops.INPUT, index=k, dtype=wide(n.dtype), shape=n.shape)
        for k, n in enumerate(node.inputs)
    ]
    compute = LOWERING.lower(make(node.op, *operands, **attrs))
    return compute


def _in_own_type(node: Node) -> Callable[..., Any]:
    compute, types = LOWERING.lower(node), [n.dtype for n in node.inputs]
    return lambda *operands: compute(*[x.to(dtype) for x, dtype in zip(operands, types)])


def _settled(value: Any, type: TensorType | tuple[Any, ...], rounded: bool) -> Any:
    if not isinstance(type, TensorType):
        return tuple(_settled(v, t, rounded) for v, t in zip(value, type, strict=True))
    return widen(value.to(type.dtype)) if rounded else widen(value)
