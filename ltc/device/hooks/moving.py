"""`module.to(device)` changes all of a module or nothing."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.autograd.graph
from torch.types import Device as DeviceLike

from ltc.device.recording.tensors import device_of, is_lazy
from ltc.support.torch_private import (
    DEVICE_TYPE,
    IS_ASSIGNABLE,
    MODULE_APPLY,
    TensorBase,
    exchange_contents,
    has_own_dispatch,
    own_buffers,
    own_parameters,
    plain_functions,
)


def install() -> None:
    """Let modules move to ltc as a whole.  Once per process."""
    module = torch.nn.Module
    apply = MODULE_APPLY.current

    def _apply(self: torch.nn.Module, function: Callable[..., Any], recurse: bool = True):
        if isinstance(function, _Conversion):  # of a module that holds this one
            return apply(self, function, recurse)
        conversion = _Conversion(self, function)
        try:
            apply(self, conversion, recurse)
        except BaseException:
            conversion.undo()
            raise
        conversion.tell_scripts()
        return self

    def move_to_ltc(self: torch.nn.Module, device: DeviceLike = None):
        return self.to(device_of(DEVICE_TYPE if device is None else device).torch_device)

    _apply.__doc__ = apply.__doc__
    MODULE_APPLY.replace(_apply)
    setattr(module, DEVICE_TYPE, move_to_ltc)


class _Conversion:
    """The function that a module applies to each of its tensors, which can be undone.

    A change of device alone is undone by a copy of the value: kept until the end, the old values
    would take the memory of a second model.
    """

    def __init__(self, module: torch.nn.Module, function: Callable[..., Any]) -> None:
        self.function = function
        self.entries = [
            (own, dict(own))
            for one in module.modules()
            for own in (own_parameters(one), own_buffers(one))
        ]
        self.of_scripts = [
            (own_parameters(one), name, parameter, parameter.device)
            for one in module.modules()
            if isinstance(one, torch.jit.ScriptModule)
            for name, parameter in own_parameters(one).items()
        ]
        self.changed: list[tuple] = []

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        result = self.function(tensor)
        if result is not tensor and (is_lazy(tensor) or is_lazy(result)):
            same = result.dtype is tensor.dtype
            for one in (tensor, tensor.grad):
                if one is not None:
                    self.changed.append((one, one.device, None if same else one.data))
        return result

    def tell_scripts(self) -> None:
        """Give TorchScript, which holds contents in place of Python objects, those of now."""
        for own, name, parameter, before in self.of_scripts:
            if parameter.device != before:
                own[name] = parameter

    def undo(self) -> None:
        if not self.changed:
            return
        for tensor, device, old in self.changed:
            if old is not None:
                tensor.data = old
            elif tensor.device != device:
                tensor.data = tensor.data.to(device)
        for own, before in self.entries:
            for name, tensor in before.items():
                own[name] = tensor


# --- `tensor.data = other` from or to an ltc device: a model that moves --------------------------

# torch keeps the tensor and gives it the other's content, which it allows between its own kinds
# of devices only, and leaves gradients where they are. Here the Python object, by which
# optimizers and modules know a parameter, gets the other's content; what C++ still holds of the
# old one, an output's graph, keeps it.

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def install_assignment() -> None:
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
            f"The .data of a tensor on {tensor.device} that autograd computed cannot be set to a "
            f"tensor on {value.device}: its gradient would no longer reach the operands. Assign to "
            f"a leaf, or move it with .to({str(value.device)!r}), which autograd follows."
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
    """Set `tensor.grad = gradient` for any shapes: FSDP's whole parameters have gradients of parts.

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
            f"A tensor on {one.device} cannot be moved to {other.device} while the records of a "
            f"profiler refer to it (torch.profiler.profile with record_shapes=True or "
            f"with_stack=True). Move it before the profile begins. After the profile, delete the "
            f"profiler first, or move a copy.deepcopy() of the module."
        ) from error


def _delivering_to(tensor: torch.Tensor):
    """A hook for the gradients of graphs from before the move: they belong to the tensor, too."""

    def deliver(gradients: tuple) -> None:
        (gradient,) = gradients
        if gradient is not None:
            here = gradient.to(tensor.device, tensor.dtype, copy=True)
            tensor.grad = here if tensor.grad is None else tensor.grad + here

    return deliver
