"""The interface that a vendor implements to run ltc's graphs on a device, and its registration.

Everything else (recording, tracing, caching, threads, files) ltc does itself. The reference is
backends/eager.py.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Protocol, runtime_checkable

import torch

from ltc.backends.capabilities import (
    BackendCapabilities,
    ComputationCapabilities,
    ObservedComputation,
    Observer,
    OneShotSums,
)  # fmt: skip
from ltc.errors import BackendMissing, Unsupported
from ltc.ir.graph import Graph, schedule
from ltc.ir.node import Node
from ltc.ir.ops import Op
from ltc.support.lazy_module import loaded

__all__ = [
    "BackendCapabilities",
    "BackendImplInterface",
    "BackendRegistrar",
    "Computation",
    "ComputationCapabilities",
    "DeviceInfo",
    "LoweringContext",
    "NodeLowering",
    "ObservedComputation",
    "Observer",
    "OneShotSums",
]

ENTRY_POINT_GROUP = "ltc.backends"

# ltc's own, as pyproject.toml has them: found without a search of what is installed, and in a
# source tree that is not.
OWN_ENTRY_POINTS = tuple(
    metadata.EntryPoint(name, place, ENTRY_POINT_GROUP)
    for name, place in (
        ("eager", "ltc.backends.eager:EagerBackend"),
        ("llvm", "ltc.backends.llvm.backend:llvm_or_reference"),
        ("xla", "ltc.backends.xla.start:xla_backend"),
    )
)


@dataclass(frozen=True)
class DeviceInfo:
    """One device: its kind ("CPU", "GPU", ...), a name for people, its memory in bytes or 0."""

    kind: str
    name: str
    memory_bytes: int = 0


@runtime_checkable
class Computation(Protocol):
    """A compiled graph, and how its device moves data.

    What it can do besides it says in an attribute `capabilities`, a ComputationCapabilities.
    """

    @staticmethod
    def upload(tensor: torch.Tensor, device: int) -> Any:
        """A new buffer on the device with the values of a contiguous CPU tensor."""

    @staticmethod
    def download(buffer: Any) -> torch.Tensor:
        """The buffer as a CPU tensor, which may share its memory: the caller copies."""

    @staticmethod
    def wait(device: int) -> None:
        """Returns when everything launched on the device has finished."""

    def launch(self, buffers: list[Any], scalars: list[Any]) -> list[Any]:
        """Run the graph; one new buffer for each output.

        An error leaves donated buffers as they were, or carries `restored`, a dict: position -> a
        buffer that has the value of a donated one; or `overwritten`, the positions of those whose
        values are lost.

        Args:
            buffers: One for each input, by its `index`.
            scalars: Python numbers, or 0-dim CPU tensors where the node is not `wrapped`, by
                `slot`.
        """


@runtime_checkable
class BackendImplInterface(Protocol):
    """A kind of device and its compiler.

    Its optional abilities are in an attribute `capabilities`, a BackendCapabilities.

    Attributes:
        name: Its name for LTC_BACKEND and the registrar.
        lowering: Its table: primitive -> how to emit it.
        computation: Its class of Computations.
    """

    name: str
    lowering: NodeLowering
    computation: type[Computation]

    def devices(self) -> tuple[DeviceInfo, ...]:
        """The devices of this kind that this process can use, in index order."""

    def compile(self, graph: Graph, device: int, donated: frozenset[int]) -> Computation:
        """A launchable form of the graph, which may write over the donated inputs.

        Args:
            donated: Positions of the inputs whose buffers are not read after the launch.
        """

    def prepare_to_exit(self) -> None:
        """Finish what runs; called once, before the interpreter ends."""


MEMBERS = ("name", "lowering", "computation", "devices", "compile", "prepare_to_exit")
COMPUTATION_MEMBERS = ("upload", "download", "wait", "launch")


class BackendRegistrar:
    """The backends this process knows: registered ones, ltc's own, those of installed packages.

    A package makes one known through the entry-point group `ltc.backends`: name = the backend's
    name, object = a function without arguments (or a class) that gives the backend.
    """

    _makers: dict[str, Callable[[], BackendImplInterface]] = {}
    _backends: dict[str, BackendImplInterface] = {}
    _capabilities: dict[str, BackendCapabilities] = {}

    @classmethod
    def register(cls, name: str, make: Callable[[], BackendImplInterface]) -> None:
        """Make `name` available; `make` is called when it is first wanted.

        Warns where the name was in use: what its backend has compiled stays compiled.
        """
        if name in cls._backends:
            warnings.warn(
                f"The backend {name!r} is in use already: its compiled programs and its tensors stay "
                f"with the old backend. Register the new one under another name, or restart the "
                f"process.",
                stacklevel=2,
            )
        cls._makers[name] = make
        cls._backends.pop(name, None)
        cls._capabilities.pop(name, None)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(sorted({*cls._makers, *(point.name for point in _entry_points())}))

    @classmethod
    def get(cls, name: str) -> BackendImplInterface:
        """The backend of that name, made once.

        Raises BackendMissing where there is none, suggesting the nearest name, and TypeError
        naming the missing members where what was registered is no backend.
        """
        if name not in cls._backends:
            backend = cls._maker(name)()
            _require(backend, MEMBERS, "BackendImplInterface")
            _require(backend.computation, COMPUTATION_MEMBERS, "Computation")
            cls._backends.setdefault(name, backend)  # another thread may have won the race
        return cls._backends[name]

    @classmethod
    def capabilities(cls, name: str) -> BackendCapabilities:
        """Return the optional abilities of the backend of that name; raise as `get` does."""
        if name not in cls._capabilities:
            cls._capabilities[name] = BackendCapabilities.of(cls.get(name))
        return cls._capabilities[name]

    @classmethod
    def prepare_to_exit(cls) -> None:
        """Tell every backend in use that the interpreter ends."""
        for backend in cls._backends.values():
            backend.prepare_to_exit()

    @classmethod
    def _maker(cls, name: str) -> Callable[[], BackendImplInterface]:
        if name in cls._makers:
            return cls._makers[name]
        for point in _entry_points():
            if point.name == name:
                loaded(point.module)
                make: Callable[[], BackendImplInterface] = point.load()
                return make
        near = difflib.get_close_matches(name, cls.names(), n=1)
        guess = f" Did you mean {near[0]!r}?" if near else ""
        raise BackendMissing(
            f"There is no backend called {name!r}; there are {', '.join(cls.names())}.{guess} "
            f"Register one with BackendRegistrar.register({name!r}, ...), install a package that "
            f"offers it in the entry-point group {ENTRY_POINT_GROUP!r}, or set LTC_BACKEND."
        )


def _entry_points() -> Iterator[metadata.EntryPoint]:
    """ltc's own first: a search of what is installed takes milliseconds."""
    yield from OWN_ENTRY_POINTS
    yield from metadata.entry_points(group=ENTRY_POINT_GROUP)


