"""Bytes kept between processes, by name: lost without harm, and never trusted unless whole.

A file is the four bytes "ltc3", a digest of its name and of what follows (HMAC with SHA-256), then
what was kept.  Its name is chosen by who writes it, so that it says all that the content depends on:
the table in docs/codegen.md lists the kinds of files.  The digest's key is made once for a folder and
lies in it, readable by this user alone: what somebody else has written has no right digest.  Any
number of processes may read and write at once: a file appears whole.  What can not be read or written
is as if it were not there.
"""

from __future__ import annotations

import hmac
import itertools
import os
import re
import secrets
import stat
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ltc import config
from ltc.debug import metrics
from ltc.support.folder_safety import danger, is_own_file

Content = TypeVar("Content")

_MAGIC = b"ltc3"
_FORMER_MAGICS = (b"ltc1", b"ltc2")  # their digests did not say the file's name, or had no key
_DIGEST_BYTES = _KEY_BYTES = 32
_KEY = "key"  # the name of the file that holds it
# A digest names what is kept; a file that is being written has the process and a number behind it.
_OWN_NAME = re.compile(r"[0-9a-f]{64}|\.[0-9a-f]{64}\.\d+\.\d+")
# A link is not followed, and a pipe not waited for: neither is a file that was written here.
_OPENED = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_TOUCH_SECONDS = 3600.0  # a file read again within that time stays as it is: reads write nothing
_KEPT_AFTER_TRIM = 0.8  # of the bytes allowed, so that not every write finds the cache full
_MEGABYTE = 1 << 20
_numbers = itertools.count()


