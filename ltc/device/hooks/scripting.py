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
from collections.abc import Callable
from typing import Any

import torch

from ltc.device.recording.tensors import is_lazy
from ltc.errors import LtcError
from ltc.support.atomic_file import replacing
from ltc.support.stand_in import stand_in
from ltc.support.torch_private import DEVICE_TYPE, RecursiveScriptModule


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
            f"torch.jit.save writes parameters and buffers of {DEVICE_TYPE} devices, and here are "
            f"other tensors on them: constants that a trace has met, or plain attributes. Make "
            f"them buffers (register_buffer), or make them on the CPU and move them in forward."
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
