"""torch.jit.save and load of modules and functions with lazy tensors: their files are the CPU's.

torch writes the memory behind each tensor, and behind a lazy one there is none.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import os
import pickle
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.backends import cudnn

from ltc.device.recording.tensors import is_lazy
from ltc.errors import LtcError
from ltc.support.atomic_file import replacing
from ltc.support.stand_in import stand_in
from ltc.support.torch_private import (
    DEVICE_TYPE,
    ONNX_PASSES,
    TRACED_GRAPH,
    RecursiveScriptModule,
    library_for_a_while,
)


def install() -> None:
    """Let TorchScript save what is on ltc.  Once per process."""
    stand_in(torch.jit, "save", _saving_to(torch.jit.save))
    stand_in(torch.jit, "load", _loading_to(torch.jit.load))
    kind: Any
    for kind in (RecursiveScriptModule, torch.jit.ScriptModule, torch.jit.ScriptFunction):
        to_buffer = kind.save_to_buffer
        kind.save = _saving_to(_through_buffer(to_buffer))
        kind.save_to_buffer = _saving_to_buffer(to_buffer)


def _through_buffer(to_buffer: Callable[..., bytes]):
    return lambda script, file, **options: file.write(to_buffer(script, **options))


def _saving_to(original: Callable[..., Any]):
    """`original(script, file, …)`, for a path as well, with its content looked at first."""

    @functools.wraps(original)
    def save(script: torch.jit.ScriptModule, f: Any, *args: Any, **kwargs: Any) -> None:
        buffer = io.BytesIO()
        with _saying_what_to_do():
            original(_on_cpu(script), buffer, *args, **kwargs)
            _require_values(buffer)
        if isinstance(f, (str, os.PathLike)):
            with replacing(f) as file:
                file.write(buffer.getbuffer())
        else:
            f.write(buffer.getvalue())

    return save


def _saving_to_buffer(original: Callable[..., Any]):
    @functools.wraps(original)
    def save_to_buffer(script: torch.jit.ScriptModule, *args: Any, **kwargs: Any):
        with _saying_what_to_do():
            content = original(_on_cpu(script), *args, **kwargs)
            _require_values(io.BytesIO(content))
        return content

    return save_to_buffer


def _loading_to(original: Callable[..., Any]):
    """torch.jit.load, which puts storages on the device: those of ltc hold nothing."""

    @functools.wraps(original)
    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any):
        if map_location is None or torch.device(map_location).type != DEVICE_TYPE:
            return original(f, map_location, *args, **kwargs)
        return original(f, "cpu", *args, **kwargs).to(map_location)

    return load


# --- copies on the CPU ------------------------------------------------------------------------


def _on_cpu(script: torch.jit.ScriptModule):
    """The same, or a copy of it without lazy parameters and buffers."""
    if not isinstance(script, torch.nn.Module):
        return script
    if not any(map(is_lazy, (*script.parameters(), *script.buffers()))):
        return script
    with torch.no_grad():  # it clones
        copied = copy.deepcopy(script)
    copies: dict[int, tuple] = {}  # what is tied stays tied
    for (_, one), (_, other) in zip(_modules(script), _modules(copied), strict=True):
        for kind in ("_parameters", "_buffers"):
            own = getattr(other, kind)
            for name, tensor in getattr(one, kind).items():
                own[name] = copies.setdefault(id(tensor), (tensor, _copy(tensor)))[1]
    return copied


def _modules(script: torch.jit.ScriptModule):
    return script.named_modules(remove_duplicate=False)


def _copy(tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None:
        return None
    plain = tensor.detach().cpu()
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(plain, tensor.requires_grad)
    return plain


# --- what is left -----------------------------------------------------------------------------


class _WithoutValues(LtcError):
    """A file would say that a tensor is on ltc; its values would not be in it."""


@contextlib.contextmanager
def _saying_what_to_do():
    try:
        yield
    except LtcError as error:
        raise LtcError(
            f"torch.jit.save writes parameters and buffers on {DEVICE_TYPE} devices, but this module "
            f"has other tensors there: constants of a trace, or plain attributes. Make them buffers "
            f"(register_buffer), or create them on the CPU and move them in forward."
        ) from error


def _require_values(file: Any) -> None:
    with zipfile.ZipFile(file) as archive:
        for name in archive.namelist():
            if name.endswith(".pkl") and _speaks_of_lazy_tensors(archive.read(name)):
                raise _WithoutValues(name)


def _speaks_of_lazy_tensors(pickled: bytes) -> bool:
    reader = _DeviceReader(io.BytesIO(pickled))
    reader.load()
    return any(place.partition(":")[0] == DEVICE_TYPE for place in reader.places)


class _DeviceReader(pickle.Unpickler):
    """Reads where the tensors of a pickle are, and makes nothing of what it describes."""

    def __init__(self, file: Any) -> None:
        super().__init__(file)
        self.places: list[str] = []

    def find_class(self, module: str, name: str):
        return _Anything

    def persistent_load(self, identity: Any) -> None:
        self.places.append(identity[3])  # ("storage", its type, its name, its place, its size)


class _Anything:
    def __new__(cls, *args: Any):
        return super().__new__(cls)

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        pass


# --- Show torch.jit.trace and torch.onnx.export the calls and values of an ltc device ------------

# torch leaves aten::convolution out of a trace: on every other device it calls
# aten::_convolution, which is traced. So, for as long as anything is traced, it does here as
# well.
#
# ONNX's older exporter looks into the memory of parameters and constants, and takes two of one
# shape at one address for one. A lazy tensor has no memory to look at, so it is given their
# copies on the CPU.


def install_tracing() -> None:
    """Let convolutions be traced, and lazy parameters exported.  Once per process."""
    for name in ("trace", "trace_module"):
        stand_in(torch.jit, name, _with_convolutions(getattr(torch.jit, name)))
    TRACED_GRAPH.replace(_with_convolutions(TRACED_GRAPH.current))
    for graph_pass in ONNX_PASSES:
        graph_pass.replace(_of_cpu_tensors(graph_pass.current))


def _with_convolutions(trace: Callable[..., Any]):
    @functools.wraps(trace)
    def wrapped(*args: Any, **kwargs: Any):
        with library_for_a_while("aten", "IMPL") as library:
            library.impl("convolution", _convolution, "AutogradPrivateUse1", allow_override=True)
            return trace(*args, **kwargs)

    return wrapped


def _convolution(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> torch.Tensor:
    return torch.ops.aten._convolution.default(
        x,
        weight,
        bias,
        stride,
        padding,
        dilation,
        transposed,
        output_padding,
        groups,
        cudnn.benchmark,
        cudnn.deterministic,
        cudnn.enabled,
        cudnn.allow_tf32,
    )


def _of_cpu_tensors(graph_pass: Callable[..., Any]):
    @functools.wraps(graph_pass)
    def wrapped(graph: Any, parameters: dict[str, Any], *args: Any):
        for node in graph.findAllNodes("onnx::Constant"):
            if node.hasAttribute("value") and is_lazy(value := node.t("value")):
                node.t_("value", value.cpu())
        return graph_pass(graph, _traced_on_cpu(parameters), *args)

    return wrapped


def _traced_on_cpu(parameters: dict[str, Any]):
    """The same names and values; a lazy tensor of two names has one copy."""
    tensors = {id(value): value for value in parameters.values() if is_lazy(value)}
    copies = {key: tensor.detach().cpu() for key, tensor in tensors.items()}
    return {name: copies.get(id(value), value) for name, value in parameters.items()}
