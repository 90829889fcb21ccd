"""What a vendor implements to make a device run ltc's graphs, and how it becomes known.

Everything else (recording, tracing, caching, threads, files) ltc does itself. The reference is
backends/eager.py.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any, Protocol, runtime_checkable

import torch

from ltc.errors import BackendMissing
from ltc.ir.graph import Graph, Origin
from ltc.ir.lowering import LoweringContext, NodeLowering
from ltc.ir.node import Node

__all__ = [
    "BackendImplInterface",
    "BackendRegistrar",
    "Computation",
    "DeviceInfo",
    "LoweringContext",
    "NodeLowering",
    "Target",
]

ENTRY_POINT_GROUP = "ltc.backends"


@dataclass(frozen=True)
class DeviceInfo:
    """One device: its kind ("CPU", "GPU", ...), a name for people, its memory in bytes or 0."""

    kind: str
    name: str
    memory_bytes: int = 0


@dataclass(frozen=True)
class Target:
    """What the passes may assume of a backend; they ask it, never the host.

    kind               "cpu", "gpu", ...
    lanes              bytes of one vector register
    fast_memory_bytes  what a tile should fit in
    tasks              how many blocks of work run at once
    epilogues          names of the ops that a matmul or convolution can hold
    halos              whether buffers may carry a border, so that padding needs no copy
    streaming_stores   whether stores may go past the caches
    """

    kind: str
    lanes: int = 1
    fast_memory_bytes: int = 0
    tasks: int = 1
    epilogues: frozenset[str] = frozenset()
    halos: bool = False
    streaming_stores: bool = False


@runtime_checkable
class Computation(Protocol):
    """A compiled graph, and how its device moves data."""

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


class HasTwins(Protocol):
    """What a Computation may offer besides, where two of its outputs are one value.

    twins  positions of outputs that lie in the same memory: groups of two or more.  None of a group
           is written over as long as another of it is left
    """

    twins: tuple[tuple[int, ...], ...]


class Launch(Protocol):
    """A launch that runs without Python, once a LaunchQueue comes to it.

    outputs  one buffer for each output: it may be there before the launch, to be filled by it
    """

    outputs: list[Any]

    def end(self) -> None:
        """It is over, or will not run: what it alone needed may go."""

    def error(self, failed: int) -> Exception:
        """What went wrong where `LaunchQueue.failed_call` gives that number; as in `launch`."""


class LaunchQueue(Protocol):
    """Launches that one thread runs in order; each has a number, counted from 1.

    given        the number of the last
    done         the number of the last that ended well
    has_stopped  whether one has failed: none after it runs before `restart`
    """

    given: int
    done: int
    has_stopped: bool

    def give(self, launch: Launch) -> int:
        """Have it run after all before; its number, or 0 where the queue takes none now."""

    def serve(self) -> bool:
        """Run what is given until called back, or until a launch fails: then True."""

    def call_back(self) -> None:
        """Let `serve` return once everything given is done."""

    def go_on(self) -> None:
        """`serve` may stay again."""

    def restart(self) -> None:
        """After a failure: what was given counts as done."""

    def rest(self) -> None:
        """Nothing is given that is not done: memory for launches may go."""

    def sleep_until_done(self, number: int) -> None:
        """Sleep while that launch is not done; may return early."""

    def nanoseconds(self, number: int) -> int:
        """How long a launch took that is done."""

    def failed_call(self, number: int) -> int:
        """What `Launch.error` of the launch that failed is to be given."""

    def leave_processor_after_next(self, nanoseconds: int) -> None:
        """Once the next launch is over, leave one processor to others for so long."""


class QueuesLaunches(Protocol):
    """What a Computation may offer besides, where its programs can run without Python."""

    @staticmethod
    def queue() -> LaunchQueue | None:
        """A queue for one device; None where there can be none."""

    def prepared(
        self, buffers: list[Any], scalars: list[Any], queue: LaunchQueue, lent: Mapping[int, Any]
    ) -> Launch | None:
        """`launch` as far as Python is needed for it; None where this program cannot be queued.

        lent  output position -> a buffer of its type that may become this output: what a launch
              before it in the queue leaves there is read by nobody
        """


class LeavesProcessors(Protocol):
    """What a Computation may offer besides, where its programs use the host's processors."""

    @staticmethod
    def leave_processor(until: int) -> None:
        """Programs leave one processor to the thread that records; 0: they may use all again.

        until  when that ends at the latest, nanoseconds as time.monotonic_ns() counts them
        """


