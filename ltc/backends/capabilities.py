"""The optional abilities of a backend and of its programs: one typed object of each.

A field that is left out is an ability that is missing: ltc then goes another way, which gives the
same values. A backend, and a Computation, have the object in their attribute `capabilities`; of one
without, members of the fields' names count as its fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, Self, runtime_checkable

import torch

from ltc.ir.graph import Graph, Origin
from ltc.ir.node import Node
from ltc.support.sizes.extent import SizeTrace


@dataclass(frozen=True)
class _Capabilities:
    @classmethod
    def of(cls, holder: Any) -> Self:
        """Return the optional abilities of a backend or a computation."""
        declared: Self | None = getattr(holder, "capabilities", None)
        if declared is not None:
            return declared
        named = {field.name: getattr(holder, field.name, None) for field in fields(cls)}
        return cls(**{name: found for name, found in named.items() if found is not None})


@dataclass(frozen=True)
class ComputationCapabilities(_Capabilities):
    """The optional abilities of one program.

    Attributes:
        aliased_outputs: Positions of outputs that lie in the same memory: groups of two or more.
            None of a group is written over as long as another of it is left.
        text: The program in the backend's own words, for LTC_SAVE_TENSORS_FMT=backend.
        timed: Launches that report the times of its kernels, for ltc.profile.
        python_calls: Number of kernels that a launch calls from Python: each call releases the
        interpreter's lock, and waits for it when the kernel has ended.
        begin: (buffers, scalars): as Computation.launch, but it returns once the device has the work.
            Its outputs may be launched with at once; they may be read once the token says so. None
            of a launch that is over.
        begins_at_once: True if `begin` waits for nothing: then the thread that records calls it.
        in_frame: The launch as native code makes it; None where it takes Python.
    """

    aliased_outputs: tuple[tuple[int, ...], ...] = ()
    text: Callable[[], str] | None = None
    timed: TimedLaunches | None = None
    python_calls: int = 0
    begin: Callable[[list[Any], list[Any]], tuple[list[Any], LaunchToken | None]] | None = None
    begins_at_once: bool = False
    in_frame: Callable[[], FrameLaunch | None] | None = None


@dataclass(frozen=True)
class FrameLaunch:
    """A launch as native code makes it: one call, over words of memory that say where all is.

    First come the addresses of the inputs and of the outputs in new memory, then those of the words
    themselves, of the constants, 0, and the address of memory to work in. A launch that fails has
    written over no input, unless `failed` raises.

    Attributes:
        run, kernels: `run(kernels, words, threads)` launches; it returns -1 if all went well.
        constants: Their address.
        frame, block: Bytes of the words, and of the memory to work in.
        inputs: Position of each input among the launch's buffers.
        written: The positions of those that the program writes over.
        made: (shape, dtype) of the outputs in new memory, which are contiguous.
        outputs: For each output the number of its address.
        guard: Bytes, whole cache lines, that these have before them, and behind their last cache line.
        cells: (slot, format, word) of each scalar: `struct` writes it there in that format.
        threads: Gives the number of threads that a launch uses.
        failed: (number that `run` returned, address of the words): raises what a check of memory has
            found.
    """

    run: int
    kernels: int
    constants: int
    frame: int
    block: int
    inputs: tuple[int, ...]
    written: frozenset[int]
    made: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    guard: int
    outputs: tuple[int, ...]
    cells: tuple[tuple[int, str, int], ...]
    threads: Callable[[], int]
    failed: Callable[[int, int], None]

    def exit_words(
        self,
        inputs: Sequence[tuple[int, bool]],
        made: Sequence[int],
        cells: Sequence[tuple[int, int, int]],
        values: Sequence[int] = (),
    ) -> list[int]:
        """Return what an Exit of the native core's exits.h is made of, whose order this is."""
        return [
            self.run, self.constants, self.block, self.guard, len(inputs), len(made), len(cells), len(values),
            *[word for one in inputs for word in one],
            *made,
            *[word for one in cells for word in one],
            *values,
        ]  # fmt: skip


