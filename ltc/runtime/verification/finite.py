"""Programs whose results are checked for NaN and infinities, as LTC_DEBUG_NANS asks.

Where a result has some that the program was not given, its graph is run once more, node by node on
the reference, for the first node that makes one of operands that have none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ltc.backends.eager import LOWERING
from ltc.backends.interface import ComputationCapabilities
from ltc.backends.plain_dispatch import PlainDispatch
from ltc.errors import NotFinite
from ltc.ir import ops
from ltc.ir.graph import Graph, Origin, schedule
from ltc.ir.node import Node
from ltc.ir.tensor_type import type_text
from ltc.runtime.verification.finding_text import asked_for, range_text
from ltc.support.module_names import name_of_held

Test = Callable[[torch.Tensor], torch.Tensor]
NAN, INFINITE = "NaN", "Inf"
_TESTS: dict[str, Test] = {NAN: torch.isnan, INFINITE: torch.isinf}
_LAST = 1 << 62  # the place of a node that no call is known of


@dataclass(frozen=True)
class Culprit:
    """A node that makes what is not finite, the value that it makes, and those it makes it of."""

    node: Node
    value: torch.Tensor
    operands: Sequence[Any]


class FiniteComputation:
    """A Computation that raises NotFinite where the one it holds gives NaN or infinities.

    The inputs that it may write over are left as they were.
    """

    def __init__(
        self, computation: Any, graph: Graph, device: int, donated: frozenset[int]
    ) -> None:
        """`graph`: what the computation was made of."""
        self.upload, self.download = computation.upload, computation.download
        self.wait = computation.wait
        aliased = ComputationCapabilities.of(computation).aliased_outputs
        self.capabilities = ComputationCapabilities(aliased)
        self._computation, self._graph = computation, graph
        self._device, self._donated = device, donated

    def launch(self, buffers: list[Any], scalars: list[Any]) -> list[Any]:
        with PlainDispatch():
            given = list(buffers)
            for position in self._donated:
                given[position] = self.upload(self.download(given[position]), self._device)
            results: list[Any] = self._computation.launch(given, scalars)
            values = [self.download(result) for result in results]
            for fault, test in _TESTS.items():
                found = [k for k, value in enumerate(values) if _has(value, test)]
                if found:
                    self._blame(fault, found, values, buffers, scalars)
            return results

    def _blame(
        self,
        fault: str,
        found: list[int],
        values: list[torch.Tensor],
        buffers: list[Any],
        scalars: list[Any],
    ) -> None:
        """Raise what tells where it comes from, if the program was not given it."""
        order, origins = schedule(*self._graph.outputs), self._graph.origins
        if not any(node.op.kind == "collective" for node in order):
            culprits = list(self._culprits(order, _TESTS[fault], buffers, scalars))
            if culprits:
                first = min(culprits, key=self._place)
                raise _error(fault, first, origins, _names_of_inputs(first.node, buffers))
        if fault == NAN:
            output = self._graph.outputs[found[0]]
            raise _error(fault, Culprit(output, values[found[0]], ()), origins, {})

    def _place(self, culprit: Culprit) -> tuple[bool, int]:
        """Return the sort key of a culprit: inputs of the program first, then calls in their order."""
        origin = self._graph.origins.get(culprit.node)
        is_computed = culprit.node.op is not ops.INPUT
        return is_computed, origin.position if origin is not None else _LAST

    def _culprits(
        self, order: list[Node], test: Test, buffers: list[Any], scalars: list[Any]
    ) -> Iterator[Culprit]:
        """Give the nodes whose value fails the test while no operand does; and NaN inputs."""
        values: dict[Node, Any] = {}
        readers = Counter(operand for node in order for operand in node.inputs)
        for node in order:
            operands = [values[operand] for operand in node.inputs]
            values[node] = self._value(node, operands, buffers, scalars)
            is_given = node.op is ops.INPUT and test is not torch.isnan
            if not is_given and _has(values[node], test) and _is_made(node, operands, test):
                yield Culprit(node, values[node], operands)
            for operand in node.inputs:
                readers[operand] -= 1
                if not readers[operand]:
                    values.pop(operand, None)

    def _value(
        self, node: Node, operands: list[Any], buffers: list[Any], scalars: list[Any]
    ) -> Any:
        if node.op is ops.INPUT:
            return self.download(buffers[node.attr("index")])
        if node.op is ops.SCALAR:
            return torch.as_tensor(scalars[node.attr("slot")], dtype=node.dtype)
        return LOWERING.lower(node)(*operands)


def _is_made(node: Node, operands: list[Any], test: Test) -> bool:
    """Return True if the node makes the tested value; a constant that the program writes is meant."""
    if node.op is ops.CONSTANT or node.op is ops.SCALAR:
        return False
    return not any(_has(operand, test) for operand in operands)


def _has(value: Any, test: Test) -> bool:
    if isinstance(value, tuple):
        return any(_has(part, test) for part in value)
    if not isinstance(value, torch.Tensor) or not (value.is_floating_point() or value.is_complex()):
        return False
    return bool(test(_plain(value)).any())


def _plain(value: torch.Tensor) -> torch.Tensor:
    """In a dtype that torch can test: it can not test all of the narrow ones."""
    return value.float() if value.dtype.itemsize == 1 else value


def _names_of_inputs(node: Node, buffers: list[Any]) -> dict[Node, str]:
    """Return the names of the inputs of the program among a node and its operands."""
    found = {}
    for one in (node, *node.inputs):
        if one.op is ops.INPUT:
            name = name_of_held(partial(_lies_in, handle=buffers[one.attr("index")]))
            found[one] = name or "an input of the program"
    return found


def _lies_in(tensor: torch.Tensor, handle: Any) -> bool:
    """Return True if the backend's object holds the value of the tensor."""
    state = getattr(tensor.untyped_storage(), "lazy", None)
    buffer = getattr(state, "buffer", None)
    return buffer is not None and buffer.handle is handle


def _error(fault: str, culprit: Culprit, origins: Any, names: dict[Node, str]) -> NotFinite:
    node, value = culprit.node, culprit.value
    given = node.op is ops.INPUT
    what = f"{asked_for(node, origins)}: the node {node.op}"
    if given:
        what = f"{names[node][0].upper()}{names[node][1:]}"
    rows = [
        f"{what} {'has' if given else 'gives'} {fault}: {_elements(node, value, _TESTS[fault])}."
    ]
    rows += [
        f"  {names.get(operand) or asked_for(operand, origins)}, "
        f"{type_text(operand.type)}: {range_text(x)}"
        for operand, x in zip(node.inputs, culprit.operands)
        if isinstance(x, torch.Tensor)
    ]
    if len(rows) > 1:
        rows.insert(1, "It is computed from:")
    rows.append(
        "Tensors that the step was to replace keep their values. LTC_DEBUG_NANS=0 permits NaN."
    )
    origin: Origin | None = origins.get(node)
    return NotFinite("\n".join(rows), origin)


def _elements(node: Node, value: Any, test: Test) -> str:
    if not isinstance(value, torch.Tensor):
        return type_text(node.type)
    wrong = test(_plain(value))
    first = wrong.nonzero()[0].tolist()
    at = f", the first at {first}" if first else ""
    return f"{int(wrong.sum())} of {value.numel()} elements of {type_text(node.type)}{at}"
