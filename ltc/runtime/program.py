"""A compiled graph together with what it takes to launch it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from threading import get_ident
from typing import Any

from ltc import config
from ltc.backends.capabilities import (
    ComputationCapabilities,
    FrameLaunch,
    LaunchToken,
    TimedFrames,
    TimedLaunches,
)
from ltc.backends.collective_runner import abort, running_as
from ltc.explaining import faults
from ltc.explaining.explanation import Explanation
from ltc.runtime.account import account_of
from ltc.runtime.backend_errors import buffers_of, in_a_launch, note_step
from ltc.runtime.buffer import Aliases, Buffer, Execution, Failure, Outputs, under_way
from ltc.runtime.core_reservation import Waits
from ltc.runtime.executor import SHORT_CALL_SECONDS, SHORT_SECONDS, Executor, executor_of
from ltc.runtime.first_runs import FirstRuns
from ltc.runtime.salvage import salvage
from ltc.runtime.transfers import capabilities, copy_of
from ltc.support.observation import metrics, spans
from ltc.support.observation.often import Often
from ltc.support.torch_private import is_profiled, record_region

_LAUNCHES = Often((), (("TensorsGraphSize", "value"), ("DeviceLockWait", "time")))
_RUNS = Often((), (("ExecuteTime", "time"),))
note_launch, note_run = (
    _LAUNCHES.happened,
    _RUNS.happened,
)  # (calls, nanoseconds waited); (nanoseconds)


@dataclass(frozen=True)
class InputRole:
    """The role of a program's input in the step that recorded it.

    Attributes:
        kind: "state" (replaced by the program), "data", "scalar" or "seed".
        position: Index in the launch's buffers, or slot in its scalars.
        origin: Its source: a scalar's argument name, a user's line.
    """

    kind: str
    position: int
    origin: str = ""


@dataclass
class Program:
    """One executable.

    Attributes:
        computation: The object that the backend compiled.
        outputs: The outputs that it fills.
        roles_of: Tells the role of every input and scalar.
        graph_of: Makes the graph it was compiled from anew: kept, it would outweigh the rest.
        calls: Number of recorded calls that it runs.
        exchanges: True if it takes part in collectives. Then it runs in another thread than its
        caller, which may have to start the program of another replica.
        is_verified: True if its launches are verified: then it runs before its caller continues.
        first_runs: Its runner until it is compiled; None once it is.
        why: The reason for the program; None until its recording has given one.
        waits: True if its runs are waited for at once: then they are their caller's.
    """

    computation: Any
    outputs: Outputs
    roles_of: Callable[[], tuple[InputRole, ...]] | None = None
    graph_of: Callable[[], Any] | None = None
    calls: int = 0
    exchanges: bool = False
    is_verified: bool = False
    first_runs: FirstRuns | None = None
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

    @property
    def is_ready(self) -> bool:
        """True if a launch runs compiled code."""
        return self.first_runs is None or self.first_runs.is_ready

    def ask(self) -> None:
        """Have it compiled, if it is not."""
        if self.first_runs is not None:
            self.first_runs.ask()

    def in_frame(self) -> FrameLaunch | None:
        """Return how native code launches what is compiled; None where a launch takes Python."""
        in_frame = self.chosen()[1].in_frame
        return None if in_frame is None else in_frame()

    def chosen(self) -> tuple[Any, ComputationCapabilities]:
        """Return the computation to run now, and its capabilities; launches under way keep theirs."""
        if self.first_runs is not None:
            computation, is_native = self.first_runs.chosen()
            if is_native:
                self.computation, self.first_runs, self._known = computation, None, None
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

        An error is that of the launch that the outputs name, and the executor knows of it.

        Args:
            previous: Output position -> the buffer whose place it takes if the program ends well,
                where that is no input.
            replica: The replica in whose collectives it takes part.
        """
        chosen = self.chosen()
        executor = executor_of(device)
        note_launch(self.calls, executor.take_waited())
        execution, (sources, dependencies) = Execution(), under_way(inputs)
        outputs, replacing = self.outputs.buffers(device, inputs, previous, execution)
        for positions in chosen[1].aliased_outputs:
            Aliases([outputs[position] for position in positions])
        work = _Work(
            self, chosen, executor, execution, sources, dependencies, inputs, scalars, outputs,
            replacing, replica,
        )  # fmt: skip
        if is_wanted():
            work.profiled = of(self, chosen, executor, inputs, outputs)
        short = SHORT_SECONDS + SHORT_CALL_SECONDS * chosen[1].python_calls
        is_long = self.seconds > short and not self.is_verified and not chosen[1].begins_at_once
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
        "marks",
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
        """Prepare the run.

        Args:
            chosen: The computation to run, and its capabilities.
            sources: For each input the launch that fills it, if that may not have ended well.
            dependencies: These launches; if there are none, `sources` is not read.
            replacing: The outputs that have a `previous`.
        """
        self.program, self.executor, self.execution = program, executor, execution
        self.computation, self.capabilities = chosen
        self.sources, self.dependencies = sources, dependencies
        self.inputs, self.scalars = inputs, scalars
        self.outputs, self.replacing, self.replica = outputs, replacing, replica
        self.profiled: ProfiledLaunch | None = None
        self.marks = executor.marks

    def __call__(self) -> None:
        if self.dependencies:
            undecided = [execution for execution in self.dependencies if not execution.done]
            if lost := self._lost_inputs():
                self._go_without(lost)
                return
            self.dependencies = undecided
        try:
            if self.program.exchanges:
                with running_as(self.replica):
                    token = self._run()
            else:
                token = self._run()
        except BaseException as error:
            self._fail(error)
            return
        self.inputs = self.scalars = _NOTHING  # donated memory goes with the last reference
        if token is not None:
            self.executor.begun(self, token)
            return
        self._end_well()

    def end_on_device(self, error: Exception | None) -> None:
        """End the execution of a launch that the device is done with.

        Nothing of a failed one is run again: its inputs are gone. Nor has a launch a value that
        began before an earlier one failed, whose values it read.
        """
        cause = next((e.failure for e in self.dependencies if e.failure is not None), None)
        if cause is None:
            if error is None:
                self._end_well()
                return
            cause = Failure(in_a_launch(error, self.executor.device, self.program.graph_of))
        for buffer in self.outputs:
            if buffer.execution is self.execution:  # a later launch has the others
                buffer.handle = None
        replaced = [o for o in self.program.replaced if self.outputs[o].previous is None]
        self._note_lost(cause.error, replaced)
        self._end_with([cause] * len(self.outputs))

    def _end_well(self) -> None:
        for buffer in self.replacing:
            buffer.previous = None  # no tensor goes back to that value
        self.execution.finish()

    @property
    def is_inline(self) -> bool:
        """Return True if a profiler wants the run in the thread that asks for it."""
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

    @property
    def usual_seconds(self) -> float:
        return self.program.seconds

    @property
    def waits(self) -> Waits:
        return self.program.waits

    def _run(self) -> LaunchToken | None:
        """Fill the outputs; return the token of a launch that the device has only begun."""
        inputs, outputs = self.inputs, self.outputs
        handles = [buffer.handle for buffer in inputs]
        for position in self.program.outputs.donated:
            if inputs[position].shared:
                handles[position] = copy_of(handles[position], self.executor.device)
        begin = self.capabilities.begin if self.profiled is None else None
        results: Any
        token = None
        started = time.perf_counter_ns()
        if begin is not None:
            results, token = begin(handles, self.scalars)
        else:
            computation = self.computation if self.profiled is None else self.profiled
            results = computation.launch(handles, self.scalars)
        elapsed = time.perf_counter_ns() - started
        if results.__class__ is not list or len(results) != len(outputs):
            results = buffers_of(results, self.computation, len(outputs))
        for buffer, handle in zip(outputs, results):  # as many: looked at just now
            buffer.handle = handle
        self.program.seconds = elapsed * 1e-9
        note_run(elapsed)
        return token

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
        """Handle the error of the run: outputs that do not depend on the failed part are still
        computed.
        """
        for buffer in self.outputs:
            buffer.write_off()  # first: what is said of memory does not count what is not there
        for position, handle in getattr(error, "restored", {}).items():
            self.inputs[position].handle = handle
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
        except Exception as fault:  # of a graph that cannot be made again
            metrics.count("SalvageFailed")
            faults.keep(fault, "the second run of a failed program")
            return [Failure(fault)] * len(self.outputs) if config.value("LTC_CHECK") else None
        except BaseException as error:  # an interrupt
            return [Failure(error)] * len(self.outputs)

    def _note_overwritten(self, error: BaseException, positions: Sequence[int]) -> None:
        """Note the lost inputs: a launch that fails late may have written over them."""
        replaced = self.program.replaced
        written = [output for output, position in replaced.items() if position in positions]
        for output in written:
            self.outputs[output].handle = self.outputs[output].previous = None
        self._note_lost(error, written)

    def _note_lost(self, error: BaseException, outputs: Sequence[int]) -> None:
        """Add the types of outputs whose old values are gone as well."""
        lost = [self.outputs[output] for output in outputs]
        if lost:
            types = ", ".join(f"{list(buffer.shape)} {buffer.dtype}" for buffer in lost)
            error.add_note(f"lost, since the program wrote to it before it failed: {types}")

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
            note_step(failure.error, self.marks)
            self.executor.note_failure(failure)
        self._end(told[0] if told else None, lost)


