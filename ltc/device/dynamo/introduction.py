"""Dynamo is told of ltc as soon as it is imported, and is not imported for that.

Importing it takes longer than importing everything else, and most programs never do.
"""

from __future__ import annotations

import functools
import sys
import threading
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import fx
from torch.optim import Optimizer

from ltc.device.dynamo import graph_backend
from ltc.device.recording.tensors import is_lazy
from ltc.errors import Unsupported
from ltc.support.after_import import after_import
from ltc.support.torch_private import (
    EXPORT_ARCHIVE,
    InductorBackend,
    has_own_dispatch,
    is_pickled_in_exports,
    leave_to_python,
    left_to_python_now,
    name_backend,
    never_inline,
    optimizer_step_code,
    traced_frames,
)


def install() -> None:
    """Once per process."""
    make_default()
    load_saved_exports()
    after_import("torch._dynamo", _introduce)


def _introduce() -> None:
    hide()
    leave_steps_to_python()
    name_backend("ltc", graph_backend.ltc)


# torch.compile leaves the step of an optimizer on ltc to Python, where it is recorded as it is.
# Traced, it would be another formula: steps are counted by tensors, of which a bias correction
# for each parameter is computed, and a new learning rate is traced anew. As Python it is recorded
# into the same program as without torch.compile, and takes no longer.


def leave_steps_to_python() -> None:
    """Once Dynamo is imported, once per process."""
    asked = traced_frames()
    asked.replace(_but_no_step_on_ltc(asked.current))


def _but_no_step_on_ltc(original: Callable[..., Any]) -> Callable[..., Any]:
    step = optimizer_step_code()

    @functools.wraps(original)
    def traced(self: Any, frame: FrameType, *rest: Any) -> Any:
        if frame.f_code is step and _is_on_ltc(*frame.f_locals["args"][:1]):
            return left_to_python_now()
        return original(self, frame, *rest)

    return traced


def _is_on_ltc(optimizer: Optimizer) -> bool:
    return any(is_lazy(p) for group in optimizer.param_groups for p in group["params"])


# --- Save a torch.export program whose weights are on ltc ----------------------------------------

# torch.export.save writes the bytes that a weight's storage points at, and an ltc tensor's points
# at none. So these weights go into the archive as torch.save writes them, as tensors of other
# classes do.


def load_saved_exports() -> None:
    """Once per process; torch.export is not imported for it."""
    after_import(EXPORT_ARCHIVE, _let_weights_be_pickled)


def _let_weights_be_pickled() -> None:
    question = is_pickled_in_exports()
    question.replace(_or_is_on_ltc(question.current))


def _or_is_on_ltc(original: Callable[[torch.Tensor], bool]) -> Callable[[torch.Tensor], bool]:
    @functools.wraps(original)
    def is_pickled(tensor: torch.Tensor) -> bool:
        return original(tensor) or (is_lazy(tensor) and not has_own_dispatch(tensor))

    return is_pickled


# torch.compile without a backend's name takes ltc's for tensors on ltc, and inductor for others.
# Which it is, is known when Dynamo has traced a graph. Until then it is torch's own object for
# inductor, with its mode and options, and marked as nobody's choice.


class _Choice(threading.local):
    """The flag that the calling thread is in a torch.compile that names no backend."""

    is_default = False


_choice = _Choice()


def make_default() -> None:
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
            hide()

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
                'backend="inductor" cannot compile for ltc tensors: write torch.compile(model) or '
                'torch.compile(model, backend="ltc"), which record the graph into the step. If a '
                'library accepts known names only, backend="eager" does the same.'
            )
        return graph_backend.ltc(graph, inputs)

    return __call__


# --- torch.compile traces the user's code and never looks into ltc's -----------------------------

# Its tracer, Dynamo, is asked about every Python frame that begins while a compiled function
# runs: also where torch calls a kernel, whose frames are ltc's. Traced, these record nothing, or
# values that do not exist. So Dynamo leaves alone what is defined here and everything that it
# calls.

_ROOT = str(Path(__file__).parents[2])
_PACKAGE = __name__.partition(".")[0]
_looked_at: set[str] = set()  # names of modules


def hide() -> None:
    """Hide all of ltc that is imported by now."""
    if not _looked_at:
        never_inline(_PACKAGE)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == _PACKAGE and name not in _looked_at:
            _looked_at.add(name)
            for code in _codes_in(module):
                leave_to_python(code)


_HELD_BY = {
    types.CodeType: lambda code: code.co_consts,
    types.FunctionType: lambda function: [function.__code__, vars(function).get("__wrapped__")],
    functools._lru_cache_wrapper: lambda cached: [cached.__wrapped__],
    staticmethod: lambda method: [method.__func__],
    classmethod: lambda method: [method.__func__],
    property: lambda one: [one.fget, one.fset],
}


def _codes_in(module: types.ModuleType) -> list[types.CodeType]:
    """The code of its functions, of its classes' and of those that they define."""
    found, met = [], set()
    left = list(vars(module).values())
    while left:
        one = left.pop()
        if id(one) in met:
            continue
        met.add(id(one))
        if isinstance(one, types.CodeType) and one.co_filename.startswith(_ROOT):
            found.append(one)
        held = _HELD_BY.get(type(one))
        if held is not None:
            left += held(one)
        elif isinstance(one, type) and one.__module__ == module.__name__:
            left += vars(one).values()
    return found
