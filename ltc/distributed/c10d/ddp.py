"""DistributedDataParallel on lazy devices: what torch's C++ reducer asks of a device."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from ltc.device.recording.recorder import Recorder, devices_in_use
from ltc.device.recording.state import State
from ltc.device.recording.sync import exclusively
from ltc.device.recording.tensors import is_lazy, uploaded
from ltc.support.torch_private import (
    CHECK_HOOK,
    MAKE_REDUCER,
    REBUILD_BUCKETS,
    REGISTER_BUILTIN_HOOK,
    SET_STATIC_GRAPH,
    DispatchMode,
    map_leaves,
    wrapper_on_cpu,
)


def install() -> None:
    """Apply what is below.  Once per process."""
    _find_unused_parameters()
    _allocate_at_once()
    _compress_in_python()
    _compress_to_bfloat16()


def _find_unused_parameters() -> None:
    """`find_unused_parameters` and `static_graph` make the reducer allocate a map of parameters."""
    for method in (MAKE_REDUCER, SET_STATIC_GRAPH):
        method.replace(_with_used_maps(method.current))


def _with_used_maps(original: Callable) -> Callable:
    @functools.wraps(original)
    def allocating(*args, **kwargs):
        with UsedMaps():
            return original(*args, **kwargs)

    return allocating


def _compress_in_python() -> None:
    """The built-in hook that compresses wants a future's list from C++: torch's own in Python does not."""
    register = REGISTER_BUILTIN_HOOK.current

    @functools.wraps(register)
    def _register_builtin_comm_hook(self, comm_hook_type):
        is_compressing = comm_hook_type == torch.distributed.BuiltinCommHookType.FP16_COMPRESS
        if is_compressing and _is_lazy_module(self):
            self.register_comm_hook(self.process_group, default_hooks.fp16_compress_hook)
        else:
            register(self, comm_hook_type)

    REGISTER_BUILTIN_HOOK.replace(_register_builtin_comm_hook)


def _compress_to_bfloat16() -> None:
    """torch knows hooks for bfloat16 by their names, and refuses them where there is no GPU."""
    check = CHECK_HOOK.current

    @functools.wraps(check)
    def _check_comm_hook(self, hook):
        if callable(hook) and _is_lazy_module(self):
            hook = functools.partial(hook)
            hook.__name__ = "hook of an ltc device"
        check(self, hook)

    CHECK_HOOK.replace(_check_comm_hook)


def _is_lazy_module(module: torch.nn.Module) -> bool:
    return any(map(is_lazy, module.parameters()))


def _allocate_at_once() -> None:
    """The reducer makes buckets when it is made and in the second step, which would set those apart.

    Made outside the steps, they are inputs of these as of every later one: nothing to compile again.
    """
    make, rebuild = MAKE_REDUCER.current, REBUILD_BUCKETS.current

    @functools.wraps(make)
    def __init__(self, *args, **kwargs):
        make(self, *args, **kwargs)
        _allocate_pending()

    @functools.wraps(rebuild)
    def _rebuild_buckets(self) -> bool:
        rebuilt = rebuild(self)
        if rebuilt:
            _allocate_pending()
        return rebuilt

    MAKE_REDUCER.replace(__init__)
    REBUILD_BUCKETS.replace(_rebuild_buckets)


def _allocate_pending() -> None:
    for device in devices_in_use():
        recorder = device.recorder()
        exclusively(recorder, functools.partial(_allocate, recorder))


def _allocate(recorder: Recorder) -> None:
    """Give every tensor that is pending as zeros a buffer of zeros; its views derive from that."""
    pending = [state for state in recorder.live if _is_zeros(state)]
    settled = set(pending)
    for state in pending:
        value: Any = state.value
        zeros = torch.zeros(value.shape, dtype=value.dtype, device="cpu")
        state.value, state.buffer = None, uploaded(zeros, state.device)
    for state in recorder.live:
        if state.base in settled:
            state.value = None
            settled.add(state)
    recorder.live[:] = [state for state in recorder.live if state not in settled]


def _is_zeros(state: State) -> bool:
    value = state.value
    return value is not None and value.call.overload is torch.ops.aten.zeros.default


# --- the map of used parameters, which the reducer sums over the ranks ------------------------
# The reducer, written in C++, copies the map through pinned memory to every device but the CPU, and a
# device written in Python has no pinned memory.  So the reducer gets a tensor that says it is on the
# CPU, and each call on that tensor goes to the lazy tensor that it stands for: the sum is recorded
# among the sums of gradients, and read only where a parameter took no part.


class UsedMap(torch.Tensor):
    """A tensor on the CPU by its type, and a lazy one by what it does.

    Args:
        lazy: The tensor that it stands for.
    """

    lazy: torch.Tensor

    @staticmethod
    def __new__(cls, lazy: torch.Tensor) -> UsedMap:
        found: UsedMap = wrapper_on_cpu(cls, lazy)
        found.lazy = lazy
        return found

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares a function, not a method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        standing_for: dict[int, UsedMap] = {}

        def lazy_of(value: Any) -> Any:
            if not isinstance(value, UsedMap):
                return value
            standing_for[id(value.lazy)] = value
            return value.lazy

        args, kwargs = map_leaves(lazy_of, (args, kwargs or {}))
        return map_leaves(lambda x: standing_for.get(id(x), x), func(*args, **kwargs))


class UsedMaps(DispatchMode):
    """A mode under which the reducer's map, the only int32 tensor it makes on a device, is a UsedMap."""

    def __torch_dispatch__(self, call, types, args=(), kwargs=None) -> Any:
        made = call(*args, **(kwargs or {}))
        is_map = (
            call is torch.ops.aten.empty.memory_format
            and made.dtype is torch.int32
            and is_lazy(made)
        )
        return UsedMap(made) if is_map else made
