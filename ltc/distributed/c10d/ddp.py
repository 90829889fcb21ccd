"""DistributedDataParallel on lazy devices: what torch's C++ reducer asks of a device, refused or made early."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from ltc.device.recording.recorder import Recorder, devices
from ltc.device.recording.state import State
from ltc.device.recording.sync import exclusively
from ltc.device.recording.tensors import is_lazy, uploaded
from ltc.errors import Unsupported
from ltc.support.torch_private import REBUILD_BUCKETS, REGISTER_BUILTIN_HOOK, SET_STATIC_GRAPH


def install() -> None:
    """Apply what is below.  Once per process."""
    _explain_what_it_cannot_do()
    _allocate_at_once()
    _compress_in_python()


def _explain_what_it_cannot_do() -> None:
    """`static_graph` and `find_unused_parameters` want pinned memory from a device's C++ hooks.

    Hooks written in Python cannot supply it; torch's own error would be about an allocator.
    """
    make, set_static = DistributedDataParallel.__init__, SET_STATIC_GRAPH.current

    @functools.wraps(make)
    def __init__(self, module, *args, **kwargs):
        for option in ("find_unused_parameters", "static_graph"):
            if kwargs.get(option):
                _require_no_lazy(module, option)
        make(self, module, *args, **kwargs)

    @functools.wraps(set_static)
    def _set_static_graph(self):
        _require_no_lazy(self.module, "static_graph")
        set_static(self)

    DistributedDataParallel.__init__ = __init__
    SET_STATIC_GRAPH.replace(_set_static_graph)


def _require_no_lazy(module: torch.nn.Module, option: str) -> None:
    if any(is_lazy(parameter) for parameter in module.parameters()):
        raise Unsupported(
            f"DistributedDataParallel({option}=True) does not work on ltc devices: torch's reducer "
            f"then asks the device for pinned memory, which a device written in Python cannot "
            f"give. Leave {option} out, and let every parameter take part in the loss (add "
            f"0 * p.sum() for one that does not), or use torch.distributed.fsdp.fully_shard."
        )


def _compress_in_python() -> None:
    """The built-in hook that compresses wants a future's list from C++: torch's own in Python does not."""
    register = REGISTER_BUILTIN_HOOK.current

    @functools.wraps(register)
    def _register_builtin_comm_hook(self, comm_hook_type):
        is_compressing = comm_hook_type == torch.distributed.BuiltinCommHookType.FP16_COMPRESS
        if is_compressing and any(is_lazy(parameter) for parameter in self.module.parameters()):
            self.register_comm_hook(self.process_group, default_hooks.fp16_compress_hook)
        else:
            register(self, comm_hook_type)

    REGISTER_BUILTIN_HOOK.replace(_register_builtin_comm_hook)


def _allocate_at_once() -> None:
    """The reducer makes its buckets anew in the second step, which would set that step apart.

    Made outside the step, they are inputs of it as in every later one: nothing to compile again.
    """
    rebuild = REBUILD_BUCKETS.current

    @functools.wraps(rebuild)
    def _rebuild_buckets(self) -> bool:
        rebuilt = rebuild(self)
        if rebuilt:
            for device in devices():
                recorder = device.recorder()
                exclusively(recorder, functools.partial(_allocate, recorder))
        return rebuilt

    REBUILD_BUCKETS.replace(_rebuild_buckets)


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
