"""Programs of symbols on disk: what was decided by sizes, and the plan with its expressions."""

from __future__ import annotations

from typing import Any

from ltc.backends.llvm.any_size.resizable import ResizableProgram
from ltc.backends.llvm.saved_program import (
    OriginOf,
    loaded_kernels,
    plan_of_record,
    program_name,
    record_of_plan,
)
from ltc.ir.json_codec import Unrecordable
from ltc.llvm.compiler import llvm_binding
from ltc.support.disk_cache import disk_cache
from ltc.support.sizes.as_json import dumped, fill_trace, loaded, record_of_trace
from ltc.support.sizes.choices import tracing
from ltc.support.sizes.extent import SizeTrace


def keep(key: str, program: ResizableProgram) -> None:
    """Write the program down; one that holds what only this process knows is left out."""
    disk = disk_cache()
    if disk is None:
        return
    try:
        record = [record_of_trace(program.trace), record_of_plan(program.plan)]
    except Unrecordable:
        return
    disk.write(program_name(key), dumped(record).encode())


def find(key: str, origin_of: OriginOf) -> ResizableProgram | None:
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
