"""Nested data as a table of JSON nodes, and back: no pickle, no code run, no recursion.

The table is in post-order: a node names its parts by their positions, all before its own, so any
depth is fine, what is shared stays shared, and a cycle can not be written down.
"""

from __future__ import annotations

import base64
import math
import sys
from collections import Counter, OrderedDict, namedtuple
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch

Node = list  # [kind, payload…]
Table = list[Node]
DTYPES = {str(v).removeprefix("torch."): v for v in vars(torch).values() if type(v) is torch.dtype}
_MAPPINGS = ("dict", "OrderedDict", "Counter")
_MAX_KEY_PARTS = 10_000  # hashing shared tuples costs their size when written out
MAX_REPEATS = 1000  # how much longer a walk over all places may be than the table that is read


# --- data to nodes ----------------------------------------------------------------------------


def to_table(data: Any, tensor_payload: Callable[[torch.Tensor], list]) -> Table:
    """Return the nodes of `data`; the last is its root.

    Args:
        tensor_payload: Returns the content of a tensor's node.

    Raises:
        TypeError: For a part of another kind.
        ValueError: For data that contain themselves or are shared too often; all say where.
    """
    table = _Writer(tensor_payload).table_of(data)
    try:
        _check_places(table)
    except ValueError as error:
        raise ValueError(f"The data cannot be saved: {error}.") from None
    return table


def tensors_of(data: Any) -> list[tuple[str, torch.Tensor]]:
    """Every tensor in `data` once, with its place as text; raises like `to_table`."""
    writer = _Writer(lambda tensor: [])
    writer.table_of(data)
    return writer.tensors


class _Place:
    """The place of a part, as a chain of keys from the root."""

    __slots__ = ("parent", "key")

    def __init__(self, parent: _Place | None, key: Any):
        self.parent, self.key = parent, key

    def keys(self) -> list:
        keys, place = [], self
        while place.parent is not None:
            keys.append(place.key)
            place = place.parent
        return keys[::-1]

    def dotted(self) -> str:
        """model.0.weight, as state_dict names its tensors."""
        return ".".join(str(key) for key in self.keys())

    def __str__(self) -> str:
        return "data" + "".join(f"[{key!r}]" for key in self.keys())


class _Writer:
    def __init__(self, tensor_payload: Callable[[torch.Tensor], list]):
        self._tensor_payload = tensor_payload
        self._table: Table = []
        self._position_of: dict[int, int | None] = {}  # by id; None while its parts are written
        self._done: list[int] = []  # positions of finished parts whose container is not finished
        self.tensors: list[tuple[str, torch.Tensor]] = []

    def table_of(self, data: Any) -> Table:
        stack: list[tuple[Any, _Place, tuple | None]] = [(data, _Place(None, None), None)]
        while stack:
            x, place, container = stack.pop()
            if container is not None:
                self._leave(x, *container)
                continue
            scalar = _SCALARS.get(type(x))
            if scalar is not None:
                self._add([scalar[0], *scalar[1](x)])
            elif not self._is_met(x, place):
                if isinstance(x, torch.Tensor):
                    self._enter_tensor(x, place)
                else:
                    kind, extra, parts = _container(x, place)
                    stack.append((x, place, (kind, extra, len(parts))))
                    stack.extend((part, _Place(place, key), None) for key, part in reversed(parts))
        return self._table

    def _is_met(self, x: Any, place: _Place) -> bool:
        if id(x) not in self._position_of:
            self._position_of[id(x)] = None
            return False
        position = self._position_of[id(x)]
        if position is None:
            raise ValueError(f"{place} contains itself: such a {type(x).__name__} has no end.")
        self._done.append(position)
        return True

    def _enter_tensor(self, x: torch.Tensor, place: _Place) -> None:
        if type(x) not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError(f"{place} is a {type(x).__name__}: only plain tensors can be saved.")
        if x.layout is not torch.strided or x.device.type == "meta" or x.is_quantized:
            raise TypeError(
                f"{place} is a tensor of layout {x.layout} on {x.device}, of {x.dtype}: only dense "
                f"tensors that have elements can be saved."
            )
        self.tensors.append((place.dotted(), x))
        self._position_of[id(x)] = self._add(["tensor", *self._tensor_payload(x)])

    def _leave(self, x: Any, kind: str, extra: list, count: int) -> None:
        parts = self._done[len(self._done) - count :]
        del self._done[len(self._done) - count :]
        self._position_of[id(x)] = self._add([kind, *extra, parts])

    def _add(self, node: Node) -> int:
        self._table.append(node)
        self._done.append(len(self._table) - 1)
        return len(self._table) - 1


