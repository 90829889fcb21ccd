"""`init_process_group("xla", init_method="xla://")`: the group that the backend "ltc" makes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import register_rendezvous_handler

from ltc.compat.torch_xla.xla_device import XLA
from ltc.support.torch_private import DEVICE_TYPE


def install() -> None:
    """Let torch.distributed know the backend "xla". Once per process."""
    dist.Backend.register_backend(XLA, _gloo, devices=["cpu", DEVICE_TYPE])
    for scheme in (XLA, "pjrt"):  # the second is what torch_xla 2.0 called it
        register_rendezvous_handler(scheme, _meet)


def ensure_group() -> None:
    """Make the group of all processes, where the script has made none."""
    if not dist.is_initialized():
        dist.init_process_group(XLA, init_method=f"{XLA}://")


def _gloo(store: Any, rank: int, size: int, timeout: Any) -> Any:
    return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)


def _meet(url: str, timeout: Any = dist.default_pg_timeout, **_: Any) -> Iterator[tuple]:
    """Give the processes of this run, under any launcher: no MASTER_ADDR or RANK is needed."""
    return dist.rendezvous(f"{DEVICE_TYPE}://", timeout=timeout)
