"""The places where torch's Python code has to know about ltc, each with the reason."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch.nn.parameter import is_lazy as is_uninitialized

from ltc.aten.call import Call, CallResult
from ltc.backends.plain_dispatch import PlainDispatch
from ltc.device.hooks import (
    adam_step,
    default_dtype,
    module,
    moving,
    names,
    printing,
    scripting,
    strided_copies,
    unmarked_loops,
)
from ltc.device.immediate.computed import computed
from ltc.device.recording.run_backward import call_engine
from ltc.device.recording.sync import exclusively, value_of
from ltc.device.recording.tensors import is_lazy, state_of, wrap
from ltc.device.torch_device import take_stashed_error
from ltc.device.user_line import user_line
from ltc.support.torch_private import (
    CURRENT_INDEX,
    DEVICE_TYPE,
    EXCHANGE_INDEX,
    PUT_INDEX_BACK,
    RUN_BACKWARD,
    SET_INDEX,
    STREAM_OF_INDEX,
    CheckpointFrame,
    is_multithreading_enabled,
    set_multithreading_enabled,
)
from ltc.tracebacks import entrance


def install() -> None:
    """Apply every patch below.  Once per process."""
    _run_backwards_in_the_calling_thread()
    _answer_for_the_accelerator()
    _copy_deeply()
    _keep_recomputation()
    moving.install_assignment()
    moving.install()
    names.install()
    printing.install()
    default_dtype.install()
    scripting.install()
    scripting.install_tracing()
    strided_copies.install()
    unmarked_loops.install()
    adam_step.install()


# --- autograd ---------------------------------------------------------------------------------


def _run_backwards_in_the_calling_thread() -> None:
    """A CPU loss may hang on an ltc graph, so no backward may use the engine's device threads."""
    run = RUN_BACKWARD.current

    def run_backward(*args: Any, **kwargs: Any):
        before = is_multithreading_enabled()
        set_multithreading_enabled(False)
        try:
            return call_engine(run, *args, **kwargs)
        except SystemError:
            error = take_stashed_error()  # what a Python hook raised, see torch_device.DeviceGuard
            if error is None:
                raise
            raise error  # noqa: B904  the SystemError says nothing more
        except RuntimeError as error:
            if _SECOND_ACCELERATOR in str(error):
                raise RuntimeError(_ONE_ACCELERATOR) from error
            raise
        finally:
            set_multithreading_enabled(before)

    RUN_BACKWARD.replace(entrance(run_backward))


# What the engine asserts of a tensor on a GPU where torch has ltc for the accelerator.
_SECOND_ACCELERATOR = "opt_ready_stream && opt_parent_stream"
_ONE_ACCELERATOR = (
    "PyTorch's autograd knows one accelerator per process, which is ltc from its import on: it runs no "
    "backward over tensors of a GPU (https://github.com/pytorch/pytorch/issues/161129). Train on the "
    "GPU in a process that does not import ltc."
)


