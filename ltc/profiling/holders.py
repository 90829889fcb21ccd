"""The holders of the device's memory: parameters, gradients and optimizer states by their names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

import torch
from torch.optim import Optimizer

from ltc import config
from ltc.device.recording.tensors import current_device, is_lazy
from ltc.device.torch_device import state_if_any
from ltc.support.module_names import models
from ltc.support.observation.spans import Peak


def names_of_buffers(optimizers: Iterable[Optimizer]) -> dict[int, tuple[str, Any]]:
    """By the identity of a buffer: "parameter layers.0.weight", and its type.

    Of every model that has been called, and these optimizers.  Gradients are those of the calling
    thread's device: the backward pass of another one may be writing them, without Python's lock.
    """
    here = current_device().index
    found: dict[int, tuple[str, Any]] = {}
    names: dict[int, str] = {}  # of parameters, by their identity
    for kind, name, tensor in _of_modules():
        names.setdefault(id(tensor), name)
        _note(found, f"{kind} {name}", tensor)
        gradient = tensor.grad if is_lazy(tensor) and tensor.device.index == here else None
        if gradient is not None:
            _note(found, f"gradient {name}", gradient)
    for optimizer in list(optimizers):
        for parameter, state in optimizer.state.items():
            name = names.get(id(parameter), "a parameter")
            for key, tensor in state.items() if isinstance(state, dict) else ():
                if isinstance(tensor, torch.Tensor):
                    _note(found, f"optimizer {key} of {name}", tensor)
    return found


def _of_modules() -> Iterator[tuple[str, str, torch.Tensor]]:
    for module in models():
        yield from (("parameter", *named) for named in module.named_parameters())
        yield from (("buffer", *named) for named in module.named_buffers())


def _note(found: dict[int, tuple[str, Any]], name: str, tensor: torch.Tensor) -> None:
    buffer = getattr(state_if_any(tensor), "buffer", None) if is_lazy(tensor) else None
    if buffer is not None:
        found.setdefault(id(buffer), (name, buffer.key))


# --- of the most that there was ---------------------------------------------------------------------


def holders_of(peak: Peak, names: Mapping[int, tuple[str, Any]]) -> list[dict[str, Any]]:
    """Return the holders of the memory, as the file has them, the largest first.

    Args:
        names: The result of `names_of_buffers`.
    """
    found: dict[int, dict[str, Any]] = {}
    block = getattr(peak.computation, "block_bytes", 0)
    inside = _values_inside(peak, block) if block else []
    if block:
        rest = block - sum(one["bytes"] for one in inside)
        found[0] = _holder(rest, None, None, "block")
    for identity, key in peak.inputs:
        found[identity] = _named_holder(identity, key, "input", names)
    places = _output_places(peak.program)
    for position, (identity, key) in enumerate(peak.outputs):
        if identity not in found:
            found[identity] = holder = _named_holder(identity, key, "output", names)
            place = places[position] if position < len(places) else None
            if place is not None:
                holder["line"], holder["module"] = place.line or None, place.module_path or None
    holders = [*found.values(), *inside]
    known = sum(one["bytes"] for one in holders)
    if peak.nbytes > known:
        holders.append(_holder(peak.nbytes - known, None, None, "other"))
    return sorted(holders, key=lambda one: -one["bytes"])


def _values_inside(peak: Peak, block: int) -> list[dict[str, Any]]:
    """Return the values of a program's own memory; of those that share memory the larger ones."""
    values_at_peak = getattr(peak.computation, "values_at_peak", None)
    graph_of = getattr(peak.program, "graph_of", None)
    if values_at_peak is None or graph_of is None:
        return []
    found, left = [], block
    for type, origin in values_at_peak(graph_of, peak.program.donated):
        size = prod(type.shape) * type.dtype.itemsize
        if size <= left:
            dtype = str(type.dtype).removeprefix("torch.")
            holder = _holder(size, list(type.shape), dtype, "value")
            line, module = origin.forward or origin.line, origin.module_path
            holder["line"], holder["module"] = line or None, module or None
            found.append(holder)
            left -= size
    return found


def _named_holder(
    identity: int, key: Any, kind: str, names: Mapping[int, tuple[str, Any]]
) -> dict[str, Any]:
    _, shape, dtype, nbytes = key
    record = _holder(nbytes, list(shape), str(dtype).removeprefix("torch."), kind)
    named = names.get(identity)
    if named is not None and named[1] == key:
        record["kind"], _, record["name"] = named[0].partition(" ")
    return record


def _holder(nbytes: int, shape: Any, dtype: Any, kind: str) -> dict[str, Any]:
    return {
        "bytes": nbytes, "shape": shape, "dtype": dtype, "kind": kind, "name": None, "line": None,
        "module": None,
    }  # fmt: skip


def _output_places(program: Any) -> list[Any]:
    """Return where each output of a program comes from, or None."""
    if getattr(program, "graph_of", None) is None:
        return []
    with config.override(LTC_DUMP=""):
        graph = program.graph_of()
    return [graph.origins.get(node) for node in graph.outputs]
