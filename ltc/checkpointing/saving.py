"""Files that are written whole or not at all, and those that any PyTorch can read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

import torch

from ltc.support.atomic_file import FolderNotSynced, remove_abandoned, replacing
from ltc.training_loop.transfer import to_cpu


def save_for_cpu(data: Any, file_or_path, write: bool) -> None:
    """torch.save of `data` on the CPU where `write`; elsewhere the tensors are only computed."""
    on_cpu = to_cpu(data)
    if not write:
        return
    if not isinstance(file_or_path, (str, os.PathLike)):
        torch.save(on_cpu, file_or_path)
        return
    with writing(file_or_path) as file:
        torch.save(on_cpu, file)


@contextmanager
def writing(path: str | os.PathLike, nbytes: int = 0) -> Iterator[BinaryIO]:
    """Open a new file that becomes `path` when the block ends well, and vanishes otherwise.

    An OSError says what could not be saved and that the old file is as it was; FolderNotSynced, that
    the new one is in its place. Before, the unfinished files of killed saves into this folder are
    removed.

    Args:
        nbytes: The size of the finished file, for the error of a full disk.
    """
    remove_abandoned(path)
    try:
        with replacing(path) as file:
            yield file
    except (OSError, RuntimeError) as error:
        # torch's zip writer, closed after an OSError, raises an error of its own on top of it
        cause = error if isinstance(error, OSError) else error.__context__
        if not isinstance(cause, OSError):
            raise
        raise type(cause)(cause.errno, _explained(path, nbytes, cause)) from error


def _explained(path: str | os.PathLike, nbytes: int, error: OSError) -> str:
    if isinstance(error, FolderNotSynced):
        return (
            f"{os.fspath(path)} is saved, but may not be there after a crash of the machine: its "
            f"folder could not be synced: {error.strerror}"
        )
    needed = f" of {nbytes} bytes" if nbytes else ""
    kept = "the file that was there is unchanged" if os.path.exists(path) else "nothing was written"
    return f"Could not save {os.fspath(path)}{needed}: {error.strerror or error}; {kept}"