@dataclass(frozen=True)
class BackendCapabilities(_Capabilities):
    """The optional abilities of a backend.

    Attributes:
        leave_processor: (until): programs leave one processor to the thread that records, at the
            latest until then, in nanoseconds as time.monotonic_ns() counts them; 0: they may use
            all again.
        resizable: (graph, device, donated, trace): a Resizable of a graph whose sizes are
            expressions of the trace's symbols; called under the trace. Raises Unsupported.
        programs: Keeps programs that outlive the process.
        observed: (graph, device, donated): the same program as `compile` makes of the graph, for
            LTC_VERIFY, which judges what its kernels leave for one another. Of a backend
            without, each node is compiled by itself.
        stages: Names of its own stages, in order, which LTC_DUMP and ltc.debug.graphs take.
        explain: (graph) -> (stage, text) for each of them, made only as far as it is asked for.
        any_device: True if a program may be launched with the buffers of every device, whichever it
            was compiled for. Of a backend without, each device has programs of its own.
        host_tensors: True if its buffers are contiguous CPU tensors: then what is new may run on
            PyTorch's kernels until it is compiled.
        one_shot_sums: The sums that its programs add themselves; other sums send messages.
        timed: (computation): one of the same program that tells the times of its kernels, for
            ltc.profile; None where there is none.
        copy: (buffer): a second buffer with the same elements, made on the device. Of a backend
            without, copies go over the host.
        together: (graph, donated): one program of all replicas, whose exchanges are part of it;
            launched by each replica with its own buffers, once all are about to. None where there
            is none: then exchanges go over the host.
        limits: The most that the device does, by name, for ltc.profile; raises Unsupported.
        describe: The device in a few words, for `ltc info`.
    """

    resizable: Callable[[Graph, int, frozenset[int], SizeTrace], Resizable] | None = None
    leave_processor: Callable[[int], None] | None = None
    programs: KeepsPrograms | None = None
    observed: Callable[[Graph, int, frozenset[int]], ObservedComputation] | None = None
    stages: tuple[str, ...] = ()
    explain: Callable[[Graph], Iterator[tuple[str, str]]] | None = None
    any_device: bool = False
    host_tensors: bool = False
    one_shot_sums: OneShotSums | None = None
    timed: Callable[[Any], TimedLaunches | None] | None = None
    copy: Callable[[Any], Any] | None = None
    together: Callable[[Graph, frozenset[int]], Any] | None = None
    limits: Callable[[], dict[str, float]] | None = None
    describe: Callable[[], str] | None = None


@dataclass(frozen=True)
class OneShotSums:
    """Sums among the replicas of a host that its programs make without messages.

    Each replica writes its operand where all see it, and adds all operands: see
    passes/one_shot_all_reduce.py.

    Attributes:
        dtypes: The dtypes that it adds.
        most_members: The most members of a sum: each of them reads everyone's operand.
    """

    dtypes: frozenset[torch.dtype]
    most_members: int


class LaunchToken(Protocol):
    """A launch that a device has begun; any thread may ask, several times and at once.

    The launches of one device finish in the order in which they were begun.
    """

    def is_finished(self) -> bool:
        """Return True if `wait` would return, or raise, at once."""

    def wait(self) -> None:
        """Block until the launch is over; raise its error, each time."""


class Resizable(Protocol):
    """A program whose sizes are symbols."""

    def fits(self, values: Sequence[int]) -> bool:
        """Return True if it is right at these values of the symbols."""

    def at(self, values: Sequence[int]) -> Any:
        """The Computation of these values, which fit; made in microseconds."""


