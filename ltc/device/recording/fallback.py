"""Calls that cannot be recorded run at once on the CPU, each counted as aten::<op>."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ltc import config
from ltc.backends.interpreter.view_chains import shown, viewed_in_place
from ltc.backends.kernel_call import kernel_call, owned
from ltc.device.evidence.cuts_explained import ran_eagerly
from ltc.device.recording.recorder import Device
from ltc.device.recording.signature import Signature
from ltc.device.recording.state import State, in_python, new_state
from ltc.device.recording.strides import REFUSAL
from ltc.device.recording.sync import exclusively, value_of
from ltc.device.recording.tensors import (
    host_tensor,
    host_value,
    is_lazy,
    state_of,
    to_device,
    uploaded,
)
from ltc.device.recording.views import write
from ltc.device.user_line import user_line, warn_user
from ltc.errors import Unsupported
from ltc.support.observation import metrics, spans
from ltc.support.torch_private import plain_functions


def count(signature: Signature) -> None:
    """Count one eager call; warn or raise where LTC_FALLBACK asks for it."""
    name = signature.op
    metrics.count(name)
    ran_eagerly(name)
    policy = config.value("LTC_FALLBACK")
    if policy == "count":
        return
    text = (
        f"{name} runs eagerly on the CPU, called at {user_line()}: the shape of its result depends "
        f"on data, or ltc cannot record it. It ends the graph recorded so far."
    )
    if policy == "error":
        raise Unsupported(f"{text} LTC_FALLBACK=error forbids that; unset it to allow it.")
    warn_user(text)


def run_on_cpu(signature: Signature, values: list):
    """A call whose result is asked for on another device: run there, on copies."""
    return _called(signature, [_each_tensor(_copy, value) for value in values])


def run_eagerly(signature: Signature, values: list, device: Device):
    """Run the CPU kernel and bring back what it returns and what it wrote, of which it has copies.

    An error of that kernel is eager PyTorch's own error for this call.
    """
    lay = kernel_call(signature.overload).laid
    copies = [
        _each_tensor(_copy, value) if i in signature.written else lay(_each_tensor(_read, value))
        for i, value in enumerate(values)
    ]
    began = spans.now()
    result = _called(signature, copies)
    if spans.timeline is not None:
        args = {"line": user_line()}
        spans.timeline.add("fallback", signature.name, began, spans.now(), args)
    count(signature)
    for i in signature.written:
        _bring_back(values[i], copies[i])
    if signature.returns_written:
        return signature.returned(values)
    return _each_tensor(lambda tensor: _to_device(signature, tensor, device), result)


def run_on_repetitions(signature: Signature, values: list):
    """Write to a view that shows elements of its base several times, as the CPU's kernel does.

    What is left then hangs on the order in which it writes, so it is given a view of a copy of the
    base that lies in memory as the CPU's would.
    """
    state = state_of(values[0])
    assert state.base is not None  # what is no view has each element once
    whole = host_value(state.base).clone()
    with torch.no_grad(), plain_functions():
        part = shown(whole, state.chain, _cpu_view)
    copies = [part, *[_each_tensor(_read, value) for value in values[1:]]]
    _called(signature, copies)
    count(signature)
    _write_through(state.base, whole)
    return values[0]


def _cpu_view(x: torch.Tensor, overload: Any, args: tuple, kwargs: dict) -> Any:
    made = viewed_in_place(x, overload, args, kwargs)
    if made is None:  # the CPU makes no such view
        raise RuntimeError(REFUSAL)
    return made


def _called(signature: Signature, values: list):
    kernel = kernel_call(signature.overload)
    return kernel(*kernel.by_name(values))


def _each_tensor(function: Callable[..., Any], value: Any):
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, list):
        return [_each_tensor(function, part) for part in value]
    if isinstance(value, tuple):
        return tuple(_each_tensor(function, part) for part in value)
    return value


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    copy: torch.Tensor = owned(host_tensor(tensor)) if is_lazy(tensor) else tensor
    return copy


def _read(tensor: torch.Tensor) -> torch.Tensor:
    return host_tensor(tensor) if is_lazy(tensor) else tensor.detach()


def _to_device(signature: Signature, tensor: torch.Tensor, device: Device) -> torch.Tensor:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "quantized tensor" if tensor.is_quantized else f"tensor of layout {tensor.layout}"
        raise Unsupported(
            f"{signature.name} gives a {kind}, which ltc devices do not hold. Move the operands to the "
            f"CPU first: x.cpu()."
        )
    return to_device(tensor, device)


def _bring_back(target: Any, result: Any) -> None:
    """Give the written arguments the values that the CPU kernel left in their copies."""
    if isinstance(target, (list, tuple)):
        for one, copy in zip(target, result):
            _bring_back(one, copy)
    elif target is not None and is_lazy(target):
        assign_host(target, result)


def assign_host(target: torch.Tensor, result: torch.Tensor) -> None:
    """`target` now holds a copy of a CPU tensor of its dtype; another shape resizes it."""
    state = in_python(state_of(target))
    if result.size() != target.size():
        target.data = to_device(result, state.device)
    elif state.views is None:
        state.value, state.buffer = None, uploaded(result, state.device)
    else:
        _write_through(state, result)


def _write_through(state: State, result: torch.Tensor) -> None:
    from_host = new_state(None, state.device)
    from_host.buffer = uploaded(result, state.device)
    exclusively(state.device.recorder(), lambda: write(state, value_of(from_host)))