@runtime_checkable
class BackendImplInterface(Protocol):
    """A kind of device and its compiler.

    name         what LTC_BACKEND and the registrar call it
    lowering     its table: primitive -> how to emit it
    computation  its class of Computations
    """

    name: str
    lowering: NodeLowering
    computation: type[Computation]

    def devices(self) -> tuple[DeviceInfo, ...]:
        """The devices of this kind that this process can use, in index order."""

    def target(self) -> Target:
        """What the passes may assume."""

    def compile(self, graph: Graph, device: int, donated: frozenset[int]) -> Computation:
        """A launchable form of the graph, which may write over the donated inputs.

        donated  positions of the inputs whose buffers nobody reads after the launch
        """

    def prepare_to_exit(self) -> None:
        """Finish what runs; called once, before the interpreter ends."""


@runtime_checkable
class RemembersPrograms(Protocol):
    """What a backend may offer besides: programs that outlive the process.

    A key names what is computed, equal in every process; of which version of itself, and for
    which machine, the backend adds.
    """

    def remember(self, key: str, computation: Any) -> None:
        """Keep a program that `compile` gave."""

    def recall(self, key: str, origin_of: Callable[[int], Origin]) -> Computation | None:
        """The program of that key, if it was kept.

        origin_of  where the call at a position of the recording comes from, for errors
        """


class Observer(Protocol):
    """Whom an observed launch tells what it does; values are CPU tensors, which it copies."""

    def reads(self, node: Node, value: torch.Tensor) -> None:
        """What is about to run finds this where the node's value is."""

    def makes(self, values: Mapping[Node, Any], is_reference: bool) -> None:
        """What ran has left these values, as the memory holds them.

        is_reference  whether the reference backend has computed them
        """


class ObservedComputation(Protocol):
    """A graph compiled as usual, for launches that are looked at.

    stages  (name, graph) after each of the backend's own passes: it observes nodes of the last
    """

    stages: Sequence[tuple[str, Graph]]

    def launch(self, buffers: list[Any], scalars: list[Any], observer: Observer) -> list[Any]:
        """As Computation.launch, kernel by kernel."""


@runtime_checkable
class ShowsValues(Protocol):
    """What a backend may offer besides: the values that its kernels leave for one another.

    LTC_VERIFY judges these.  A backend without is judged by programs that give every value.
    """

    def observed(self, graph: Graph, device: int, donated: frozenset[int]) -> ObservedComputation:
        """The same program as `compile` makes of the graph."""


MEMBERS = ("name", "lowering", "computation", "devices", "target", "compile", "prepare_to_exit")
COMPUTATION_MEMBERS = ("upload", "download", "wait", "launch")


class BackendRegistrar:
    """The backends this process knows: registered ones, then those of installed packages.

    A package makes one known through the entry-point group `ltc.backends`: name = the backend's
    name, object = a function without arguments (or a class) that gives the backend.
    """

    _makers: dict[str, Callable[[], BackendImplInterface]] = {}
    _backends: dict[str, BackendImplInterface] = {}

    @classmethod
    def register(cls, name: str, make: Callable[[], BackendImplInterface]) -> None:
        """Make `name` available; `make` is called when it is first wanted."""
        cls._makers[name] = make
        cls._backends.pop(name, None)

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
