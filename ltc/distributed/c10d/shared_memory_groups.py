"""A process group whose ranks share a host exchanges through memory, as replicas do."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Iterator

import torch

from ltc.distributed.transport.call_log import SharedMemoryCallLog
from ltc.distributed.transport.communicator import Communicator
from ltc.distributed.transport.shm_segment import Region, region_bytes
from ltc.errors import LtcError
from ltc.ir.collective import Collective
from ltc.support.process.private_folder import exposure, private_folder

_log = logging.getLogger("ltc")
_NAMES = {"sum": "sum", "avg": "sum", "product": "mul", "min": "min", "max": "max"}
_KINDS = frozenset({"all_reduce", "all_gather", "reduce_scatter", "broadcast"})

_folders = contextlib.ExitStack()
atexit.register(_folders.close)
_folders_here: list[str] = []  # that this process has made
os.register_at_fork(after_in_child=_folders_here.clear)


def takes(collective: Collective, operands) -> bool:
    """Return True if the exchange goes through memory: every rank comes to the same answer."""
    if collective.kind not in _KINDS:
        return False
    if collective.reduction not in _NAMES:
        return collective.kind in ("all_gather", "broadcast")
    whole = not all(x.dtype.is_floating_point for x in operands)
    return not (whole and collective.reduction == "avg")  # gloo's own error, or rounding


def run(
    communicator: Communicator,
    collective: Collective,
    operands: list[torch.Tensor],
    described: tuple[bytes, int],
) -> list[torch.Tensor]:
    """The results, new tensors.

    Args:
        described: The line for the board, and the number that all ranks must agree on.
    """
    reduction = collective.reduction
    known = Collective(
        collective.kind,
        _NAMES.get(reduction, reduction),
        root=collective.root,
        site=collective.site,
    )
    if collective.kind in ("all_gather", "broadcast"):
        results = communicator.run(known, [_movable(x) for x in operands], described)
        return [result.view(x.dtype) for result, x in zip(results, operands)]
    results = communicator.run(known, operands, described)
    if reduction == "avg":
        for result in results:
            result.div_(communicator.replicas)
    return results


def _movable(x: torch.Tensor) -> torch.Tensor:
    """The tensor, as bytes where it is of a dtype that torch hardly computes with."""
    return x.view(torch.uint8) if x.dtype.is_floating_point and x.dtype.itemsize == 1 else x


# --- the files that the ranks share -------------------------------------------------------------


class SharedFiles:
    """The files that the ranks of a group have mapped: the region for messages, and the log of
    calls.
    """

    def __init__(self, path: str, rank: int, size: int) -> None:
        self.region = Region.of_processes(size, f"{path}-region")
        self.calls = SharedMemoryCallLog(f"{path}-calls", rank, size)


@contextlib.contextmanager
def shared_files(
    rank: int, size: int, broadcast: Callable[[torch.Tensor], None]
) -> Iterator[tuple[str, Callable[[], SharedFiles | None]]]:
    """A word that the group alone has, and a function that opens its files: None where they are not there.

    The first rank makes the files.  They have names until the end of the block, at which all ranks
    have opened them.

    Args:
        broadcast: Fills a tensor of bytes with that of the first rank, on every rank.
    """
    path, content = "", torch.zeros(_MOST_PATH_BYTES, dtype=torch.uint8, device="cpu")
    token = secrets.token_hex(16)
    if rank == 0:
        path = _new_files(token, size)
        told = f"{token}{path}".encode()
        content[: len(told)] = torch.frombuffer(bytearray(told), dtype=torch.uint8)
    try:
        broadcast(content)
        told_text = content.numpy().tobytes().rstrip(b"\0").decode(errors="replace")
        token, path = told_text[: len(token)], told_text[len(token) :]
        yield token, lambda: _opened(path, rank, size)
    finally:
        if rank == 0 and path:
            for name in _NAMES_OF_FILES:
                with contextlib.suppress(FileNotFoundError):
                    os.remove(path + name)


_NAMES_OF_FILES = ("-region", "-calls")
_MOST_PATH_BYTES = 1024


def _new_files(token: str, size: int) -> str:
    """Return the prefix of the files' names; "" without room for the ranks' messages."""
    try:
        path = os.path.join(_folder_with_room(region_bytes(size)), token)
        SharedFiles(path, 0, size)
    except LtcError as error:
        _log.warning("A process group exchanges through torch.distributed: %s", error)
        return ""
    return path if len(path) + len(token) < _MOST_PATH_BYTES else ""


def _folder_with_room(nbytes: int) -> str:
    for folder in _folders_here:
        system = os.statvfs(folder)
        if system.f_bavail * system.f_frsize >= nbytes:
            return folder
    _folders_here.append(_folders.enter_context(private_folder(nbytes)))
    return _folders_here[-1]


def _opened(path: str, rank: int, size: int) -> SharedFiles | None:
    """Open the files, if they are there and no other user can have made them."""
    folder = os.path.dirname(path)
    if not path or exposure(folder) is not None:
        return None
    if not all(os.path.exists(path + name) for name in _NAMES_OF_FILES):
        return None
    try:
        return SharedFiles(path, rank, size)
    except (OSError, LtcError) as error:
        _log.warning("A process group exchanges through torch.distributed: %s", error)
        return None
