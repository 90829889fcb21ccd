"""The devices that JAX finds, as a backend."""

from __future__ import annotations

import atexit
import multiprocessing.util
import os

import jax

from ltc import config
from ltc.backends.collective_runner import SERVICE
from ltc.backends.interface import BackendCapabilities, Computation, DeviceInfo
from ltc.backends.xla.computation import XlaComputation, copied
from ltc.backends.xla.joint_computation import joint_computation
from ltc.backends.xla.lowering import LOWERING
from ltc.errors import NowhereToMeet
from ltc.ir.graph import Graph
from ltc.support.disk_cache import default_folder

_OF_PROCESSES = {
    "jax_cpu_collectives_implementation": "gloo",
    # else JAX waits at the end for the heartbeats of a process that is gone: 100 seconds
    "jax_enable_recoverability": True,
    "jax_enable_preemption_service": False,  # it takes SIGTERM, by which launchers end processes
}


class XlaBackend:
    """Compiles graphs for what JAX names as its devices."""

    name = "xla"
    computation: type[Computation] = XlaComputation
    lowering = LOWERING

    def __init__(self) -> None:
        _join_other_processes()
        jax.devices()  # raises where the platform that was asked for does not start
        _keep_programs()
        self.capabilities = BackendCapabilities(
            copy=copied, describe=_described, together=joint_computation
        )

    def devices(self) -> tuple[DeviceInfo, ...]:
        return tuple(
            DeviceInfo(d.platform.upper(), d.device_kind, _memory_of(d))
            for d in jax.local_devices()
        )

    def compile(self, graph: Graph, device: int, donated: frozenset[int]) -> XlaComputation:
        return XlaComputation(graph, device, donated)

    def prepare_to_exit(self) -> None:
        """JAX waits for its devices itself."""


def _join_other_processes() -> None:
    """Have JAX know the devices of all processes of the run, which wait for each other here."""
    processes = config.value("XRT_SHARD_WORLD_SIZE")
    if processes == 1 or jax.distributed.is_initialized():
        return
    try:
        address = SERVICE[0].address(processes)
    except NowhereToMeet:
        return  # each of them is told to do its part by itself
    for name, value in _OF_PROCESSES.items():
        if hasattr(jax.config, name):
            jax.config.update(name, value)
    limit = int(config.value("LTC_PEER_TIMEOUT"))
    jax.distributed.initialize(
        address,
        processes,
        config.value("XRT_SHARD_ORDINAL"),
        _devices_of_process(),
        initialization_timeout=limit,
        shutdown_timeout_seconds=limit,
    )
    # in processes of multiprocessing, and in others before JAX's own call
    atexit.register(multiprocessing.util.Finalize(None, _leave, (processes,), exitpriority=100))


def _leave(processes: int) -> None:
    """Leave JAX's run. JAX ends every process whose first one is gone, so that is the last one."""
    SERVICE[0].wait_for_others(processes)
    jax.distributed.shutdown()


def _devices_of_process() -> list[int] | None:
    """The numbers of this process's devices among those of its host; None where JAX is to know."""
    first, count = config.value("XRT_SHARD_LOCAL_ORDINAL"), config.value("LTC_NUM_DEVICES")
    return [first * count + k for k in range(count)] if first >= 0 and count else None


def _described() -> str:
    kinds = {f"{d.platform.upper()}, {d.device_kind}": None for d in jax.local_devices()}
    return f"{'; '.join(kinds)} (JAX {jax.__version__})"


def _memory_of(device: jax.Device) -> int:
    """Bytes that programs may have; 0 where the device does not say."""
    if device.platform == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return int((device.memory_stats() or {}).get("bytes_limit", 0))


def _keep_programs() -> None:
    """Have JAX keep compiled programs in ltc's folder, unless its user has chosen another."""
    if config.value("LTC_CACHE") and jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(default_folder() / "xla"))
        jax.config.update("jax_compilation_cache_max_size", config.value("LTC_CACHE_MB") << 20)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
