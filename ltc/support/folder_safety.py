"""A check of a folder: the ways in which another user could replace it, or bring files there."""

from __future__ import annotations

import functools
import os
import stat
from pathlib import Path

_MOST_LINKS = 40  # as many as Linux follows in one path
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def danger(folder: Path) -> str | None:
    """Return why others may change what `folder` names, in words; None if only this user and root
    may.

    Every folder on the path counts, and every link: a user with the right to rename one of them can
    replace it. In a folder with the sticky bit, such as /tmp, users rename only their own files.

    Raises:
        OSError: If there is no such folder.
    """
    at, links = Path("/"), 0
    left = list(reversed(folder.absolute().parts[1:]))
    while left:
        part = left.pop()
        if part == "..":  # `at` holds no link, so this is what the system takes it for
            at = at.parent
            continue
        if (reason := _of_parent(at, os.lstat(at))) is not None:
            return reason
        path = at / part
        status = os.lstat(path)
        if not stat.S_ISLNK(status.st_mode):
            at = path
            continue
        links += 1
        if links > _MOST_LINKS:
            return f"{path} is one of too many links"
        if status.st_uid not in _trusted():
            return f"the link {path} belongs to user {status.st_uid}"
        target = Path(os.readlink(path))
        at = Path("/") if target.is_absolute() else at
        left += [one for one in reversed(target.parts) if one != "/"]
    return danger_of(at, os.lstat(at))


def is_own_file(status: os.stat_result) -> bool:
    """Return True if an open file is an ordinary one of this user's, and no other may write to it."""
    return (
        stat.S_ISREG(status.st_mode)
        and status.st_uid == os.geteuid()
        and not status.st_mode & _WRITABLE_BY_OTHERS
    )


def danger_of(path: Path, status: os.stat_result) -> str | None:
    """Return the reason why others may change a folder itself; None if they may not.

    Args:
        path: The folder's name.
        status: The folder's status, from os.stat.
    """
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"{path} is not a folder")
    if status.st_uid != os.geteuid():
        return f"{path} belongs to user {status.st_uid}"
    if status.st_mode & _WRITABLE_BY_OTHERS:
        return f"others can write to {path}"
    return None


def _of_parent(path: Path, status: os.stat_result) -> str | None:
    if status.st_uid not in _trusted():
        return f"{path}, a folder of its path, belongs to user {status.st_uid}"
    if status.st_mode & _WRITABLE_BY_OTHERS and not status.st_mode & stat.S_ISVTX:
        return f"others can write to {path}, a folder of its path"
    return None


@functools.cache
def _trusted() -> frozenset[int]:
    """Return root and this user; and `nobody`, if a container shows root of the host as that."""
    return frozenset({0, os.geteuid(), *_unmapped()})


def _unmapped() -> list[int]:
    """Return the user that stands for all users outside this process's user namespace."""
    try:
        with open("/proc/self/uid_map", encoding="ascii") as file:
            all_are_mapped = sum(int(line.split()[2]) for line in file) >= 2**32 - 1
        if all_are_mapped:
            return []
        with open("/proc/sys/kernel/overflowuid", encoding="ascii") as file:
            return [int(file.read())]
    except (OSError, ValueError):  # no Linux, or no /proc
        return []
