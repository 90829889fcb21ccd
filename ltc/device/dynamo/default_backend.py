"""torch.compile without a backend's name takes ltc's for tensors on ltc, and inductor for others.

Which it is, is known when Dynamo has traced a graph.  Until then it is torch's own object for
inductor, with its mode and options, and marked as nobody's choice.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from ltc.device.dynamo import graph_backend, hidden_code
from ltc.errors import Unsupported
from ltc.support.torch_private import InductorBackend


class _Choice(threading.local):
    """Whether the calling thread is in a torch.compile that names no backend."""

    is_default = False


_choice = _Choice()


def install() -> None:
    """Let torch.compile and its object for inductor know of ltc.  Once per process."""
    torch.compile = _choosing(torch.compile)
    InductorBackend.__init__ = _remembering(InductorBackend.__init__)
    InductorBackend.__call__ = _asking_where(InductorBackend.__call__)


def _choosing(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compile(model: Callable[..., Any] | None = None, **arguments: Any) -> Any:
        if arguments.get("backend") is None:
            arguments.pop("backend", None)  # torch before 2.13 takes no None
        if model is None:  # a decorator; torch's own would name the backend that it has filled in
            return lambda model: compile(model, **arguments)
        before = _choice.is_default
        _choice.is_default = "backend" not in arguments
        try:
            return original(model, **arguments)
        finally:
            _choice.is_default = before
            hidden_code.hide()

    return compile


def _remembering(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        self.ltc_is_default = _choice.is_default
        original(self, *args, **kwargs)

    return __init__


def _asking_where(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def __call__(self: Any, graph: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        if not graph_backend.is_on_ltc(graph, inputs):
            return original(self, graph, inputs, **kwargs)
        if not getattr(self, "ltc_is_default", True):  # one made before ltc was imported has none
            raise Unsupported(
                'backend="inductor" makes no code for ltc tensors: write torch.compile(model) or '
                'torch.compile(model, backend="ltc"), which record the graph into the step '
                '("eager" does the same, where a library takes known names alone).'
            )
        return graph_backend.ltc(graph, inputs)

    return __call__