# A launch that is looked at: by ltc.profile, which keeps its times, or by torch's profiler. The
# latter is shown a span for the launch and one for each kernel. As it sees the calling thread
# alone, the program runs there, one kernel at a time.

_timed: weakref.WeakKeyDictionary[Any, TimedLaunches | None] = weakref.WeakKeyDictionary()


def is_wanted() -> bool:
    """Return True if a profiler records launches now."""
    return spans.timeline is not None or is_profiled()


def of(
    program: Any,
    chosen: tuple[Any, ComputationCapabilities],
    executor: Executor,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
) -> ProfiledLaunch:
    """Return the launch of a program under a profiler.

    Args:
        chosen: The computation to run, and its capabilities.
    """
    timed, launch, timeline = _timed_of(*chosen), None, spans.timeline
    if timeline is not None:
        held = _held(executor.device, timed)
        launch = timeline.ask(program, timed, executor.device, held, inputs, outputs)
        launch.tier = "native" if program.first_runs is None else "interpreted"
    if is_profiled():
        executor.wait()  # then it runs here
        return _ShownToTorch(program, chosen[0], timed, launch)
    return ProfiledLaunch(program, chosen[0], timed, launch)


def _held(device: int, timed: TimedLaunches | None) -> int:
    return account_of(device).bytes + (0 if timed is None else timed.block_bytes)


