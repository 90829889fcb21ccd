"""The backend of this process, and tensors to and from its memory."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from ltc import config
from ltc.backends.interface import BackendCapabilities, BackendImplInterface, BackendRegistrar
from ltc.errors import InvalidGraph
from ltc.ir.tensor_type import TensorType
from ltc.runtime.physical_dtype import physical
from ltc.support.observation import spans

_chosen = config.reader("LTC_BACKEND")


def backend() -> BackendImplInterface:
    """The backend that LTC_BACKEND names; raises BackendMissing where there is none."""
    (name,) = _chosen()
    return BackendRegistrar.get(name)


def capabilities() -> BackendCapabilities:
    """Return the further capabilities of that backend."""
    (name,) = _chosen()
    return BackendRegistrar.capabilities(name)


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
        f"`download` of the backend {backend().name!r} returned {given} for a buffer of "
        f"{TensorType(dtype, shape)}: it must return a CPU tensor of the buffer's shape. This is a "
        f"fault of the backend, not of your program: see ltc/backends/interface.py."
    )


def copy_of(handle: Any, device: int) -> Any:
    """A second buffer with the same elements."""
    copy = capabilities().copy
    if copy is not None:
        return copy(handle)
    computation = backend().computation
    return computation.upload(computation.download(handle), device)
