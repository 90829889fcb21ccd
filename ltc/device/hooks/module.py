"""torch.ltc: the ltc device, with the functions of torch.cuda and torch.accelerator.

`device` is an index, a string, a torch.device, or None for the thread's current device.

- Devices: device_count, current_device, set_device, exchange_device, device, is_available,
  is_initialized, init, get_device_name, get_device_capability, get_device_properties, synchronize.
- Random numbers: manual_seed, manual_seed_all, seed, seed_all, initial_seed, get_rng_state,
  set_rng_state, get_rng_state_all, set_rng_state_all.
- Memory: memory_allocated, max_memory_allocated, memory_reserved, max_memory_reserved,
  memory_stats, memory_summary, memory_snapshot, mem_get_info, reset_peak_memory_stats,
  reset_accumulated_memory_stats, empty_cache, empty_host_cache.
- Precision, streams and events: get_amp_supported_dtype, is_bf16_supported, Stream, Event,
  current_stream, default_stream, set_stream, stream.

Settings are in torch.backends.ltc; `torch.Generator("ltc")` makes a generator.
"""

from __future__ import annotations

import contextlib
import gc
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch.types import Device as DeviceLike

from ltc.device.hooks.streams import Event, Stream
from ltc.device.recording.recorder import Device, devices
from ltc.device.recording.sync import end_what_runs_at_once
from ltc.device.recording.sync import synchronize as _synchronize
from ltc.device.recording.tensors import current_device as _current_device
from ltc.device.recording.tensors import device_of, set_current_device
from ltc.device.torch_device import DTYPES, state_if_any
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
    """Return True: every machine has an ltc device."""
    return True


def is_initialized() -> bool:
    """Return True: `import ltc` has done it."""
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
    """Return the processor's name; of another backend than ltc's own, its name for the device."""
    return _information(device).name


def get_device_capability(device: DeviceLike = None) -> tuple[int, int]:
    """Return (0, 0), which is less than any GPU's: no check for a GPU's instructions passes."""
    return (0, 0)


def capability(device: DeviceLike = None) -> dict[str, set[torch.dtype]]:
    """Return torch.accelerator.get_device_capability(): the dtypes of tensors on the device."""
    _device(device)  # raises if there is no such device
    return {"supported_dtypes": set(DTYPES)}


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
    """Return the seed of the current device."""
    return _current_device().random.initial


def get_rng_state(device: DeviceLike = DEVICE_TYPE) -> torch.Tensor:
    """The random state of a device, as a ByteTensor on the CPU."""
    return _device(device).random.as_tensor()


