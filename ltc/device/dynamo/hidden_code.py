"""torch.compile traces the user's code and never looks into ltc's.

Its tracer, Dynamo, is asked about every Python frame that begins while a compiled function runs:
also where torch calls a kernel, whose frames are ltc's.  Traced, these record nothing, or values
that do not exist.  So Dynamo leaves alone what is defined here and everything that it calls.
"""

from __future__ import annotations

import functools
import sys
import types
from pathlib import Path

from ltc.support.torch_private import leave_to_python, never_inline

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
