"""Drafts as kernels and products, in an order in which they may run."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from ltc.ir.loop_nest import Access, Kernel, Product, Store, Unit
from ltc.ir.node import Node
from ltc.ir.tensor_type import TensorType
from ltc.passes.fusion.body import Body
from ltc.passes.fusion.draft import Draft


class FusedUnits:
    """What runs, made of what was decided.

    position  of every node in the graph's order
    products  the nodes that can hold an epilogue
    accesses  where each product finds its operands
    parts     of a product with several results: the nodes that take them, by their index
    """

    def __init__(
        self,
        position: Mapping[Node, int],
        products: Container[Node],
        accesses: Mapping[Node, tuple[Access, ...]],
        parts: Mapping[Node, Mapping[int, Node]],
    ) -> None:
        self.position, self.products, self.accesses = position, products, accesses
        self.parts = parts

    def ordered(
        self, units: list[Draft | Node], needs: Mapping[Draft | Node, Iterable[Draft | Node]]
    ) -> list[Unit]:
        """Every unit after those it needs, otherwise as the graph was recorded."""
        done: set[Draft | Node] = set()
        result: list[Unit] = []
        for unit in sorted(units, key=self._time):
            waiting = [(unit, False)]
            while waiting:
                one, needs_done = waiting.pop()
                if one in done:
                    continue
                if needs_done:
                    done.add(one)
                    result.append(self._unit(one))
                else:
                    waiting.append((one, True))
                    waiting.extend((u, False) for u in needs[one] if u not in done)
        return result

    def _unit(self, unit: Draft | Node) -> Unit:
        if isinstance(unit, Node):
            return self._product(unit, None) if unit in self.products else unit
        kernel = self._kernel(unit)
        if unit.product is None:
            return kernel
        return self._product(unit.product, kernel)

    def _product(self, node: Node, epilogue: Kernel | None) -> Product:
        results: tuple[Node | None, ...] = (node,)
        if not isinstance(node.type, TensorType):
            results = tuple(self.parts[node].get(i) for i in range(len(node.type)))
        return Product(node, self.accesses[node], epilogue, results)

    def _time(self, unit: Draft | Node) -> int:
        if isinstance(unit, Node):
            return self.position[unit]
        return max(self.position[n] for n in (*unit.stores, *unit.sums))

    def _kernel(self, draft: Draft) -> Kernel:
        body = Body(draft)
        stores = tuple(
            Store(node, body.stored(node, offset), offset) for node, offset in draft.stores.items()
        )
        sums = tuple(
            Store(node, body.operand(*place), offset, node.op)
            for node, (offset, place) in draft.sums.items()
        )
        depth = len(draft.space) if draft.depth is None else draft.depth
        return Kernel(draft.space, depth, stores + sums)
