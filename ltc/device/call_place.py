"""In which module of the user's model a call is made, and for which line of the forward.

Asked for each call that is new on its path, and kept with it: a steady step is told by its path.
"""

from __future__ import annotations

import sys
import threading
from types import CodeType, FrameType
from typing import Any

from torch.optim import Optimizer

from ltc.support.module_names import ModuleName, known_name, name_in
from ltc.support.torch_private import (
    MODULE_CALL,
    autograd_node,
    graph_task,
    number_of_node,
    sequence_number,
)

MOST_NODES = 1 << 16  # of autograd's, whose places in the forward a thread remembers
Place = tuple[ModuleName | str, str]


def _wrapper_of_steps() -> CodeType:
    """The code that all optimizers' `step` runs in; the first of its `args` is the optimizer."""
    constants = Optimizer.profile_hook_step.__code__.co_consts
    return next(one for one in constants if isinstance(one, CodeType))


_MODULE_CALL, _OPTIMIZER_STEP = MODULE_CALL.__code__, _wrapper_of_steps()


class _ForwardsOfThread(threading.local):
    def __init__(self) -> None:
        # by the number of the node that goes back
        self.places: dict[int, Place] = {}


_thread = _ForwardsOfThread()


def place_of_call(line: str) -> Place:
    """(module, forward) of a call that is made at `line`.

    module   that in whose forward it is, or whose forward a backward goes back from; the name of an
             optimizer's class in its step; "" outside of all
    forward  in a backward, the line of the call that it goes back from; else ""
    """
    if graph_task() != -1 and (node := autograd_node()) is not None:
        place = _thread.places.get(number_of_node(node))
        if place is not None:
            return place
    module = _innermost(sys._getframe(1))
    if graph_task() != -1:
        return module, ""
    places = _thread.places
    if len(places) >= MOST_NODES:
        places.clear()
    # Autograd has counted the node of this call already, if it makes one; the first call that is
    # recorded after that is the one.
    places.setdefault(sequence_number() - 1, (module, line))
    return module, ""


def _innermost(frame: FrameType | None) -> ModuleName | str:
    """Return the innermost module or optimizer in whose call the frame is."""
    module = model = None
    while frame is not None:
        code: Any = frame.f_code
        if code is _MODULE_CALL:
            model = frame.f_locals["self"]
            if module is None:
                module = model
                if (name := known_name(module)) is not None:
                    return name
        elif code is _OPTIMIZER_STEP and module is None:
            return type(frame.f_locals["args"][0]).__name__
        frame = frame.f_back
    return "" if module is None or model is None else name_in(model, module)