def _keep_recomputation() -> None:
    """A checkpoint's second forward must stay a second forward: its inputs pass a barrier.

    Otherwise equal expressions would be merged with those of the first, and kept alive.
    """
    checkpoint = torch.utils.checkpoint
    detach = checkpoint.detach_variable
    make_frame = CheckpointFrame.__init__

    def detach_variable(inputs: tuple[Any, ...]):
        detached = detach(inputs)
        with torch.no_grad():
            for i, tensor in enumerate(detached):
                if is_lazy(tensor):
                    tensor.data = barrier(tensor)
        return detached

    def __init__(self: Any, recompute_fn: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        def recompute(*inputs: Any):
            return recompute_fn(*[_Barrier.apply(x) if is_lazy(x) else x for x in inputs])

        make_frame(self, recompute, *args, **kwargs)

    checkpoint.detach_variable = detach_variable
    CheckpointFrame.__init__ = __init__


def barrier(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a lazy tensor that no pass merges with anything else."""
    state = state_of(tensor)
    recorder = state.device.recorder()

    def record_barrier() -> torch.Tensor:
        value: Any = value_of(state)
        session = recorder.immediate
        if session is None:
            depth = recorder.last.depth
            return wrap(recorder, recorder.advance(key(value), lambda: call(value, depth)).value)
        with PlainDispatch():  # what has run is merged with nothing
            copy = value.tensor.clone()
        noted = session.noted_one(
            lambda: key(value.noted), lambda: call(value.noted, session.depth)
        )
        return wrap(recorder, computed(recorder, copy, noted))

    def key(value: CallResult) -> tuple[Any, ...]:
        return ("ltc::barrier", value)

    def call(value: CallResult, depth: int) -> Call:
        made = Call("ltc::barrier", (value, depth), {}, line=user_line())
        recorder.values(made, [(value.shape, value.dtype)])
        return made

    return exclusively(recorder, record_barrier)


class _Barrier(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor):
        return barrier(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor):
        return gradient


# --- the rest ---------------------------------------------------------------------------------

# torch.accelerator's name -> what answers for ltc; its own ask C++ for an allocator, which a device
# without one can not give: they raise an internal assertion, or end the process.
_ACCELERATOR = {
    "synchronize": module.synchronize,
    "empty_cache": module.empty_cache,
    "empty_host_cache": module.empty_host_cache,
    "get_device_capability": module.capability,
    "get_memory_info": module.mem_get_info,
    "max_memory_allocated": module.max_memory_allocated,
    "max_memory_reserved": module.max_memory_reserved,
    "memory_allocated": module.memory_allocated,
    "memory_reserved": module.memory_reserved,
    "memory_stats": module.memory_stats,
    "reset_accumulated_memory_stats": module.reset_accumulated_memory_stats,
    "reset_peak_memory_stats": module.reset_peak_memory_stats,
}

# Below torch.accelerator's Python: its own ask the device guard, which Python can not tell of a
# thread's current device, and which answers 0.
_CURRENT_DEVICE = {
    CURRENT_INDEX: module.current_device,
    SET_INDEX: module.set_device,
    EXCHANGE_INDEX: module.exchange_device,
    PUT_INDEX_BACK: module.exchange_device,
    STREAM_OF_INDEX: module.current_stream,
}


def _answer_for_the_accelerator() -> None:
    """torch.accelerator asks C++ hooks that Python cannot supply."""
    accelerator = torch.accelerator
    for name, answer in _ACCELERATOR.items():
        for holder in (accelerator, getattr(accelerator, "memory", accelerator)):
            if hasattr(holder, name):
                setattr(holder, name, _for_ltc(getattr(holder, name), answer))
    for place, answer in _CURRENT_DEVICE.items():
        place.replace(_for_ltc(place.current, answer))


def _for_ltc(original: Callable[..., Any], answer: Any):
    """`original`, but `answer` where ltc is the accelerator."""

    @functools.wraps(original)
    def asked(*device: Any):
        current = torch.accelerator.current_accelerator()
        if current is None or current.type != DEVICE_TYPE:
            return original(*device)
        return answer(*device)

    return asked


def _copy_deeply() -> None:
    """copy.copy of a lazy tensor is a deep copy, as the lazy tensor core has it."""
    original = getattr(torch.Tensor, "__copy__", None)

    def __copy__(self: torch.Tensor):
        if is_lazy(self):
            return _copied(self)
        if original is not None:
            return original(self)
        return copy._reconstruct(self, None, *self.__reduce_ex__(4))  # type: ignore[attr-defined]  # private

    torch.Tensor.__copy__ = __copy__  # type: ignore[attr-defined]  # torch has none


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """The values anew, in a tensor of the same class; its attributes are shared, as by copy.copy."""
    if is_uninitialized(tensor):
        return copy.deepcopy(tensor)
    copied = (tensor.detach() if tensor.is_leaf else tensor).clone()
    if type(copied) is not type(tensor):
        copied = copied.as_subclass(type(tensor))
    vars(copied).update(vars(tensor))
    return copied.requires_grad_(tensor.requires_grad)
