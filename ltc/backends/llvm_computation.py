"""A plan made ready to launch: where all of it is native, one call runs the whole step."""

from __future__ import annotations

import builtins
import struct
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ltc.backends.eager import LOWERING, EagerComputation
from ltc.backends.llvm_blocks import Block, Blocks
from ltc.backends.llvm_cells import Cells
from ltc.backends.llvm_plan import (
    COPIED,
    ITSELF,
    OWNED,
    WORD,
    FailedCheck,
    InBlock,
    Plan,
    PlannedCall,
    ReferenceCall,
)  # fmt: skip
from ltc.backends.output_pool import maker_of
from ltc.backends.undisturbed import Undisturbed, is_alone
from ltc.debug import metrics
from ltc.ir import ops
from ltc.llvm.loading import LoadedKernel
from ltc.llvm.program import KernelCall, KernelRun
from ltc.passes.memory import ALIGNMENT

_blocks = Blocks()
_address_of = torch.Tensor.data_ptr


def _copied(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def _owned(x: torch.Tensor) -> torch.Tensor:
    """What the reference gave, as a buffer: contiguous and alone in its memory."""
    x = x.contiguous()
    return x.clone() if x.untyped_storage().nbytes() > x.nbytes else x


_WAYS: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {OWNED: _owned, COPIED: _copied}


class LlvmComputation:
    """A program on this machine's CPU; its buffers are contiguous CPU tensors."""

    upload = staticmethod(EagerComputation.upload)
    download = staticmethod(EagerComputation.download)
    wait = staticmethod(EagerComputation.wait)

    def __init__(self, plan: Plan, kernels: Mapping[str, LoadedKernel]):
        """`kernels`: those that the plan names."""
        self.plan, self._kernels = plan, kernels  # which stay loaded as long as this is held
        self._reads_all = plan.positions == tuple(range(len(plan.positions)))
        self._constants = _constants_of(plan)
        self._fixed = [(value, LOWERING.lower(node)()) for value, node in plan.fixed]
        # Of the block, whose address comes first, the constants, and nothing.
        self._tail = (self._constants.data_ptr(), 0)
        given = len(plan.positions) + len(plan.made)
        self._addresses = struct.Struct(f"={given + 3}q")
        self._cells = Cells(plan.cells, WORD * plan.values)
        self._runs = [self._made_ready(run) for run in plan.runs]
        self._outputs = [value for value, _ in plan.outputs]
        self._ways = [
            (position, _WAYS[way]) for position, (_, way) in enumerate(plan.outputs)
            if way != ITSELF
        ]
        self._more_values = plan.values - given
        makers = [maker_of(shape, dtype) for shape, dtype in plan.made]
        self._makers = [make for make, _ in makers]
        native = not any(isinstance(run, ReferenceCall) for run in plan.runs)
        # Whether a launch asks torch for anything that the caller's modes could change.
        self._dispatches = not native or bool(self._ways) or any(asks for _, asks in makers)

    def _made_ready(self, run):
        if isinstance(run, ReferenceCall):
            return _Reference(run)
        first_check = self.plan.values + len(self.plan.cells)
        checks = range(first_check, first_check + len(self.plan.checks))
        calls = [
            KernelCall(
                self._kernels[call.kernel].entry, call.arguments, call.tasks,
                0 if call.check < 0 else first_check + call.check,
            )
            for call in run
        ]  # fmt: skip
        return _Kernels(run, KernelRun(calls, checks.stop, checks))

    def launch(self, buffers: list[torch.Tensor], scalars: list[Any]) -> list[torch.Tensor]:
        if self._dispatches or not is_alone():
            with Undisturbed():
                return self._launched(buffers, scalars)
        return self._launched(buffers, scalars)

    def _launched(self, buffers: list[torch.Tensor], scalars: list[Any]) -> list[torch.Tensor]:
        block = _blocks.take(self.plan.block)
        try:
            values = self._begin(block, buffers, scalars)
            self._run(block, values)
            outputs = [values[value] for value in self._outputs]
            for position, own in self._ways:
                outputs[position] = own(outputs[position])
            return outputs
        finally:
            _blocks.give_back(block)

    def _begin(self, block: Block, buffers, scalars) -> list[Any]:
        """The values that the launch starts with, their addresses and the scalars in the frame."""
        plan = self.plan
        values = list(buffers) if self._reads_all else [buffers[p] for p in plan.positions]
        del values[len(plan.positions) :]
        values += [make() for make in self._makers]
        addresses = map(_address_of, values)
        self._addresses.pack_into(block.memory, 0, *addresses, block.address, *self._tail)
        self._cells.write(block.memory, scalars)
        if self._more_values > 3:
            values += [None] * self._more_values
            self._begin_reference(block, values, scalars)
        return values

    def _begin_reference(self, block: Block, values: list[Any], scalars) -> None:
        for value, constant in self._fixed:
            values[value] = constant
        for value, slot, dtype in self.plan.scalars:
            values[value] = torch.as_tensor(scalars[slot], dtype=dtype)
        for value, where in self.plan.in_block:
            values[value] = _in_block(block, where)

    def _run(self, block: Block, values: list[Any]) -> None:
        done: list[int] = []  # positions of the inputs that were written over
        for run in self._runs:
            try:
                run(self.plan, block, values)
            except Exception as error:
                done.extend(run.overwritten)
                error.overwritten = tuple(done)
                raise
            done.extend(run.overwrites)


class _Kernels:
    """Kernels in a row.

    overwrites   positions of the inputs that they write over
    overwritten  of those that they had written over when one failed
    """

    def __init__(self, calls: tuple[PlannedCall, ...], run: KernelRun):
        self._calls, self._run = calls, run
        self.overwrites = tuple(p for call in calls for p in call.overwrites)

    def __call__(self, plan: Plan, block: Block, values: list[Any]) -> None:
        failed = self._run.launch(block.address)
        if failed >= 0:
            calls = self._calls[: failed + 1]
            self.overwritten = tuple(p for call in calls for p in call.overwrites)
            self._raise(plan, block, values, calls[-1])

    def _raise(self, plan: Plan, block: Block, values: list[Any], call: PlannedCall) -> None:
        place = WORD * (plan.values + len(plan.cells) + call.check)
        (code,) = struct.unpack_from("=q", block.memory, place)
        check = plan.checks[call.check + (code & 0xFF) - 1]
        try:
            raise _error_of(check, code, block, values)
        except Exception as error:
            if check.origin is not None:
                error.add_note(f"while running {check.origin}")
            raise


def _error_of(check: FailedCheck, code: int, block: Block, values: list[Any]) -> Exception:
    """The error that a fault stands for; where the reference finds one, it raises it."""
    if check.error:
        return getattr(builtins, check.error)(check.message.format(value=code >> 8))
    operands = [
        _in_block(block, where) if isinstance(where, InBlock) else values[where]
        for where in check.operands
    ]
    LOWERING.lower(check.node)(*operands)
    return RuntimeError(f"a kernel of {check.node} failed with code {code}, the reference did not")


class _Reference:
    """One node through the reference."""

    overwrites = overwritten = ()

    def __init__(self, call: ReferenceCall):
        self._call, self._compute = call, LOWERING.lower(call.node)
        is_extern = call.node.op is ops.EXTERN
        self._name = call.node.attr("template").overload if is_extern else call.node.op.name

    def __call__(self, plan: Plan, block: Block, values: list[Any]) -> None:
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
            struct.pack_into("=q", block.memory, WORD * call.result, result.data_ptr())
        values[call.result] = result
        for value in call.dead:
            values[value] = None


def _in_block(block: Block, where: InBlock) -> torch.Tensor:
    # A storage of its own: as_strided counts from where the storage begins.
    count = torch.Size(where.shape).numel()
    flat = torch.frombuffer(block.memory, dtype=where.dtype, count=count, offset=where.offset)
    return flat.view(where.shape)


def _constants_of(plan: Plan) -> torch.Tensor:
    """The memory of the constants that kernels read."""
    memory = torch.zeros(ALIGNMENT * max(1, len(plan.constants)), dtype=torch.uint8)
    for node, offset in plan.constants:
        value = LOWERING.lower(node)().reshape(1)
        memory[offset : offset + value.nbytes] = value.view(torch.uint8)
    return memory
