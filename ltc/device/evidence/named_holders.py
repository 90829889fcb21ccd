"""By which of the user's variables and attributes tensors are held: `losses[3]`, `self.last`.

Looked for only where a program is new, from the frames of the user's that led to its end, and never
far: what is not found soon has no name.
"""

from __future__ import annotations

import inspect
import sys
from collections import deque
from collections.abc import Collection, Iterator
from types import FrameType, ModuleType
from typing import Any

import torch

from ltc.aten.call import CallResult
from ltc.device.torch_device import state_if_any
from ltc.support.torch_private import DEVICE_TYPE, is_view
from ltc.tracebacks import is_of_the_program

MOST_OBJECTS = 2000  # that are looked at for one program
_MOST_PARTS = 200  # of one list or dictionary, the latest
_DEEPEST = 4  # attributes and items on the way to a tensor
_REFERENCES_OF_A_SNAPSHOT = 3  # the frame's, the variable's here, and getrefcount's own
_LEAVES = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, torch.dtype)
_OF_EVERY_MODULE = frozenset(torch.nn.Module().__dict__)


def name_holders(values: Collection[CallResult]) -> None:
    """Set `holder` of those values whose tensor a variable of the user's leads to."""
    wanted = set(values)
    if not wanted or sys.gettrace() is not None:  # a debugger has the frames in its hands
        return
    try:
        _look(wanted)
    except Exception:  # objects of the user's may do anything when they are looked at: no name then
        return


def _look(wanted: set[CallResult]) -> None:
    waiting = deque([("", _variables(sys._getframe(3)), 0)])
    seen: set[int] = set()
    left = MOST_OBJECTS
    while waiting and wanted:
        name, parts, depth = waiting.popleft()
        for part, held in parts:
            left -= 1
            if left < 0:
                return
            if isinstance(held, _LEAVES) or id(held) in seen:
                continue
            seen.add(id(held))
            if isinstance(held, torch.Tensor):
                _name(held, name + part, wanted)
            elif depth < _DEEPEST:
                waiting.append((name + part, _parts(held), depth + 1))


def _name(tensor: torch.Tensor, name: str, wanted: set[CallResult]) -> None:
    for held, words in ((tensor, name), (_gradient(tensor), f"{name}.grad")):
        value = _pending(held)
        if value in wanted:
            value.holder = words
            wanted.discard(value)


def _gradient(tensor: torch.Tensor) -> torch.Tensor | None:
    """That of a leaf: another one's is a warning.

    A view is not asked whether it is one. Where its base was written to, autograd would make its
    history anew, here, inside of a kernel, where nothing has any: it would be lost.
    """
    return tensor.grad if not is_view(tensor) and tensor.is_leaf else None


def _pending(tensor: torch.Tensor | None) -> Any:
    """The value that a tensor waits for; None where it waits for nothing."""
    if tensor is None or tensor.device.type != DEVICE_TYPE:
        return None
    return getattr(state_if_any(tensor), "value", None)


# --- where they may be --------------------------------------------------------------------------


def _variables(frame: FrameType | None) -> Iterator[tuple[str, Any]]:
    """Those of the program's functions, the innermost first, then those of its modules."""
    modules: dict[int, dict[str, Any]] = {}
    while frame is not None:
        if is_of_the_program(frame.f_code.co_filename):
            modules[id(frame.f_globals)] = frame.f_globals
            if frame.f_code.co_flags & inspect.CO_OPTIMIZED:
                yield from _locals_of(frame).items()
        frame = frame.f_back
    for variables in modules.values():
        yield from list(variables.items())


def _locals_of(frame: FrameType) -> dict[str, Any]:
    """The variables of a function that runs.

    Before Python 3.13 the frame keeps the dictionary that it tells them by: a tensor that the
    function lets go of later would live on in there, so it is emptied again.
    """
    snapshot = frame.f_locals
    found = dict(snapshot)
    if sys.version_info < (3, 13) and sys.getrefcount(snapshot) <= _REFERENCES_OF_A_SNAPSHOT:
        snapshot.clear()
    return found


def _parts(object: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, each with what is written behind its name to get it."""
    if isinstance(object, dict):
        latest = list(dict.items(object))[-_MOST_PARTS:]
        yield from ((f"[{_key(key)}]", held) for key, held in latest)
    elif isinstance(object, list | tuple | deque):
        first = max(0, len(object) - _MOST_PARTS)
        yield from ((f"[{first + n}]", held) for n, held in enumerate(list(object)[first:]))
    elif isinstance(object, torch.nn.Module):
        for table in (object._parameters, object._buffers, object._modules):
            yield from ((f".{name}", held) for name, held in list(table.items()))
        yield from _attributes(object, _OF_EVERY_MODULE)
    else:
        yield from _attributes(object)


def _key(key: Any) -> str:
    return repr(key) if isinstance(key, str | int) else "..."


def _attributes(object: Any, but: Collection[str] = ()) -> Iterator[tuple[str, Any]]:
    held = getattr(object, "__dict__", None)
    if held.__class__ is dict:
        yield from ((f".{name}", part) for name, part in list(held.items()) if name not in but)
