"""A compiled graph together with what it takes to launch it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ltc.backends.collective_runner import abort, running_as
from ltc.backends.interface import ComputationCapabilities, Launch, LaunchQueue
from ltc.debug import metrics
from ltc.debug.often import Often
from ltc.explaining.explanation import Explanation
from ltc.runtime.backend_errors import buffers_of, in_a_launch
from ltc.runtime.buffer import Aliases, Buffer, Execution, Failure, Outputs, under_way
from ltc.runtime.core_reservation import Waits
from ltc.runtime.executor import SHORT_CALL_SECONDS, SHORT_SECONDS, Executor, executor_of
from ltc.runtime.salvage import salvage
from ltc.runtime.tiers import Tiers
from ltc.runtime.timing import profiled_launch
from ltc.runtime.timing.profiled_launch import ProfiledLaunch
from ltc.runtime.transfers import copy_of
from ltc.support.reference_counts import IN_ONE_LIST, reference_counts

_LAUNCHES = Often((), (("TensorsGraphSize", "value"), ("DeviceLockWait", "time")))
_RUNS = Often((), (("ExecuteTime", "time"),))


@dataclass(frozen=True)
class InputRole:
    """What an input of a program is to the step that recorded it.

    kind      "state" (replaced by the program), "data", "scalar" or "seed"
    position  index in the launch's buffers, or slot in its scalars
    origin    where it comes from: a scalar's argument name, a user's line
    """

    kind: str
    position: int
    origin: str = ""


@dataclass
class Program:
    """One executable.

    computation  what the backend compiled
    outputs      what it fills
    roles_of     tells the role of every input and scalar
    graph_of     makes the graph it was compiled from anew: kept, it would outweigh the rest
    calls        how many recorded calls it runs
    exchanges    whether it takes part in collectives: then it runs behind its caller, who may have
                 to start the program of another replica
    is_verified  whether its launches are judged: then it runs before its caller goes on
    tiers        what it is run by until it is compiled; None once it is
    why          why there is such a program; None until the recording that needed it has told
    waits        whether its runs are waited for at once: then they are their caller's
    """

    computation: Any
    outputs: Outputs
    roles_of: Callable[[], tuple[InputRole, ...]] | None = None
    graph_of: Callable[[], Any] | None = None
    calls: int = 0
    exchanges: bool = False
    is_verified: bool = False
    tiers: Tiers | None = None
    why: Explanation | None = None
    waits: Waits = field(default_factory=Waits)
    seconds: float = 0.0  # of the latest run: decides whether the next one runs behind the caller
    last_use: int = 0  # grows from use to use, over all programs
    _known: tuple[Any, ComputationCapabilities] | None = None  # the computation, with its own

    @property
    def replaced(self) -> dict[int, int]:
        return self.outputs.replaced

    @property
    def donated(self) -> frozenset[int]:
        return self.outputs.donated

    def _chosen(self) -> tuple[Any, ComputationCapabilities]:
        """What is to run it now, and what that can do; launches under way keep theirs."""
        if self.tiers is not None:
            computation, is_native = self.tiers.chosen(self.last_use)
            if is_native:
                self.computation, self.tiers, self._known = computation, None, None
        known = self._known
        if known is None:
            computation = self.computation
            known = self._known = computation, ComputationCapabilities.of(computation)
        return known

    def launch(
        self,
        device: int,
        inputs: list[Buffer],
        scalars: list[Any],
        previous: dict[int, Buffer],
        replica: Any = None,
    ) -> list[Buffer]:
        """Start the program, for which the caller has waited for room; it may run behind it.

        previous  output position -> the buffer whose place it takes if the program ends well, where
                  that is no input
        replica   whose collectives it takes part in
        An error is that of the launch that the outputs name, and the executor knows of it.
        """
        chosen = self._chosen()
        executor = executor_of(device)
        _LAUNCHES.happened(self.calls, executor.take_waited())
        execution, (sources, dependencies) = Execution(), under_way(inputs)
        outputs, replacing = self.outputs.buffers(device, inputs, previous, execution)
        for positions in chosen[1].aliased_outputs:
            Aliases([outputs[position] for position in positions])
        # A list of its own: what this one holds is not gone, though no tensor has it yet.
        given = list(outputs)
        work = _Work(
            self, chosen, executor, execution, sources, dependencies, inputs, scalars, given,
            replacing, replica,
        )  # fmt: skip
        if profiled_launch.is_wanted():
            work.profiled = profiled_launch.of(self, chosen, executor, inputs, given)
        short = SHORT_SECONDS + SHORT_CALL_SECONDS * chosen[1].python_calls
        is_long = self.seconds > short and not self.is_verified
        is_behind = is_long and not work.is_inline and not self.waits.are_expected()
        executor.run(work, long=self.exchanges or is_behind)
        return outputs


_NOTHING: list[Any] = []  # what a work that is over has


class _Work:
    """One run of a program, as the executor calls it: never raises, always ends its execution."""

    __slots__ = (
        "program",
        "computation",
        "capabilities",
        "executor",
        "execution",
        "sources",
        "dependencies",
        "inputs",
        "scalars",
        "outputs",
        "replacing",
        "replica",
        "profiled",
        "_launch",
        "_handles_before",
    )

    def __init__(
        self,
        program: Program,
        chosen: tuple[Any, ComputationCapabilities],
        executor: Executor,
        execution: Execution,
        sources: Sequence[Execution | None],
        dependencies: Collection[Execution],
        inputs: list[Buffer],
        scalars: list[Any],
        outputs: list[Buffer],
        replacing: list[Buffer],
        replica: Any,
    ) -> None:
        """
        chosen        what runs it, with what that can do
        sources       of each input the launch that fills it, where that may not have ended well
        dependencies  these launches; where there are none, nobody looks at `sources`
        replacing     of the outputs those that have a `previous`
        """
        self.program, self.executor, self.execution = program, executor, execution
        self.computation, self.capabilities = chosen
        self.sources, self.dependencies = sources, dependencies
        self.inputs, self.scalars = inputs, scalars
        self.outputs, self.replacing, self.replica = outputs, replacing, replica
        self.profiled: ProfiledLaunch | None = None
        self._launch: Launch | None = None  # while it is queued
        self._handles_before: list[Any] = []  # of its outputs, before it was

    def __call__(self) -> None:
        if self.dependencies and (lost := self._lost_inputs()):
            self._go_without(lost)
            return
        try:
            if self.program.exchanges:
                with running_as(self.replica):
                    self._run()
            else:
                self._run()
        except BaseException as error:
            self._fail(error)
        else:
            self.inputs = self.scalars = _NOTHING  # donated memory goes with the last reference
            self.execution.finish()

    @property
    def is_inline(self) -> bool:
        """Whether whoever profiles wants it in the thread that asks for it."""
        return self.profiled is not None and self.profiled.is_inline

    def _end(
        self, failure: Failure | None = None, lost: dict[Buffer, Failure] | None = None
    ) -> None:
        self.inputs = self.scalars = _NOTHING
        if not self.execution.done:
            self.execution.finish(failure, lost)

    def lose_outputs(self) -> None:
        for buffer in self.outputs:
            buffer.handle = buffer.previous = None

    # --- in a queue

    @property
    def usual_seconds(self) -> float:
        return self.program.seconds

    @property
    def waits(self) -> Waits:
        return self.program.waits

    @property
    def needs_python(self) -> bool:
        return self.capabilities.prepared is None or self.program.exchanges

    def launch_for(self, queue: LaunchQueue, queued: Sequence[_Work]) -> Launch | None:
        """What the queue is to run; None where this work needs Python.

        queued  the works there: where one fails, this will not run
        """
        prepared: Any = self.capabilities.prepared
        within = {work.execution for work in queued}
        if not all([e in within or (e.done and e.failure is None) for e in self.dependencies]):
            return None  # what is not queued may have ended well since it was looked up
        if any([self.inputs[position].shared for position in self.program.outputs.donated]):
            return None  # they are copied first
        try:
            handles, lent = [b.handle for b in self.inputs], self._lent_by(queued)
            if self.profiled is not None:
                prepared = self.profiled.prepared
            self._launch = prepared(handles, self.scalars, queue, lent)
        except Exception:
            return None  # it is raised again, where the error is this work's
        if self._launch is not None:
            self._handles_before = [buffer.handle for buffer in self.outputs]
            for buffer, handle in zip(self.outputs, self._launch.outputs, strict=True):
                buffer.handle = handle
        return self._launch

    def _lent_by(self, queued: Sequence[_Work]) -> dict[int, Any]:
        """Memory for outputs: of the run before, where these are gone when it has filled them."""
        if not queued or queued[-1].program is not self.program:
            return {}
        outputs = queued[-1].outputs
        return {
            position: outputs[position].handle
            for position, count in enumerate(reference_counts(outputs))
            if count == IN_ONE_LIST and position not in self.program.replaced
        }

    def leave_queue(self) -> None:
        """It has not run there; those behind it have left."""
        if self._launch is not None:
            self._launch.end()
        self._launch = None
        for buffer, handle in zip(self.outputs, self._handles_before, strict=True):
            buffer.handle = handle
        self._handles_before = []

    def end_well(self, nanoseconds: int) -> None:
        """The queue has run it; said again where it was interrupted."""
        launch, self._launch = self._launch, None
        if launch is not None:
            launch.end()
        self._handles_before = []
        self._forget_previous()
        self._note_time(nanoseconds)
        if self.profiled is not None:
            self.profiled.was_queued(nanoseconds, self.executor.thread)
        self._end(None)

    def end_badly(self, failed: int) -> None:
        """It has failed in the queue, which calls the reason by that number."""
        assert self._launch is not None
        error = self._launch.error(failed)
        self.leave_queue()
        self._fail(error)

    # --- here

    def _run(self) -> None:
        inputs, outputs = self.inputs, self.outputs
        handles = [buffer.handle for buffer in inputs]
        for position in self.program.outputs.donated:
            if inputs[position].shared:
                handles[position] = copy_of(handles[position], self.executor.device)
        started = time.perf_counter_ns()
        computation = self.computation if self.profiled is None else self.profiled
        results = computation.launch(handles, self.scalars)
        elapsed = time.perf_counter_ns() - started
        if results.__class__ is not list or len(results) != len(outputs):
            results = buffers_of(results, self.computation, len(outputs))
        for buffer, handle in zip(outputs, results):  # as many: looked at just now
            buffer.handle = handle
        if self.replacing:
            self._forget_previous()
        self._note_time(elapsed)

    def _forget_previous(self) -> None:
        """All went well: no tensor goes back to what it was."""
        for buffer in self.replacing:
            buffer.previous = None

    def _note_time(self, nanoseconds: int) -> None:
        self.program.seconds = nanoseconds * 1e-9
        _RUNS.happened(nanoseconds)

    # --- where not all of it goes well

    def _lost_inputs(self) -> dict[int, Failure]:
        """The positions of inputs that an earlier launch has left without their value, and why."""
        if all([execution.failure is None for execution in self.dependencies]):
            return {}
        found = {
            position: source.failure_of(buffer)
            for position, (buffer, source) in enumerate(zip(self.inputs, self.sources))
            if source is not None
        }
        return {position: failure for position, failure in found.items() if failure is not None}

    def _fail(self, error: BaseException) -> None:
        """It has raised: what does not need what failed is computed nevertheless."""
        for buffer in self.outputs:
            buffer.write_off()  # first: what is said of memory does not count what is not there
        error = in_a_launch(error, self.executor.device, self.program.graph_of)
        overwritten = getattr(error, "overwritten", ())
        self._note_overwritten(error, overwritten)
        failure = Failure(error)
        lost = dict.fromkeys(overwritten, failure)
        results = self._salvaged(lost) if isinstance(error, Exception) else None
        if results is None or not any(result.__class__ is Failure for result in results):
            results = [failure] * len(self.outputs)  # nobody knows which node it was
        self._end_with(results)

    def _go_without(self, lost: dict[int, Failure]) -> None:
        """Some inputs are not there: what does not need them is computed."""
        first = next(iter(lost.values()))
        if self.program.exchanges:
            abort(self.replica, first.error)
        self._end_with(self._salvaged(lost) or [first] * len(self.outputs))

    def _salvaged(self, lost: Mapping[int, Failure]) -> list[Any] | None:
        """Each output's handle, or why there is none; None where that cannot be found out.

        A program with collectives is not run again: the others have been told that it failed.
        """
        if self.program.exchanges or self.program.graph_of is None:
            return None
        handles = [buffer.handle for buffer in self.inputs]
        computation, device = self.computation, self.executor.device
        try:
            return salvage(
                self.program.graph_of(), computation, handles, self.scalars, device, lost
            )
        except Exception:  # a graph that cannot be made again
            metrics.count("SalvageFailed")
            return None
        except BaseException as error:  # an interrupt
            return [Failure(error)] * len(self.outputs)

    def _note_overwritten(self, error: BaseException, positions: Sequence[int]) -> None:
        """What is there no more: a launch that fails late may have written over its inputs."""
        written = []
        for output, position in self.program.replaced.items():
            if position in positions:
                buffer = self.outputs[output]
                buffer.handle = buffer.previous = None
                written.append(f"{list(buffer.shape)} {buffer.dtype}")
        if written:
            error.add_note(f"written to before it failed, and lost: {', '.join(written)}")

    def _end_with(self, results: list[Any]) -> None:
        """The outputs get their handles, or their failures."""
        lost = {b: r for b, r in zip(self.outputs, results) if r.__class__ is Failure}
        for buffer, result in zip(self.outputs, results, strict=True):
            if buffer in lost:
                buffer.write_off()
            else:
                buffer.handle, buffer.previous = result, None
                buffer.write_on()
        told = list(dict.fromkeys(failure.first for failure in lost.values()))
        for failure in told:
            self.executor.note_failure(failure)
        self._end(told[0] if told else None, lost)
