"""The backend of this process, and tensors to and from its memory."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from ltc import config
from ltc.backends.eager import EagerBackend
from ltc.backends.interface import BackendCapabilities, BackendImplInterface, BackendRegistrar
from ltc.backends.llvm.backend import LlvmBackend
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


def backend() -> BackendImplInterface:
    """The backend that LTC_BACKEND names; raises BackendMissing where there is none."""
    return BackendRegistrar.get(config.value("LTC_BACKEND"))


def capabilities() -> BackendCapabilities:
    """What that backend can do besides."""
    return BackendRegistrar.capabilities(config.value("LTC_BACKEND"))


def upload(tensor: torch.Tensor, device: int) -> Any:
    """A backend's buffer with a copy of a contiguous CPU tensor, in the type it is kept as."""
    if spans.timeline is None:
        return _upload(tensor, device)
    with spans.timeline.span("upload", f"upload {list(tensor.shape)}", bytes=tensor.nbytes):
        return _upload(tensor, device)


def _upload(tensor: torch.Tensor, device: int) -> Any:
    return backend().computation.upload(tensor.to(physical(tensor.dtype)), device)


def download(handle: Any, dtype: torch.dtype) -> torch.Tensor:
    """A buffer as a contiguous CPU tensor of `dtype`, which may share its memory."""
    return backend().computation.download(handle).to(dtype)


def copy_of(handle: Any, device: int) -> Any:
    """A second buffer with the same elements."""
    computation = backend().computation
    return computation.upload(computation.download(handle), device)
