"""Bytes kept between processes, by name: lost without harm, and never trusted unless whole.

A file is the four bytes "ltc3", a digest of its name and of what follows (HMAC with SHA-256), then
what was kept.  Its name is chosen by who writes it, so that it says all that the content depends on:
the table in docs/codegen.md lists the kinds of files.  The digest's key is made once for a folder and
lies in it, readable by this user alone: what somebody else has written has no right digest.  Any
number of processes may read and write at once: a file appears whole.  A folder that is removed and
made anew, or gets another key, is noticed by the processes that use it.  What can not be read or
written is as if it were not there.
"""

from __future__ import annotations

import hmac
import re
import secrets
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from ltc import config
from ltc.debug import metrics
from ltc.support.bounded_table import BoundedTable
from ltc.support.own_folder import Dangerous, FoundFile, Identity, Misfit, OwnFolder

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

    Only files of this user, in a folder that nobody else can change, are read: what is kept here is
    code. The first trouble is told in one warning; after trouble with writing, nothing more is
    written.
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
        """What was written under that name; None where there is nothing whole."""
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
        folder = None if self._is_unwritable else self._open() or self._make()
        if folder is None:
            return
        try:
            self._put(folder, name, data)
        except IsADirectoryError as error:
            self._warn(f"{error}: what belongs there is not kept")
        except OSError as error:
            self._is_unwritable = True
            self._warn(f"nothing more is kept in {self.folder}: {error}")
        else:
            self._count(len(data))

    def remove(self, name: str) -> bool:
        """Whether it is gone now."""
        folder = self._open()
        return folder is None or folder.remove(name)

    def remove_damaged(self, name: str, told: bool = True) -> None:
        """Remove a file that is not what its name says, and tell of it."""
        gone = "is removed" if self.remove(name) else "can not be removed"
        if told:
            path = self.folder / name
            self._warn(f"{path} was damaged: it {gone}, and what it held is made anew")

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
            self._warn(f"{self.folder} can not be made: {error}. Nothing is kept on disk")
            return None
        return self._open()

    def _content(self, folder: OwnFolder, name: str) -> bytes | None:
        """All bytes of a file of this user's; None where there is none.  What else is there goes."""
        path = self.folder / name
        try:
            return folder.content(name, _most_bytes())[0]
        except FileNotFoundError:
            return None
        except Misfit as misfit:
            gone = "it is removed" if folder.remove(name) else "it can not be removed"
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
        """The key that some process has made; None where none has, or it is not whole.

        put_back  where it was removed, the one that this process knows comes back
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
        """A new key, or another process's that was faster.  Raises OSError."""
        if folder.identity(_KEY) is not None:  # no process writes such a one
            self.remove_damaged(_KEY)
        _put_first(folder, secrets.token_bytes(_KEY_BYTES))
        key = self._key_in(folder)
        if key is None:
            raise OSError(f"{self.folder / _KEY} can not be read")
        return key

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            warnings.warn(
                f"ltc's cache: {text}. Set LTC_CACHE_DIR to another folder, or LTC_CACHE=0 to do "
                f"without.",
                stacklevel=2,
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
        """What was written here, unfinished files too.

        Somebody may keep other things in the folder: they are no concern of the cache's.
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
    """Of the name as well: a file that was moved to another name is none."""
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
        raise NotADirectoryError(f"{folder} is no folder")


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
    folder = default_folder()
    return _caches.get(folder) or _caches.keep(folder, DiskCache(folder))
