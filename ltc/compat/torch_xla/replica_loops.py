"""Loaders, threads and processes, under torch_xla's signatures."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from ltc.compat.torch_xla.xla_device import native, shown
from ltc.compat.torch_xla.xla_only import XlaOnly
from ltc.distributed.data_parallel import DataParallel
from ltc.distributed.lazy_multiprocessing import spawn
from ltc.distributed.parallel_loader import MpDeviceLoader, ParallelLoader
from ltc.support.torch_private import DEVICE_TYPE

_PREFETCH = {"loader_prefetch_size": 16, "device_prefetch_size": 8}  # torch_xla's own


def _loader_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return torch_xla's keywords that ltc's loader takes; one thread uploads, in order."""
    if options.get("input_sharding") is not None:
        raise XlaOnly(
            "A loader with input_sharding: sharding by XLA's compiler is part of XLA. Omit the "
            "argument: each process loads its own part of the data."
        )
    left_out = ("input_sharding", "host_to_device_transfer_threads")
    return {**_PREFETCH, **{name: v for name, v in options.items() if name not in left_out}}


class XlaParallelLoader(ParallelLoader):
    """ParallelLoader, by torch_xla's arguments."""

    def __init__(
        self,
        cpu_loader: Any,
        devices: Sequence,
        batchdim: int = 0,
        batches_per_execution: int = 1,
        loader_prefetch_size: int = _PREFETCH["loader_prefetch_size"],
        device_prefetch_size: int = _PREFETCH["device_prefetch_size"],
        host_to_device_transfer_threads: int = 1,
        input_sharding: Any = None,
        fixed_batch_size: bool = False,
    ) -> None:
        _loader_options({"input_sharding": input_sharding})
        super().__init__(
            cpu_loader,
            [native(device) for device in devices],
            batchdim,
            batches_per_execution,
            loader_prefetch_size,
            device_prefetch_size,
            fixed_batch_size=fixed_batch_size,
        )

    def _served(self, device: Any) -> Any:
        return super()._served(native(device))


class XlaMpDeviceLoader(MpDeviceLoader):
    """MpDeviceLoader, by torch_xla's arguments."""

    def __init__(self, loader: Any, device: Any, **kwargs: Any) -> None:
        super().__init__(loader, native(device), **_loader_options(kwargs))


class XlaDataParallel(DataParallel):
    """DataParallel whose loop function gets torch_xla's device, and a loader of plain batches."""

    def __init__(
        self,
        network: nn.Module | Callable[[], nn.Module],
        device_ids: Sequence | None = None,
        **kwargs: Any,
    ) -> None:
        ids = None if device_ids is None else [native(device) for device in device_ids]
        super().__init__(network, ids, enumerate_batches=False, **_loader_options(kwargs))

    @property
    def devices(self) -> list[str]:
        """The names of the devices, in order."""
        return [str(shown(device)) for device in super().devices]

    def __call__(self, loop_fn: Callable, loader: Iterable, *args: Any, **kwargs: Any) -> list:
        """Return the results of `loop_fn(model, loader, device, context, **kwargs)`, in device
        order.
        """
        return super().__call__(_with_shown_device(loop_fn), loader, *args, **kwargs)


def _with_shown_device(loop_fn: Callable) -> Callable:
    @functools.wraps(loop_fn)
    def call(model: nn.Module, loader: Any, device: torch.device, context: Any, **kwargs: Any):
        place = shown(device) if device.type == DEVICE_TYPE else device
        return loop_fn(model, loader, place, context, **kwargs)

    return call


def run_multiprocess(
    fn: Callable, *args: Any, start_method: str = "spawn", **kwargs: Any
) -> dict[int, Any]:
    """ordinal -> what `fn(*args, **kwargs)` returns in a process for each device."""
    values: Any = spawn(_without_ordinal, (fn, args, kwargs), start_method=start_method)
    return dict(enumerate(values))


def _without_ordinal(ordinal: int, fn: Callable, args: tuple, kwargs: dict) -> Any:
    return fn(*args, **kwargs)
