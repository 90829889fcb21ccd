"""Files that are written whole or not at all."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

UNFINISHED = ".ltc-unfinished"  # how the name of a file ends that is being written
UNLOCKED_SECONDS = 60  # how old one must be without a write where the file system has no locks


class FolderNotSynced(OSError):
    """A new file is whole and in its place; whether it is there after a crash is not known."""


@contextmanager
def replacing(path: str | os.PathLike) -> Iterator[BinaryIO]:
    """Open a new file that becomes `path` when the block ends well, and vanishes otherwise.

    A reader of `path` sees the old content or the new, never part of either, also after a crash of
    the machine. A link is followed; the file it replaces passes its permissions on. A device or a
    pipe, such as /dev/null or /dev/stdout, is written to as it is: no file may take its place.

    Raises:
        OSError: If the old content is still there.
        FolderNotSynced: If the new one is.
    """
    if _holds_no_content(path):
        with open(path, "wb") as stream:
            yield stream
        return
    path = Path(os.path.realpath(path))
    beside, opened = _created_beside(path)
    try:
        with opened as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # a rename may reach the disk before the bytes it names
            with contextlib.suppress(FileNotFoundError):
                os.chmod(beside, os.stat(path).st_mode & 0o7777)
            os.replace(beside, path)  # before the lock goes: without it, it counts as abandoned
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def remove_abandoned(path: str | os.PathLike) -> None:
    """Remove the unfinished files in the folder of `path` whose writers have died.

    A writer holds a lock on its file, which goes with its process however that ends.
    """
    path = Path(os.path.realpath(path))
    of_older = re.escape(path.name) + r"\.[0-9a-f]{32}"  # without the ending, before there was one
    unfinished = re.compile(
        rf"\.(?:{of_older}|.+\.[0-9a-f]{{32}}{re.escape(UNFINISHED)})", re.DOTALL
    )
    with contextlib.suppress(OSError):  # tidying up is no part of a save
        for file in path.parent.iterdir():
            if unfinished.fullmatch(file.name):
                with contextlib.suppress(OSError):  # of another user, or gone meanwhile
                    _remove_unless_held(file)


def _remove_unless_held(path: Path) -> None:
    with open(path, "r+b") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        except OSError:
            if time.time() - path.stat().st_mtime < UNLOCKED_SECONDS:
                return
        path.unlink(missing_ok=True)  # with its lock: a writer that has just made it makes another


def _created_beside(path: Path) -> tuple[Path, BinaryIO]:
    """A new file in the folder of `path`, for a rename copies nothing there, and its lock held."""
    while True:
        beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}{UNFINISHED}")
        file = open(beside, "xb")  # noqa: SIM115  the caller closes it
        if _is_held(file, beside):
            return beside, file
        file.close()
        beside.unlink(missing_ok=True)


def _is_held(file: BinaryIO, path: Path) -> bool:
    """Take the lock of a new file. False if another process took it for an abandoned one."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # some network folders know no locks
        return True
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _holds_no_content(path: str | os.PathLike) -> bool:
    """Return True if something is there that is neither a file nor a folder."""
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
