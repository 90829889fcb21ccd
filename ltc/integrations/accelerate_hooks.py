"""Accelerate's queries for its kind of device: processes, half precision, random numbers.

With ACCELERATE_TORCH_DEVICE=ltc alone accelerate trains on ltc in one process, and knows nothing
else of the device. Several processes, `mixed_precision="fp16"` and random numbers of checkpoints
are added here. Without the variable all is as if this were not here.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from ltc.amp.grad_scaler import GradScaler
from ltc.checkpointing import checked_archive
from ltc.integrations.around import around
from ltc.integrations.asked_for import asked_for
from ltc.support.torch_private import DEVICE_TYPE


def install(accelerator_module: ModuleType) -> None:
    """Put what is below around the functions of `accelerate.accelerator` and what it imports."""
    around(PartialState, "_prepare_backend", _prepare_backend)
    around(accelerator_module.Accelerator, "__init__", _initialise)
    around(accelerator_module, "save_accelerator_state", _save_state)
    around(accelerator_module, "load_accelerator_state", _load_state)


def _prepare_backend(original: Callable, state: Any, cpu: bool = False, *args, **kwargs) -> tuple:
    """(backend, kind) of a process that a launcher started: accelerate would train each for itself.

    The kind is that of processes without devices of their own: DDP is then made without device
    indices, since each process has the one device that it calls `ltc`.
    """
    backend, kind = original(state, cpu, *args, **kwargs)
    if kind != DistributedType.NO or cpu or not asked_for() or "LOCAL_RANK" not in os.environ:
        return backend, kind
    sharded = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    return backend or DEVICE_TYPE, (
        DistributedType.MULTI_GPU if sharded else DistributedType.MULTI_CPU
    )


def _initialise(original: Callable, accelerator: Any, *args, **kwargs) -> None:
    """An Accelerator; its list of devices that scale losses of float16 does not know this one."""
    if not asked_for():
        original(accelerator, *args, **kwargs)
        return
    with _fp16_untold():
        original(accelerator, *args, **kwargs)
    if accelerator.mixed_precision == "fp16" and accelerator.device.type == DEVICE_TYPE:
        handler = accelerator.scaler_handler
        accelerator.native_amp = True
        accelerator.scaler = GradScaler(**(handler.to_kwargs() if handler else {}))


@contextlib.contextmanager
def _fp16_untold() -> Iterator[None]:
    told = AcceleratorState.mixed_precision
    AcceleratorState.mixed_precision = property(
        lambda state: "no" if told.fget(state) == "fp16" else told.fget(state)
    )
    try:
        yield
    finally:
        AcceleratorState.mixed_precision = told


def _save_state(original: Callable, *args, **kwargs) -> Any:
    saved = original(*args, **kwargs)
    torch.save(
        torch.get_device_module(DEVICE_TYPE).get_rng_state_all(), _file(original, args, kwargs)
    )
    return saved


def _load_state(original: Callable, *args, **kwargs) -> Any:
    loaded = original(*args, **kwargs)
    if (file := _file(original, args, kwargs)).exists():
        torch.get_device_module(DEVICE_TYPE).set_rng_state_all(checked_archive.load(file))
    return loaded


def _file(function: Callable, args: tuple, kwargs: dict) -> Path:
    """Return where the random numbers of this process lie, beside accelerate's own file of them."""
    given = inspect.signature(function).bind(*args, **kwargs).arguments
    folder = given.get("output_dir") or given["input_dir"]
    return Path(folder) / f"random_states_{DEVICE_TYPE}_{given['process_index']}.pkl"
