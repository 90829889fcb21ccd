"""torch.ltc: what PyTorch code expects of a device module."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch.types import Device as DeviceLike

from ltc.device.hooks.streams import Event, Stream  # noqa: F401  torch.ltc.Event
from ltc.device.recording.recorder import Device, devices
from ltc.device.recording.sync import end_what_runs_at_once
from ltc.device.recording.sync import synchronize as _synchronize
from ltc.device.recording.tensors import current_device as _current_device
from ltc.device.recording.tensors import device_of, set_current_device
from ltc.runtime.account import Account, account_of
from ltc.runtime.transfers import backend
from ltc.support.torch_private import DEVICE_TYPE
from ltc.tracebacks import entrance

_initialized = True  # torch.utils.checkpoint keeps a device's random state only where it says so


def _device(device: DeviceLike = None) -> Device:
    return _current_device() if device is None else device_of(device)


class device(contextlib.ContextDecorator):
    """`with torch.ltc.device(1):` makes ltc:1 the thread's current device inside the block."""

    def __init__(self, device: DeviceLike = None) -> None:
        self.entered = None if device is None or _is_negative(device) else _device(device)

    def __enter__(self) -> None:
        self.before = _current_device()
        if self.entered is not None:
            set_current_device(self.entered)

    def __exit__(self, *error: Any) -> None:
        set_current_device(self.before)


# --- devices ----------------------------------------------------------------------------------


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    """Nothing to do: `import ltc` did it."""


_lazy_init = init  # torch asks for it before the first tensor; without one, before each


def device_count() -> int:
    """Devices of this process: LTC_NUM_DEVICES."""
    return len(devices())


def current_device() -> int:
    """Index of the calling thread's current device."""
    return _current_device().index


def set_device(device: DeviceLike) -> None:
    """Make a device the calling thread's current one; a negative index means none, as in torch."""
    if not _is_negative(device):
        set_current_device(_device(device))


def exchange_device(device: DeviceLike) -> int:
    """The index of the device that was current until now; `set_device` is called with the new."""
    before = current_device()
    set_device(device)
    return before


def _is_negative(device: DeviceLike) -> bool:
    return isinstance(device, int) and device < 0


def get_device_name(device: DeviceLike = None) -> str:
    return _information(device).name


def get_device_capability(device: DeviceLike = None) -> tuple[int, int]:
    return (0, 0)


def get_device_properties(device: DeviceLike = None):
    """name, and total_memory in bytes."""
    information = _information(device)
    return types.SimpleNamespace(name=information.name, total_memory=information.memory_bytes)


def _information(device: DeviceLike):
    known = backend().devices()
    return known[min(_device(device).index, len(known) - 1)]


@entrance
def synchronize(device: DeviceLike = None) -> None:
    """Run what is pending on the device (all of them where None) and wait; raises its errors."""
    _synchronize(None if device is None else _device(device))


def _is_in_bad_fork() -> bool:
    return False


# --- random numbers ---------------------------------------------------------------------------


def manual_seed(seed: int) -> None:
    """Seed the current device."""
    _current_device().random.reset(int(seed))


def manual_seed_all(seed: int) -> None:
    """Seed every device of this process; torch.manual_seed calls this."""
    for one in devices():
        one.random.reset(int(seed))


def seed() -> None:
    """Seed the current device from the machine's randomness."""
    manual_seed(torch.seed())


def seed_all() -> None:
    """Seed every device from the machine's randomness."""
    manual_seed_all(torch.seed())


def initial_seed() -> int:
    return _current_device().random.initial


def get_rng_state(device: DeviceLike = DEVICE_TYPE) -> torch.Tensor:
    """The random state of a device, as a ByteTensor on the CPU."""
    return _device(device).random.as_tensor()


def set_rng_state(new_state: torch.Tensor, device: DeviceLike = DEVICE_TYPE) -> None:
    _device(device).random.restore(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [one.random.as_tensor() for one in devices()]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    for one, state in zip(devices(), new_states):
        one.random.restore(state)


# --- memory -----------------------------------------------------------------------------------


def _account(device: DeviceLike) -> Account:
    chosen = _device(device)
    end_what_runs_at_once(chosen)
    return account_of(chosen.index)


def memory_allocated(device: DeviceLike = None) -> int:
    """Bytes held by live buffers of the device."""
    return _account(device).bytes


def max_memory_allocated(device: DeviceLike = None) -> int:
    """The most bytes held at once since the start, or since reset_peak_memory_stats."""
    return _account(device).peak


def memory_reserved(device: DeviceLike = None) -> int:
    return memory_allocated(device)


def max_memory_reserved(device: DeviceLike = None) -> int:
    return max_memory_allocated(device)


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    account = _account(device)
    account.peak = account.bytes


def reset_accumulated_memory_stats(device: DeviceLike = None) -> None:
    """Count the buffers that are made and freed from here on."""
    _account(device).forget_freed()


def memory_stats(device: DeviceLike = None) -> dict[str, int]:
    """Bytes and numbers of live buffers, under the names that torch.cuda has for them."""
    account = _account(device)
    return {
        "allocated_bytes.all.current": account.bytes,
        "allocated_bytes.all.peak": account.peak,
        "allocation.all.allocated": account.buffers + account.freed_in_all,
        "allocation.all.current": account.buffers,
        "allocation.all.freed": account.freed_in_all,
        "reserved_bytes.all.current": account.bytes,
        "reserved_bytes.all.peak": account.peak,
    }


def mem_get_info(device: DeviceLike = None) -> tuple[int, int]:
    """(free, total) bytes of the device's memory."""
    total = _information(device).memory_bytes
    return max(total - memory_allocated(device), 0), total


def empty_cache() -> None:
    """Nothing to do: a buffer that nothing refers to is freed at once."""


def empty_host_cache() -> None:
    """Nothing to do: no pinned memory is kept."""


# --- mixed precision and streams --------------------------------------------------------------


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def is_bf16_supported() -> bool:
    return True


def current_stream(device: DeviceLike = None):
    """Everything on a device runs in one order, which is its only stream."""
    return Stream(_device(device).torch_device)


def default_stream(device: DeviceLike = None):
    return current_stream(device)


def set_stream(stream: torch.Stream) -> None:
    """There is one stream per device; nothing to do."""


def stream(stream: torch.Stream | None):
    """A context in which calls run on `stream`, the only one there is."""
    return contextlib.nullcontext()
