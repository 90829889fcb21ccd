"""A plan made ready to launch: where all of it is native, one call runs the whole step."""

from __future__ import annotations

import builtins
import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any, NoReturn

import torch

from ltc import errors
from ltc.backends import collective_runner
from ltc.backends.capabilities import FrameLaunch
from ltc.backends.eager import LOWERING
from ltc.backends.interface import ComputationCapabilities
from ltc.backends.llvm.host_computation import HostComputation
from ltc.backends.llvm.output_pool import LARGE_BYTES, copied, maker_of
from ltc.backends.llvm.program_plan import (
    ALIAS,
    COPIED,
    ITSELF,
    OWN_VALUES,
    OWNED,
    FailedCheck,
    InBlock,
    PlannedCall,
    PlannedRun,
    ProgramPlan,
    ReferenceCall,
)  # fmt: skip
from ltc.backends.llvm.scalar_arguments import Cells
from ltc.backends.llvm.workspace import Blocks, WorkBlock, constants_of, in_block
from ltc.backends.plain_dispatch import PlainDispatch, has_plain_dispatch
from ltc.backends.reference.own_memory import made_by
from ltc.backends.reference.torch_call import at_sizes, element
from ltc.ir import ops
from ltc.llvm.native import runner
from ltc.llvm.native.kernel_cache import LoadedKernel
from ltc.llvm.native.kernel_run import WORD, EntryCall, KernelRun
from ltc.support.lazy_module import LazyModule
from ltc.support.observation import metrics
from ltc.support.shallow_copy import copied_with, elements_at

_checked_steps = LazyModule("ltc.backends.llvm.checked_steps")  # of programs under LTC_CHECK alone
_blocks = Blocks()
_address_of = torch.Tensor.data_ptr


def _owned(x: torch.Tensor) -> torch.Tensor:
    """Return a result of the reference as a buffer: contiguous and alone in its memory."""
    x = x.contiguous()
    return x.clone() if x.untyped_storage().nbytes() > x.nbytes else x


# What makes an output of a value that is not one as it is.
_MADE_OUTPUT: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {OWNED: _owned, COPIED: copied}


# (number of a run, frame, values) -> the block that this run is in; the values are there once it is over
Around = Callable[[int, WorkBlock, list[Any]], AbstractContextManager[Any]]


def words_of_stamps(run: PlannedRun) -> int:
    """Words of the frame for the times of a run.

    A run of kernels notes when it began and when each was over; a call of the reference has room for
    the times of its beginning and its end.
    """
    return 2 if isinstance(run, ReferenceCall) else 1 + len(run)


