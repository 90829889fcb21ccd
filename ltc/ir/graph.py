"""The nodes reachable from a step's outputs, the text they print as, and their fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from ltc.ir.node import Node, attr_text
from ltc.ir.tensor_type import TensorType, type_text
from ltc.support.module_names import ModuleName
from ltc.support.torch_private import OpOverload

# Attributes that the type column already shows.
_SHOWN_BY_TYPE = frozenset({"dtype", "shape", "results"})


class Origin(NamedTuple):
    """The recorded call a node was made for.

    Attributes:
        position: The position of the call among those that the program runs.
        module: The ModuleName of the module it was made in; or a name, or "": see `module_path`.
        forward: The line of the forward's call, if this is a backward's.
    """

    overload: str
    line: str
    position: int = -1
    module: ModuleName | str = ""
    forward: str = ""

    @property
    def module_path(self) -> str:
        """ "encoder.layers.3.attn"; "" outside of all modules."""
        return self.module if isinstance(self.module, str) else self.module.path

    def __str__(self) -> str:
        return f"{self.overload} called at {self.line}" if self.line else self.overload


@dataclass(frozen=True, eq=False)
class Graph:
    """The computation of one program.

    Attributes:
        inputs: INPUT nodes; a node's `index` attribute is its position in the launch's buffers.
        scalars: SCALAR nodes; a node's `slot` attribute is its position in the launch's scalars.
        outputs: The values that the launch returns, in order.
        origins: The origins of nodes; nodes that a pass made may be missing.
        scratch: The dtype that float32 values may be rounded to where they are stored between
            kernels.
        reproducible: True if the bits of its results may depend on no measurement.
    """

    inputs: tuple[Node, ...]
    scalars: tuple[Node, ...]
    outputs: tuple[Node, ...]
    origins: Mapping[Node, Origin] = field(default_factory=dict, repr=False)
    scratch: torch.dtype = torch.float32
    reproducible: bool = True

    @property
    def lines(self) -> dict[Node, str]:
        """The user's line of each node that has one."""
        return {node: origin.line for node, origin in self.origins.items()}

    def with_outputs(self, outputs: Iterable[Node], origins: Mapping[Node, Origin]) -> Graph:
        return replace(self, outputs=tuple(outputs), origins=origins)

    def __str__(self) -> str:
        return show(*self.outputs)


def calls_text(graph: Graph) -> str:
    """The calls that it was recorded from, for errors: the first and the last with a line."""
    origins = [origin for origin in graph.origins.values() if origin.line]
    if not origins:
        return "a program without calls of yours"
    first, last = (choose(origins, key=lambda one: one.position) for choose in (min, max))
    return str(first) if first == last else f"a program, from {first} to {last}"


def schedule(*outputs: Node) -> list[Node]:
    """Every node the outputs need, each once, after its operands."""
    order: list[Node] = []
    placed: set[Node] = set()
    waiting = [(output, False) for output in reversed(outputs)]  # no recursion: graphs are deep
    while waiting:
        node, operands_done = waiting.pop()
        if node in placed:
            continue
        if operands_done or not node.inputs:
            placed.add(node)
            order.append(node)
        else:
            waiting.append((node, True))
            waiting.extend([(n, False) for n in reversed(node.inputs) if n not in placed])
    return order


def show(*outputs: Node, notes: Mapping[Node, str] | None = None) -> str:
    """The graph as text, one node a line: name, operation, type, attributes, and its note."""
    notes = notes or {}
    names: dict[Node, str] = {}
    rows = []
    for position, node in enumerate(schedule(*outputs)):
        names[node] = f"%{position}"
        operands = "".join(f" {names[n]}" for n in node.inputs)
        rest = f"{_attrs(node)} {notes.get(node, '')}".strip()
        rows.append((f"%{position} = {node.op.name}{operands}", type_text(node.type), rest))
    if not rows:
        return ""
    first = max(len(row[0]) for row in rows) + 8
    second = max(len(row[1]) for row in rows) + 4
    return "\n".join(f"{a:<{first}}{b:<{second}}{c}".rstrip() for a, b, c in rows)


def _attrs(node: Node) -> str:
    hidden = _SHOWN_BY_TYPE if isinstance(node.type, TensorType) else {"results"}
    return " ".join(f"{key}={attr_text(value)}" for key, value in node.attrs if key not in hidden)


# --- A graph's name ---------------------------------------------------------------------------

# Two lists of recorded calls with one fingerprint run the same program: same overloads in the same order, same
# wiring, same static arguments, same types. Left out on purpose: the values of scalars and seeds, the index
# of a device, the user's lines, and what sets one barrier apart from another (its position in the
# list is enough).


def fingerprint(
    calls: Sequence[Any], outputs: Iterable[Any], slots: dict[int, int], storage: str = ""
) -> str:
    """Return 64 hexadecimal digits for these calls (aten/call.py) and the values read of them.

    Args:
        slots: The scalars they use, numbered: aten/call.py's Numbering.
        storage: The dtypes that tensors are kept in, if they differ from the reported ones.
    """
    digest = hashlib.sha256(storage.encode())
    positions: dict[Any, int] = {call: position for position, call in enumerate(calls)}
    positions.update(slots)
    for call in calls:
        digest.update(_call_text(call, positions).encode())
    digest.update(";".join(_text(value, positions) for value in outputs).encode())
    return digest.hexdigest()


def _call_text(call: Any, positions: dict[Any, int]) -> str:
    name, args = call.name, call.args
    if name in _UNIQUE:
        args = args[: _UNIQUE[name]]
    mutated = ",".join(map(repr, call.mutated)) if call.mutated else ""
    types = ",".join(map(_type_text, call.results))
    parts = _text(args, positions), _text(call.kwargs, positions), mutated, types
    default = "" if call.default is None else f"|{call.default}"
    return f"{name}|{'|'.join(parts)}|{_text(call.seed, positions)}{default}\n"


# A barrier's second argument and an input's position are unique to their recording.
_UNIQUE = {"ltc::barrier": 1, "ltc::input": 0}
_PLAIN = frozenset({bool, int, float, str})  # most arguments that are no values


def _type_text(value: Any) -> str:
    return "-" if value is None else f"{value.dtype}{tuple(value.shape)}"


def _text(argument: Any, positions: dict[Any, int]) -> str:
    if argument is None:
        return "-"
    kind = argument.__class__
    if kind in _PLAIN:
        return f"{kind.__name__} {argument!r}"
    if kind is tuple or kind is list:
        return f"[{','.join([_text(a, positions) for a in argument])}]"
    # By attribute, not by class: the recorder's classes are of a layer above this one.
    if hasattr(argument, "slot"):
        return f"scalar {positions[argument.slot]} {argument.dtype} {argument.wrapped}"
    if hasattr(argument, "call"):
        return f"%{positions[argument.call]}.{argument.index}"
    if isinstance(argument, (list, tuple)):  # of a class of its own: torch.Size
        return f"[{','.join([_text(a, positions) for a in argument])}]"
    if isinstance(argument, dict):
        return ",".join(f"{key}={_text(argument[key], positions)}" for key in sorted(argument))
    if isinstance(argument, torch.device):
        return f"device {argument.type}"
    if isinstance(argument, torch.Generator):
        return "generator"  # what it draws reaches the program as a seed
    if isinstance(argument, OpOverload):
        return str(argument.name())
    return f"{type(argument).__name__} {argument!r}"
