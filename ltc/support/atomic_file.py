"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


class FolderNotSynced(OSError):
    """A new file is whole and in its place; whether it is there after a crash is not known."""


@contextmanager
def replacing(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """Open a new file that becomes `path` when the block ends well, and vanishes otherwise.

    A reader of `path` sees the old content or the new, never part of either, also after a crash of
    the machine. A link is followed; the file it replaces passes its permissions on.
    Raises OSError where the old content is still there, FolderNotSynced where the new one is.
    """
    path = Path(os.path.realpath(path))
    beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")  # one folder: a rename can not copy
    try:
        with open(beside, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # a rename may reach the disk before the bytes it names
        if path.exists():
            os.chmod(beside, path.stat().st_mode & 0o7777)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise FolderNotSynced(error.errno, error.strerror, str(folder)) from error
