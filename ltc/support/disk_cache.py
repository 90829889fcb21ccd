"""Bytes kept between processes, by name: lost without harm, and never trusted unless whole.

A file is the four bytes "ltc2", the SHA-256 of its name and of what follows, then what was kept.  Its
name is chosen by who writes it, so that it says all that the content depends on: the table in
docs/codegen.md lists the kinds of files.  Any number of processes may read and write at once: a file
appears whole.  What can not be read or written is as if it were not there.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import stat
import time
import warnings
from pathlib import Path

from ltc import config
from ltc.debug import metrics

_MAGIC = b"ltc2"
_FORMER_MAGIC = b"ltc1"  # whose digests did not say under which name the file was written
_DIGEST_BYTES = 32
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

    Only files of this user in a folder that nobody else can write to are read: what is kept here
    is code. The first trouble is told in one warning; after trouble with writing, nothing more is
    written.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._writable: bool | None = None  # None: not tried yet
        self._readable: bool | None = None  # None: not looked at yet
        self._bytes: int | None = None  # in the folder, as far as this process knows
        self._warned = False

    def read(self, name: str) -> bytes | None:
        """What was written under that name; None where there is nothing whole."""
        path = self.folder / name
        if not self._may_read():
            return None
        try:
            with open(path, "rb") as file:
                if not self._is_safe(os.fstat(file.fileno())):
                    return None
                content = file.read()
        except OSError:
            return None
        data = _unwrapped(name, content)
        if data is None:
            self.remove(name)
            if content.startswith(_FORMER_MAGIC):
                return None
            self._warn(f"{path} was damaged: it is removed, and what it held is made anew")
            return None
        self._touch(path)
        return data

    def write(self, name: str, data: bytes) -> None:
        """Keep `data`; a reader sees all of it or nothing."""
        if self._writable is False or not self._make_folder():
            return
        beside = self.folder / f".{name}.{os.getpid()}.{next(_numbers)}"
        try:
            descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                with open(descriptor, "wb") as file:
                    file.write(_wrapped(name, data))
                os.replace(beside, self.folder / name)
            except BaseException:
                beside.unlink(missing_ok=True)
                raise
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

    # --- safety ----------------------------------------------------------------------------------

    def _is_safe(self, status: os.stat_result) -> bool:
        mine = status.st_uid == os.getuid() and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if not mine:
            self._warn(f"others can write to {self.folder}, or to files there: nothing is read")
        return mine

    def _may_read(self) -> bool:
        """Whether nobody else can bring files here, looked at once: then it is there to stay."""
        if self._readable is None:
            try:
                status = os.stat(self.folder)
            except OSError:
                return False  # it may be made later
            self._readable = self._is_safe(status)
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
            if time.time() - os.stat(path).st_mtime > _TOUCH_SECONDS:
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
        """(when it was last used, bytes, name) of every file, unfinished ones among them."""
        found = []
        try:
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    try:
                        status = entry.stat(follow_symlinks=False)
                    except FileNotFoundError:
                        continue  # another process trims too
                    if stat.S_ISREG(status.st_mode):
                        found.append((status.st_mtime, status.st_size, entry.name))
        except OSError:
            pass
        return found


def _wrapped(name: str, data: bytes) -> bytes:
    return _MAGIC + _digest(name, data) + data


def _unwrapped(name: str, content: bytes) -> bytes | None:
    digest, data = content[len(_MAGIC) :][:_DIGEST_BYTES], content[len(_MAGIC) + _DIGEST_BYTES :]
    whole = content.startswith(_MAGIC) and _digest(name, data) == digest
    return data if whole else None


def _digest(name: str, data: bytes) -> bytes:
    """Of the name as well: a file that was moved to another name is none."""
    digest = hashlib.sha256(name.encode() + b"\0")
    digest.update(data)
    return digest.digest()


_caches: dict[Path, DiskCache] = {}


def disk_cache() -> DiskCache | None:
    """The cache that the environment asks for; None where it asks for none."""
    if not config.value("LTC_CACHE"):
        return None
    folder = default_folder()
    return _caches.get(folder) or _caches.setdefault(folder, DiskCache(folder))
