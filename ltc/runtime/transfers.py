"""The backend of this process, and tensors to and from its memory."""

from __future__ import annotations

import warnings
from typing import Any, NoReturn

import torch

from ltc import config
from ltc.backends.eager import EagerBackend
from ltc.backends.interface import BackendCapabilities, BackendImplInterface, BackendRegistrar
from ltc.backends.llvm.backend import LlvmBackend
from ltc.errors import InvalidGraph
from ltc.ir.tensor_type import TensorType
from ltc.llvm.compiler.object_loader import is_code_allowed
from ltc.profiling import spans
from ltc.runtime.physical_dtype import physical


def _llvm_or_reference() -> BackendImplInterface:
    """The LLVM backend, where this system lets a process make code; with a warning, the reference."""
    if is_code_allowed():
        return LlvmBackend()
    warnings.warn(
        "This system lets no memory become machine code, as hardened ones do: ltc computes with "
        "PyTorch's own CPU kernels, one call at a time, which is slower. LTC_BACKEND=eager says "
        "so without this warning.",
        stacklevel=2,
    )
    return EagerBackend()


BackendRegistrar.register(EagerBackend.name, EagerBackend)
BackendRegistrar.register(LlvmBackend.name, _llvm_or_reference)


_chosen = config.reader("LTC_BACKEND")


def backend() -> BackendImplInterface:
    """The backend that LTC_BACKEND names; raises BackendMissing where there is none."""
    (name,) = _chosen()
    return BackendRegistrar.get(name)


def capabilities() -> BackendCapabilities:
    """What that backend can do besides."""
    return BackendRegistrar.capabilities(config.value("LTC_BACKEND"))


def upload(tensor: torch.Tensor, device: int) -> Any:
    """A backend's buffer with a copy of a contiguous CPU tensor, in the type it is kept as."""
    (name,) = _chosen()
    copy = BackendRegistrar.get(name).computation.upload
    dtype = tensor.dtype
    kept = physical(dtype)
    if kept is not dtype:
        tensor = tensor.to(kept)
    if spans.timeline is None:
        return copy(tensor, device)
    with spans.timeline.span("upload", f"upload {list(tensor.shape)}", bytes=tensor.nbytes):
        return copy(tensor, device)


def download(handle: Any, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A buffer as a contiguous CPU tensor of that type, which may share its memory."""
    found = backend().computation.download(handle)
    if not isinstance(found, torch.Tensor) or found.shape != shape:
        _refuse(found, shape, dtype)
    if found.dtype is dtype and found.is_contiguous():
        return found
    return found.to(dtype).contiguous()


def _refuse(found: Any, shape: tuple[int, ...], dtype: torch.dtype) -> NoReturn:
    is_tensor = isinstance(found, torch.Tensor)
    given = TensorType(found.dtype, tuple(found.shape)) if is_tensor else type(found).__name__
    raise InvalidGraph(
        f"`download` of the backend {backend().name!r} has given {given} for a buffer of "
        f"{TensorType(dtype, shape)}: it has to return a CPU tensor of the buffer's shape. This is a "
        f"fault of the backend, not of your program: see ltc/backends/interface.py."
    )


def copy_of(handle: Any, device: int) -> Any:
    """A second buffer with the same elements."""
    computation = backend().computation
    return computation.upload(computation.download(handle), device)
