"""This machine's CPU as a backend. What compiles is imported where the first program is compiled:
calls that run when they are made need none of it.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from ltc.backends.eager import LOWERING, EagerBackend
from ltc.backends.interface import (
    BackendCapabilities,
    BackendImplInterface,
    Computation,
    DeviceInfo,
    NodeLowering,
    OneShotSums,
)  # fmt: skip
from ltc.backends.llvm.host_computation import HostComputation
from ltc.llvm.compiler.object_loader import is_code_allowed
from ltc.llvm.native import system
from ltc.support.lazy_module import LazyModule
from ltc.support.process import processors
from ltc.support.sizes.extent import SizeTrace

if TYPE_CHECKING:
    from ltc.backends.llvm.executable import LlvmComputation
    from ltc.backends.llvm.resizable import ResizableProgram
    from ltc.backends.llvm.timed import ObservedLlvmComputation, TimedComputation
    from ltc.ir.graph import Graph, Origin

_compiling = LazyModule("ltc.backends.llvm.compiling")
_program_name = LazyModule("ltc.backends.llvm.program_name")
_runner = LazyModule("ltc.llvm.native.runner")
_saved_program = LazyModule("ltc.backends.llvm.saved_program")

# The names of what a graph becomes: after each of compiling.PASSES, then as text.
STAGES = (
    "recognise", "order", "channels_last", "layout", "split", "split_concats", "narrow_scratch",
    "one_shot_sums", "kernels", "llvm", "assembly",
)  # fmt: skip
# A sum of few is added up by everyone: each more is one more operand to read for all of them.
ONE_SHOT_SUMS = OneShotSums(
    dtypes=frozenset({torch.float32, torch.float64, torch.int32, torch.int64}), most_members=4
)


class SavedPrograms:
    """The `KeepsPrograms` of backends/capabilities.py: plans and objects in the disk cache."""

    def remember(self, key: str, computation: LlvmComputation) -> None:
        _saved_program.keep(key, computation.plan)

    def recall(self, key: str, origin_of: Callable[[int], Origin]) -> LlvmComputation | None:
        if not _program_name.is_kept(key):
            return None
        found: LlvmComputation | None = _saved_program.find(key, origin_of)
        return found

    def remember_resizable(self, key: str, program: ResizableProgram) -> None:
        _saved_program.keep_resizable(key, program)

    def recall_resizable(
        self, key: str, origin_of: Callable[[int], Origin]
    ) -> ResizableProgram | None:
        if not _program_name.is_kept(key):
            return None
        found: ResizableProgram | None = _saved_program.find_resizable(key, origin_of)
        return found


class LlvmBackend:
    """Compiles graphs for this machine's CPU."""

    name = "llvm"
    computation: type[Computation] = HostComputation

    def __init__(self) -> None:
        # Every op runs: what has no kernel goes through the reference.
        self.lowering = NodeLowering(LOWERING.table)
        self.capabilities = BackendCapabilities(
            resizable=self.resizable,
            leave_processor=_leave_processor,
            programs=SavedPrograms(),
            observed=self.observed,
            stages=STAGES,
            explain=self.explain,
            any_device=True,
            host_tensors=True,
            one_shot_sums=ONE_SHOT_SUMS if system.has_threads() else None,
            timed=self.timed,
            limits=_limits,
            describe=processor,
        )

    def devices(self) -> tuple[DeviceInfo, ...]:
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return (DeviceInfo("CPU", processors.name(), memory_bytes),)

    def compile(self, graph: Graph, device: int, donated: frozenset[int]) -> LlvmComputation:
        made: LlvmComputation = _compiling.compiled(graph, donated)
        return made

    def resizable(
        self, graph: Graph, device: int, donated: frozenset[int], trace: SizeTrace
    ) -> ResizableProgram:
        made: ResizableProgram = _compiling.resizable(graph, donated, trace)
        return made

    def observed(
        self, graph: Graph, device: int, donated: frozenset[int]
    ) -> ObservedLlvmComputation:
        made: ObservedLlvmComputation = _compiling.observed(graph, donated)
        return made

    def timed(self, computation: Any) -> TimedComputation | None:
        made: TimedComputation | None = _compiling.timed(computation)
        return made

    def explain(
        self, graph: Graph, donated: frozenset[int] = frozenset()
    ) -> Iterator[tuple[str, str]]:
        """(stage, text) for each of `STAGES`, made only as far as it is asked for."""
        texts: Iterator[tuple[str, str]] = _compiling.explain(graph, donated)
        return texts

    def prepare_to_exit(self) -> None:
        """Nothing runs between launches."""


def _leave_processor(until: int) -> None:
    """See `runner.leave_processor`; without a program, no kernel has any processor."""
    if _runner.is_imported:
        _runner.leave_processor(until)


def _limits() -> dict[str, Any]:
    """Return the most that this machine does: see machine_limits.py."""
    found: dict[str, Any] = _compiling.machine()
    return found


def processor() -> str:
    """The processor's name, and the instructions that kernels are made of."""
    name: str = _compiling.processor()
    return name


def llvm_or_reference() -> BackendImplInterface:
    """Return the LLVM backend; warn and return the reference where no memory may become code."""
    if is_code_allowed():
        return LlvmBackend()
    warnings.warn(
        "This system forbids executable memory, as hardened systems do, so ltc cannot run compiled "
        "programs. It runs PyTorch's own CPU kernels, one call at a time, which is slower. Set "
        "LTC_BACKEND=eager to choose this without the warning.",
        stacklevel=2,
    )
    return EagerBackend()
