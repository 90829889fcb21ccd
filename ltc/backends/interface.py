"""What a vendor implements to make a device run ltc's graphs, and how it becomes known.

Everything else (recording, tracing, caching, threads, files) ltc does itself. The reference is
backends/eager.py.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from types import SimpleNamespace
from typing import Any, Protocol, runtime_checkable

import torch

from ltc.backends.capabilities import (
    BackendCapabilities,
    ComputationCapabilities,
    Launch,
    LaunchQueue,
    ObservedComputation,
    Observer,
    OneShotSums,
)  # fmt: skip
from ltc.errors import BackendMissing
from ltc.ir.graph import Graph
from ltc.ir.lowering import LoweringContext, NodeLowering

__all__ = [
    "BackendCapabilities",
    "BackendImplInterface",
    "BackendRegistrar",
    "Computation",
    "ComputationCapabilities",
    "DeviceInfo",
    "Launch",
    "LaunchQueue",
    "LoweringContext",
    "NodeLowering",
    "ObservedComputation",
    "Observer",
    "OneShotSums",
    "Target",
]

ENTRY_POINT_GROUP = "ltc.backends"


@dataclass(frozen=True)
class DeviceInfo:
    """One device: its kind ("CPU", "GPU", ...), a name for people, its memory in bytes or 0."""

    kind: str
    name: str
    memory_bytes: int = 0


class Target(SimpleNamespace):
    """What a backend once said of itself, by keywords.  Nothing asks for it any more.

    The passes that assume something of a machine are those that its backend runs in `compile`.
    """


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

        buffers  one for each input, by its `index`
        scalars  Python numbers, or 0-dim CPU tensors where the node is not `wrapped`, by `slot`

        An error leaves donated buffers as they were, or carries `overwritten`: the positions of
        those that were not.
        """


@runtime_checkable
class BackendImplInterface(Protocol):
    """A kind of device and its compiler.

    What it can do besides it says in an attribute `capabilities`, a BackendCapabilities.

    name         what LTC_BACKEND and the registrar call it
    lowering     its table: primitive -> how to emit it
    computation  its class of Computations
    """

    name: str
    lowering: NodeLowering
    computation: type[Computation]

    def devices(self) -> tuple[DeviceInfo, ...]:
        """The devices of this kind that this process can use, in index order."""

    def compile(self, graph: Graph, device: int, donated: frozenset[int]) -> Computation:
        """A launchable form of the graph, which may write over the donated inputs.

        donated  positions of the inputs whose buffers nobody reads after the launch
        """

    def prepare_to_exit(self) -> None:
        """Finish what runs; called once, before the interpreter ends."""


MEMBERS = ("name", "lowering", "computation", "devices", "compile", "prepare_to_exit")
COMPUTATION_MEMBERS = ("upload", "download", "wait", "launch")


class BackendRegistrar:
    """The backends this process knows: registered ones, then those of installed packages.

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
                f"The backend {name!r} is in use already: programs that it has compiled, and tensors "
                f"that are there, stay its own. Register the new one under another name, or start "
                f"the process anew.",
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
        """What the backend of that name can do besides; raises as `get`."""
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
                make: Callable[[], BackendImplInterface] = point.load()
                return make
        near = difflib.get_close_matches(name, cls.names(), n=1)
        guess = f" Did you mean {near[0]!r}?" if near else ""
        raise BackendMissing(
            f"There is no backend called {name!r}; there are {', '.join(cls.names())}.{guess} "
            f"Register one with BackendRegistrar.register({name!r}, ...), install a package that "
            f"offers it in the entry-point group {ENTRY_POINT_GROUP!r}, or set LTC_BACKEND."
        )


def _entry_points() -> tuple[metadata.EntryPoint, ...]:
    return tuple(metadata.entry_points(group=ENTRY_POINT_GROUP))


def _require(candidate: Any, members: tuple[str, ...], protocol: str) -> None:
    missing = [member for member in members if not hasattr(candidate, member)]
    if missing:
        name = candidate.__name__ if isinstance(candidate, type) else type(candidate).__name__
        raise TypeError(
            f"{name} is not a {protocol}: it lacks {', '.join(missing)}. "
            f"See ltc/backends/interface.py."
        )
