"""A process group whose ranks share a host exchanges through memory, as replicas do."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
import time
from collections import Counter
from datetime import timedelta

import torch
import torch.distributed as dist

from ltc import config
from ltc.distributed.transport.communicator import Communicator
from ltc.distributed.transport.private_folder import private_folder
from ltc.distributed.transport.shm_segment import Region, region_bytes
from ltc.distributed.transport.status_board import StatusBoard
from ltc.distributed.transport.wire import SharedMemoryWire
from ltc.errors import LtcError
from ltc.ir.collective import Collective
from ltc.support.torch_private import backend_of_group, default_store, timeout_of_backend

_log = logging.getLogger("ltc")
_NAMES = {"sum": "sum", "avg": "sum", "product": "mul", "min": "min", "max": "max"}
_KINDS = frozenset({"all_reduce", "all_gather", "reduce_scatter", "broadcast"})

_POLL_SECONDS = 0.005

_folders = contextlib.ExitStack()
atexit.register(_folders.close)
_of_group: dict[str, Communicator | None] = {}
_made: Counter[str] = Counter()  # a group that is made anew must not find what the old one left
os.register_at_fork(after_in_child=_of_group.clear)


def communicator_of(group: dist.ProcessGroup) -> Communicator | None:
    """The way through memory among a group's ranks; None where they do not all share a host.

    All ranks call this at the same place of their order, the first time; then it is remembered.
    """
    name = group.group_name
    if name not in _of_group:
        possible = group.size() > 1 and config.value("LTC_TRANSPORT") != "hosts"
        _of_group[name] = _new_communicator(group) if possible else None
    return _of_group[name]


def forget(group: dist.ProcessGroup | None) -> None:
    """Drop what belongs to a group that ends; with None or the first one all groups end."""
    if group is None or group is dist.group.WORLD:
        _of_group.clear()
    else:
        _of_group.pop(group.group_name, None)


def takes(collective: Collective, operands) -> bool:
    """Whether the exchange goes through memory: every rank comes to the same answer."""
    if collective.kind not in _KINDS:
        return False
    if collective.reduction not in _NAMES:
        return collective.kind in ("all_gather", "broadcast")
    whole = not all(x.dtype.is_floating_point for x in operands)
    return not (whole and collective.reduction == "avg")  # gloo's own error, or rounding


def run(
    communicator: Communicator, collective: Collective, operands: list[torch.Tensor]
) -> list[torch.Tensor]:
    """The results, new tensors."""
    reduction = collective.reduction
    known = Collective(
        collective.kind,
        _NAMES.get(reduction, reduction),
        root=collective.root,
        site=collective.site,
    )
    if collective.kind in ("all_gather", "broadcast"):
        results = communicator.run(known, [_movable(x) for x in operands])
        return [result.view(x.dtype) for result, x in zip(results, operands)]
    results = communicator.run(known, operands)
    if reduction == "avg":
        for result in results:
            result.div_(communicator.replicas)
    return results


def _movable(x: torch.Tensor) -> torch.Tensor:
    """The tensor, as bytes where it is of a dtype that torch hardly computes with."""
    return x.view(torch.uint8) if x.dtype.is_floating_point and x.dtype.itemsize == 1 else x


def _new_communicator(group: dist.ProcessGroup) -> Communicator | None:
    rank, size = group.rank(), group.size()
    folder = _folder_that_all_see(_store_of(group), rank, size, _limit_seconds(group))
    if folder is None:
        return None
    region = Region.of_processes(size, os.path.join(folder, "region"))
    communicator = Communicator(SharedMemoryWire(region, rank), StatusBoard(region, rank))
    communicator.limit_seconds = _given_seconds(group)
    return communicator


def _given_seconds(group: dist.ProcessGroup) -> float | None:
    """The group's timeout in seconds; None where it is torch's default, which nobody has chosen."""
    given = timeout_of_backend(backend_of_group(group, "cpu"))
    return None if given in (None, dist.default_pg_timeout) else given.total_seconds()


def _store_of(group: dist.ProcessGroup) -> dist.Store:
    """A store for this group alone, and for this time that it is made."""
    name = group.group_name
    _made[name] += 1
    ranks, attempt = dist.get_process_group_ranks(group), config.value("TORCHELASTIC_RESTART_COUNT")
    prefix = f"ltc/memory/{attempt}/{name}/{ranks[0]}/{_made[name]}"
    store = dist.PrefixStore(prefix, default_store())
    store.set_timeout(timedelta(seconds=_limit_seconds(group)))
    return store


def _limit_seconds(group: dist.ProcessGroup) -> float:
    given = _given_seconds(group)
    return config.value("LTC_PEER_TIMEOUT") if given is None else given


def _folder_that_all_see(store: dist.Store, rank: int, size: int, limit: float) -> str | None:
    """A folder in which every rank finds the same file: equal names of hosts would prove nothing.

    The first rank of the group makes it.  Whoever does not find it, or finds another one, says so.
    Raises DistError where not all have come within `limit` seconds.
    """
    if rank == 0:
        token = secrets.token_hex(16)
        store.set("place", f"{_new_folder(token, size)}\n{token}")
    folder, token = store.get("place").decode().split("\n")
    store.add("not seen", int(_read(os.path.join(folder, "token")) != token))
    store.add("looked", 1)
    deadline = time.monotonic() + limit
    while (looked := store.add("looked", 0)) < size:
        if time.monotonic() > deadline:
            raise dist.DistError(
                f"{looked} of {size} ranks came within {limit:g} s to the first collective of their "
                f"process group, in which rank {rank} of it waits."
            )
        time.sleep(_POLL_SECONDS)
    return None if store.add("not seen", 0) else folder


def _new_folder(token: str, size: int) -> str:
    """Its path, with the token in it; "" where there is no room for what the ranks exchange."""
    try:
        folder = _folders.enter_context(private_folder(region_bytes(size)))
    except LtcError as error:
        _log.warning("A process group exchanges through torch.distributed: %s", error)
        return ""
    with open(os.path.join(folder, "token"), "w") as file:
        file.write(token)
    return folder


def _read(path: str) -> str:
    with contextlib.suppress(OSError):
        with open(path) as file:
            return file.read()
    return ""