class LlvmComputation(HostComputation):
    """A program on this machine's CPU; its buffers are contiguous CPU tensors."""

    def __init__(
        self, plan: ProgramPlan, kernels: Mapping[str, LoadedKernel], stamps: int = 0
    ) -> None:
        """Prepare launches.

        Args:
            kernels: The kernels that the plan names.
            stamps: Place in the frame, in words, from which on `words_of_stamps` of each run follow
                one another; 0: no launch notes times.
        """
        self.plan, self.loaded = plan, kernels  # which stay loaded as long as this is held
        self.frames = Blocks()
        self._read = elements_at(plan.positions)
        self._constants = constants_of(plan)
        self._fixed = [(value, LOWERING.lower(node)()) for value, node in plan.fixed]
        self._constants_address = self._constants.data_ptr()
        given = len(plan.positions) + len(plan.made)
        self._addresses = struct.Struct(f"={given + OWN_VALUES}q")
        self._cells = Cells(plan.cells, plan.values)
        self._sum_words = struct.Struct(f"={plan.sums.words}q")
        self._runs = self._made_ready(plan.runs, stamps)
        self._given = elements_at([value for value, _ in plan.outputs])
        self._made_outputs = [
            (position, _MADE_OUTPUT[how])
            for position, (_, how) in enumerate(plan.outputs)
            if how not in (ITSELF, ALIAS)
        ]
        self._aliased_outputs = _aliased(plan.outputs)
        self._more_values = plan.values - given - OWN_VALUES
        self._is_native = not any(isinstance(run, ReferenceCall) for run in plan.runs)
        self._maker_of: dict[tuple[Any, ...], tuple[Callable[[], torch.Tensor], bool]] = {}
        self._prepare_outputs(plan)
        if plan.called_products:
            metrics.count("CalledProducts", plan.called_products)

    def _prepare_outputs(self, plan: ProgramPlan) -> None:
        known = self._maker_of  # at other sizes, too: most outputs have one size
        makers = {kind: known.get(kind) or maker_of(*kind, plan.guard) for kind in plan.made}
        self._maker_of = makers
        self._makers = [makers[kind][0] for kind in plan.made]
        # Whether a launch asks torch for anything that the caller's modes could change.
        asks = any([asks for _, asks in makers.values()])
        self._dispatches = not self._is_native or bool(self._made_outputs) or asks

    @property
    def capabilities(self) -> ComputationCapabilities:
        """Made when asked for: kept, it would hold the computation that holds it."""
        return ComputationCapabilities(self._aliased_outputs, in_frame=self.in_frame)

    def in_frame(self) -> FrameLaunch | None:
        """The launch of kernels alone, whose checks come before they write over inputs; else None."""
        plan, cells = self.plan, self._cells.formats
        run = self._runs[0] if len(self._runs) == 1 else None
        is_plain = not (plan.sums.all or self._made_outputs or self._more_values)
        if not isinstance(run, _Kernels) or cells is None or not is_plain:
            return None
        if self._aliased_outputs or not run.fails_before_it_writes(plan) or _has_large(plan):
            return None
        return FrameLaunch(
            runner.address(), run.run.address, self._constants_address, plan.frame, plan.block,
            plan.positions, frozenset(run.overwrites), plan.made, plan.guard,
            tuple(value for value, _ in plan.outputs), cells, runner.thread_count,
            partial(run.fail_by_memory, plan),
        )  # fmt: skip

    def words_of(self, run: int, arguments: Any, calls: Any) -> Any:
        """Return the words of a run that hold the addends of these arguments, and these calls'
        tasks.
        """
        return self._runs[run].words_of(arguments, calls)

    def resized(self, plan: ProgramPlan, words: Sequence[tuple[Any, Any]]) -> LlvmComputation:
        """Return the same program at other sizes.

        Args:
            plan: This program's plan with other shapes, bytes of the block and texts of errors.
            words: The arguments of `KernelRun.with_words` for each run.
        """
        runs = [run.with_words(*new) for run, new in zip(self._runs, words, strict=True)]
        other = copied_with(self, plan=plan, _runs=runs)
        if plan.memory is not self.plan.memory:
            other._constants = constants_of(plan)
            other._constants_address = other._constants.data_ptr()
        other._prepare_outputs(plan)
        return other

    @property
    def plan_at_sizes(self) -> ProgramPlan:
        """The plan with the arguments and tasks of its kernels as they are at these sizes."""
        return replace(self.plan, runs=tuple(run.planned for run in self._runs))

    def _made_ready(self, runs: Sequence[PlannedRun], stamps: int) -> list[Any]:
        made: list[Any] = []
        for run in runs:
            if isinstance(run, ReferenceCall):
                made.append(_Reference(run))
            else:
                made.append(self._kernels(run, stamps))
            stamps += words_of_stamps(run) if stamps else 0
        return made

    def _kernels(self, run: tuple[PlannedCall, ...], stamps: int) -> _Kernels:
        first_check = self.plan.first_check
        calls = [
            EntryCall(
                self.loaded[call.kernel].entry, call.arguments, call.tasks,
                0 if call.check < 0 else first_check + call.check,
            )
            for call in run
        ]  # fmt: skip
        awaiting = [k for k, call in enumerate(run) if call.awaits >= 0]
        rests = {k: self._run_from(calls, k + 1, stamps) for k in awaiting}
        return _Kernels(run, self._run_from(calls, 0, stamps), rests)

    def _run_from(self, calls: Sequence[EntryCall], first: int, stamps: int) -> KernelRun:
        """The calls from that number on."""
        checks = self.plan.places_of_checks
        return KernelRun(calls[first:], checks.stop, checks, stamps + first if stamps else 0)

    def launch(
        self, buffers: list[torch.Tensor], scalars: list[Any], around: Around | None = None
    ) -> list[torch.Tensor]:
        """Run the graph: see Computation.launch.

        Args:
            around: Makes the block that each run is in.
        """
        if self._dispatches or not has_plain_dispatch():
            with PlainDispatch():
                return self._launched(buffers, scalars, around)
        return self._launched(buffers, scalars, around)

    def _launched(
        self, buffers: list[torch.Tensor], scalars: list[Any], around: Around | None
    ) -> list[torch.Tensor]:
        plan = self.plan
        frame, block = self.frames.take(plan.frame), _blocks.take(plan.block)
        try:
            values = self._begin(frame, block, buffers, scalars)
            self._run(frame, block, values, around)
            outputs = list(self._given(values))
            for position, made in self._made_outputs:
                outputs[position] = made(outputs[position])
            return outputs
        finally:
            self.frames.give_back(frame)
            _blocks.give_back(block)

    def _begin(
        self, frame: WorkBlock, block: WorkBlock, buffers: list[Any], scalars: list[Any]
    ) -> list[Any]:
        """The values that the launch starts with, their addresses and the scalars in the frame."""
        plan = self.plan
        values = [*self._read(buffers), *[make() for make in self._makers]]
        self._addresses.pack_into(
            frame.memory, 0,
            *map(_address_of, values), frame.address, self._constants_address, 0, block.address,
        )  # fmt: skip
        self._cells.write(frame.memory, scalars)
        if plan.sums.all:
            words = collective_runner.begin(plan.sums)
            self._sum_words.pack_into(frame.memory, WORD * plan.first_sum, *words)
        if self._more_values:
            values += [None] * (OWN_VALUES + self._more_values)
            self._begin_reference(block, values, scalars)
        return values

    def _begin_reference(self, block: WorkBlock, values: list[Any], scalars: list[Any]) -> None:
        for value, constant in self._fixed:
            values[value] = constant
        for value, slot, dtype in self.plan.scalars:
            values[value] = torch.as_tensor(scalars[slot], dtype=dtype)
        for value, where in self.plan.in_block:
            values[value] = in_block(block, where)

    def _run(
        self, frame: WorkBlock, block: WorkBlock, values: list[Any], around: Around | None
    ) -> None:
        done: list[int] = []  # positions of the inputs that were written over
        for number, run in enumerate(self._runs):
            try:
                if around is None:
                    run(self.plan, frame, block, values)
                else:
                    with around(number, frame, values):
                        run(self.plan, frame, block, values)
            except Exception as error:
                written = (*done, *getattr(error, "overwritten", ()))
                error.overwritten = written  # type: ignore[attr-defined]  # see Computation.launch
                raise
            done.extend(run.overwrites)