def _require(candidate: Any, members: tuple[str, ...], protocol: str) -> None:
    missing = [member for member in members if not hasattr(candidate, member)]
    if missing:
        name = candidate.__name__ if isinstance(candidate, type) else type(candidate).__name__
        raise TypeError(
            f"{name} is not a {protocol}: it lacks {', '.join(missing)}. "
            f"See ltc/backends/interface.py."
        )


# The one loop by which everything consumes a graph: each node once, by its op's row of a table.


class NodeLowering:
    """A backend's table: primitive -> how to emit it.

    Args:
        table: Op -> row; a row is called with the node and what its operands were lowered to.
        accepts: Further condition on a node whose op is in the table, such as its dtype; None: any.
    """

    def __init__(
        self, table: Mapping[Op, Callable[..., Any]], accepts: Callable[[Node], bool] | None = None
    ) -> None:
        self.table = table
        self._accepts = accepts

    def supports(self, node: Node) -> bool:
        """Return True if the backend runs this node itself; others run on the CPU for it, counted."""
        return node.op in self.table and (self._accepts is None or self._accepts(node))

    def takes(self, node: Node) -> bool:
        """Return True if the backend holds values of an input's dtype itself."""
        return self._accepts is None or self._accepts(node)

    def lower(self, node: Node, *operands: Any) -> Any:
        """Raises Unsupported naming the op where the table has no row for it."""
        row = self.table.get(node.op)
        if row is None:
            raise Unsupported(
                f"{node.op} giving {node.type} has no row in this backend's NodeLowering. "
                f"Add one; its meaning is in ltc/backends/eager.py."
            )
        return row(node, *operands)


class LoweringContext:
    """The results of one graph's nodes so far: a tensor, an LLVM value, a vendor's handle."""

    def __init__(self, lowering: NodeLowering, known: Mapping[Node, Any] | None = None) -> None:
        """`known`: what some nodes, usually the leaves, are already."""
        self.lowering = lowering
        self.lowered: dict[Node, Any] = dict(known or {})

    def lower(self, *outputs: Node) -> tuple[Any, ...]:
        """Lower what the outputs need, each node once."""
        for node in schedule(*outputs):
            if node not in self.lowered:
                operands = [self.lowered[n] for n in node.inputs]
                self.lowered[node] = self.lowering.lower(node, *operands)
        return tuple(self.lowered[output] for output in outputs)
