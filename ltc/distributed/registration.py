"""The names under which `torch.distributed` finds ltc; what they stand for is imported by the first group.

A process that makes no process group imports nothing of ltc/distributed/c10d.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import register_rendezvous_handler

from ltc import config
from ltc.backends import collective_runner
from ltc.support.lazy_module import LazyModule
from ltc.support.process.private_folder import require_private
from ltc.support.torch_private import DEVICE_TYPE, NEW_PROCESS_GROUP

_groups = LazyModule("ltc.distributed.process_group")
_bootstrap = LazyModule("ltc.distributed.transport.bootstrap")
_sessions = LazyModule("ltc.distributed.transport.session")


def install() -> None:
    """Teach torch.distributed about ltc: backend "ltc", init_method "ltc://". `import ltc` calls it.

    Once per process.

    Example:
        >>> import torch.distributed as dist
        >>> dist.is_backend_available("ltc")
        True
        >>> dist.init_process_group("ltc", init_method="ltc://")
        >>> x = torch.ones(2, device="ltc")
        >>> dist.all_reduce(x)
        >>> x.tolist()
        [1.0, 1.0]
        >>> dist.destroy_process_group()
    """
    collective_runner.SERVICE[:] = [_Service()]
    dist.Backend.register_backend(DEVICE_TYPE, _gloo, devices=["cpu", DEVICE_TYPE])
    dist.Backend.backend_capability["gloo"].append(DEVICE_TYPE)
    _choose_for_who_names_no_backend()
    register_rendezvous_handler(DEVICE_TYPE, _meet)
    for name in ("init_process_group", "destroy_process_group", "monitored_barrier"):
        call = _forwarded(name, getattr(dist, name))
        for holder in (dist, dist.distributed_c10d):
            setattr(holder, name, call)
    NEW_PROCESS_GROUP.replace(_forwarded("new_process_group", NEW_PROCESS_GROUP.current))
    if dist.is_initialized():  # before the device was first used, so before ltc was imported
        _groups.take_arguments()


class _Service:
    """A service of the first process: see ltc/backends/collective_runner.py."""

    def address(self, processes: int) -> str:
        address: str = _bootstrap.address_of_first(processes)
        return address

    def wait_for_others(self, processes: int) -> None:
        _sessions.wait_for_others(processes)


def _forwarded(name: str, original: Callable) -> Callable:
    """Make the function that calls `process_group.<name>`, whose first argument is torch's own.

    It is there from the beginning, since programs import these names before the first group is made.
    """

    @functools.wraps(original)
    def forwarded(*args: Any, **kwargs: Any) -> Any:
        return getattr(_groups, name)(original, *args, **kwargs)

    return forwarded


def _gloo(store, rank: int, size: int, timeout):
    """Make the group of the backend "ltc": gloo, as one would make it by name."""
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


_stores = itertools.count()  # a second process group of a run has a store of its own


def _meet(url: str, timeout=dist.default_pg_timeout, **_) -> Iterator[tuple]:
    """Answer to init_method "ltc://": the processes of this run, whichever launcher started them."""
    folder = config.value("LTC_RENDEZVOUS")
    world, rank = config.value("XRT_SHARD_WORLD_SIZE"), config.value("XRT_SHARD_ORDINAL")
    if folder:
        require_private(folder)
        yield dist.FileStore(str(Path(folder) / f"torch{next(_stores)}"), world), rank, world
    elif world == 1:
        yield dist.HashStore(), 0, 1
    else:
        yield from dist.rendezvous("env://", timeout=timeout)


def _choose_for_who_names_no_backend() -> None:
    """Let init_process_group() without a backend, as init_device_mesh calls it, serve CPU tensors too.

    torch would register the backend for the device alone, and CPU tensors could not travel.
    """
    dist.Backend.default_device_backend_map[DEVICE_TYPE] = DEVICE_TYPE
    make = dist.distributed_c10d.BackendConfig.__init__

    @functools.wraps(make)
    def __init__(self, backend):
        make(self, backend)
        if backend == dist.Backend.UNDEFINED and DEVICE_TYPE in self.device_backend_map:
            chosen = self.device_backend_map[DEVICE_TYPE]
            self.device_backend_map = {"cpu": chosen, DEVICE_TYPE: chosen}

    dist.distributed_c10d.BackendConfig.__init__ = __init__
