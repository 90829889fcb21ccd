"""Calls of which torch looks at the values on the CPU alone: the classes of a one-hot, q of a quantile.

For other devices torch's formulas leave that out, and nothing behind them finds what is wrong.  Here a
recorded call looks, when the step runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from ltc.device.recording.fast_path import lazily_built
from ltc.device.recording.tensors import is_lazy
from ltc.native.core import KERNEL_KEY
from ltc.support.torch_private import (
    DispatchKey,
    dispatch_mode_depth,
    function_mode_depth,
    is_forward_mode,
    is_transformed,
    kernel_of_key,
    plain_functions,
)
from ltc.tracebacks import entrance

aten = torch.ops.aten
SCHEMAS = {
    "one_hot": "(Tensor self, int num_classes) -> Tensor",
    "quantile_fractions": "(Tensor q) -> Tensor",
}
# overload -> the kernel that records it
_RECORDED = {name: lazily_built(f"ltc::{name}") for name in SCHEMAS}
_NEGATIVE = "Class values must be non-negative."
_TOO_LARGE = "Class values must be smaller than num_classes."
_NO_FRACTION = "quantile() q values must be in the range [0, 1]"


def define(library: torch.library.Library) -> None:
    """Define the overloads, each with a kernel that records it."""
    for name, arguments in SCHEMAS.items():
        library.define(name + arguments)
        library.impl(name, _RECORDED[name], KERNEL_KEY)
    library.impl("one_hot", F.one_hot, "CPU")
    library.impl("one_hot", lambda x, classes: x.new_empty((*x.shape, classes)), "Meta")
    library.impl("quantile_fractions", _fractions_of_cpu, "CPU")
    library.impl("quantile_fractions", torch.empty_like, "Meta")


def _fractions_of_cpu(q: torch.Tensor):
    if not ((q >= 0) & (q <= 1)).all():
        raise RuntimeError(_NO_FRACTION)
    return q.clone()


class _Fractions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: torch.Tensor):
        return _RECORDED["quantile_fractions"](q)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor):
        return gradient


def _is_followed() -> bool:
    """Return True if a transform, a mode or a trace is to see torch's own formula."""
    modes = function_mode_depth() or dispatch_mode_depth() or is_forward_mode()
    return bool(modes or is_transformed() or torch.jit.is_tracing())


def _one_hot(formula: Callable[..., Any]) -> Callable[..., Any]:
    def one_hot(self: torch.Tensor, num_classes: int = -1):
        """aten::one_hot."""
        if self.dtype is not torch.int64 or not self.numel():
            return formula(self, num_classes)
        if num_classes == -1:
            least, most = torch.stack(torch.aminmax(self)).tolist()
            if least < 0:
                raise RuntimeError(_NEGATIVE)
            num_classes = most + 1
        if num_classes <= 0:
            raise RuntimeError(_TOO_LARGE)
        return _RECORDED["one_hot"](self, num_classes)

    return one_hot


def _quantile(formula: Callable[..., Any]) -> Callable[..., Any]:
    def quantile(self: torch.Tensor, q: torch.Tensor, *args: Any, **named: Any):
        """aten::quantile and nanquantile."""
        if is_lazy(q) and q.dtype.is_floating_point:
            q = _Fractions.apply(q) if q.requires_grad else _RECORDED["quantile_fractions"](q)
        return formula(self, q, *args, **named)

    return quantile


_KERNELS = {
    "one_hot": _one_hot,
    "quantile": _quantile,
    "quantile.out": _quantile,
    "nanquantile": _quantile,
    "nanquantile.out": _quantile,
}


def install(library: torch.library.Library) -> None:
    """Put the kernels in the place of torch's own formulas for this device."""
    for name, kernel in _KERNELS.items():
        packet, _, overload = name.partition(".")
        by_key = kernel_of_key(getattr(getattr(aten, packet), overload or "default"))
        made = entrance(_unless_followed(kernel, _composite(by_key)))
        for key in (KERNEL_KEY, "AutogradPrivateUse1"):
            library.impl(name, made, key)


def _composite(by_key: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **named: by_key(DispatchKey.CompositeImplicitAutograd, *args, **named)


def _unless_followed(
    kernel: Callable[[Callable[..., Any]], Callable[..., Any]], formula: Callable[..., Any]
) -> Callable[..., Any]:
    checked = kernel(formula)

    def guarded(*args: Any, **named: Any):
        if _is_followed():
            return formula(*args, **named)
        with plain_functions():
            return checked(*args, **named)

    return guarded
