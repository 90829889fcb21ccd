"""A folder that this user alone can change, held open: whatever its path names later, this stays it."""

from __future__ import annotations

import errno
import itertools
import os
import stat
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from ltc.support.folder_safety import danger, danger_of, is_own_file

# A link is not followed, and a pipe not waited for: neither is a file that was written here.
_OPENED = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_MADE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
# What opening or reading says of something that is no readable file; others may pass, as too many
# open files do.
_NO_FILE = frozenset({errno.ELOOP, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENXIO, errno.EIO})
_numbers = itertools.count()

Identity = tuple[int, ...]


class Dangerous(Exception):
    """Somebody else could bring files into a folder; the text says how."""


class Misfit(Exception):
    """Under a name lies what this user has not written there; the text says what."""


class FoundFile(NamedTuple):
    """One file: when it was last used, its bytes, its name."""

    used: float
    nbytes: int
    name: str


class OwnFolder:
    """Files of one folder by name, each opened beside the others and without following a link.

    Raises Dangerous where others can change the folder, or what leads to it; OSError where there
    is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        reason = danger(path)
        if reason is not None:
            raise Dangerous(reason)
        self._file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._file).atexit = False
        self._number = _number_of(os.fstat(self._file))
        self.require_safe()

    def is_at_path(self) -> bool:
        """Whether the path still names this folder: it may have been removed, and made anew."""
        try:
            return _number_of(os.stat(self.path)) == self._number
        except OSError:
            return False

    def require_safe(self) -> None:
        """Raises Dangerous where somebody has opened the folder to others since."""
        reason = danger_of(self.path, os.fstat(self._file))
        if reason is not None:
            raise Dangerous(reason)

    def identity(self, name: str) -> Identity | None:
        """Differs where another file was put in the place of one; None where there is none."""
        try:
            return _identity(self._status(name))
        except OSError:
            return None

    def content(self, name: str, most: int) -> tuple[bytes, Identity]:
        """All bytes of a file, and which one it is.

        most  bytes that it may have

        Raises FileNotFoundError; Misfit where it is no file of this user's alone; OSError.
        """
        try:
            if not is_own_file(self._status(name)):  # a device is not even opened
                raise Misfit("others can write to it, or it is no file of this user's")
            with open(os.open(name, _OPENED, dir_fd=self._file), "rb") as file:
                status = os.fstat(file.fileno())
                if not is_own_file(status):
                    raise Misfit("it was exchanged while it was looked at")
                if status.st_size > most:
                    raise Misfit(f"it has {status.st_size} bytes")
                return file.read(), _identity(status)
        except OSError as error:
            if error.errno in _NO_FILE:
                raise Misfit(str(error)) from None
            raise

    def put(self, name: str, content: bytes) -> None:
        """A file that appears whole, in the place of what has that name.  Raises OSError."""
        self._put(name, content, os.replace)

    def put_first(self, name: str, content: bytes) -> None:
        """The same; raises FileExistsError where there is one of that name."""
        self._put(name, content, os.link)

    def remove(self, name: str) -> bool:
        """Whether it is gone now."""
        for remove in (os.unlink, os.rmdir):
            try:
                remove(name, dir_fd=self._file)
                return True
            except FileNotFoundError:
                return True  # another process was faster
            except OSError:
                pass  # a folder; or nothing here can be changed
        return False

    def touch(self, name: str) -> None:
        """Mark a file as used now.  Raises OSError."""
        os.utime(name, dir_fd=self._file, follow_symlinks=False)

    def used(self, name: str) -> float:
        """When a file was last used, in seconds since the epoch.  Raises OSError."""
        return self._status(name).st_mtime

    def files(self) -> Iterator[FoundFile]:
        """Every ordinary file.  Raises OSError."""
        with os.scandir(self._file) as entries:
            for entry in entries:
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue  # another process removes files too
                if stat.S_ISREG(status.st_mode):
                    yield FoundFile(status.st_mtime, status.st_size, entry.name)

    def _status(self, name: str) -> os.stat_result:
        return os.stat(name, dir_fd=self._file, follow_symlinks=False)

    def _put(self, name: str, content: bytes, place: Callable[..., None]) -> None:
        beside = f".{name}.{os.getpid()}.{next(_numbers)}"
        try:
            with open(os.open(beside, _MADE, 0o600, dir_fd=self._file), "wb") as file:
                file.write(content)
            place(beside, name, src_dir_fd=self._file, dst_dir_fd=self._file)
        finally:
            self.remove(beside)  # as os.replace leaves it, there is none


def _number_of(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _identity(status: os.stat_result) -> Identity:
    return (*_number_of(status), status.st_size, status.st_mtime_ns)
