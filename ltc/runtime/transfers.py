"""The backend of this process, and tensors to and from its memory."""

from __future__ import annotations

from typing import Any

import torch

from ltc import config
from ltc.backends.eager import EagerBackend
from ltc.backends.interface import BackendCapabilities, BackendImplInterface, BackendRegistrar
from ltc.backends.llvm.backend import LlvmBackend
from ltc.profiling import spans
from ltc.runtime.physical_dtype import physical

BackendRegistrar.register(EagerBackend.name, EagerBackend)
BackendRegistrar.register(LlvmBackend.name, LlvmBackend)


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
