"""F.linear as one recorded call, and its gradients as another.

torch takes the overload of an outside device apart: a transposition, views around a product, and in a
backward some seven calls more. Its autograd does have a formula for the whole, which devices of its own
use; here it is asked for under the key of nested tensors, the only one that always stands for it. What
the formula does not hold for (batching rules, forward mode, classes and modes that expect the parts) is
taken apart as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from ltc.device.recording.fast_path import lazily_built
from ltc.native.core import CORE, KERNEL_KEY
from ltc.support.torch_private import (
    DispatchKey,
    DispatchKeySet,
    dispatch_mode_depth,
    function_mode_depth,
    has_own_dispatch,
    is_forward_mode,
    is_transformed,
    plain_functions,
)
from ltc.tracebacks import entrance, shorten

_linear = torch.ops.aten.linear.default
_differentiable = DispatchKeySet(DispatchKey.AutogradNestedTensor) | DispatchKeySet(
    DispatchKey.PrivateUse1
)
_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})  # of their subclasses each is looked at
recorded = lazily_built("aten::linear")
is_grad_enabled, redispatch = torch.is_grad_enabled, _linear.redispatch
_is_of_real_numbers = torch.__version__ < "2.12"  # torch's formula: complex numbers it refuses


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None):
    """aten::linear."""
    try:
        if is_transformed() or function_mode_depth() or dispatch_mode_depth() or is_forward_mode():
            return _in_parts(x, weight, bias)
        if not (
            x.__class__ in _PLAIN
            and weight.__class__ in _PLAIN
            and (bias is None or bias.__class__ in _PLAIN)
        ) and any(map(has_own_dispatch, [one for one in (x, weight, bias) if one is not None])):
            return _in_parts(x, weight, bias)
        if is_grad_enabled():
            if _is_of_real_numbers and weight.is_complex():
                return _in_parts(x, weight, bias)
            return redispatch(_differentiable, x, weight, bias)
        return recorded(x, weight, bias)
    except BaseException as error:
        shorten(error)
        raise


def _in_parts(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None):
    with plain_functions():
        return _linear.decompose(x, weight, bias)


def gradients(
    x: torch.Tensor, gradient: torch.Tensor, weight: torch.Tensor, output_mask: Sequence[bool]
):
    """aten::linear_backward: of x, the weight and the bias, as far as they are wanted."""
    rows = gradient.reshape(prod(gradient.shape[:-1]), gradient.shape[-1])
    of_x = of_weight = of_bias = None
    if output_mask[0]:
        of_x = (rows @ weight.conj()).reshape(x.shape)
    if output_mask[1]:
        of_weight = rows.t() @ x.reshape(prod(x.shape[:-1]), x.shape[-1]).conj()
    if output_mask[2]:
        of_bias = rows.sum(0)
    return of_x, of_weight, of_bias


def _without_modes(kernel: Callable[..., Any]):
    def guarded(*args: Any):
        with plain_functions():
            return kernel(*args)

    return entrance(guarded)


def install(library: torch.library.Library) -> None:
    """Put the kernels in the place of torch's own formula for this device.

    torch has the gradients' overload for some devices alone: on the CPU, where steps run call by call,
    and for gradients of several results at once it is written with products.
    """
    library.impl("linear", recorded, KERNEL_KEY)
    library.impl("linear", linear, f"Autograd{KERNEL_KEY}")
    for key in ("CPU", "FuncTorchBatched") if CORE is None else ("FuncTorchBatched",):
        library.impl("linear_backward", _without_modes(gradients), key)
