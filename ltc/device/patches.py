"""The places where torch's Python code has to know about ltc, each with the reason."""

from __future__ import annotations

import contextlib
import copy
import threading

import torch
import torch.autograd.graph
import torch.utils.checkpoint

from ltc.aten.call import Call
from ltc.device import assignment, default_dtype
from ltc.device.lines import user_line
from ltc.device.step import exclusively, synchronize, value_of
from ltc.device.tensor import device_of, is_lazy, state_of, wrap
from ltc.device.torch_api import (
    DEVICE_TYPE, is_multithreading_enabled, set_multithreading_enabled, take_stashed_error,
)
from ltc.tracebacks import entrance


def install() -> None:
    """Apply every patch below.  Once per process."""
    _run_backwards_in_the_calling_thread()
    _swap_parameters_on_moves()
    _synchronize_accelerator()
    _copy_deeply()
    _keep_recomputation()
    assignment.install()
    default_dtype.install()


# --- autograd ---------------------------------------------------------------------------------

def _run_backwards_in_the_calling_thread() -> None:
    """A CPU loss may hang on an ltc graph, so no backward may use the engine's device threads."""
    run = torch.autograd.graph._engine_run_backward

    def run_backward(*args, **kwargs):
        before = is_multithreading_enabled()
        set_multithreading_enabled(False)
        try:
            return run(*args, **kwargs)
        except SystemError:
            error = take_stashed_error()  # what a Python hook raised, see torch_api.Guard
            if error is None:
                raise
            raise error
        finally:
            set_multithreading_enabled(before)

    shortened = entrance(run_backward)
    torch.autograd.graph._engine_run_backward = shortened
    torch.autograd._engine_run_backward = shortened


def _keep_recomputation() -> None:
    """A checkpoint's second forward must stay a second forward: its inputs pass a barrier.

    Otherwise equal expressions would be merged with those of the first, and kept alive.
    """
    checkpoint = torch.utils.checkpoint
    detach = checkpoint.detach_variable
    make_frame = checkpoint._CheckpointFrame.__init__

    def detach_variable(inputs):
        detached = detach(inputs)
        with torch.no_grad():
            for i, tensor in enumerate(detached):
                if is_lazy(tensor):
                    tensor.data = barrier(tensor)
        return detached

    def __init__(self, recompute_fn, *args, **kwargs):
        def recompute(*inputs):
            return recompute_fn(*[_Barrier.apply(x) if is_lazy(x) else x for x in inputs])

        make_frame(self, recompute, *args, **kwargs)

    checkpoint.detach_variable = detach_variable
    checkpoint._CheckpointFrame.__init__ = __init__


def barrier(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of a lazy tensor that no pass merges with anything else."""
    state = state_of(tensor)
    recorder = state.device.recorder()

    def record_barrier() -> torch.Tensor:
        value = value_of(state)

        def make_call() -> Call:
            call = Call("ltc::barrier", (value, recorder.last.depth), {}, line=user_line())
            recorder.values(call, [(value.shape, value.dtype)])
            return call

        return wrap(recorder, recorder.advance(("ltc::barrier", value), make_call).value)

    return exclusively(recorder, record_barrier)


class _Barrier(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return barrier(tensor)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


# --- modules ----------------------------------------------------------------------------------

def _swap_parameters_on_moves() -> None:
    """Moving a module to or from ltc keeps its Parameter objects.

    torch would make new ones, which breaks tied weights and an optimizer built before the move.
    Only such moves are affected: CPU modules keep torch's behaviour.
    """
    module = torch.nn.Module
    apply, to, to_empty = module._apply, module.to, module.to_empty

    def _apply(self, function, recurse=True):
        if torch.__future__.get_swap_module_params_on_conversion() or not _holds_lazy(self):
            return apply(self, function, recurse)
        with _swapping():
            return apply(self, function, recurse)

    def move(self, *args, **kwargs):
        with _swapping() if _names_ltc(args, kwargs) else contextlib.nullcontext():
            return to(self, *args, **kwargs)

    def move_empty(self, *, device, recurse=True):
        with _swapping() if _names_ltc((device,), {}) else contextlib.nullcontext():
            return to_empty(self, device=device, recurse=recurse)

    def move_to_ltc(self, device=None):
        return self.to(device_of(DEVICE_TYPE if device is None else device).torch_device)

    module._apply, module.to, module.to_empty = _apply, move, move_empty
    setattr(module, DEVICE_TYPE, move_to_ltc)
    for patched, original in ((_apply, apply), (move, to), (move_empty, to_empty)):
        patched.__doc__, patched.__name__ = original.__doc__, original.__name__


def _holds_lazy(module: torch.nn.Module) -> bool:
    return any(is_lazy(p) for p in module.parameters()) or any(
        is_lazy(b) for b in module.buffers()
    )


def _names_ltc(args: tuple, kwargs: dict) -> bool:
    candidates = [*args, *kwargs.values()]
    return any(
        is_lazy(c)
        or (isinstance(c, torch.device) and c.type == DEVICE_TYPE)
        or (isinstance(c, str) and c.partition(":")[0] == DEVICE_TYPE)
        for c in candidates
    )


_swap_setting = threading.RLock()  # torch's switch belongs to the process, moves to threads


@contextlib.contextmanager
def _swapping():
    with _swap_setting:
        before = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            yield
        finally:
            torch.__future__.set_swap_module_params_on_conversion(before)


# --- the rest ---------------------------------------------------------------------------------

def _synchronize_accelerator() -> None:
    """torch.accelerator.synchronize asks C++ hooks that Python cannot supply."""
    original = torch.accelerator.synchronize

    def synchronize_accelerator(device=None, /):
        current = torch.accelerator.current_accelerator()
        if current is None or current.type != DEVICE_TYPE:
            return original(device)
        return synchronize(None if device is None else device_of(device))

    torch.accelerator.synchronize = synchronize_accelerator


def _copy_deeply() -> None:
    """copy.copy of a lazy tensor is a deep copy, as the lazy tensor core has it."""
    original = getattr(torch.Tensor, "__copy__", None)

    def __copy__(self):
        if is_lazy(self):
            return copy.deepcopy(self) if self.is_leaf else self.clone()
        if original is not None:
            return original(self)
        return copy._reconstruct(self, None, *self.__reduce_ex__(4))

    torch.Tensor.__copy__ = __copy__
