"""The backend "ltc" of torch.compile: a graph that Dynamo has traced is recorded, call by call.

So a compiled function is part of its step like everything around it: one program for the step, by
ltc's own passes, and autograd, autocast and random numbers are as without Dynamo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import fx

from ltc.device.dynamo.nested_graphs import run_as_code
from ltc.device.dynamo.traced_lines import at_the_users_lines
from ltc.device.recording.tensors import is_lazy


def ltc(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
) -> Callable[..., Any]:
    """What Dynamo calls in the place of the code it has traced.

    inputs         stand-ins for what it will be called with
    mode, options  inductor's; there is nothing to choose, and every value is taken

    >>> @torch.compile(backend="ltc")
    ... def norm(x):
    ...     return x.square().sum().sqrt()
    >>> norm(torch.full((4,), 2.0, device="ltc")).item()
    4.0
    """
    run_as_code(graph)
    return at_the_users_lines(graph)


def is_on_ltc(graph: fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Whether any tensor that the graph takes, holds or makes is on an ltc device."""
    return any(is_lazy(tensor) for tensor in _tensors_of(graph, inputs))


def _tensors_of(graph: fx.GraphModule, inputs: Sequence[Any]) -> Iterator[Any]:
    yield from inputs
    yield from graph.parameters()
    yield from graph.buffers()
    for module in graph.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.nodes:
                made = node.meta.get("example_value")
                yield from made if isinstance(made, (tuple, list)) else (made,)
