"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import stat
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
    the machine. A link is followed; the file it replaces passes its permissions on. A device or a
    pipe, such as /dev/null or /dev/stdout, is written to as it is: no file may take its place.
    Raises OSError where the old content is still there, FolderNotSynced where the new one is.
    """
    if _holds_no_content(path):
        with open(path, "wb") as stream:
            yield stream
        return
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


def _holds_no_content(path: str | os.PathLike) -> bool:
    """Whether something is there that is neither a file nor a folder."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _sync_folder(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise FolderNotSynced(error.errno, error.strerror, str(folder)) from error
