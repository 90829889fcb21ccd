"""In which module of the user's model a call is made, and for which line of the forward.

Asked for each call that is new on its path, and kept with it: a steady step is told by its path.
"""

from __future__ import annotations

import sys
import threading
import weakref
from types import CodeType, FrameType
from typing import Any

from torch import nn
from torch.optim import Optimizer

from ltc.support.torch_private import MODULE_CALL, autograd_node, graph_task, sequence_number

MOST_NODES = 1 << 16  # of autograd's, whose places in the forward a thread remembers


def _wrapper_of_steps() -> CodeType:
    """The code that all optimizers' `step` runs in; its local `self` is the optimizer."""
    constants = Optimizer.profile_hook_step.__code__.co_consts
    return next(one for one in constants if isinstance(one, CodeType))


_MODULE_CALL, _OPTIMIZER_STEP = MODULE_CALL.__code__, _wrapper_of_steps()
_names: weakref.WeakKeyDictionary[nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()


class _ForwardsOfThread(threading.local):
    def __init__(self) -> None:
        self.places: dict[int, tuple[str, str]] = {}  # by the number of the node that goes back


_thread = _ForwardsOfThread()


def place_of_call(line: str) -> tuple[str, str]:
    """("encoder.layers.3.attn", "model.py:12 in forward") of a call that is made at `line`.

    The module's path below the model that was called first; of the model itself, and of an
    optimizer's step, the name of its class; "" outside of both. The second is "" but in a backward.
    """
    if graph_task() == -1:
        module = module_path(sys._getframe(1))
        places = _thread.places
        if len(places) >= MOST_NODES:
            places.clear()
        # Autograd has counted the node of this call already, if it makes one; the first call that
        # is recorded after that is the one.
        places.setdefault(sequence_number() - 1, (module, line))
        return module, ""
    node = autograd_node()
    forward = "", ""
    if node is not None:
        forward = _thread.places.get(node._sequence_nr(), forward)
    return module_path(sys._getframe(1)) or forward[0], forward[1]


def module_path(frame: FrameType | None) -> str:
    """Of the innermost module whose call the frame is in; "" where it is in none."""
    root = innermost = None
    while frame is not None:
        code = frame.f_code
        if code is _MODULE_CALL:
            root = frame.f_locals["self"]
            innermost = root if innermost is None else innermost
        elif code is _OPTIMIZER_STEP and innermost is None:
            return type(frame.f_locals["args"][0]).__name__
        frame = frame.f_back
    return "" if innermost is None else _name_in(root, innermost)


def _name_in(root: Any, module: nn.Module) -> str:
    names = _names.get(root)
    if names is None or id(module) not in names:
        names = _names[root] = {id(one): name for name, one in root.named_modules()}
    return names.get(id(module)) or type(module).__name__
