"""Bytes kept between processes, by name: lost without harm, and never trusted unless whole.

A file is the four bytes "ltc3", a digest of its name and of what follows (HMAC with SHA-256), then
what was kept. Its writer chooses the name, so that it names all that the content depends on: the
table in docs/codegen.md lists the kinds of files. The digest's key is made once for a folder and
lies in it, readable by this user alone: a file that another user has written has a wrong digest. Any
number of processes may read and write at once: a file appears whole. The processes that use a folder
notice if it is removed and made anew, or gets another key. A file that cannot be read or written
counts as missing.
"""

from __future__ import annotations

import errno
import fcntl
import hmac
import itertools
import os
import re
import secrets
import stat
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

from ltc import config
from ltc.support.bounded_table import BoundedTable
from ltc.support.folder_safety import danger, danger_of, is_own_file
from ltc.support.observation import metrics
from ltc.support.user_frame import warn_user

Content = TypeVar("Content")

_MAGIC = b"ltc3"
_FORMER_MAGICS = (b"ltc1", b"ltc2")  # their digests did not say the file's name, or had no key
_DIGEST_BYTES = _KEY_BYTES = 32
_KEY = "key"  # the name of the file that holds it
# A digest names what is kept; a file that is being written has the process and a number behind it.
_OWN_NAME = re.compile(r"[0-9a-f]{64}|\.[0-9a-f]{64}\.\d+\.\d+")
_TOUCH_SECONDS = 3600.0  # a file read again within that time stays as it is: reads write nothing
_KEPT_AFTER_TRIM = 0.8  # of the bytes allowed, so that not every write finds the cache full
_MEGABYTE = 1 << 20


