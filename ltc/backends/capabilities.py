"""What a backend and its programs may offer besides what they must: one typed object of each.

A field that is left out is a thing that cannot be done: ltc then goes another way, which gives the
same values.  A backend, and a Computation, have the object in their attribute `capabilities`; of
one without, members of the fields' names count as its fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol, Self

import torch

from ltc.ir.graph import Graph, Origin
from ltc.ir.node import Node
from ltc.support.sizes.extent import SizeTrace


@dataclass(frozen=True)
class _Capabilities:
    @classmethod
    def of(cls, holder: Any) -> Self:
        """What a backend or a computation can do besides."""
        declared: Self | None = getattr(holder, "capabilities", None)
        if declared is not None:
            return declared
        named = {field.name: getattr(holder, field.name, None) for field in fields(cls)}
        return cls(**{name: found for name, found in named.items() if found is not None})


@dataclass(frozen=True)
class ComputationCapabilities(_Capabilities):
    """What one program can do besides.

    aliased_outputs  positions of outputs that lie in the same memory: groups of two or more. None
                     of a group is written over as long as another of it is left
    prepared         (buffers, scalars, queue, lent) -> Launch or None: `launch` as far as Python is
                     needed for it; None where this program cannot be queued now.
                     queue: one that `queue` of its BackendCapabilities gave
                     lent: output position -> a buffer of its type that may become this output: what
                     a launch before it in the queue leaves there is read by nobody
    text             the program in the backend's own words, for LTC_SAVE_TENSORS_FMT=backend
    timed            tells the times of its kernels, for ltc.profile
    python_calls     how many kernels a launch calls from Python: each call gives the interpreter's
                     lock away, and waits for it when the kernel has ended
    """

    aliased_outputs: tuple[tuple[int, ...], ...] = ()
    prepared: Callable[[list[Any], list[Any], Any, Mapping[int, Any]], Launch | None] | None = None
    text: Callable[[], str] | None = None
    timed: TimedLaunches | None = None
    python_calls: int = 0


@dataclass(frozen=True)
class BackendCapabilities(_Capabilities):
    """What a backend can do besides.

    queue            a LaunchQueue for one device, or None where there can be none: launches that
                     run without Python, given ahead
    leave_processor  (until): programs leave one processor to the thread that records, at the latest
                     until then, in nanoseconds as time.monotonic_ns() counts them; 0: they may use
                     all again
    resizable        (graph, device, donated, trace): a Resizable of a graph whose sizes are
                     expressions of the trace's symbols; called under the trace. Raises Unsupported
    programs         keeps programs that outlive the process
    observed         (graph, device, donated): the same program as `compile` makes of the graph, for
                     LTC_VERIFY, which judges what its kernels leave for one another. A backend
                     without is judged by programs that give every value
    stages           names of its own stages, in order, which LTC_DUMP and ltc.debug.graphs take
    explain          (graph) -> (stage, text) for each of them, made only as far as it is asked for
    any_device       whether a program may be launched with the buffers of every device, whichever it
                     was compiled for. Of a backend without, each device has programs of its own
    host_tensors     whether its buffers are contiguous CPU tensors: then what is new may run on
                     PyTorch's kernels until it is compiled
    one_shot_sums    which sums its programs add themselves; of others, messages are sent
    timed            (computation): one of the same program that tells the times of its kernels, for
                     ltc.profile; None where there is none
    """

    queue: Callable[[], LaunchQueue | None] | None = None
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


@dataclass(frozen=True)
class OneShotSums:
    """Sums among the replicas of a host that its programs make without messages.

    Each writes its operand where all see it, and adds what all have written: see
    passes/one_shot_all_reduce.py.

    dtypes        of what it adds
    most_members  of a sum: each of them reads everyone's operand
    """

    dtypes: frozenset[torch.dtype]
    most_members: int


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

    def give(self, launch: Any) -> int:
        """Have it run after all before; its number, or 0 where the queue takes none now.

        launch  what `prepared` of one of its backend's programs gave
        """

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


class Resizable(Protocol):
    """A program whose sizes are symbols."""

    def fits(self, values: Sequence[int]) -> bool:
        """Whether it is right at these values of the symbols."""

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

        origin_of  where the call at a position of the recording comes from, for errors
        """

    def remember_resizable(self, key: str, program: Any) -> None:
        """Keep a program that `resizable` gave."""

    def recall_resizable(self, key: str, origin_of: Callable[[int], Origin]) -> Resizable | None:
        """The Resizable of that key, if it was kept."""

    def keep_launcher(self) -> None:
        """Keep what launches need besides, so that who recalls a program has nothing to compile."""


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


@dataclass(frozen=True)
class KernelFacts:
    """What one kernel of a program does.

    name           what it computes of which shapes, in a line
    ops            the recorded calls it stands for, "aten::addmm", the main one first
    line, forward  of the main one: the user's line; of a backward also that of the forward
    lines          of all of them, the user's lines, those of the forward in place of a backward's
    module         of the main one, modules: of all
    read_bytes, written_bytes  of memory, each element once
    multiply_adds  of products; operations: elementwise ones, and those of reductions
    tasks          how many pieces threads share
    is_double      whether its products are of 64-bit numbers, of which a register holds half as many
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


class TimedLaunches(Protocol):
    """A program that tells the times of its kernels.

    block_bytes  of memory that a launch works in, besides its buffers
    """

    block_bytes: int

    def launch_timed(
        self, buffers: list[Any], scalars: list[Any], told: Callable[[bytes], object]
    ) -> list[Any]:
        """As Computation.launch; `told` gets the times when it is over, as `times` reads them."""

    def prepared_timed(
        self,
        buffers: list[Any],
        scalars: list[Any],
        queue: Any,
        lent: Mapping[int, Any],
        told: Callable[[bytes], object],
    ) -> Launch | None:
        """As `prepared` of its ComputationCapabilities."""

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
        """What these kernels do, in the same order; None where it is not known.

        graph_of, donated  what the program was compiled from
        """
