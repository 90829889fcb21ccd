"""contiguous, reshape, flatten and ravel of a view are copies where the CPU's are.

torch decides by the strides of a tensor, and every lazy tensor appears contiguous. So its Python
functions ask here first; with the native core, its kernels of reshape and flatten ask where they do not
know. The tensors that C++ reshapes for its own use are never written to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ltc.device.recording.recorder import device_at
from ltc.device.recording.strides import Strides, layout_by, strides_of, without_values
from ltc.device.torch_device import storage_of
from ltc.native.core import CORE
from ltc.support.stand_in import stand_in
from ltc.support.torch_private import plain_functions, register_builtin, storage_identity

_NAMES = ("contiguous", "ravel")
_NAMES_WITHOUT_CORE = ("reshape", "reshape_as", "flatten")  # the core's kernels of these decide
# what a fake tensor and other wrappers raise where a lazy tensor's state is looked for
_NO_STATE = (AttributeError, TypeError, NotImplementedError, RuntimeError)
is_compiling = torch.compiler.is_compiling


def install() -> None:
    for name in _NAMES if CORE is not None else _NAMES + _NAMES_WITHOUT_CORE:
        method = getattr(torch.Tensor, name)
        stand_in(torch.Tensor, name, _method(method))
        if hasattr(torch, name):
            function = _function(getattr(torch, name), method)
            stand_in(torch, name, function)
            register_builtin(function, f"aten::{name}")  # a script means torch's own by it


def _method(original: Callable[..., Any]):
    """A tensor's method, given a copy of a lazy view of which it makes a copy on the CPU."""

    @functools.wraps(original)
    def method(self: torch.Tensor, *args: Any, **kwargs: Any):
        if self.is_cpu:
            return original(self, *args, **kwargs)
        return original(_copy_where_needed(original, self, args, kwargs), *args, **kwargs)

    return method


def _function(original: Callable[..., Any], method: Callable[..., Any]):
    """The same for torch's function of that name, through which Dynamo looks."""

    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any):
        if is_compiling() or not args:
            return original(*args, **kwargs)
        tensor = _copy_where_needed(method, args[0], args[1:], kwargs)
        return original(tensor, *args[1:], **kwargs)

    return function


def _copy_where_needed(
    method: Callable[..., Any], tensor: torch.Tensor, args: tuple, kwargs: dict
) -> torch.Tensor:
    return tensor if _is_left(method, tensor, args, kwargs) else tensor.clone()


def reshapes_by_copy(tensor: torch.Tensor, sizes: Sequence[int]) -> bool:
    """Return True if the CPU would reshape the tensor by a copy."""
    return not _is_left(torch.Tensor.reshape, tensor, tuple(sizes), {})


def _is_left(method: Callable[..., Any], tensor: torch.Tensor, args: tuple, kwargs: dict) -> bool:
    """Return True if the method takes the tensor as it is: it makes a view of it, as on the CPU."""
    try:
        strides = _strides_of(tensor)
    except _NO_STATE:
        return True
    if strides is None:
        return True
    shape, named = tuple(tensor.shape), tuple(kwargs.items())
    if method.__name__ == "reshape_as":
        method, args = torch.Tensor.reshape, tuple(args[0].shape)
    try:
        return _gives_view(method, shape, strides, args, named)
    except TypeError:  # a list has no hash
        return _gives_view.__wrapped__(method, shape, strides, args, named)


def _strides_of(tensor: torch.Tensor) -> Strides:
    """The core is asked first: what it has, it keeps."""
    storage = storage_of(tensor)
    if CORE is not None:
        known = CORE.view_strides(storage_identity(storage))
        if known == -2:
            known = _of_followed_view(storage)
        if not isinstance(known, int):
            return known or None
    return strides_of(storage.lazy)


def _of_followed_view(storage: Any) -> tuple[int, ...] | int:
    """Return the strides of a view that the core follows; -1 where it does not know them."""
    told, walk = (
        torch.ops.ltc_core.walked_view(storage_identity(storage)),
        device_at(0).recorder().walk,
    )
    if told is None or walk is None:
        return -1
    shape, like, links = told
    chain = tuple([walk.track.link(*link) for link in links])
    return layout_by(chain, tuple(shape), like.dtype).strides or ()


@functools.lru_cache(1024)
def _gives_view(
    method: Callable[..., Any],
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    args: tuple,
    named: tuple,
) -> bool:
    with plain_functions(), torch.no_grad():
        viewed = without_values(shape, strides, torch.uint8)
        try:
            result = method(viewed, *args, **dict(named))
        except (RuntimeError, TypeError, IndexError):  # so it will for the caller
            return True
    return storage_of(result) is storage_of(viewed)
