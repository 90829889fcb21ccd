"""Programs on disk: the plan and the names of its kernels, as JSON, for another process to run.

With them a process neither traces, fuses nor compiles a step that an earlier one has compiled.
`record_of_plan` writes the list that is kept, `plan_of_record` reads it: to change the format, change both.  A
changed source of ltc changes every name, so that nothing old is read (`program_name`).
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from itertools import islice
from typing import Any

from ltc.backends.llvm.executable import LlvmComputation
from ltc.backends.llvm.program_name import program_name
from ltc.backends.llvm.program_plan import (
    FailedCheck,
    InBlock,
    MemoryChecks,
    PlannedCall,
    PlannedRun,
    ProgramPlan,
    ReferenceCall,
)
from ltc.backends.llvm.resizable import ResizableProgram
from ltc.ir.graph import Origin
from ltc.ir.json_codec import Unrecordable, record_of, value_of
from ltc.llvm.compiler import llvm_binding
from ltc.llvm.native import kernel_cache
from ltc.support.disk_cache import disk_cache
from ltc.support.sizes.as_json import dumped, fill_trace, loaded, record_of_trace
from ltc.support.sizes.choices import tracing
from ltc.support.sizes.extent import SizeTrace

OriginOf = Callable[[int], Origin]


def keep(key: str, plan: ProgramPlan) -> None:
    """Write the program down; one that holds what only this process knows is left out."""
    disk = disk_cache()
    if disk is None:
        return
    try:
        record = record_of_plan(plan)
    except Unrecordable:
        return
    disk.write(program_name(key), json.dumps(record, separators=(",", ":")).encode())


def find(key: str, origin_of: OriginOf) -> LlvmComputation | None:
    """Return a program from the disk cache; None if anything is missing.

    Args:
        origin_of: Gives the origin, in this process, of the call at a position of the recording.
    """
    disk = disk_cache()
    if disk is None or not llvm_binding.may_have_compiled():
        return None
    plan = disk.read_as(program_name(key), lambda data: plan_of_record(json.loads(data), origin_of))
    if plan is None:
        return None
    kernels = loaded_kernels(plan)
    return None if kernels is None else LlvmComputation(plan, kernels)


def loaded_kernels(plan: ProgramPlan) -> dict[str, kernel_cache.LoadedKernel] | None:
    """Load the kernels that the plan names; return None if one is not on the disk."""
    names = dict.fromkeys(
        call.kernel for run in plan.runs if not isinstance(run, ReferenceCall) for call in run
    )
    return kernel_cache.load_from_disk(names)


# --- writing -------------------------------------------------------------------------------------


def record_of_plan(plan: ProgramPlan) -> list[Any]:
    """Raises Unrecordable where it holds what only this process knows."""
    if plan.sums.all:
        raise Unrecordable("a program with sums among replicas")
    names: dict[str, int] = {}  # a kernel that runs often is named once, and so is a type
    types: dict[tuple[Any, ...], int] = {}
    made = [types.setdefault(one, len(types)) for one in plan.made]
    runs = [_run_record(run, names) for run in plan.runs]
    return [
        plan.values, plan.arguments, plan.frame, plan.block, _memory_record(plan.memory),
        plan.called_products, list(names), runs,
        list(map(_check_record, plan.checks)), plan.positions, made,
        [number for output in plan.outputs for number in output],
        *map(
            record_of,
            (
                tuple(types), plan.constants, plan.fixed, plan.cells, plan.scalars,
                tuple((value, _plain(there)) for value, there in plan.in_block),
            ),
        ),
    ]  # fmt: skip


def _run_record(run: tuple[PlannedCall, ...] | ReferenceCall, names: dict[str, int]) -> Any:
    if isinstance(run, ReferenceCall):
        return {
            "node": record_of(run.node), "operands": run.operands, "result": run.result,
            "address": run.address, "dead": run.dead, "origin": _position(run.origin),
        }  # fmt: skip
    # By columns: few objects to read again.  None waits for other replicas: see record_of_plan.
    return {
        "kernels": [names.setdefault(call.kernel, len(names)) for call in run],
        "tasks": [call.tasks for call in run],
        "checks": [call.check for call in run],
        "lengths": [len(call.arguments) for call in run],
        "arguments": [number for call in run for number in call.arguments],
        "overwrites": [[k, *call.overwrites] for k, call in enumerate(run) if call.overwrites],
    }


def _memory_record(checks: MemoryChecks | None) -> list[Any] | None:
    if checks is None:
        return None
    return [base64.b64encode(checks.rows).decode(), checks.names, checks.sizes]


def _check_record(check: FailedCheck) -> list[Any]:
    operands = [o if isinstance(o, int) else record_of(_plain(o)) for o in check.operands]
    origin = _position(check.origin)
    return [record_of(check.node), check.error, check.message, origin, operands]


def _plain(there: InBlock) -> tuple[Any, ...]:
    return (there.offset, there.dtype, there.shape)


def _position(origin: Origin | None) -> int:
    return -1 if origin is None else origin.position


# --- reading -------------------------------------------------------------------------------------


def plan_of_record(record: list[Any], origin_of: OriginOf) -> ProgramPlan:
    """The plan that `record_of_plan` wrote down."""
    values, arguments, frame, block, memory, called_products, names, runs, *rest = record
    checks, positions, made, outputs, *rest = rest
    types, constants, fixed, cells, scalars, in_block = map(value_of, rest)
    return ProgramPlan(
        tuple(positions), tuple(types[number] for number in made), values, constants, fixed,
        cells, scalars,
        tuple(_check(check, origin_of) for check in checks), arguments, frame, block,
        tuple((value, InBlock(*there)) for value, there in in_block),
        tuple(_run(run, names, origin_of) for run in runs),
        tuple(zip(outputs[::2], outputs[1::2])), memory=_memory(memory),
        called_products=called_products,
    )  # fmt: skip


def _run(record: dict[str, Any], names: list[str], origin_of: OriginOf) -> PlannedRun:
    if "node" in record:
        return ReferenceCall(
            value_of(record["node"]), tuple(record["operands"]), record["result"],
            record["address"], tuple(record["dead"]), _origin(record["origin"], origin_of),
        )  # fmt: skip
    overwrites = {k: tuple(positions) for k, *positions in record["overwrites"]}
    columns = (record[column] for column in ("kernels", "tasks", "checks", "lengths"))
    calls, arguments = [], iter(record["arguments"])
    for k, (kernel, tasks, check, length) in enumerate(zip(*columns, strict=True)):
        own = tuple(islice(arguments, length))
        calls.append(PlannedCall(names[kernel], own, tasks, check, overwrites.get(k, ())))
    return tuple(calls)


def _memory(record: list[Any] | None) -> MemoryChecks | None:
    if record is None:
        return None
    rows, names, sizes = record
    return MemoryChecks(base64.b64decode(rows), tuple(names), tuple(map(tuple, sizes)))


def _check(record: list[Any], origin_of: OriginOf) -> FailedCheck:
    node, error, message, origin, operands = record
    found = tuple(o if isinstance(o, int) else InBlock(*value_of(o)) for o in operands)
    return FailedCheck(value_of(node), error, message, _origin(origin, origin_of), found)


def _origin(position: int, origin_of: OriginOf) -> Origin | None:
    return None if position < 0 else origin_of(position)


# Programs of symbols on disk: what was decided by sizes, and the plan with its expressions.


def keep_resizable(key: str, program: ResizableProgram) -> None:
    """Write the program down; one that holds what only this process knows is left out."""
    disk = disk_cache()
    if disk is None:
        return
    try:
        record = [record_of_trace(program.trace), record_of_plan(program.plan)]
    except Unrecordable:
        return
    disk.write(program_name(key), dumped(record).encode())


def find_resizable(key: str, origin_of: OriginOf) -> ResizableProgram | None:
    """The program that some process has kept; None where anything is missing."""
    disk, trace = disk_cache(), SizeTrace()
    if disk is None or not llvm_binding.may_have_compiled():
        return None

    def read(data: bytes) -> Any:
        of_trace, of_plan = loaded(data, trace)
        fill_trace(trace, of_trace)
        return plan_of_record(of_plan, origin_of)

    with tracing(trace):
        plan = disk.read_as(program_name(key), read)
        if plan is None:
            return None
        kernels = loaded_kernels(plan)
        return None if kernels is None else ResizableProgram(trace, plan, kernels)
