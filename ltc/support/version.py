"""The version of ltc: its number, and a name for the very files it consists of."""

from __future__ import annotations

import functools
import hashlib
import os
from pathlib import Path

VERSION = "0.1.0"


@functools.cache
def source_digest() -> str:
    """Differs whenever a file of the package was changed: what an edited checkout compiles is new.

    By names, sizes and times of change: reading every file would cost each process 10 ms.
    """
    package = Path(__file__).parents[1]
    files = _sources(str(package)) or [str(one) for one in package.parents if one.is_file()]
    seen = [f"{file[len(str(package)) :]} {_change(file)}" for file in sorted(files)]
    return hashlib.sha256("\n".join([VERSION, *seen]).encode()).hexdigest()


def _sources(package: str) -> list[str]:
    """None where the package is in an archive.  A link to a folder is not followed: it may be a circle."""
    folders, found = [package], []
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.name.endswith(".py"):
                        found.append(entry.path)
                    elif entry.name != "__pycache__" and entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except OSError:  # what cannot be listed is not imported either
            pass
    return found


def _change(file: str) -> str:
    try:
        status = os.stat(file)
    except OSError:  # an editor's lock: a link to nowhere
        return ""
    return f"{status.st_size} {status.st_mtime_ns}"
