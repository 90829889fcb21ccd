"""From a graph as it was traced to what runs it: every pass, then the backend; kept by its name."""

from __future__ import annotations

from typing import Any

import torch

from ltc import config
from ltc.backends.capabilities import Resizable
from ltc.backends.eager import EagerBackend
from ltc.backends.host_memory import as_out_of_memory
from ltc.errors import CodeRefused, Unsupported
from ltc.explaining import faults
from ltc.ir.graph import Graph, calls_text, schedule
from ltc.passes import pipeline
from ltc.runtime.partition import compiled
from ltc.runtime.transfers import backend, capabilities
from ltc.support.bounded_table import BoundedTable
from ltc.support.sizes.extent import SizeTrace
from ltc.support.torch_private import shown_region

# What a program depends on and may change while a process runs. The numeric modes may not.
# The last three do not change how a program is compiled: its record is the same.
SETTINGS = (
    "must_reproduce()", "LTC_BACKEND", "LTC_CHECK", "LTC_CHECK_INDEX", "LTC_TIER", "LTC_VERIFY",
    "LTC_DEBUG_NANS",
)  # fmt: skip
_HAS_GROUPS = torch.distributed.is_available()
_REFERENCE = EagerBackend()
_NO_FAULTS = (Unsupported, CodeRefused, OSError, config.WrongSetting)
_compiled_calls: BoundedTable[tuple[Any, ...], Any] = BoundedTable("CompiledCalls", 64)


def _settings(*variables: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the settings without and with the demand to reproduce: steps compare these tuples all the time."""
    *variables_of_programs, processes, devices = variables
    tier = variables[SETTINGS.index("LTC_TIER") - 1]
    may_differ = tier != "native" and processes <= 1 >= devices
    return (not may_differ, *variables_of_programs), (True, *variables_of_programs)


_settings_of_variables = config.reader(
    *SETTINGS[1:], "XRT_SHARD_WORLD_SIZE", "LTC_NUM_DEVICES", of=_settings
)


def settings_now() -> tuple[Any, ...]:
    """Return the values of `SETTINGS`."""
    settings: tuple[Any, ...] = _settings_of_variables()[_is_asked_to_reproduce()]
    return settings


def must_reproduce() -> bool:
    """Return True if the bits of results may depend on no measurement.

    LTC_TIER=native and deterministic algorithms ask for the same bits in every run. Replicas, which
    measure at other times, are to agree.
    """
    is_needed: bool = settings_now()[0]
    return is_needed


def _is_asked_to_reproduce() -> bool:
    return torch.are_deterministic_algorithms_enabled() or has_peers()


def has_peers() -> bool:
    """Return True if this process is one of a group of torch.distributed."""
    return _HAS_GROUPS and torch.distributed.GroupMember.WORLD is not None


def compile_traced(graph: Graph, device: int, donated: frozenset[int] = frozenset()) -> Any:
    """Return a Computation of this process's backend, in segments where it cannot run every node.

    Where a pass or the backend fails, the reference backend runs the graph as it was traced.

    Raises:
        Unsupported: No backend runs the graph.
        Exception: The compiler failed, and LTC_CHECK is on, or the reference cannot take its place.
    """
    chosen = backend()
    with shown_region("ltc::compile"):
        try:
            return compiled(chosen, pipeline.run(graph), device, donated)
        except Exception as error:
            # a compiler knows nothing of the user's lines
            error.add_note(f"while {chosen.name} compiled {calls_text(graph)}")
            if not is_fault(error) or not _reference_may_run(graph):
                raise
            faults.note(error, f"the compilation by {chosen.name}")
            return _REFERENCE.compile(graph, device, donated)


def is_fault(error: Exception) -> bool:
    """Return True unless the error is of the program, its settings, the machine or the system."""
    if isinstance(error, _NO_FAULTS) or as_out_of_memory(error) is not None:
        return False
    return faults.is_own(error)


def refusal_of(error: Exception, what: str) -> str:
    """Return why something is not made that calls run without; note a fault of ltc's own.

    Args:
        error: The exception that was caught.
        what: The work that failed, as a noun phrase.

    Raises:
        Exception: The error itself, if the program's own code raised it, or if LTC_CHECK is on and it
            is a fault.
    """
    if not isinstance(error, (Unsupported, CodeRefused)):
        if not faults.is_own(error):
            raise error
        if is_fault(error):
            faults.note(error, what)
    return f"{type(error).__name__}: {error}"


def _reference_may_run(graph: Graph) -> bool:
    """True if the backend's buffers are the reference's, and no other replica sums by its kernels."""
    if not capabilities().host_tensors:
        return False
    return not any(node.op.kind == "collective" for node in schedule(*graph.outputs))


def compiled_call(graph: Graph, device: int) -> Any:
    """Compile one call that is part of many programs, such as a draw of normal numbers.

    Calls of one line with equal graphs share the compiled program.
    """
    key = graph.outputs, tuple(graph.lines.values()), device, settings_now()
    known = _compiled_calls.get(key)
    if known is not None:
        return known
    return _compiled_calls.keep(key, compile_traced(graph, device))


def compile_and_keep(name: str, graph: Graph, device: int, donated: frozenset[int]) -> Any:
    """Compile a graph, and keep the program under `name` for later processes if the backend can."""
    computation = compile_traced(graph, device, donated)
    programs = capabilities().programs
    if programs is not None and isinstance(computation, backend().computation):
        programs.remember(name, computation)
    return computation


def resizable_and_keep(
    name: str | None, graph: Graph, device: int, donated: frozenset[int], trace: SizeTrace
) -> Resizable:
    """Return the resizable program of a graph whose sizes are expressions of the trace's symbols.

    Called under the trace.

    Args:
        name: The name under which it is kept; None: it is not kept.

    Raises:
        Unsupported: If the backend compiles none.
    """
    resizable, programs = capabilities().resizable, capabilities().programs
    if resizable is None:
        raise Unsupported("this backend cannot compile programs with symbolic sizes")
    with shown_region("ltc::compile"):
        made = resizable(pipeline.run(graph), device, donated, trace)
    if programs is not None and name is not None:
        programs.remember_resizable(name, made)
    return made
