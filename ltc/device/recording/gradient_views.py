"""Views that a backward makes become tensors of their own when it ends.

Autograd takes a view for a leaf's gradient if that tensor has no other holder, though another tensor
may show the same memory: after `(p.reshape(n) + q.t().reshape(n)).sum().backward()` both gradients
are views of one. An addition to one of them (by a second backward, by gradient clipping) would reach
the other. PyTorch on the CPU copies gradients with strides that differ from their leaf's. Lazy tensors
have no strides, so every view that autograd's formulas make is made independent.
"""

from __future__ import annotations

import sys
from threading import get_ident
from types import CodeType, FrameType
from typing import NamedTuple
from weakref import ref

import torch
from torch.autograd.function import BackwardCFunction

from ltc.device.recording.state import State
from ltc.support.torch_private import autograd_node, graph_task


class Backward(NamedTuple):
    """A running backward.

    Attributes:
        engine: The code of torch's function that runs it.
        views: The views that its formulas made.
    """

    engine: CodeType
    views: list[ref[State]]


is_grad_enabled, getframe = torch.is_grad_enabled, sys._getframe
running: dict[int, Backward] = {}  # by thread: the innermost
FUNCTION = BackwardCFunction.apply.__code__  # calls a Function's backward, as the core knows, too
_REPLAYS_WRITES = "torch::autograd::CopySlices"
_ACCUMULATES = "torch::autograd::AccumulateGrad"


def formula_calls() -> bool:
    """Return True if autograd's own code makes the recorded call, for a gradient to hand on.

    False where it replays the views that the forward wrote through, to write through them again,
    and with create_graph: then it copies what it accumulates.
    """
    if is_grad_enabled():
        return False
    backward = running.get(get_ident())
    if backward is not None and _callers(backward.engine):
        return False
    return node_name() != _REPLAYS_WRITES


def accumulates() -> bool:
    """Return True if a leaf's gradient is being made: added to, or shown to the leaf's hooks."""
    return node_name() == _ACCUMULATES


def node_name() -> str:
    """The kind of node whose backward runs, or "" outside a backward."""
    node = autograd_node() if graph_task() != -1 else None
    return "" if node is None else node.name()


def watch(state: State) -> None:
    """Remember a new view, if a formula of this thread's backward has made it.

    What hooks make is theirs: they may give a parameter a view of a larger gradient on purpose, but
    not one that shows an element twice, since nothing could be added to it.
    With create_graph, autograd copies what it accumulates, and knows of views itself.
    """
    backward = running.get(get_ident())
    if backward is None or is_grad_enabled():
        return
    engine = backward.engine
    # mostly the engine has called the kernel that calls link_view, the caller of this
    if getframe(3).f_code is engine or state.is_expanded or _is_a_formulas(engine):
        backward.views.append(ref(state))


def watch_again(state: State) -> None:
    """Remember a view that the core has made in a backward, maybe of another thread's."""
    for backward in list(running.values()):
        backward.views.append(ref(state))


def is_watched(state: State) -> bool:
    """Return True if the view that was made last becomes independent when the backward ends."""
    backward = running.get(get_ident())
    return backward is not None and ref(state) in backward.views[-1:]


def _is_a_formulas(engine: CodeType) -> bool:
    """Return True if autograd's own code asks for the view, or the body of a Function's backward.

    False for functions that such a body calls: a library may arrange the memory of its parameters
    there.
    """
    others = _callers(engine)
    return not others or (len(others) == 2 and others[1] is FUNCTION)


def _callers(engine: CodeType) -> list[CodeType]:
    """The code outside ltc between the engine and this call, the innermost first."""
    frame: FrameType | None = getframe(2)
    others = []
    while frame is not None and frame.f_code is not engine:
        if not frame.f_globals.get("__name__", "ltc.").startswith("ltc."):
            others.append(frame.f_code)
        frame = frame.f_back
    return others