def default_folder() -> Path:
    """LTC_CACHE_DIR; else ltc in the user's folder for caches."""
    chosen = config.value("LTC_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    caches = config.value("XDG_CACHE_HOME", "~/.cache")  # the freedesktop standard
    return Path(caches).expanduser() / "ltc"


class DiskCache:
    """One folder of files, at most LTC_CACHE_MB in all: the longest unused go first.

    Only files of this user, in a folder that nobody else can change, are read: what is kept here is
    code. The first trouble is told in one warning; after trouble with writing, nothing more is
    written.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._writable: bool | None = None  # None: not tried yet
        self._readable: bool | None = None  # None: not looked at yet
        self._key: bytes | None = None
        self._bytes: int | None = None  # in the folder, as far as this process knows
        self._warned = False

    def read(self, name: str) -> bytes | None:
        """What was written under that name; None where there is nothing whole."""
        if not self._may_read() or self._key_of_folder() is None:
            return None
        content = self._content(name)
        if content is None:
            return None
        data = self._unwrapped(name, content)
        if data is None:
            self.remove_damaged(name, told=not content.startswith(_FORMER_MAGICS))
            return None
        self._touch(self.folder / name)
        return data

    def read_as(self, name: str, parse: Callable[[bytes], Content]) -> Content | None:
        """What `parse` makes of it; a file of which it can make nothing is removed as damaged."""
        data = self.read(name)
        if data is None:
            return None
        try:
            return parse(data)
        except Exception:  # whatever it stumbles over: it is made for what is written here
            self.remove_damaged(name)
            return None

    def write(self, name: str, data: bytes) -> None:
        """Keep `data`; a reader sees all of it or nothing."""
        if self._writable is False or not self._make_folder():
            return
        try:
            self._put(name, self._wrapped(name, data))
        except OSError as error:
            self._writable = False
            self._warn(f"nothing more is kept in {self.folder}: {error}")
            return
        self._count(len(data))

    def remove(self, name: str) -> None:
        try:
            os.unlink(self.folder / name)
        except OSError:
            pass  # another process was faster, or nothing here can be changed

    def remove_damaged(self, name: str, told: bool = True) -> None:
        """Remove a file that is not what its name says, and tell of it."""
        self.remove(name)
        if told:
            path = self.folder / name
            self._warn(f"{path} was damaged: it is removed, and what it held is made anew")

    def count(self) -> tuple[int, int]:
        """(number of files, bytes in them)"""
        files = self._files()
        return len(files), sum(size for _, size, _ in files)

    def clear(self) -> None:
        """Remove every file of the cache. What else lies in the folder stays, and so does the key:
        processes that run go on writing with it."""
        for _, _, name in self._files():
            self.remove(name)
        self._bytes = None

    # --- files -----------------------------------------------------------------------------------

    def _content(self, name: str) -> bytes | None:
        """All bytes of a file of this user's; None where there is none."""
        path = self.folder / name
        try:
            with open(os.open(path, _OPENED), "rb") as file:
                if is_own_file(os.fstat(file.fileno())):
                    return file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._warn(f"{path} is not read: {error}")
            return None
        self._warn(f"others can write to {path}, or it is no file: it is not read")
        return None

    def _put(self, name: str, content: bytes, put: Callable[..., None] | None = None) -> None:
        beside = self.folder / f".{name}.{os.getpid()}.{next(_numbers)}"
        try:
            with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(content)
            (put or os.replace)(beside, self.folder / name)
        finally:
            beside.unlink(missing_ok=True)  # as os.replace leaves it, there is none

    # --- digests ---------------------------------------------------------------------------------

    def _wrapped(self, name: str, data: bytes) -> bytes:
        return _MAGIC + self._digest(name, data) + data

    def _unwrapped(self, name: str, content: bytes) -> bytes | None:
        digest, data = (
            content[len(_MAGIC) :][:_DIGEST_BYTES],
            content[len(_MAGIC) + _DIGEST_BYTES :],
        )
        is_whole = content.startswith(_MAGIC) and hmac.compare_digest(
            self._digest(name, data), digest
        )
        return data if is_whole else None

    def _digest(self, name: str, data: bytes) -> bytes:
        """Of the name as well: a file that was moved to another name is none."""
        key = self._key_of_folder() or self._make_key()
        digest = hmac.new(key, name.encode() + b"\0", "sha256")
        digest.update(data)
        return digest.digest()

    def _key_of_folder(self) -> bytes | None:
        """The key that some process has made; None where none has, or it is not whole."""
        if self._key is None:
            key = self._content(_KEY)
            self._key = key if key is not None and len(key) == _KEY_BYTES else None
        return self._key

    def _make_key(self) -> bytes:
        """A new key, or another process's that was faster.  Raises OSError."""
        if self._content(_KEY) is not None:  # of another length: no process writes such a one
            self.remove_damaged(_KEY)
        try:
            self._put(_KEY, secrets.token_bytes(_KEY_BYTES), os.link)
        except FileExistsError:
            pass
        except (
            OSError
        ):  # no second names here; of two processes at once, one's files are made again
            self._put(_KEY, secrets.token_bytes(_KEY_BYTES))
        key = self._key_of_folder()
        if key is None:
            raise OSError(f"{self.folder / _KEY} can not be read")
        return key

    # --- safety ----------------------------------------------------------------------------------

    def _may_read(self) -> bool:
        """Whether nobody else can bring files here, looked at once: then it is there to stay."""
        if self._readable is None:
            try:
                reason = danger(self.folder)
            except OSError:
                return False  # it may be made later
            self._readable = reason is None
            if reason is not None:
                self._warn(f"{reason}: nothing is read from {self.folder}, nor written there")
        return self._readable

    def _make_folder(self) -> bool:
        if self._writable is None:
            try:
                os.makedirs(self.folder, mode=0o700, exist_ok=True)
                self._writable = self._may_read()
            except OSError as error:
                self._writable = False
                self._warn(f"{self.folder} can not be made: {error}. Nothing is kept on disk")
        return self._writable

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"ltc's cache: {text}. Set LTC_CACHE_DIR to another folder, or LTC_CACHE=0 to do "
                f"without.",
                stacklevel=2,
            )

    # --- size ------------------------------------------------------------------------------------

    def _touch(self, path: Path) -> None:
        """Mark the file as used lately."""
        try:
            # a clock that was put back leaves times that lie ahead
            if abs(time.time() - os.stat(path).st_mtime) > _TOUCH_SECONDS:
                os.utime(path)
        except OSError:
            pass  # read-only: nobody trims it either

    def _count(self, nbytes: int) -> None:
        limit = config.value("LTC_CACHE_MB") * _MEGABYTE
        if self._bytes is None:
            self._bytes = sum(size for _, size, _ in self._files())
        else:
            self._bytes += nbytes
        if self._bytes > limit:
            self._trim(int(limit * _KEPT_AFTER_TRIM))

    def _trim(self, limit: int) -> None:
        files = sorted(self._files())
        self._bytes = sum(size for _, size, _ in files)
        for _, size, name in files:
            if self._bytes <= limit:
                break
            self.remove(name)
            self._bytes -= size
            metrics.count("DiskCacheTrimmed")

    def _files(self) -> list[tuple[float, int, str]]:
        """(when it was last used, bytes, name) of what was written here, unfinished files too.

        Somebody may keep other things in the folder: they are no concern of the cache's.
        """
        found = []
        try:
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    if not _OWN_NAME.fullmatch(entry.name):
                        continue
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue  # another process trims too
                    if stat.S_ISREG(status.st_mode):
                        found.append((status.st_mtime, status.st_size, entry.name))
        except OSError:
            pass
        return found


_caches: dict[Path, DiskCache] = {}


def disk_cache() -> DiskCache | None:
    """The cache that the environment asks for; None where it asks for none."""
    if not config.value("LTC_CACHE"):
        return None
    folder = default_folder()
    return _caches.get(folder) or _caches.setdefault(folder, DiskCache(folder))