def _has_large(plan: ProgramPlan) -> bool:
    """Return True if an output lies in the pool."""
    return any([prod(shape) * dtype.itemsize >= LARGE_BYTES for shape, dtype in plan.made])


def _aliased(outputs: Sequence[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    """Positions of outputs that are one value in one place."""
    places: dict[int, list[int]] = {value: [] for value, how in outputs if how == ALIAS}
    for position, (value, how) in enumerate(outputs):
        if value in places and how in (ITSELF, ALIAS):
            places[value].append(position)
    return tuple(map(tuple, places.values()))


class _Kernels:
    """Kernels in a row; their errors carry `overwritten`, see backends/interface.py.

    Attributes:
        run: All of them.
        overwrites: Positions of the inputs that they write over.
    """

    def __init__(
        self, calls: tuple[PlannedCall, ...], run: KernelRun, rests: Mapping[int, KernelRun]
    ) -> None:
        """Prepare a run; `rests` has, by the number of each call that waits for replicas, the run
        after it.
        """
        self._calls, self.run, self._rests = calls, run, rests
        self.overwrites = tuple(p for call in calls for p in call.overwrites)

    def fails_before_it_writes(self, plan: ProgramPlan) -> bool:
        """Return True if no call fails once one has written over an input, or waits for others.

        What LTC_CHECK finds is none of these failures: see `fail_by_memory`.
        """
        calls = self._calls
        writing = next((k for k, call in enumerate(calls) if call.overwrites), len(calls))
        may_fail = (
            k for k, call in enumerate(calls) if call.check >= 0 and not _is_of_memory(plan, call)
        )
        return max(may_fail, default=-1) < writing and not self._rests

    def fail_by_memory(self, plan: ProgramPlan, failed: int, frame: int) -> None:
        """Raise the failure of a launch in native code if that is a finding of LTC_CHECK.

        Args:
            failed: The number of the call.
            frame: The address of the frame.
        """
        if _is_of_memory(plan, self._calls[failed]):
            words: Any = (ctypes.c_char * plan.frame).from_address(frame)
            self.fail(plan, words, None, [], failed)

    def words_of(self, arguments: Any, calls: Any) -> Any:
        return self.run.words_of(arguments, calls)

    def with_words(self, places: Any, words: Any) -> _Kernels:
        return copied_with(self, run=self.run.with_words(places, words))

    @property
    def planned(self) -> tuple[PlannedCall, ...]:
        """The calls with the numbers that the run has."""
        added, tasks = self.run.numbers
        rest = iter(added)
        found = []
        for call, count in zip(self._calls, tasks, strict=True):
            places = call.arguments[::2]
            arguments = tuple(n for place in places for n in (place, next(rest)))
            found.append(call._replace(arguments=arguments, tasks=count))
        return tuple(found)

    def __call__(
        self, plan: ProgramPlan, frame: WorkBlock, block: WorkBlock, values: list[Any]
    ) -> None:
        failed = self.run.launch(frame.address)
        if failed < 0:
            return
        while (
            failed in self._rests
        ):  # others are late: the kernel has stopped waiting, and Python sleeps
            self._await(plan, failed)
            after = self._rests[failed].launch(frame.address)
            failed = after if after < 0 else failed + 1 + after
        if failed >= 0:
            self.fail(plan, frame.memory, block, values, failed)

    def _await(self, plan: ProgramPlan, number: int) -> None:
        """Wait for the other replicas in place of a kernel that has stopped waiting."""
        call = self._calls[number]
        try:
            collective_runner.wait_for_members(call.awaits)
        except Exception as error:
            error.overwritten = self._overwritten(number)  # type: ignore[attr-defined]  # see Computation.launch
            origin = plan.checks[call.check].origin
            if origin is not None:
                error.add_note(f"while running {origin}")
            raise

    def _overwritten(self, failed: int) -> tuple[int, ...]:
        calls = self._calls[: failed + 1]
        return tuple(p for call in calls for p in call.overwrites)

    def fail(
        self, plan: ProgramPlan, words: Any, block: Any, values: list[Any], failed: int
    ) -> NoReturn:
        """Raise what the call of that number stands for; `words`: the memory of the frame."""
        call = self._calls[failed]
        place = WORD * (plan.first_check + call.check)
        (code,) = struct.unpack_from("=q", words, place)
        check = plan.checks[call.check + (code & 0xFF) - 1]
        try:
            raise _error_of(plan, check, code, block, values)
        except Exception as error:
            error.overwritten = self._overwritten(failed)  # type: ignore[attr-defined]  # see Computation.launch
            if check.origin is not None:
                error.add_note(f"while running {check.origin}")
            raise


def _is_of_memory(plan: ProgramPlan, call: PlannedCall) -> bool:
    """Return True if a call looks at what kernels do to memory, for LTC_CHECK."""
    return call.check >= 0 and plan.checks[call.check].error == errors.MemoryFault.__name__


def _error_of(
    plan: ProgramPlan, check: FailedCheck, code: int, block: Any, values: list[Any]
) -> Exception:
    """The error that a fault stands for; where the reference finds one, it raises it."""
    if check.error == errors.MemoryFault.__name__:
        assert plan.memory is not None
        told = _checked_steps.told(plan.memory, code >> 8)
        return errors.MemoryFault(check.message.format(value=told))
    if check.error:
        kind: type[Exception]
        kind = getattr(errors, check.error, None) or getattr(builtins, check.error)
        return kind(check.message.format(value=code >> 8))
    operands = [
        in_block(block, where) if isinstance(where, InBlock) else values[where]
        for where in check.operands
    ]
    made = LOWERING.lower(check.node)(*operands)
    if check.node.op is ops.EXTERN:
        for index in range(len(made)):
            element(made, index)
    return RuntimeError(f"a kernel of {check.node} failed with code {code}, the reference did not")


class _Reference:
    """One node through the reference."""

    overwrites: tuple[int, ...] = ()

    def __init__(self, call: ReferenceCall) -> None:
        self._call, self._compute = call, made_by(call.node, LOWERING.lower(call.node))
        is_extern = call.node.op is ops.EXTERN
        self._name = call.node.attr("template").overload if is_extern else call.node.op.name

    def words_of(self, sizes: Any, calls: Any) -> Any:
        """Return the sizes of its results that `with_words` changes."""
        return sizes

    def with_words(self, places: Any, sizes: Any) -> _Reference:
        node = at_sizes(self._call.node, places, sizes)
        return self if node is self._call.node else _Reference(replace(self._call, node=node))

    @property
    def planned(self) -> ReferenceCall:
        return self._call

    def __call__(
        self, plan: ProgramPlan, frame: WorkBlock, block: WorkBlock, values: list[Any]
    ) -> None:
        call = self._call
        if call.is_counted:
            metrics.count("extern.python")
            metrics.count(f"extern.python::{self._name}")
        try:
            result = self._compute(*[values[value] for value in call.operands])
        except Exception as error:
            if call.origin is not None:
                error.add_note(f"while running {call.origin}")
            raise
        if call.address:
            result = result.contiguous()
            struct.pack_into("=q", frame.memory, WORD * call.result, result.data_ptr())
        values[call.result] = result
        for value in call.dead:
            values[value] = None
