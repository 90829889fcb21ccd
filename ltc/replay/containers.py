"""What lists, tables, sets and arrays hold: the same things, in the same order."""

from __future__ import annotations

import array
import types
from collections import ChainMap, OrderedDict, UserDict, UserList, UserString, deque
from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

from ltc.replay.conditions import Conditions, Obstacle

_SEQUENCES = (list, tuple, deque)
_TABLES = (dict, types.MappingProxyType)
_SETS = (set, frozenset)
# classes of Python around a container, which is their `data`
_WRAPPED: Any = (UserDict, UserList, UserString, WeakKeyDictionary, WeakValueDictionary, WeakSet)
CONTAINERS = (*_SEQUENCES, *_TABLES, *_SETS, *_WRAPPED, ChainMap)
PLAIN_CONTAINERS = (*CONTAINERS, OrderedDict)  # of no class that a user has written
_LITERAL = (str, int, bool, bytes, type(None))  # keys that stand in an expression themselves
_MOST_BYTES = 1 << 16  # of an array that is compared in each call


def visit_container(use: Conditions, value: Any, name: str) -> None:
    if isinstance(value, _SETS):
        _visit_set(use, value, name)
    elif isinstance(value, _WRAPPED):
        use.visit(value.data, f"{name}.data")
    elif isinstance(value, ChainMap):
        use.visit(value.maps, f"{name}.maps")
    else:
        use.require(same_places(use, value, name))
        for key, part in items(value):
            place = repr(key) if key.__class__ in _LITERAL else use.constant(key)
            use.visit(part, f"{name}[{place}]")


def _visit_set(use: Conditions, value: Any, name: str) -> None:
    """Its members are looked at one by one, as it has no order."""
    for member in value:
        use.visit_new(member)
        use.constant(member)  # held: its id is its own
    if isinstance(value, set):
        use.require(f"sorted(map(id, {name})) == {sorted(map(id, value))}")


def same_places(use: Conditions, value: Any, expression: str) -> str:
    """That it has as many parts; a table, the same keys in the same order."""
    if not value:
        return f"not {expression}"
    if not isinstance(value, _TABLES):
        return f"len({expression}) == {len(value)}"
    if all(key.__class__ in _LITERAL for key in value):
        return f"(*{expression},) == {(*value,)!r}"
    for key in value:
        use.constant(key)
    return f"[*map(id, {expression})] == {[*map(id, value)]}"


def items(value: Any) -> Iterator[tuple[Any, Any]]:
    return iter(value.items()) if isinstance(value, _TABLES) else enumerate(value)


# --- arrays -------------------------------------------------------------------------------------


def is_array(value: Any) -> bool:
    """Whether it is numbers in memory: of numpy, of `array`, a bytearray, or a view of one."""
    kind = type(value)
    if (kind.__module__, kind.__name__) == ("numpy", "ndarray"):
        return True
    return isinstance(value, (bytearray, memoryview, array.array))


def visit_array(use: Conditions, value: Any, name: str) -> None:
    """Small ones are compared; what a large one holds is too much to look at in each call."""
    kind = type(value)
    count = memoryview(value).nbytes if kind.__name__ != "ndarray" else value.nbytes
    if count > _MOST_BYTES:
        raise Obstacle(
            f"it uses a {kind.__module__}.{kind.__name__} of {count} bytes, too many to compare in "
            f"each call: use a tensor"
        )
    if kind.__name__ == "ndarray":
        use.pin(f"{name}.shape", value.shape)
        use.visit(value.dtype, f"{name}.dtype")
    if kind is bytearray:
        use.pin(f"bytes({name})", bytes(value))
    else:
        use.pin(f"{name}.tobytes()", value.tobytes())
