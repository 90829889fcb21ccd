"""`torch_xla.runtime`: which devices, processes and replicas there are."""

from __future__ import annotations

import contextlib
from typing import Any

import ltc
from ltc import config
from ltc.compat.torch_xla.xla_model import get_xla_supported_devices, xla_device_kind
from ltc.compat.torch_xla.xla_only import ignored
from ltc.device.hooks import names
from ltc.runtime.program_cache import PROGRAMS

_chosen = contextlib.ExitStack()  # variables that stay set


def device_type() -> str:
    """The kind of hardware behind the devices: "CPU"."""
    return names.device_kinds()[0]


def set_device_type(pjrt_device: str) -> None:
    """Nothing: the devices are of the kind that the backend has."""
    if pjrt_device != device_type():
        ignored("device_type", f"its devices are of the kind {device_type()}, set by LTC_BACKEND")


def using_pjrt() -> bool:
    """Return True: each process has devices of its own."""
    return True


def is_bf16_supported() -> bool:
    """Return True: tensors may be bfloat16."""
    return True


def is_spmd() -> bool:
    """Return False: XLA never shards programs by itself here."""
    return False


def local_device_count() -> int:
    """Devices of all processes on this host."""
    return local_process_count() * ltc.device_count()


def addressable_device_count() -> int:
    """Devices of this process."""
    return ltc.device_count()


def global_device_count() -> int:
    """Devices of all processes."""
    return process_count() * ltc.device_count()


def process_count() -> int:
    """Processes that train together, each with one interpreter."""
    return int(config.value("XRT_SHARD_WORLD_SIZE"))


def process_index() -> int:
    """This process's number among all."""
    return int(config.value("XRT_SHARD_ORDINAL"))


def local_process_count() -> int:
    """Processes of this run on this host."""
    return int(config.value("LOCAL_WORLD_SIZE")) or process_count()


def host_index() -> int:
    """This host's number."""
    return process_index() // local_process_count()


addressable_runtime_device_count = addressable_device_count
global_runtime_device_count = global_device_count


def runtime_device_attributes(device: Any) -> dict[str, Any]:
    """Return the known facts of a device: its vendor's name."""
    return {"name": str(device), "kind": xla_device_kind(device)}


def global_runtime_device_attributes() -> list[dict[str, Any]]:
    """Return the known facts of each device of this process."""
    return [runtime_device_attributes(device) for device in get_xla_supported_devices()]


def get_master_ip() -> str:
    """Return the address of the first process of the run."""
    return str(config.value("MASTER_ADDR"))


def initialize_cache(path: str, readonly: bool = False) -> None:
    """Keep compiled programs in the folder `path`, for later processes."""
    if readonly:
        ignored("cache_readonly", "programs that the folder lacks are added to it")
    _chosen.enter_context(config.override(LTC_CACHE_DIR=path))


def get_num_cached_compilation_graph() -> int:
    """Return how many compiled programs this process keeps."""
    return len(PROGRAMS)
