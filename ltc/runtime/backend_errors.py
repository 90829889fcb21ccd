"""Error texts where a backend fails: the calls it ran; of memory, the size asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ltc.backends.host_memory import as_out_of_memory
from ltc.errors import InvalidGraph, LtcError, OutOfMemory
from ltc.ir import ops
from ltc.ir.graph import Graph, calls_text, schedule
from ltc.ir.node import Node
from ltc.ir.tensor_type import TensorType, type_text
from ltc.runtime.account import account_of


def in_a_launch(
    error: BaseException, device: int, graph_of: Callable[[], Graph] | None
) -> BaseException:
    """An error of a launch; where a backend says nothing of calls, those of its graph are noted."""
    told = in_a_program(error, device, graph_of)
    if graph_of is not None and not _says_where(told):
        told.add_note(f"while running {calls_text(graph_of())}")
    return told


def note_step(error: BaseException, marks: int) -> None:
    """Add to the error how many step marks came before its launch, or its call; once."""
    if marks and not any(note.startswith(_STEP) for note in getattr(error, "__notes__", ())):
        error.add_note(f"{_STEP}{marks} step mark{'s' if marks > 1 else ''}")


_STEP = "in the step after "


def _says_where(error: BaseException) -> bool:
    """Return True for an error that names its place: ltc's own do, and an interrupt comes from
    elsewhere.
    """
    if isinstance(error, LtcError) or not isinstance(error, Exception):
        return True
    return any(note.startswith("while running ") for note in getattr(error, "__notes__", ()))


def buffers_of(results: Any, computation: Any, count: int) -> Sequence[Any]:
    """Return a launch's results: one buffer for each of its `count` outputs; else raise
    InvalidGraph.
    """
    given = f"a {type(results).__name__}"
    if isinstance(results, (list, tuple)):
        if len(results) == count:
            return results
        given += f" of {len(results)}"
    kind = type(computation)
    raise InvalidGraph(
        f"{kind.__module__}.{kind.__qualname__}.launch returned {given} for a program of {count} "
        f"outputs: it must return a list with one new buffer for each. This is a fault of the "
        f"backend, not of your program: see ltc/backends/interface.py."
    )


def in_a_program(
    error: BaseException, device: int, graph_of: Callable[[], Graph] | None
) -> BaseException:
    """An error of a launch; one of memory names the largest value of its graph."""
    found = as_out_of_memory(error)
    if found is None:
        return error
    return _told(found, error, device, "" if graph_of is None else _largest(graph_of()))


def in_an_upload(error: Exception, device: int) -> Exception:
    """An error of a copy to the device."""
    found = as_out_of_memory(error)
    return error if found is None else _told(found, error, device, "")


def _told(found: OutOfMemory, error: BaseException, device: int, culprit: str) -> OutOfMemory:
    asked = f"{found.nbytes} bytes more" if found.nbytes else "more memory"
    told = OutOfMemory(
        f"ltc:{device} out of memory. Tried to allocate {asked}; its tensors hold "
        f"{account_of(device).bytes} bytes.{culprit} Smaller batches need less, and so do fewer "
        f"steps at a time (LTC_MAX_IN_FLIGHT=1). torch.ltc.memory_snapshot() lists what is held.",
        found.nbytes,
    )
    told.__cause__ = error
    for note in getattr(error, "__notes__", ()):
        told.add_note(note)
    told.overwritten = getattr(error, "overwritten", ())  # type: ignore[attr-defined]  # see Computation.launch
    return told


def _largest(graph: Graph) -> str:
    made = [node for node in schedule(*graph.outputs) if node.op is not ops.INPUT]
    nodes = [node for node in made if node in graph.origins]
    if not nodes:
        return ""
    node = max(nodes, key=_nbytes)
    made_by = graph.origins[node]
    return f" The largest value of the program is {type_text(node.type)}, made by {made_by}."


def _nbytes(node: Node) -> int:
    types = (node.type,) if isinstance(node.type, TensorType) else node.type
    return sum(type.size * type.dtype.itemsize for type in types)
