"""The stores of a kernel over its own operands."""

from __future__ import annotations

from ltc.ir.loop_nest import READS, Kernel, Product, Store, Unit
from ltc.ir.node import Node


def stores_of(unit: Unit) -> tuple[Kernel | None, set[Node]]:
    """The kernel whose stores a unit makes, if any, and what it reads in other places as well."""
    if isinstance(unit, Product):
        return unit.epilogue, {access.node for access in unit.operands}
    return unit if isinstance(unit, Kernel) else None, set()


def in_place(kernel: Kernel, store: Store, free: set[Node]) -> Node | None:
    """A free node that the kernel reads nowhere but where it stores, and has read when it does.

    The stores of a point run one after the other: what another store reads of the node, it finds
    in a register only if this one has read it there, whichever way its choices went.
    """
    if store.sums:
        return None
    there = _loaded_at(store)
    for other in kernel.stores:
        if other is not store:
            there -= _loaded_at(other) - _loaded_at(store, of_choices=False)
    loads: dict[Node, bool] = {}
    if kernel.base is not None:  # a copy reads all of it, and none where it is in place
        there.add(kernel.base)
        loads[kernel.base] = True
    for value in kernel.values():
        if value.kind in READS:
            node, offset = value.data[:2]
            same = value.kind == "load" and offset == store.offset and not value.guards
            loads[node] = loads.get(node, True) and same
    for node, same in loads.items():
        if same and node in there & free and node.type == store.node.type:
            return node
    return None


def _loaded_at(store: Store, of_choices: bool = True) -> set[Node]:
    """Return the nodes loaded for a store at its own point, not in a reduction before.

    Args:
        of_choices: Include nodes loaded for one side of a choice, at the points of that side.
    """
    found: set[Node] = set()
    waiting, seen = [store.value], set()
    while waiting:
        value = waiting.pop()
        if value not in seen and value.kind != "reduced":
            seen.add(value)
            if of_choices or value.kind != "choose":
                waiting.extend(value.operands)
            if value.kind == "load":
                found.add(value.data[0])
    return found
