"""What a kernel is but for its buffers: layers that are alike have kernels of one form."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from ltc.ir.loop_nest import READS, Kernel, Value
from ltc.ir.node import Node


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