class ProfiledFrame:
    """A launch in native code of which ltc.profile hears.

    Attributes:
        launch: The launch that tells the times of its kernels; None where Python has to make it.
    """

    def __init__(self, program: Program, device: int) -> None:
        self._program, self._device = program, device
        self._timed: Any = _timed_of(*program.chosen())
        timeline: Any = spans.timeline
        self._timeline: spans.Timeline = timeline
        is_peak = timeline.is_peak(device, _held(device, self._timed))  # whose buffers get names
        framed = self._timed if isinstance(self._timed, TimedFrames) and not is_peak else None
        self.launch: FrameLaunch | None = None if framed is None else framed.in_frame()

    def ran(self, begin: int, frame: int) -> None:
        """Note the run that is just over.

        Args:
            frame: The address of its words.
        """
        held = _held(self._device, self._timed)
        record = self._timeline.ask(self._program, self._timed, self._device, held, (), ())
        record.told(self._timed.stamps_in(frame))
        record.ran(begin, spans.now(), get_ident())


class ProfiledLaunch:
    """In place of a computation: launches it, and tells when it ran.

    Attributes:
        is_inline: True if it has to run in the thread that asks for it.
    """

    is_inline = False

    def __init__(
        self, program: Any, computation: Any, timed: TimedLaunches | None, launch: Any
    ) -> None:
        """Prepare one launch.

        Args:
            timed: The same computation, with times for its kernels.
            launch: A spans.LaunchRecord, or None if no profile is open.
        """
        self._program, self._computation = program, computation
        self._timed, self._launch = timed, launch
        self._told: Callable[[bytes], object] = bytes if launch is None else launch.told

    def launch(self, buffers: list[Any], scalars: list[Any]) -> list[Any]:
        begin = spans.now()
        try:
            return self._launched(buffers, scalars)
        finally:
            if self._launch is not None:
                self._launch.ran(begin, spans.now(), get_ident())

    def _launched(self, buffers: list[Any], scalars: list[Any]) -> list[Any]:
        made: list[Any]
        if self._timed is None:
            made = self._computation.launch(buffers, scalars)
        else:
            made = self._timed.launch_timed(buffers, scalars, self._told)
        return made


class _ShownToTorch(ProfiledLaunch):
    is_inline = True

    def _launched(self, buffers: list[Any], scalars: list[Any]) -> list[Any]:
        program, launch = self._program, self._computation.launch
        if self._timed is not None:
            launch = self._timed.shown(program.graph_of, program.donated, record_region)
        with record_region(f"ltc::launch of {program.calls} calls"):
            made: list[Any] = launch(buffers, scalars)
        return made


def _timed_of(computation: Any, own: ComputationCapabilities) -> TimedLaunches | None:
    if own.timed is not None:
        return own.timed
    if computation not in _timed:
        make = capabilities().timed
        _timed[computation] = make(computation) if make is not None else None
    return _timed[computation]
