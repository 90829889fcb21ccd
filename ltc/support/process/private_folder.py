"""A folder for the files and sockets of one launch, which goes when its processes have gone.

Its name ends in eight letters that cannot be guessed, and its maker holds a lock on it. A folder
without a lock was left by processes that were killed together with their janitor. It goes when the
next one is made.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import logging
import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from ltc.errors import LtcError
from ltc.support.folder_safety import danger, is_own_file

_log = logging.getLogger("ltc")
IN_MEMORY = "/dev/shm"  # Linux's file system without a disk
# Earlier versions locked nothing, and called theirs otherwise: those are left alone.
_NAME, _UNFINISHED = "ltc-run-", "ltc-new-"
_UNFINISHED_SECONDS = 60.0  # an unlocked folder of that age is a leftover
_JANITOR = 'read -r _; rm -rf -- "$0"'  # read ends when every holder of the pipe's other end has
_MOST_PATH = 1000  # characters of a path that another process names
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})


@contextlib.contextmanager
def private_folder(nbytes: int = 0) -> Iterator[str]:
    """Give the path of a new folder that only this user can enter, in memory if there is room.

    It is removed at the end of the block; if this process is killed, a process that waits for its
    end removes it.

    Args:
        nbytes: The bytes that will be written; if memory has less room, the folder is on a disk.

    Raises:
        LtcError: If no place has so much room.
    """
    parent, owner = _place_with_room(nbytes), os.getpid()
    _remove_leftovers(parent)
    path, lock = _made(parent)
    janitor = subprocess.Popen(
        ["/bin/sh", "-c", _JANITOR, path],
        stdin=subprocess.PIPE,
        start_new_session=True,  # no signal meant for this process's group reaches it
    )
    try:
        yield path
    finally:
        os.close(lock)
        if os.getpid() == owner:  # a forked child that ends leaves it to its parent
            shutil.rmtree(path, ignore_errors=True)
            assert janitor.stdin is not None
            janitor.stdin.close()
            if not os.path.exists(path):  # where somebody still writes there it stays, for later
                janitor.kill()  # processes forked meanwhile hold the pipe open while they live
                janitor.wait()


def require_private(path: str) -> None:
    """Raise LtcError if others could bring files into a folder in which processes meet."""
    try:
        reason = danger(Path(path))
    except OSError:
        return  # opening a file there raises the reason
    if reason is not None:
        raise LtcError(
            f"Processes of this user cannot meet in {path}: {reason}. Choose a folder that no other "
            f"user may write to."
        )


def exposure(path: str) -> str | None:
    """Return the reason why a path from another process cannot be a folder of `private_folder`.

    None if this user alone may enter the folder, and no other can put another in its place.
    """
    if len(path) > _MOST_PATH or not os.path.isabs(path) or not path.isprintable():
        return "it is not an absolute path of a usual length"
    if not os.path.basename(path).startswith(_NAME):
        return f"its name does not begin with {_NAME}"
    try:
        status = os.lstat(path)
        if not stat.S_ISDIR(status.st_mode):
            return "it is not a folder"
        if status.st_uid != os.geteuid():
            return f"it belongs to user {status.st_uid}"
        if stat.S_IMODE(status.st_mode) != 0o700:
            return "others may enter it"
        return danger(Path(path))
    except OSError as error:
        return f"it cannot be read ({error.strerror})"


def require_from_store(told: bytes) -> str:
    """Return the folder of this host's processes that the run's store names.

    Raises:
        LtcError: For anything but a folder that a process of this user has made: all that reach the
            store can write to it.
    """
    path = told[: _MOST_PATH + 1].decode(errors="replace")
    reason = exposure(path)
    if reason is not None:
        raise LtcError(
            f"The run's store names {path!r} as the folder where the processes of this host meet, "
            f"but it cannot be used: {reason}. Any process that reaches the store can write to it: "
            f"keep its port (MASTER_PORT) from other users and machines."
        )
    return path


def shared_file(path: str, nbytes: int) -> int:
    """Return the descriptor of a file of `nbytes` bytes, which the first process makes.

    Only its reserved bytes have memory: see `reserve`.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    file = os.open(path, flags, 0o600)
    if not is_own_file(os.fstat(file)):
        os.close(file)
        raise LtcError(f"{path} cannot be used: another user owns it, or may write to it.")
    os.ftruncate(file, nbytes)  # each process sets the same size, and new bytes are zero
    return file


def reserve(file: int, start: int, nbytes: int) -> None:
    """Allocate bytes of a file now: a lack of room is an error here, not a signal later.

    Raises LtcError.
    """
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(file, start, nbytes)
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        raise LtcError(
            f"The file system of shared memory has no room for {nbytes} more bytes: {error}. Enlarge "
            f"{IN_MEMORY} (docker run --shm-size), or set LTC_TRANSPORT=hosts."
        ) from None


# --- places ----------------------------------------------------------------------------------


def _place_with_room(nbytes: int) -> str:
    """Return the first place with enough room; warn if it is not the preferred one."""
    reasons: list[str] = []
    for place in dict.fromkeys((IN_MEMORY, tempfile.gettempdir())):
        reason = _lack(place, nbytes)
        if reason is None:
            if reasons:
                _say_once(f"{reasons[0]}: processes exchange through files in {place}")
            return place
        reasons.append(reason)
    raise LtcError(
        f"Processes that train together have no place to exchange: {'; '.join(reasons)}. Set TMPDIR to "
        f"a folder with more room, or LTC_TRANSPORT=hosts."
    )


def _lack(place: str, nbytes: int) -> str | None:
    """Return what a place lacks for so many bytes."""
    if not os.access(place, os.W_OK | os.X_OK):
        return f"{place} is not writable" if os.path.isdir(place) else f"there is no {place}"
    system = os.statvfs(place)
    free = system.f_bavail * system.f_frsize
    if free < nbytes:
        return f"{place} has {free >> 20} MB left of the {-(-nbytes >> 20)} MB that are needed"
    return None


@functools.lru_cache(64)
def _say_once(text: str) -> None:
    _log.warning("%s", text)


# --- folders ---------------------------------------------------------------------------------


def _made(parent: str) -> tuple[str, int]:
    """(path, descriptor that holds the lock) of a new folder, which has its name once it is locked."""
    new = tempfile.mkdtemp(prefix=_UNFINISHED, dir=parent)  # with mode 0700
    lock = os.open(new, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)
    path = os.path.join(parent, _NAME + os.path.basename(new).removeprefix(_UNFINISHED))
    os.rename(new, path)
    return path, lock


def _remove_leftovers(parent: str) -> None:
    """Remove this user's folders that no living process has locked."""
    with os.scandir(parent) as entries:
        names = [entry.name for entry in entries if entry.name.startswith((_NAME, _UNFINISHED))]
    for name in names:
        with contextlib.suppress(OSError):  # another process removes it too
            _remove_leftover(os.path.join(parent, name))


def _remove_leftover(path: str) -> None:
    status = os.lstat(path)
    if not _is_ours(path, status):
        return
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(folder)


def _is_ours(path: str, status: os.stat_result) -> bool:
    """Return True if it is a folder that `_made` has made, and long enough ago."""
    name = os.path.basename(path)
    new = name.startswith(_UNFINISHED)
    random = name.removeprefix(_UNFINISHED if new else _NAME)
    return (
        stat.S_ISDIR(status.st_mode)
        and stat.S_IMODE(status.st_mode) == 0o700
        and status.st_uid == os.geteuid()
        and len(random) == 8
        and not (new and abs(time.time() - status.st_mtime) < _UNFINISHED_SECONDS)
    )
