"""`tensor.data = other` from or to an ltc device: a model that moves.

torch keeps the tensor and gives it the other's content, which it allows between its own kinds of
devices only, and leaves gradients where they are.  Here the Python object, by which optimizers and
modules know a parameter, gets the other's content; what C++ still holds of the old one, an output's
graph, keeps it.
"""

from __future__ import annotations

import functools
import gc
from typing import Any

import torch
import torch.autograd.graph

from ltc.device.recording.tensors import is_lazy
from ltc.support.torch_private import (
    IS_ASSIGNABLE,
    TensorBase,
    exchange_contents,
    has_own_dispatch,
    plain_functions,
)

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def install() -> None:
    """Let `.data` be assigned across devices, and modules move by it.  Once per process."""
    inherited: Any = TensorBase.data  # a descriptor

    def assign(self: torch.Tensor, value: torch.Tensor) -> None:
        if not isinstance(value, torch.Tensor) or self.device == value.device:
            inherited.__set__(self, value)
        elif is_lazy(self) or is_lazy(value):
            _take_content(self, value)
        else:
            inherited.__set__(self, value)

    described = property(inherited.__get__, assign, doc=inherited.__doc__)
    torch.Tensor.data = described  # type: ignore[assignment]  # a descriptor
    compatible = IS_ASSIGNABLE.current

    @functools.wraps(compatible)
    def is_assignable(*args: Any, **kwargs: Any):
        return compatible(*args, **kwargs) or sum(map(is_lazy, (*args, *kwargs.values()))) == 1

    IS_ASSIGNABLE.replace(is_assignable)


def _take_content(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if not tensor.is_leaf:
        raise RuntimeError(
            f"The .data of a tensor on {tensor.device} that autograd computed cannot become one on "
            f"{value.device}: its gradient would no longer reach what it was computed from. Assign "
            f"to a leaf, or move it with .to({str(value.device)!r}), which autograd follows."
        )
    with torch.no_grad(), plain_functions():
        new = value.detach().requires_grad_(tensor.requires_grad)
        if isinstance(tensor, torch.nn.Parameter):
            new = torch.nn.Parameter(new, tensor.requires_grad)
        gradient = tensor.grad
        if gradient is not None:
            moved = gradient.to(value)
            _give_gradient(new, moved)
        accumulator = None
        if tensor.requires_grad and not tensor.is_inference():  # of such a one no graph is made
            with torch.inference_mode(False), torch.enable_grad():
                accumulator = torch.autograd.graph.get_gradient_edge(tensor).node
        _exchange(tensor, new)
        if gradient is not None:
            _exchange(gradient, moved)
        for name in _HOOKS:
            hooks = getattr(tensor, name)
            if hooks:
                setattr(tensor, name, hooks)  # the content of before had them
        if accumulator is not None:
            accumulator.register_prehook(_delivering_to(tensor))


def _give_gradient(tensor: torch.Tensor, gradient: torch.Tensor) -> None:
    """As `tensor.grad = gradient`, whatever their shapes: FSDP's whole parameters have those of parts.

    They differ where `.data` has been assigned since; torch looks only when the gradient is set.
    """
    whole = tensor.detach()
    if gradient.shape != whole.shape:
        tensor.data = gradient
    tensor.grad = gradient
    if gradient.shape != whole.shape:
        tensor.data = whole


def _exchange(one: torch.Tensor, other: torch.Tensor) -> None:
    if has_own_dispatch(one):  # much of what it holds is in attributes
        torch.utils.swap_tensors(one, other)
        return
    try:
        exchange_contents(one, other)
    except RuntimeError:  # C++ has weak references, which would stay with the old content
        gc.collect()  # a profiler, whose records have them, is part of a cycle
        _exchange_unless_recorded(one, other)


def _exchange_unless_recorded(one: torch.Tensor, other: torch.Tensor) -> None:
    try:
        exchange_contents(one, other)
    except RuntimeError as error:
        raise RuntimeError(
            f"A tensor on {one.device} cannot become one on {other.device} while a profiler's "
            f"records refer to it, as those of torch.profiler.profile with record_shapes=True or "
            f"with_stack=True do. Move it before the profile begins; or, where the profile is "
            f"over, delete the profiler first, or move a copy.deepcopy() of the module."
        ) from error


def _delivering_to(tensor: torch.Tensor):
    """A hook for the gradients of graphs from before the move: they belong to the tensor, too."""

    def deliver(gradients: tuple) -> None:
        (gradient,) = gradients
        if gradient is not None:
            here = gradient.to(tensor.device, tensor.dtype, copy=True)
            tensor.grad = here if tensor.grad is None else tensor.grad + here

    return deliver
