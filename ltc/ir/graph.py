"""The nodes reachable from a step's outputs, and the text they print as."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from ltc.ir.node import Node, attr_text
from ltc.ir.tensor_type import TensorType, type_text
from ltc.support.module_names import ModuleName

# Attributes that the type column already shows.
_SHOWN_BY_TYPE = frozenset({"dtype", "shape", "results"})


class Origin(NamedTuple):
    """The recorded call a node was made for.

    position  of the call among those that the program runs
    module    the ModuleName of the module it was made in; or a name, or "": see `module_path`
    forward   of a call of a backward: the line of the forward's call
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
    """What one program computes.

    inputs   INPUT nodes; a node's `index` attribute is its position in the launch's buffers
    scalars  SCALAR nodes; a node's `slot` attribute is its position in the launch's scalars
    outputs  what the launch gives back, in order
    origins  where nodes come from; nodes that a pass made may be missing
    scratch  the dtype that float32 values may be rounded to where they are stored between kernels
    """

    inputs: tuple[Node, ...]
    scalars: tuple[Node, ...]
    outputs: tuple[Node, ...]
    origins: Mapping[Node, Origin] = field(default_factory=dict, repr=False)
    scratch: torch.dtype = torch.float32

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