class KeepsPrograms(Protocol):
    """Programs on disk.

    A key names what is computed, equal in every process; of which version of itself, and for
    which machine, the backend adds.
    """

    def remember(self, key: str, computation: Any) -> None:
        """Keep a program that `compile` gave."""

    def recall(self, key: str, origin_of: Callable[[int], Origin]) -> Any | None:
        """The Computation of that key, if it was kept.

        Args:
            origin_of: Gives the origin of the call at a position of the recording, for errors.
        """

    def remember_resizable(self, key: str, program: Any) -> None:
        """Keep a program that `resizable` gave."""

    def recall_resizable(self, key: str, origin_of: Callable[[int], Origin]) -> Resizable | None:
        """The Resizable of that key, if it was kept."""


class Observer(Protocol):
    """The receiver of an observed launch's values, which are CPU tensors that it copies."""

    def reads(self, node: Node, value: torch.Tensor) -> None:
        """Place the value where the kernel that runs next finds the node's."""

    def makes(self, values: Mapping[Node, Any], is_reference: bool) -> None:
        """Take the values that a kernel has left, as the memory holds them.

        Args:
            is_reference: True if the reference backend has computed them.
        """


class ObservedComputation(Protocol):
    """A graph compiled as usual, for launches that are looked at.

    Attributes:
        stages: (name, graph) after each of the backend's own passes: it observes nodes of the last.
    """

    stages: Sequence[tuple[str, Graph]]

    def launch(self, buffers: list[Any], scalars: list[Any], observer: Observer) -> list[Any]:
        """Launch as Computation.launch does, but kernel by kernel."""


@dataclass(frozen=True)
class KernelFacts:
    """The work of one kernel of a program.

    Attributes:
        name: The operation and its shapes, in a line.
        ops: The recorded calls it stands for, "aten::addmm", the main one first.
        line, forward: The user's line of the main call; if it is of a backward, also the forward's.
        lines: The user's lines of all calls, with the forward's in place of a backward's.
        module, modules: The module of the main call; the modules of all calls.
        read_bytes, written_bytes: Bytes of memory, each element counted once.
        multiply_adds, operations: Number of multiply-adds in products; of other operations.
        tasks: Number of pieces that threads share.
        is_double: True if its products are of 64-bit numbers: a register holds half as many.
    """

    name: str
    ops: tuple[str, ...] = ()
    line: str = ""
    forward: str = ""
    lines: tuple[str, ...] = ()
    module: str = ""
    modules: tuple[str, ...] = ()
    read_bytes: int = 0
    written_bytes: int = 0
    multiply_adds: int = 0
    operations: int = 0
    tasks: int = 1
    is_double: bool = False


@runtime_checkable
class TimedFrames(Protocol):
    """A TimedLaunches whose launches native code may make."""

    def in_frame(self) -> FrameLaunch | None:
        """Return the launch as native code makes it; None where it takes Python."""

    def stamps_in(self, frame: int) -> bytes:
        """Return the times that such a launch has left in its words, at an address."""


class TimedLaunches(Protocol):
    """A program that tells the times of its kernels.

    Attributes:
        block_bytes: The memory that a launch works in, besides its buffers.
    """

    block_bytes: int

    def launch_timed(
        self, buffers: list[Any], scalars: list[Any], told: Callable[[bytes], object]
    ) -> list[Any]:
        """Launch as Computation.launch does; `told` gets the times afterwards, as `times` reads
        them.
        """

    def shown(
        self,
        graph_of: Callable[[], Graph] | None,
        donated: frozenset[int],
        region: Callable[[str], Any],
    ) -> Callable[[list[Any], list[Any]], list[Any]]:
        """Computation.launch with each kernel in a block `with region(name)`; else as `kernels`."""

    def times(self, stamps: bytes) -> Iterable[tuple[int, int]]:
        """(begin, end) of each kernel that ran, in their order, as time.monotonic_ns() counts."""

    def kernels(
        self, graph_of: Callable[[], Graph] | None, donated: frozenset[int]
    ) -> Sequence[KernelFacts] | None:
        """Return the facts of these kernels, in the same order; None if they are not known.

        Args:
            graph_of, donated: The graph and the donated inputs that the program was compiled from.
        """