def set_rng_state(new_state: torch.Tensor, device: DeviceLike = DEVICE_TYPE) -> None:
    """Give a device the random state that `get_rng_state` has returned."""
    _device(device).random.restore(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    """Return the random state of each device of this process."""
    return [one.random.as_tensor() for one in devices()]


def set_rng_state_all(new_states: Iterable[torch.Tensor]) -> None:
    """Give each device the random state that `get_rng_state_all` has returned for it."""
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
    """Return memory_allocated(): nothing is kept in reserve."""
    return memory_allocated(device)


def max_memory_reserved(device: DeviceLike = None) -> int:
    """Return max_memory_allocated(): nothing is kept in reserve."""
    return max_memory_allocated(device)


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    """Let max_memory_allocated() begin again with the bytes that are held now."""
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


def memory_summary(device: DeviceLike = None, abbreviated: bool = False) -> str:
    """Return the figures of `memory_stats` as a table for people.

    Args:
        abbreviated: Leave out the number of buffers.

    Example:
        >>> kept = torch.ones(1 << 20, device="ltc")
        >>> print(torch.ltc.memory_summary())
        ltc:0                        now           peak
        allocated        ...MiB...MiB
        buffers          ...
    """
    chosen = _device(device)
    stats = memory_stats(chosen.torch_device)
    now, peak = (stats[f"allocated_bytes.all.{when}"] / 2**20 for when in ("current", "peak"))
    lines = [
        f"{chosen.torch_device!s:12} {'now':>15} {'peak':>15}",
        f"{'allocated':12} {now:11.2f} MiB {peak:11.2f} MiB",
    ]
    if not abbreviated:
        made, freed = (stats[f"allocation.all.{what}"] for what in ("allocated", "freed"))
        lines.append(
            f"{'buffers':12} {stats['allocation.all.current']:15}   made {made}, freed {freed}"
        )
    return "\n".join(lines)


def memory_snapshot(device: DeviceLike = None) -> list[dict[str, Any]]:
    """Return a dictionary for each live buffer of the device, the largest first.

    Each has the keys of a segment of torch.cuda.memory_snapshot() that apply: device, total_size,
    allocated_size, active_size, segment_type, and blocks. `shape` and `dtype` are the buffer's, and
    `name` is "weight" or "0.bias" for a parameter of a model. Buffers that no Python tensor holds, such
    as values that autograd keeps, are one last entry, so that the sizes add up to memory_allocated().

    Example:
        >>> kept = torch.ones(3, 4, device="ltc")
        >>> [one["total_size"] for one in torch.ltc.memory_snapshot() if one["shape"] == (3, 4)]
        [48]
    """
    chosen = _device(device)
    account = _account(device)
    objects = gc.get_objects()
    names = _names_of_parameters(one for one in objects if torch.nn.Module in type(one).__mro__)
    found: dict[int, dict[str, Any]] = {}
    for tensor in [one for one in objects if torch.Tensor in type(one).__mro__]:
        buffer = _buffer_of(tensor, chosen)
        if (
            buffer is not None and buffer.account is account
        ):  # that of a failed launch has no memory
            one = found.setdefault(
                id(buffer), _segment(chosen, buffer.nbytes, buffer.shape, buffer.dtype)
            )
            one["name"] = one["name"] or names.get(id(tensor), "")
    segments = sorted(found.values(), key=lambda one: -one["total_size"])
    rest = account.bytes - sum(one["total_size"] for one in segments)
    return segments + ([_segment(chosen, rest, None, None)] if rest > 0 else [])


def _names_of_parameters(modules: Iterable[torch.nn.Module]) -> dict[int, str]:
    """Return the name of each parameter, by its id, in the outermost module that has it."""
    names: dict[int, str] = {}
    for module in modules:
        if "_modules" not in vars(module):
            continue  # its __init__ has not run
        for name, parameter in module.named_parameters():
            if len(name) > len(names.get(id(parameter), "")):
                names[id(parameter)] = name
    return names


def _buffer_of(tensor: torch.Tensor, device: Device) -> Any:
    state = state_if_any(tensor) if tensor.device == device.torch_device else None
    state = None if state is None else state.base or state
    return None if state is None else state.buffer


def _segment(device: Device, nbytes: int, shape: Any, dtype: Any) -> dict[str, Any]:
    return {
        "device": device.index,
        "segment_type": "other" if shape is None else "buffer",
        "total_size": nbytes,
        "allocated_size": nbytes,
        "active_size": nbytes,
        "shape": shape,
        "dtype": dtype,
        "name": "",
        "blocks": [
            {"size": nbytes, "requested_size": nbytes, "state": "active_allocated", "frames": []}
        ],
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
    """Return the dtypes that torch.autocast takes."""
    return [torch.bfloat16, torch.float16]


def is_bf16_supported() -> bool:
    """Return True: bfloat16 is computed on every processor."""
    return True


def current_stream(device: DeviceLike = None):
    """Everything on a device runs in one order, which is its only stream."""
    return Stream(_device(device).torch_device)


def default_stream(device: DeviceLike = None):
    """Return the device's only stream."""
    return current_stream(device)


def set_stream(stream: torch.Stream) -> None:
    """There is one stream per device; nothing to do."""


def stream(stream: torch.Stream | None):
    """A context in which calls run on `stream`, the only one there is."""
    return contextlib.nullcontext()


# --- the module itself ------------------------------------------------------------------------

__all__ = ["Event", "Stream"]
__all__ += [  # but for what accelerators are asked
    name
    for name, one in list(globals().items())
    if getattr(one, "__module__", "") == __name__ and name[0] != "_" and name != "capability"
]


def torch_module() -> types.ModuleType:
    """Return torch.ltc: the public names of this module, under the name that users know."""
    made = types.ModuleType(f"torch.{DEVICE_TYPE}", __doc__)
    private = ("__all__", "__file__", "_initialized", "_lazy_init", "_is_in_bad_fork")
    vars(made).update({name: globals()[name] for name in (*__all__, *private)})
    return made
