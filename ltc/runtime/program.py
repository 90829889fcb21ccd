"""A compiled graph together with what it takes to launch it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ltc.backends.collective import abort, running_as
from ltc.debug import metrics
from ltc.runtime.buffer import Buffer, Execution, Failure, input_key, under_way
from ltc.runtime.executor import SHORT_SECONDS, executor_of
from ltc.runtime.transfers import copy_of


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
    types        (shape, dtype) of every output
    replaced     output position -> position of the input that it takes the place of, and whose
                 memory it may write over
    roles        every input and scalar, by role
    graph_of     makes the graph it was compiled from anew: kept, it would outweigh the rest
    calls        how many recorded calls it runs
    exchanges    whether it takes part in collectives: then it runs behind its caller, who may have
                 to start the program of another replica
    """

    computation: Any
    types: tuple[tuple, ...]
    replaced: dict[int, int]
    roles: tuple[InputRole, ...] = ()
    graph_of: Callable[[], Any] | None = None
    calls: int = 0
    exchanges: bool = False
    seconds: float = 0.0  # of the latest run: decides whether the next one runs behind the caller

    @cached_property
    def donated(self) -> frozenset[int]:
        """Positions of the inputs whose memory the program may overwrite."""
        return frozenset(self.replaced.values())

    @cached_property
    def _outputs(self) -> tuple[tuple[tuple, int | None], ...]:
        """(type, position of the input it takes the place of or None) of every output."""
        keys = [input_key(shape, dtype) for shape, dtype in self.types]
        return tuple((key, self.replaced.get(i)) for i, key in enumerate(keys))

    def launch(
        self, device: int, inputs: list[Buffer], scalars: list, previous: dict[int, Buffer],
        replica: Any = None,
    ) -> list[Buffer]:
        """Start the program; the outputs may still be on their way when this returns.

        previous  output position -> the buffer whose place it takes if the program ends well, where
                  that is no input
        replica   whose collectives it takes part in
        An error of a short program is raised here, that of a long one when an output is read,
        at the next step mark, or in wait_device_ops().
        """
        executor = executor_of(device)
        started = time.perf_counter_ns()
        executor.wait_for_room()
        metrics.record("DeviceLockWait", time.perf_counter_ns() - started, "time")
        execution, dependencies = Execution(), under_way(inputs)
        outputs = []
        for key, position in self._outputs:
            old = previous.get(len(outputs)) if position is None else inputs[position]
            if position is None or old.shared:
                outputs.append(Buffer(key, device, None, execution, old))
            else:
                old.execution = execution
                outputs.append(old)
        work = _Work(self, executor, execution, dependencies, inputs, scalars, outputs, replica)
        executor.run(work, long=self.exchanges or self.seconds > SHORT_SECONDS)
        return outputs


class _Work:
    """One run of a program, as the executor calls it: never raises, always ends its execution."""

    __slots__ = (
        "program", "executor", "execution", "dependencies", "inputs", "scalars", "outputs",
        "replica",
    )

    def __init__(
        self, program, executor, execution, dependencies, inputs, scalars, outputs, replica
    ):
        """`dependencies`: the launches that it needs to have ended well."""
        self.program, self.executor, self.execution = program, executor, execution
        self.dependencies, self.inputs, self.scalars = dependencies, inputs, scalars
        self.outputs, self.replica = outputs, replica

    def __call__(self) -> None:
        failure = self._failure_of_an_input()
        if failure is None:
            try:
                if self.program.exchanges:
                    with running_as(self.replica):
                        self._run()
                else:
                    self._run()
            except BaseException as error:
                failure = self._failed(error)
        elif self.program.exchanges:
            abort(self.replica, failure.error)
        self.inputs = self.scalars = None  # donated memory goes back with the last reference
        self.execution.finish(failure)

    def lose_outputs(self) -> None:
        for buffer in self.outputs:
            buffer.handle = buffer.previous = None

    def _failure_of_an_input(self) -> Failure | None:
        failures = (execution.failure for execution in self.dependencies)
        return next((failure for failure in failures if failure is not None), None)

    def _run(self) -> None:
        handles = [buffer.handle for buffer in self.inputs]
        if any([buffer.shared for buffer in self.inputs]):
            for position in self.program.donated:
                if self.inputs[position].shared:
                    handles[position] = copy_of(handles[position], self.executor.device)
        started = time.perf_counter_ns()
        results = self.program.computation.launch(handles, self.scalars)
        elapsed = time.perf_counter_ns() - started
        for buffer, handle in zip(self.outputs, results, strict=True):
            buffer.handle = handle
            if buffer.previous is not None:
                buffer.previous = None
        self.program.seconds = elapsed * 1e-9
        metrics.record("ExecuteTime", elapsed, "time")

    def _failed(self, error: BaseException) -> Failure:
        overwritten = set(getattr(error, "overwritten", ()))
        written = []
        for output, position in self.program.replaced.items():
            if position in overwritten:
                buffer = self.outputs[output]
                buffer.handle = buffer.previous = None
                written.append(f"{list(buffer.shape)} {buffer.dtype}")
        if written:
            error.add_note(f"written to before it failed, and lost: {', '.join(written)}")
        failure = Failure(error)
        self.executor.note_failure(failure)
        return failure