def _container(x: Any, place: _Place) -> tuple[str, list, list[tuple[Any, Any]]]:
    """(kind, what the node says beside its parts, [(key, part)])."""
    held: Any = type(x)
    kind = _CONTAINERS.get(held)
    if kind is None and isinstance(x, tuple) and hasattr(x, "_fields"):
        return (
            "namedtuple",
            [type(x).__module__, type(x).__qualname__, list(x._fields)],
            (list(zip(x._fields, x, strict=True))),
        )
    if kind is None:
        raise TypeError(
            f"{place} is a {type(x).__module__}.{type(x).__qualname__}, which cannot be saved "
            f"without pickle. Save what it consists of: tensors, numbers, strings, containers."
        )
    if isinstance(x, dict):
        parts = [pair for key, value in x.items() for pair in ((key, key), (key, value))]
        described = getattr(x, "_metadata", None)  # the versions that state_dict() adds
        return kind, [], parts if described is None else [*parts, ("_metadata", described)]
    return kind, [], list(enumerate(x))


def _int_payload(x: int) -> list:
    return [x] if abs(x) < 1 << 63 else [hex(x)]


def _float_payload(x: float) -> list:
    return [x] if math.isfinite(x) else [str(x)]


_SCALARS: dict[type, tuple[str, Callable[[Any], list]]] = {
    type(None): ("none", lambda x: []),
    bool: ("bool", lambda x: [x]),
    int: ("int", _int_payload),
    float: ("float", _float_payload),
    complex: ("complex", lambda x: [_float_payload(x.real)[0], _float_payload(x.imag)[0]]),
    str: ("str", lambda x: [x]),
    bytes: ("bytes", lambda x: [base64.b64encode(x).decode()]),
    torch.dtype: ("dtype", lambda x: [str(x).removeprefix("torch.")]),
    torch.device: ("device", lambda x: [str(x)]),
}

_CONTAINERS = {
    dict: "dict",
    OrderedDict: "OrderedDict",
    Counter: "Counter",
    list: "list",
    tuple: "tuple",
    torch.Size: "Size",
    set: "set",
    frozenset: "frozenset",
}


# --- nodes to data ----------------------------------------------------------------------------


def from_table(
    table: Table, roots: Iterable[int], make_tensor: Callable[..., torch.Tensor]
) -> dict[int, Any]:
    """Return the values of the nodes at `roots`, by position; no other nodes are decoded.

    Args:
        make_tensor: Called with the payload of a tensor's node.

    Raises:
        ValueError, TypeError, or another error of Python: If a node says what can not be. The text
            begins with the node's position and kind.
    """
    made: dict[int, Any] = {}
    weights: dict[int, int] = {}
    for position in sorted(_needed(table, roots)):
        kind, *payload = table[position]
        try:
            if kind == "tensor":
                made[position] = make_tensor(*payload)
            elif kind in _FROM_SCALAR:
                made[position] = _FROM_SCALAR[kind](*payload)
            else:
                parts = payload.pop()
                _check_keys(kind, parts, weights)
                made[position] = _FROM_PARTS[kind]([made[part] for part in parts], *payload)
                if kind in ("tuple", "namedtuple", "frozenset"):
                    weights[position] = 1 + sum(weights.get(part, 1) for part in parts)
        except (TypeError, ValueError, KeyError, OverflowError, AssertionError) as error:
            raise ValueError(f"node {position}, a {kind}: {error}") from error
    return made


def check_table(table: Any) -> None:
    """Raise ValueError where `table` is not nodes of known kinds that name parts before them."""
    if not isinstance(table, list) or not table:
        raise ValueError("it is not a list of nodes")
    for position, node in enumerate(table):
        if not isinstance(node, list) or not node or not isinstance(node[0], str):
            raise ValueError(f"node {position} is not a list that begins with its kind")
        kind = node[0]
        if kind in _FROM_PARTS:
            parts = node[-1]
            if not isinstance(parts, list) or not all(
                type(part) is int and 0 <= part < position for part in parts
            ):
                raise ValueError(
                    f"node {position}, a {kind}, names parts that do not come before it"
                )
        elif kind != "tensor" and kind not in _FROM_SCALAR:
            raise ValueError(f"node {position} is of the unknown kind {kind[:40]!r}")
    _check_places(table)


def _check_places(table: Table) -> None:
    """Raise ValueError where sharing makes data of far more places than the table has.

    Sixty lists that each hold the one before twice are 2**60 places, which no program can walk over.
    """
    most = MAX_REPEATS * (1 + sum(len(_parts_of(node)) for node in table))
    places: list[int] = []
    for position, node in enumerate(table):
        places.append(1 + sum(places[part] for part in _parts_of(node)))
        if places[-1] > most:
            shared = f"a shared part may have {MAX_REPEATS} places"
            raise ValueError(f"node {position}, a {node[0]}, has more than {most} places: {shared}")


def _parts_of(node: Node) -> list[int]:
    return node[-1] if node[0] in _FROM_PARTS else []