def default_folder() -> Path:
    """LTC_CACHE_DIR; else ltc in the user's folder for caches."""
    chosen = config.value("LTC_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    caches = config.value("XDG_CACHE_HOME", "~/.cache")  # the freedesktop standard
    return Path(caches).expanduser() / "ltc"


class DiskCache:
    """One folder of files, at most LTC_CACHE_MB in all: the longest unused go first.

    Only files of this user, in a folder that no other user can change, are read: the files are code.
    The first trouble gives one warning; after trouble with writing, nothing more is written.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._opened: OwnFolder | None = None
        self._is_dangerous = self._is_unwritable = False  # once found so, it is used no more
        self._key: bytes | None = None
        self._key_identity: Identity | None = None
        self._bytes: int | None = None  # in the folder, as far as this process knows
        self._warned = False

    def read(self, name: str) -> bytes | None:
        """Return the bytes written under that name; None if there is no whole file."""
        folder = self._open()
        if folder is None or self._key_in(folder) is None:
            return None
        content = self._content(folder, name)
        if content is None:
            return None
        data = self._unwrapped(name, content)
        if data is None:
            self.remove_damaged(name, told=not content.startswith(_FORMER_MAGICS))
            return None
        _touch(folder, name)
        return data

    def has(self, name: str) -> bool:
        """Return True if there is a file of that name; that it is whole is not looked at."""
        folder = self._open()
        return folder is not None and folder.identity(name) is not None

    def read_as(self, name: str, parse: Callable[[bytes], Content]) -> Content | None:
        """Return the parsed content; a file that `parse` refuses is removed as damaged."""
        data = self.read(name)
        if data is None:
            return None
        try:
            return parse(data)
        except Exception as error:  # whatever it stumbles over: it is made for what is written here
            self.remove_damaged(name, why=f" ({type(error).__name__}: {error})")
            return None

    def write(self, name: str, data: bytes) -> bool:
        """Keep `data`; a reader sees all of it or nothing. Return True if it is kept."""
        folder = self._writable()
        if folder is None:
            return False
        try:
            self._put(folder, name, data)
        except IsADirectoryError as error:
            self._warn(f"{error}: the file of that name is not kept")
        except OSError as error:
            self._is_unwritable = True
            self._warn(f"nothing more is kept in {self.folder}: {error}")
        else:
            self._count(len(data))
            return True
        return False

    def lock(self, name: str, wait: bool) -> int | None:
        """Lock a file of that name against other processes.

        Args:
            wait: True to wait until no other process has it.

        Returns:
            A descriptor: what is locked is free once it and its copies in other processes are closed.
            None if another process has it, or nothing can be written here.
        """
        folder = self._writable()
        try:
            return None if folder is None else folder.lock(name, wait)
        except OSError as error:
            self._warn(f"{self.folder / name} cannot be locked: {error}")
            return None

    def remove(self, name: str) -> bool:
        """Remove the file; return True if it is gone now."""
        folder = self._open()
        return folder is None or folder.remove(name)

    def remove_damaged(self, name: str, told: bool = True, why: str = "") -> None:
        """Remove a file with another content than its name says, and warn of it."""
        gone = "is removed" if self.remove(name) else "cannot be removed"
        if told:
            path = self.folder / name
            self._warn(f"{path} was damaged{why}: it {gone}, and its content is made anew")

    def count(self) -> tuple[int, int]:
        """(number of files, bytes in them)"""
        files = self._files()
        return len(files), sum(file.nbytes for file in files)

    def clear(self) -> None:
        """Remove every file of the cache. What else lies in the folder stays, and so does the key:
        processes that run go on writing with it."""
        for file in self._files():
            self.remove(file.name)
        self._bytes = None

    # --- the folder ------------------------------------------------------------------------------

    def _open(self) -> OwnFolder | None:
        """The folder at the path now; None where there is none, or others can change it."""
        if self._is_dangerous:
            return None
        try:
            if self._opened is None or not self._opened.is_at_path():
                self._key = self._key_identity = self._bytes = None
                self._opened = OwnFolder(self.folder)
            self._opened.require_safe()
        except Dangerous as reason:
            self._is_dangerous, self._opened = True, None
            self._warn(f"{reason}: nothing is read from {self.folder}, nor written there")
        except OSError:  # it may be made later
            self._opened = None
        return self._opened

    def _make(self) -> OwnFolder | None:
        if self._is_dangerous:
            return None
        try:
            _make_private(self.folder)
        except OSError as error:
            self._is_unwritable = True
            self._warn(f"{self.folder} cannot be made: {error}. Nothing is kept on disk")
            return None
        return self._open()

    def _writable(self) -> OwnFolder | None:
        return None if self._is_unwritable else self._open() or self._make()

    def _content(self, folder: OwnFolder, name: str) -> bytes | None:
        """Return all bytes of a file of this user's, or None; anything else there is removed."""
        path = self.folder / name
        try:
            return folder.content(name, _most_bytes())[0]
        except FileNotFoundError:
            return None
        except Misfit as misfit:
            gone = "it is removed" if folder.remove(name) else "it cannot be removed"
            self._warn(f"{path} is not read: {misfit}; {gone}")
        except (OSError, MemoryError) as error:
            self._warn(f"{path} is not read: {error}")
        return None

    def _put(self, folder: OwnFolder, name: str, data: bytes) -> None:
        """Raises OSError."""
        while True:
            key = self._key_in(folder, put_back=True) or self._made_key(folder)
            folder.put(name, _MAGIC + _digest(key, name, data) + data)
            if folder.identity(_KEY) == self._key_identity or not folder.is_at_path():
                return  # else somebody has made another key meanwhile, which counts from now on

    # --- digests ---------------------------------------------------------------------------------

    def _unwrapped(self, name: str, content: bytes) -> bytes | None:
        assert self._key is not None
        start = len(_MAGIC)
        digest, data = content[start : start + _DIGEST_BYTES], content[start + _DIGEST_BYTES :]
        expected = _digest(self._key, name, data)
        return data if content[:start] == _MAGIC and hmac.compare_digest(expected, digest) else None

    def _key_in(self, folder: OwnFolder, put_back: bool = False) -> bytes | None:
        """Return the key that some process has made; None if there is none, or it is not whole.

        Args:
            put_back: True to write the key that this process knows if the file was removed.
        """
        there = folder.identity(_KEY)
        if there is None and self._key is not None and put_back:
            _put_first(folder, self._key)
            there = folder.identity(_KEY)
        if there is not None and there != self._key_identity:
            self._key = self._key_identity = None
            self._read_key(folder)
        return self._key

    def _read_key(self, folder: OwnFolder) -> None:
        try:
            key, identity = folder.content(_KEY, _KEY_BYTES)
        except (OSError, Misfit):
            return
        if len(key) == _KEY_BYTES:
            self._key, self._key_identity = key, identity

    def _made_key(self, folder: OwnFolder) -> bytes:
        """Return a new key, or the key of another process that was faster. Raises OSError."""
        was_there = (
            folder.identity(_KEY) is not None
        )  # asked before the key is read: one may appear
        key = self._key_in(folder)
        if key is not None:
            return key
        if was_there:  # no process writes such a one
            self.remove_damaged(_KEY)
        _put_first(folder, secrets.token_bytes(_KEY_BYTES))
        key = self._key_in(folder)
        if key is None:
            raise OSError(f"{self.folder / _KEY} cannot be read")
        return key

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            warn_user(
                f"ltc's cache: {text}. Set LTC_CACHE_DIR to another folder, or LTC_CACHE=0 to run "
                f"without a disk cache."
            )

    # --- size ------------------------------------------------------------------------------------

    def _count(self, nbytes: int) -> None:
        limit = _most_bytes()
        if self._bytes is None:
            self._bytes = sum(file.nbytes for file in self._files())
        else:
            self._bytes += nbytes
        if self._bytes > limit:
            self._trim(int(limit * _KEPT_AFTER_TRIM))

    def _trim(self, limit: int) -> None:
        now = time.time()
        # what a clock that went ahead has marked is not the latest for ever
        files = sorted(self._files(), key=lambda file: (file.used <= now + _TOUCH_SECONDS, file))
        self._bytes = sum(file.nbytes for file in files)
        for file in files:
            if self._bytes <= limit:
                break
            self.remove(file.name)
            self._bytes -= file.nbytes
            metrics.count("DiskCacheTrimmed")

    def _files(self) -> list[FoundFile]:
        """Return the files written here, unfinished ones too.

        Other files in the folder are not the cache's.
        """
        folder = self._open()
        try:
            found = () if folder is None else folder.files()
            return [file for file in found if _OWN_NAME.fullmatch(file.name)]
        except OSError:
            return []


def _most_bytes() -> int:
    return config.value("LTC_CACHE_MB") * _MEGABYTE


def _digest(key: bytes, name: str, data: bytes) -> bytes:
    """Return a digest of name and data: a file that was moved to another name is invalid."""
    digest = hmac.new(key, name.encode() + b"\0", "sha256")
    digest.update(data)
    return digest.digest()


def _put_first(folder: OwnFolder, key: bytes) -> None:
    """The key of a folder that has none; another process may be faster.  Raises OSError."""
    try:
        folder.put_first(_KEY, key)
    except FileExistsError:
        pass
    except OSError:  # no second names here; of two processes at once, one's files are made again
        folder.put(_KEY, key)


def _make_private(folder: Path) -> None:
    """Make a folder, and what leads to it, which only this user can enter.  Raises OSError."""
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    for one in reversed(missing):
        one.mkdir(mode=0o700, exist_ok=True)
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder")


def _touch(folder: OwnFolder, name: str) -> None:
    """Mark a file as used lately."""
    try:
        # a clock that was put back leaves times that lie ahead
        if abs(time.time() - folder.used(name)) > _TOUCH_SECONDS:
            folder.touch(name)
    except OSError:
        pass  # read-only: nobody trims it either


_MOST_FOLDERS = 16  # of one process; each is a file that is open
_caches: BoundedTable[Path, DiskCache] = BoundedTable("DiskCaches", _MOST_FOLDERS)


def disk_cache() -> DiskCache | None:
    """The cache that the environment asks for; None where it asks for none."""
    if not config.value("LTC_CACHE"):
        return None
    return cache_of(default_folder())


def cache_of(folder: Path) -> DiskCache:
    """Return the cache in a folder: the same one each time."""
    return _caches.get(folder) or _caches.keep(folder, DiskCache(folder))


# A folder that this user alone can change, held open: whatever its path names later, this stays
# it.

# A link is not followed, and a pipe not waited for: neither is a file that was written here.
_OPENED = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_MADE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
_LOCKED = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
# What opening or reading says of something that is no readable file; others may pass, as too many
# open files do.
_NO_FILE = frozenset({errno.ELOOP, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENXIO, errno.EIO})
_numbers = itertools.count()

Identity = tuple[int, ...]


class Dangerous(Exception):
    """Another user could bring files into a folder; the text says how."""


class Misfit(Exception):
    """A name leads to something that this user has not written; the text describes it."""


class FoundFile(NamedTuple):
    """One file: when it was last used, its bytes, its name."""

    used: float
    nbytes: int
    name: str


def _close_in(process: int, file: int) -> None:
    """Close a file in the process that opened it: a fork may have closed it, and taken its number."""
    if os.getpid() == process:
        os.close(file)


class OwnFolder:
    """Files of one folder by name, each opened beside the others and without following a link.

    Raises Dangerous if others can change the folder or its path; OSError if there is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        reason = danger(path)
        if reason is not None:
            raise Dangerous(reason)
        self._file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        weakref.finalize(self, _close_in, os.getpid(), self._file).atexit = False
        self._number = _number_of(os.fstat(self._file))
        self.require_safe()

    def is_at_path(self) -> bool:
        """Return True if the path still names this folder: it may have been removed, and made anew."""
        try:
            return _number_of(os.stat(self.path)) == self._number
        except OSError:
            return False

    def require_safe(self) -> None:
        """Raise Dangerous if the folder has been opened to other users since."""
        reason = danger_of(self.path, os.fstat(self._file))
        if reason is not None:
            raise Dangerous(reason)

    def identity(self, name: str) -> Identity | None:
        """Return a value that changes when another file takes the name; None if there is no file."""
        try:
            return _identity(self._status(name))
        except OSError:
            return None

    def content(self, name: str, most: int) -> tuple[bytes, Identity]:
        """Return all bytes of a file, and its identity.

        Raises FileNotFoundError; Misfit if another user can write to it, or owns it; OSError.

        Args:
            most: The most bytes that it may have.
        """
        try:
            if not is_own_file(self._status(name)):  # a device is not even opened
                raise Misfit("others can write to it, or it is not a file of this user's")
            with open(os.open(name, _OPENED, dir_fd=self._file), "rb") as file:
                status = os.fstat(file.fileno())
                if not is_own_file(status):
                    raise Misfit("it was replaced during the check")
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
        """Remove the file; return True if it is gone now."""
        for remove in (os.unlink, os.rmdir):
            try:
                remove(name, dir_fd=self._file)
                return True
            except FileNotFoundError:
                return True  # another process was faster
            except OSError:
                pass  # a folder; or nothing here can be changed
        return False

    def lock(self, name: str, wait: bool) -> int | None:
        """Lock a file, made where it is missing; None if another process has it. Raises OSError."""
        descriptor = os.open(name, _LOCKED, 0o600, dir_fd=self._file)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except BaseException:
            os.close(descriptor)
            raise

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
