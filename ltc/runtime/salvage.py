"""The outputs that a failed program can still give: those that depend on no failed node.

Its graph is run once more from the same inputs, which are as they were: node by node on the
reference, since any node may fail. A node that needs a failed one is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from ltc.backends.eager import LOWERING
from ltc.backends.interface import Computation
from ltc.backends.plain_dispatch import PlainDispatch
from ltc.ir import ops
from ltc.ir.graph import Graph, schedule
from ltc.ir.node import Node
from ltc.runtime import backend_errors
from ltc.runtime.buffer import Failure
from ltc.support.observation import metrics


def salvage(
    graph: Graph,
    computation: Any,
    handles: list[Any],
    scalars: list[Any],
    device: int,
    lost: Mapping[int, Failure],
) -> list[Any]:
    """Return for each output a buffer of its own, or the Failure of the first failed node it needs.

    Args:
        computation: Converts buffers to CPU tensors and back.
        lost: Positions of the missing inputs -> the reason.
    """
    run = _Run(graph, computation, handles, scalars, device, lost)
    with PlainDispatch():
        run.go_through(schedule(*run.possible_outputs()))
        results = [run.buffer_of(node) for node in graph.outputs]
    run.tell_first()
    metrics.count("SalvagedOutputs", sum(result.__class__ is not Failure for result in results))
    return results


class _Run:
    """Every node's value, until its last reader has it; or the reason why it has none.

    A reason is a failure and its rank: the first in the order of the user's calls counts.
    """

    def __init__(
        self,
        graph: Graph,
        computation: Computation,
        handles: list[Any],
        scalars: list[Any],
        device: int,
        lost: Mapping[int, Failure],
    ) -> None:
        self._graph, self._computation, self._device = graph, computation, device
        self._handles, self._scalars = handles, scalars
        self._values: dict[Node, Any] = {}
        self._reasons: dict[Node, tuple[tuple[Any, ...], Failure]] = {
            node: ((-1, 0), lost[node.attr("index")])
            for node in graph.inputs
            if node.attr("index") in lost
        }
        self._new: list[tuple[tuple[Any, ...], Failure]] = []

    def possible_outputs(self) -> list[Node]:
        """Return the outputs that need no lost input; the others get their reason."""
        for node in schedule(*self._graph.outputs):
            self._hand_on_reason(node)
        return [node for node in self._graph.outputs if node not in self._reasons]

    def go_through(self, order: list[Node]) -> None:
        readers = Counter(operand for node in order for operand in node.inputs)
        readers.update(self._graph.outputs)
        for node in order:
            self._hand_on_reason(node)
            if node not in self._reasons:
                self._compute(node)
            for operand in node.inputs:
                readers[operand] -= 1
                if not readers[operand]:
                    self._values.pop(operand, None)

    def buffer_of(self, node: Node) -> Any:
        """An output's buffer or Failure."""
        if node not in self._reasons:
            try:
                return self._computation.upload(self._values[node].contiguous(), self._device)
            except Exception as error:  # no memory for it, say
                self._note(node, error)
        return self._reasons[node][1]

    def tell_first(self) -> None:
        """Report the first of the failures found here; the others follow it."""
        if self._new:
            _, first = min(self._new, key=_rank)
            for _, other in self._new:
                if other is not first:
                    other.follows(first)

    def _hand_on_reason(self, node: Node) -> None:
        reasons = [self._reasons[operand] for operand in node.inputs if operand in self._reasons]
        if reasons:
            self._reasons[node] = min(reasons, key=_rank)

    def _compute(self, node: Node) -> None:
        try:
            self._values[node] = self._value(node)
        except Exception as error:
            self._note(node, error)

    def _value(self, node: Node) -> Any:
        if node.op is ops.INPUT:
            return self._computation.download(self._handles[node.attr("index")])
        if node.op is ops.SCALAR:
            return torch.as_tensor(self._scalars[node.attr("slot")], dtype=node.dtype)
        return LOWERING.lower(node)(*[self._values[operand] for operand in node.inputs])

    def _note(self, node: Node, error: Exception) -> None:
        told = backend_errors.in_a_program(error, self._device, lambda: self._graph)
        origin = self._graph.origins.get(node)
        if origin is not None:
            told.add_note(f"while running {origin}")
        rank = (0, len(self._new)) if origin is None else (origin.position, len(self._new))
        self._reasons[node] = rank, Failure(told)
        self._new.append(self._reasons[node])


def _rank(reason: tuple[tuple[Any, ...], Failure]) -> tuple[Any, ...]:
    return reason[0]
