"""Dtypes of PyTorch as JAX's, and CPU tensors as NumPy arrays in the same memory."""

from __future__ import annotations

from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
import torch

from ltc.ir.tensor_type import LOW_PRECISION

Array: TypeAlias = Any  # a jax.Array, or what stands for one while JAX traces a function

_NAMES = """float64 float32 float16 bfloat16 int64 int32 int16 int8 uint64 uint32 uint16 uint8
    complex128 complex64"""
DTYPES: dict[torch.dtype, np.dtype[Any]] = {
    getattr(torch, name): np.dtype(getattr(jnp, name)) for name in _NAMES.split()
} | {torch.bool: np.dtype(bool)}
_TORCH = {theirs: ours for ours, theirs in DTYPES.items()}
_BFLOAT16 = DTYPES[torch.bfloat16]


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The elements of a contiguous CPU tensor, in its memory."""
    if tensor.dtype == torch.bfloat16:  # of which torch and NumPy know nothing of each other
        return tensor.view(torch.int16).numpy().view(_BFLOAT16)
    return tensor.numpy()


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """The elements of a NumPy array, in its memory where it may be written to."""
    if not array.size:  # NumPy gives it strides of 0, with which torch cannot view its bytes
        return torch.empty(array.shape, dtype=_TORCH[array.dtype])
    if array.dtype == _BFLOAT16:
        return as_tensor(array.view(np.int16)).view(torch.bfloat16)
    if not array.flags.writeable or not array.flags.c_contiguous:
        array = np.array(array, order="C")
    return torch.from_numpy(array)


def torch_dtype(x: Array) -> torch.dtype:
    return _TORCH[np.dtype(x.dtype)]


def is_low(x: Array) -> bool:
    """True if sums and functions of x are computed in float32."""
    return torch_dtype(x) in LOW_PRECISION


def wide(x: Array) -> Array:
    """x as it is computed with."""
    return x.astype(jnp.float32) if is_low(x) else x
