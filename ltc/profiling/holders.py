"""What holds the device's memory: parameters, gradients and optimizer states by their names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from ltc import config
from ltc.device.recording.tensors import is_lazy
from ltc.device.torch_device import state_if_any
from ltc.profiling.spans import Peak
from ltc.support.module_names import models


def names_of_buffers(optimizers: Iterable[Optimizer]) -> dict[int, tuple[str, Any]]:
    """By the identity of a buffer: "parameter layers.0.weight", and its type.

    Of every model that has been called, and these optimizers.
    """
    found: dict[int, tuple[str, Any]] = {}
    names: dict[int, str] = {}  # of parameters, by their identity
    for kind, name, tensor in _of_modules():
        names.setdefault(id(tensor), name)
        _note(found, f"{kind} {name}", tensor)
        if tensor.grad is not None:
            _note(found, f"gradient {name}", tensor.grad)
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
    """What held the memory, as the file has it, the largest first.

    names  as `names_of_buffers` gives them
    """
    found: dict[int, dict[str, Any]] = {}
    block = getattr(peak.computation, "block_bytes", 0)
    if block:
        found[0] = _holder(block, None, None, "block")
    for identity, key in peak.inputs:
        found[identity] = _named_holder(identity, key, "input", names)
    places = _output_places(peak.program)
    for position, (identity, key) in enumerate(peak.outputs):
        if identity not in found:
            found[identity] = holder = _named_holder(identity, key, "output", names)
            place = places[position] if position < len(places) else None
            if place is not None:
                holder["line"], holder["module"] = place.line or None, place.module_path or None
    holders = list(found.values())
    known = sum(one["bytes"] for one in holders)
    if peak.nbytes > known:
        holders.append(_holder(peak.nbytes - known, None, None, "other"))
    return sorted(holders, key=lambda one: -one["bytes"])


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
    """Where each output of a program comes from, or None."""
    if getattr(program, "graph_of", None) is None:
        return []
    with config.override(LTC_DUMP=""):
        graph = program.graph_of()
    return [graph.origins.get(node) for node in graph.outputs]