def find(table: Table, key: str) -> int:
    """The position of what sits at a dotted key, such as model.0.weight; raises KeyError."""
    candidates = [(len(table) - 1, key)]
    while candidates:
        position, rest = candidates.pop()
        if not rest:
            return position
        for name, part in _named_parts(table, position):
            if rest == name:
                candidates.append((part, ""))
            elif rest.startswith(f"{name}."):
                candidates.append((part, rest[len(name) + 1 :]))
    raise KeyError(key)


def _named_parts(table: Table, position: int) -> list[tuple[str, int]]:
    kind, *payload = table[position]
    if kind not in _FROM_PARTS:
        return []
    parts = payload[-1]
    if kind in _MAPPINGS:
        named = ((table[k], v) for k, v in zip(parts[0::2], parts[1::2]))
        return [(str(node[1]), v) for node, v in named if node[0] in ("str", "int") and node[1:]]
    if kind == "namedtuple":
        return list(zip(map(str, payload[2]), parts)) if isinstance(payload[2], list) else []
    return [(str(number), part) for number, part in enumerate(parts)]


def _needed(table: Table, roots: Iterable[int]) -> set[int]:
    needed, stack = set(), list(roots)
    while stack:
        position = stack.pop()
        if position not in needed:
            needed.add(position)
            stack.extend(_parts_of(table[position]))
    return needed


def _check_keys(kind: str, parts: list[int], weights: dict[int, int]) -> None:
    hashed = parts[0::2] if kind in _MAPPINGS else parts
    if kind in ("list", "tuple", "Size", "namedtuple"):
        return
    if any(weights.get(part, 1) > _MAX_KEY_PARTS for part in hashed):
        raise ValueError(f"a key of more than {_MAX_KEY_PARTS} parts")


def _mapping(kind: type) -> Callable[[list], Any]:
    def build(parts: list) -> Any:
        made = kind()
        for key, value in zip(parts[0::2], parts[1::2]):
            made[key] = value
        if len(made) != len(parts) // 2:
            raise ValueError("two keys are equal")
        if len(parts) % 2:
            if kind is not OrderedDict:
                raise ValueError("a key has no value")
            made._metadata = parts[-1]
        return made

    return build


def _unique(kind: type) -> Callable[[list], Any]:
    def build(parts: list) -> Any:
        made = kind(parts)
        if len(made) != len(parts):
            raise ValueError("two elements are equal")
        return made

    return build


def _named_tuple(parts: list, module: str, qualified: str, fields: list) -> tuple:
    """An instance of the named class where the program has it, else of a class just like it."""
    for text in (module, qualified, *fields):
        _exactly(text, str)
    if len(fields) != len(parts):
        raise ValueError(f"{len(parts)} values for {len(fields)} fields")
    kind = _known_class(module, qualified)
    known = isinstance(kind, type) and issubclass(kind, tuple)
    if not known or vars(kind).get("_fields") != tuple(fields):
        make: Any = namedtuple
        kind = make(qualified.rpartition(".")[2], fields)  # checks the names
    return tuple.__new__(kind, parts)


def _known_class(module: str, qualified: str) -> Any:
    """Return the object of that name in a module already imported, without running code."""
    found: Any = sys.modules.get(module)
    for name in qualified.split("."):
        if not isinstance(found, (ModuleType, type)):
            return None
        found = vars(found).get(name)
    return found


def _exactly(x: Any, *kinds: type) -> Any:
    if type(x) not in kinds:
        raise TypeError(f"{str(x)[:40]!r} is a {type(x).__name__}")
    return x


def _integer(x: Any) -> int:
    return int(x, 16) if isinstance(x, str) else _exactly(x, int)


def _real(x: Any) -> float:
    if isinstance(x, str) and x not in ("nan", "inf", "-inf"):
        raise ValueError(f"{x[:40]!r} is not a number")
    return float(_exactly(x, float, int, str))


_FROM_SCALAR: dict[str, Callable[..., Any]] = {
    "none": lambda: None,
    "bool": lambda x: _exactly(x, bool),
    "int": _integer,
    "float": _real,
    "complex": lambda real, imaginary: complex(_real(real), _real(imaginary)),
    "str": lambda x: _exactly(x, str),
    "bytes": lambda x: base64.b64decode(_exactly(x, str), validate=True),
    "dtype": lambda x: DTYPES[x],
    "device": lambda x: _device(_exactly(x, str)),
}

_FROM_PARTS: dict[str, Callable[..., Any]] = {
    "dict": _mapping(dict),
    "OrderedDict": _mapping(OrderedDict),
    "Counter": _mapping(Counter),
    "list": list,
    "tuple": tuple,
    "Size": lambda parts: torch.Size([_exactly(part, int) for part in parts]),
    "set": _unique(set),
    "frozenset": _unique(frozenset),
    "namedtuple": _named_tuple,
}


def _device(text: str) -> torch.device:
    try:
        return torch.device(text)
    except RuntimeError as error:  # torch's own text is longer than a screen
        raise ValueError(f"{text[:40]!r} is not a device") from error
